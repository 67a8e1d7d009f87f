// SPDX-License-Identifier: Apache-2.0
// What an adapter is in a layer, in every step.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>
#include <vector>

#include "kernels.h"

namespace choreo {

class Adapter {
 public:
  // Of a slice: expand [num_ranks, num_columns], its first rank, its first column of the output.
  using Slice = std::tuple<at::Tensor, int64_t, int64_t>;

  // Throws ValueError where matrices do not fit together.
  Adapter(const at::Tensor& shrink, const std::vector<Slice>& slices);

  // y += the products of x, in these rows. Throws ValueError, or IndexError for a row that does
  // not exist.
  void add(const at::Tensor& y, const at::Tensor& x, const at::Tensor& rows, double scale) const;

 private:
  void check_rows(const at::Tensor& t, const char* name, int64_t num_columns) const;

  at::Tensor shrink_;
  std::vector<at::Tensor> expands_;
  std::vector<AdapterSlice> slices_;
  int64_t num_columns_ = 0;  // that an output has at least
};

}  // namespace choreo
