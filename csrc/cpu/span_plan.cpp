// SPDX-License-Identifier: Apache-2.0
#include "span_plan.h"

#include <algorithm>
#include <stdexcept>

#include "checks.h"

namespace choreo {
namespace {

const at::Tensor& find(const Arrays& arrays, const char* name) {
  const auto found = arrays.find(name);
  TORCH_CHECK_VALUE(found != arrays.end(), name, " is missing");
  return found->second;
}

// Starts must begin at 0 and not decrease, or the kernel would read out of bounds.
void check_starts(const int32_t* starts, int count, int min_step, const char* name) {
  TORCH_CHECK_VALUE(starts[0] == 0, name, " must begin with 0");
  for (int i = 0; i < count; ++i) {
    TORCH_CHECK_VALUE(starts[i + 1] - starts[i] >= min_step, name, " must grow by at least ",
                      min_step, " at request ", i);
  }
}

}  // namespace

SpanPlan::SpanPlan(const Arrays& spans, const std::optional<Arrays>& reads,
                   const std::optional<at::Tensor>& cos_sin, int64_t block_size,
                   int64_t first_chosen, const std::optional<Arrays>& reweighting) {
  TORCH_CHECK_VALUE(block_size > 0, "block_size is ", block_size, "; it must be at least 1");
  step_.block_size = static_cast<int>(block_size);
  copy_spans(spans);
  copy_blocks(find(spans, "block_table"));
  if (cos_sin) {
    check_floats(*cos_sin, "cos_sin");
    TORCH_CHECK_VALUE(
        cos_sin->dim() == 2 && cos_sin->size(0) == step_.num_spans && cos_sin->size(1) % 2 == 0,
        "cos_sin must be [num_spans, rotary_dim]");
    cos_sin_ = *cos_sin;
    step_.cos_sin = cos_sin_.const_data_ptr<float>();
    step_.rotary_dim = static_cast<int>(cos_sin_.size(1));
  }
  if (reads) {
    copy_reads(*reads, first_chosen);
    keep_weights(reweighting);
    check_reads(step_);
  } else {
    TORCH_CHECK_VALUE(!reweighting, "spans that count by other weights need reads");
    alone_ = ReadsAlone(step_);
    step_.reads = alone_.view();
  }
}

const int32_t* SpanPlan::copy(const Arrays& arrays, const char* name, int64_t numel) {
  const at::Tensor& tensor = find(arrays, name);
  check_ints(tensor, name, numel);
  const int32_t* data = tensor.const_data_ptr<int32_t>();
  return arrays_.emplace_back(data, data + numel).data();
}

void SpanPlan::copy_spans(const Arrays& spans) {
  const int64_t num_reqs = find(spans, "query_start_loc").numel() - 1;
  const int64_t num_spans = find(spans, "first_slot").numel();
  TORCH_CHECK_VALUE(num_reqs >= 0, "query_start_loc is empty");
  step_.num_reqs = static_cast<int>(num_reqs);
  step_.num_spans = static_cast<int>(num_spans);
  step_.query_start_loc = copy(spans, "query_start_loc", num_reqs + 1);
  step_.span_start_loc = copy(spans, "span_start_loc", num_reqs + 1);
  step_.first_slot = copy(spans, "first_slot", num_spans);
  step_.num_tokens = copy(spans, "num_tokens", num_spans);
  step_.stored_position = copy(spans, "stored_position", num_spans);
  step_.position_delta = copy(spans, "position_delta", num_spans);
  check_starts(step_.query_start_loc, step_.num_reqs, 0, "query_start_loc");
  check_starts(step_.span_start_loc, step_.num_reqs, 1, "span_start_loc");
  TORCH_CHECK_VALUE(step_.span_start_loc[num_reqs] == num_spans,
                    "span_start_loc must end at the number of spans");
}

// Rows are as wide as the spans reach, not as the table is: that has columns for max_model_len.
void SpanPlan::copy_blocks(const at::Tensor& table) {
  TORCH_CHECK_VALUE(table.is_cpu() && table.dim() == 2 && table.scalar_type() == at::kInt &&
                        table.size(0) >= step_.num_reqs && table.stride(1) == 1,
                    "block_table must be int32 [num_reqs, max_blocks] with contiguous rows");
  int64_t width = 0;
  for (int j = 0; j < step_.num_spans; ++j) {
    const int64_t first = step_.first_slot[j];
    const int64_t end = (first + step_.num_tokens[j] - 1) / step_.block_size + 1;
    if (first < 0 || end > table.size(1)) {
      throw std::out_of_range("span " + std::to_string(j) + " reaches beyond its block table");
    }
    width = std::max(width, end);
  }
  blocks_.reset(new int32_t[step_.num_reqs * width]);
  step_.block_table = blocks_.get();
  step_.block_table_stride = width;
  for (int req = 0; req < step_.num_reqs; ++req) {
    const int32_t* from = table.const_data_ptr<int32_t>() + req * table.stride(0);
    int32_t* to = blocks_.get() + req * width;
    for (int j = step_.span_start_loc[req]; j < step_.span_start_loc[req + 1]; ++j) {
      const int64_t first = step_.first_slot[j];
      const int64_t end = (first + step_.num_tokens[j] - 1) / step_.block_size + 1;
      for (int64_t b = first / step_.block_size; b < end; ++b) {
        to[b] = from[b];
        lowest_block_ = std::min(lowest_block_, from[b]);
        highest_block_ = std::max(highest_block_, from[b]);
      }
    }
  }
}

void SpanPlan::keep_weights(const std::optional<Arrays>& reweighting) {
  const Reads& r = step_.reads;
  if (r.first_chosen == r.num_groups) return;
  TORCH_CHECK_VALUE(reweighting.has_value(), "groups that count by other weights have none");
  temperature_ = find(*reweighting, "temperature");
  factor_ = find(*reweighting, "factor");
  check_floats(temperature_, "temperature");
  check_floats(factor_, "factor");
  TORCH_CHECK_VALUE(temperature_.numel() == step_.num_reqs && factor_.numel() == step_.num_reqs,
                    "temperature and factor must be [num_reqs]");
  step_.temperature = temperature_.const_data_ptr<float>();
  step_.factor = factor_.const_data_ptr<float>();
}

void SpanPlan::copy_reads(const Arrays& reads, int64_t first_chosen) {
  const int64_t num_groups = find(reads, "member_start_loc").numel() - 1;
  TORCH_CHECK_VALUE(num_groups >= step_.num_reqs, "reads has ", num_groups, " groups for ",
                    step_.num_reqs, " requests");
  Reads& r = step_.reads;
  r.num_groups = static_cast<int>(num_groups);
  TORCH_CHECK_VALUE(step_.num_reqs <= first_chosen && first_chosen <= num_groups,
                    "first_chosen is ", first_chosen, " of ", num_groups, " groups");
  r.first_chosen = static_cast<int>(first_chosen);
  r.member_start_loc = copy(reads, "member_start_loc", num_groups + 1);
  r.piece_start_loc = copy(reads, "piece_start_loc", num_groups + 1);
  r.read_start_loc = copy(reads, "read_start_loc", num_groups + 1);
  check_starts(r.member_start_loc, r.num_groups, 1, "member_start_loc");
  check_starts(r.piece_start_loc, r.num_groups, 0, "piece_start_loc");
  check_starts(r.read_start_loc, r.num_groups, 0, "read_start_loc");
  for (int64_t g = 0; g < num_groups; ++g) {
    const int members = r.member_start_loc[g + 1] - r.member_start_loc[g];
    TORCH_CHECK_VALUE(g < first_chosen || members == 1, "group ", g,
                      " counts by other weights and must be of one request");
    const int pieces = r.piece_start_loc[g + 1] - r.piece_start_loc[g];
    TORCH_CHECK_VALUE(r.read_start_loc[g + 1] - r.read_start_loc[g] == members * pieces,
                      "read_start_loc must grow by pieces * members at group ", g);
  }
  r.member_req = copy(reads, "member_req", r.member_start_loc[num_groups]);
  r.piece_tokens = copy(reads, "piece_tokens", r.piece_start_loc[num_groups]);
  r.read_span = copy(reads, "read_span", r.read_start_loc[num_groups]);
  r.read_begin = copy(reads, "read_begin", r.read_start_loc[num_groups]);
}

void SpanPlan::check_cache(const CacheView& cache) const {
  TORCH_CHECK_VALUE(cache.block_size == step_.block_size, "kv_cache has block size ",
                    cache.block_size, ", the batch ", step_.block_size);
  const int most = cache.head_size - cache.rotary_offset();
  TORCH_CHECK_VALUE(step_.rotary_dim <= most, "cos_sin must be [num_spans, rotary_dim]",
                    " with a rotary_dim of at most ", most, ", the dims of a head that may rotate");
  if (step_.num_spans == 0) return;
  check_block(lowest_block_, cache.num_blocks);
  check_block(highest_block_, cache.num_blocks);
}

const Tiles& SpanPlan::tiles(const LayerShape& shape) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Tiles& tiles : tiles_) {
    if (tiles.shape == shape) return tiles;
  }
  return tiles_.emplace_back(make_tiles(shape, step_));
}

}  // namespace choreo
