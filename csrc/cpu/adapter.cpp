// SPDX-License-Identifier: Apache-2.0
#include "adapter.h"

#include <algorithm>

#include "checks.h"
#include "launcher.h"

namespace choreo {
namespace {

void check_index(const at::Tensor& rows, int64_t num_rows) {
  TORCH_CHECK_VALUE(rows.is_cpu() && rows.scalar_type() == at::kLong && rows.is_contiguous(),
                    "rows must be a contiguous int64 tensor on the CPU");
  const int64_t* row = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows.numel(); ++i) {
    TORCH_CHECK_INDEX(row[i] >= 0 && row[i] < num_rows, "row ", row[i], " of ", num_rows);
  }
}

}  // namespace

Adapter::Adapter(const at::Tensor& shrink, const std::vector<Slice>& slices) : shrink_(shrink) {
  check_floats(shrink, "shrink");
  TORCH_CHECK_VALUE(shrink.dim() == 2 && shrink.size(1) % kColumnStep == 0,
                    "shrink must be [in_features, a multiple of ", kColumnStep, "]");
  TORCH_CHECK_VALUE(!slices.empty(), "an adapter needs a slice");
  for (const auto& [expand, first_rank, first_column] : slices) {
    TORCH_CHECK_VALUE(expand.is_cpu() && expand.dim() == 2 && expand.is_contiguous(),
                      "expand must be a contiguous [num_ranks, num_columns] on the CPU");
    TORCH_CHECK_VALUE(expand.scalar_type() == at::kFloat || expand.scalar_type() == at::kBFloat16,
                      "the CPU kernel takes float32 and bfloat16, not ", expand.scalar_type());
    TORCH_CHECK_VALUE(expand.scalar_type() == std::get<0>(slices[0]).scalar_type(),
                      "slices differ in dtype");
    TORCH_CHECK_VALUE(
        first_rank >= 0 && first_rank + expand.size(0) <= shrink.size(1) && first_column >= 0,
        "a slice reaches beyond the ranks of shrink, or begins before its columns");
    slices_.push_back({expand.data_ptr(), static_cast<int>(first_rank),
                       static_cast<int>(expand.size(0)), first_column, expand.size(1)});
    expands_.push_back(expand);
    num_columns_ = std::max(num_columns_, first_column + expand.size(1));
  }
}

void Adapter::check_rows(const at::Tensor& t, const char* name, int64_t num_columns) const {
  TORCH_CHECK_VALUE(t.is_cpu() && t.dim() == 2 && t.stride(1) == 1 && t.size(1) >= num_columns,
                    name, " must be [num_rows, at least ", num_columns,
                    "] with a contiguous last dim");
  TORCH_CHECK_VALUE(t.scalar_type() == expands_[0].scalar_type(), name, " is ", t.scalar_type(),
                    ", the adapter ", expands_[0].scalar_type());
}

void Adapter::add(const at::Tensor& y, const at::Tensor& x, const at::Tensor& rows,
                  double scale) const {
  check_rows(x, "x", shrink_.size(0));
  check_rows(y, "y", num_columns_);
  TORCH_CHECK_VALUE(x.size(0) == y.size(0), "x has ", x.size(0), " rows, y ", y.size(0));
  check_index(rows, x.size(0));
  run_add_adapter(
      {x.const_data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), rows.const_data_ptr<int64_t>(),
       rows.numel(), y.scalar_type() == at::kFloat ? DType::kFloat32 : DType::kBFloat16,
       shrink_.const_data_ptr<float>(), shrink_.size(0), static_cast<int>(shrink_.size(1)),
       slices_.data(), static_cast<int>(slices_.size()), static_cast<float>(scale)});
}

}  // namespace choreo
