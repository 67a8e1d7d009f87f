// SPDX-License-Identifier: Apache-2.0
// Which tokens are read together, and the checks that nothing is read out of bounds.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace choreo {

// Throws std::out_of_range if the block id lies outside the cache.
void check_block(int32_t block, int num_blocks);

// Throws std::out_of_range if the reads name what is no parent span of a member, and
// std::invalid_argument if the members of a group do not read the same slots.
void check_reads(const Step& step);

// The reads of a step in which every request reads for itself.
class ReadsAlone {
 public:
  ReadsAlone() = default;
  explicit ReadsAlone(const Step& step) {
    for (int req = 0; req <= step.num_reqs; ++req) {
      member_start_loc_.push_back(req);
      piece_start_loc_.push_back(step.span_start_loc[req] - req);  // own spans are left out
    }
    for (int req = 0; req < step.num_reqs; ++req) {
      for (int j = step.span_start_loc[req]; j + 1 < step.span_start_loc[req + 1]; ++j) {
        piece_tokens_.push_back(step.num_tokens[j]);
        read_span_.push_back(j);
      }
    }
    read_begin_.resize(read_span_.size());
  }

  Reads view() const {
    const int num_groups = static_cast<int>(member_start_loc_.size()) - 1;
    return {num_groups,
            num_groups,
            member_start_loc_.data(),
            member_start_loc_.data(),
            piece_start_loc_.data(),
            piece_tokens_.data(),
            piece_start_loc_.data(),
            read_span_.data(),
            read_begin_.data()};
  }

 private:
  std::vector<int32_t> member_start_loc_;
  std::vector<int32_t> piece_start_loc_;
  std::vector<int32_t> piece_tokens_;
  std::vector<int32_t> read_span_;
  std::vector<int32_t> read_begin_;
};

}  // namespace choreo
