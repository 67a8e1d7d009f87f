// SPDX-License-Identifier: Apache-2.0
// Runs the kernels on torch's threads.
#pragma once

#include "kernels.h"

namespace choreo {

// Both throw std::out_of_range if a block id in use lies outside the cache. Without reads (no
// groups) every request reads for itself; reads of another batch throw std::invalid_argument.
void run_span_attention(AttentionArgs args);
void run_reposition_keys(const RepositionArgs& args);

}  // namespace choreo
