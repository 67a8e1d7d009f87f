// SPDX-License-Identifier: Apache-2.0
// What tensors must be before their pointers are taken.
#pragma once

#include <ATen/core/Tensor.h>

namespace choreo {

inline void check_ints(const at::Tensor& t, const char* name, int64_t numel) {
  TORCH_CHECK_VALUE(t.is_cpu() && t.scalar_type() == at::kInt && t.is_contiguous(), name,
                    " must be a contiguous int32 tensor on the CPU");
  TORCH_CHECK_VALUE(t.numel() == numel, name, " has ", t.numel(), " entries, expected ", numel);
}

inline void check_floats(const at::Tensor& t, const char* name) {
  TORCH_CHECK_VALUE(t.is_cpu() && t.scalar_type() == at::kFloat && t.is_contiguous(), name,
                    " must be a contiguous float32 tensor on the CPU");
}

}  // namespace choreo
