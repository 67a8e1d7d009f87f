// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
// Standard headers come before the pragma, so that no inline function of theirs is compiled for
// an instruction set that another machine lacks.
#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")

#define CHOREO_ISA avx512
#define CHOREO_VEC_BYTES 64
#define CHOREO_MAX_ROWS 12  // 24 accumulators of 32 registers
#include "adapter_kernel.h"
#include "attention_kernel.h"
#include "reposition_kernel.h"

namespace choreo {
const Kernels kAvx512Kernels = {"avx512",
                                avx512::scratch_floats,
                                avx512::attend_tile,
                                avx512::merge_partials,
                                avx512::reposition_block,
                                avx512::add_adapter};
}  // namespace choreo
#endif
