// SPDX-License-Identifier: Apache-2.0
// Choice of the kernels that this CPU runs.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace choreo {

// Names of the instruction sets that this CPU runs, best first.
std::vector<std::string> available_isas();

// The kernels in use: the best available, unless use_isa chose others.
const Kernels& active_kernels();

// Chooses kernels by name for the whole process; "" restores the best. False: not available.
bool use_isa(const std::string& name);

}  // namespace choreo
