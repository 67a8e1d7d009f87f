// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
// Standard headers come before the pragma, see kernels_avx512.cpp.
#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

#pragma GCC target("avx2,fma,f16c")

#define CHOREO_ISA avx2
#define CHOREO_VEC_BYTES 32
#define CHOREO_MAX_ROWS 6  // 12 accumulators of 16 registers
#include "adapter_kernel.h"
#include "attention_kernel.h"
#include "reposition_kernel.h"

namespace choreo {
const Kernels kAvx2Kernels = {"avx2",
                              avx2::scratch_floats,
                              avx2::attend_tile,
                              avx2::merge_partials,
                              avx2::reposition_block,
                              avx2::add_adapter};
}  // namespace choreo
#endif
