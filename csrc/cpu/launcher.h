// SPDX-License-Identifier: Apache-2.0
// Runs the kernels on torch's threads.
#pragma once

#include "kernels.h"
#include "tiles.h"

namespace choreo {

// All blocks of the step lie in the cache, and its reads name spans of it (see span_plan.h).
void run_span_attention(const AttentionArgs& args, const Tiles& tiles);

// Throws std::out_of_range if a block id lies outside the cache.
void run_reposition_keys(const RepositionArgs& args);

// Rows lie in x and y, no row is named twice, and slices within the shrunk ranks and the columns.
void run_add_adapter(const AdapterArgs& args);

}  // namespace choreo
