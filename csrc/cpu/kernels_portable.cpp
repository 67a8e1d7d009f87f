// SPDX-License-Identifier: Apache-2.0
// 128-bit vectors: what every x86-64 (SSE2) and ARMv8 (NEON) has.
#include <cstdint>

#include "kernels.h"

#define CHOREO_ISA portable
#define CHOREO_VEC_BYTES 16
#define CHOREO_MAX_ROWS 6  // 12 accumulators of 16 registers
#include "adapter_kernel.h"
#include "attention_kernel.h"
#include "reposition_kernel.h"

namespace choreo {
const Kernels kPortableKernels = {"portable",
                                  portable::scratch_floats,
                                  portable::attend_tile,
                                  portable::merge_partials,
                                  portable::reposition_block,
                                  portable::add_adapter};
}  // namespace choreo
