// SPDX-License-Identifier: Apache-2.0
#include "reads.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace choreo {

void check_block(int32_t block, int num_blocks) {
  if (block < 0 || block >= num_blocks) {
    throw std::out_of_range("block id " + std::to_string(block) + " lies outside the cache of " +
                            std::to_string(num_blocks) + " blocks");
  }
}

namespace {

// All members of a group must read the same slots: a plan made for another batch would give wrong
// numbers without a word.
void check_same_slots(const Step& step, int group, int piece, const int32_t* spans,
                      const int32_t* begins) {
  const Reads& reads = step.reads;
  const int size = step.block_size;
  const int first_member = reads.member_start_loc[group];
  const int num_members = reads.member_start_loc[group + 1] - first_member;
  const int64_t tokens = reads.piece_tokens[piece];
  const auto slot = [&](int m) { return int64_t{step.first_slot[spans[m]]} + begins[m]; };
  const auto row = [&](int m) {
    return step.block_table + reads.member_req[first_member + m] * step.block_table_stride;
  };
  for (int m = 0; m < num_members; ++m) {
    const int req = reads.member_req[first_member + m];
    const bool is_parent =
        step.span_start_loc[req] <= spans[m] && spans[m] + 1 < step.span_start_loc[req + 1];
    if (!is_parent || begins[m] < 0 || tokens < 1 ||
        begins[m] + tokens > step.num_tokens[spans[m]]) {
      throw std::out_of_range("reads: group " + std::to_string(group) +
                              " reads beyond a parent span of its member");
    }
    const int64_t num_blocks = (slot(0) % size + tokens - 1) / size + 1;
    const bool is_same = slot(m) % size == slot(0) % size &&
                         std::equal(row(m) + slot(m) / size, row(m) + slot(m) / size + num_blocks,
                                    row(0) + slot(0) / size);
    if (!is_same) {
      throw std::invalid_argument("reads: the members of group " + std::to_string(group) +
                                  " read different slots; plan the reads of this batch again");
    }
  }
}

}  // namespace

void check_reads(const Step& step) {
  const Reads& reads = step.reads;
  int64_t read = 0;
  for (int group = 0; group < reads.num_groups; ++group) {
    const int begin = reads.member_start_loc[group];
    const int num_members = reads.member_start_loc[group + 1] - begin;
    for (int m = begin; m < begin + num_members; ++m) {
      const int req = reads.member_req[m];
      if (req < 0 || req >= step.num_reqs ||
          (group < step.num_reqs && (req != group || num_members != 1))) {
        throw std::out_of_range("reads: group " + std::to_string(group) + " has a wrong member");
      }
    }
    for (int p = reads.piece_start_loc[group]; p < reads.piece_start_loc[group + 1]; ++p) {
      check_same_slots(step, group, p, reads.read_span + read, reads.read_begin + read);
      read += num_members;
    }
  }
}

}  // namespace choreo
