// SPDX-License-Identifier: Apache-2.0
// Runs the kernels on torch's threads.
#pragma once

#include "kernels.h"

namespace choreo {

// Both throw std::out_of_range if a block id in use lies outside the cache.
void run_span_attention(const AttentionArgs& args);
void run_reposition_keys(const RepositionArgs& args);

}  // namespace choreo
