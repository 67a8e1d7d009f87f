// SPDX-License-Identifier: Apache-2.0
// What the layers of a step share, checked once.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "reads.h"
#include "tiles.h"

namespace choreo {

// Tensors by their names in vllm_choreo/ops (SpanBatch, SharedReads).
using Arrays = std::map<std::string, at::Tensor>;

// A copy of everything that is checked, so that what was checked is what is read: a block table
// that is filled anew for the next step, or reads that were planned for another one, cannot turn
// into wrong numbers.
class SpanPlan {
 public:
  // Throws c10::ValueError if the arrays do not fit together, std::out_of_range if a span reaches
  // beyond its block table or a read beyond its span, and std::invalid_argument if the members of
  // a group read different slots. Without reads every request reads for itself. Groups from
  // `first_chosen` on count by `reweighting` (temperature, factor).
  SpanPlan(const Arrays& spans, const std::optional<Arrays>& reads,
           const std::optional<at::Tensor>& cos_sin, int64_t block_size, int64_t first_chosen,
           const std::optional<Arrays>& reweighting);

  const Step& step() const { return step_; }

  // Throws std::out_of_range if a span reads a block that the cache does not have.
  void check_cache(const CacheView& cache) const;

  // Made when a layer of the shape asks first.
  const Tiles& tiles(const LayerShape& shape);

 private:
  const int32_t* copy(const Arrays& arrays, const char* name, int64_t numel);
  void copy_spans(const Arrays& spans);
  void copy_blocks(const at::Tensor& table);
  void copy_reads(const Arrays& reads, int64_t first_chosen);
  void keep_weights(const std::optional<Arrays>& reweighting);

  Step step_{};
  std::deque<std::vector<int32_t>> arrays_;
  std::unique_ptr<int32_t[]> blocks_;  // of the spans; all other entries are left as they come
  int32_t lowest_block_ = 0;
  int32_t highest_block_ = 0;
  ReadsAlone alone_;
  at::Tensor cos_sin_;
  at::Tensor temperature_;
  at::Tensor factor_;
  std::mutex mutex_;
  std::deque<Tiles> tiles_;
};

}  // namespace choreo
