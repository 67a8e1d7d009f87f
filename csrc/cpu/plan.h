// SPDX-License-Identifier: Apache-2.0
// What one call of span_attention computes, cut into tiles for the threads to take.
#pragma once

#include <vector>

#include "kernels.h"

namespace choreo {

// Buffers are laid out in whole cache lines.
inline int64_t round_to_line(int64_t floats) {
  return (floats + 15) / 16 * 16;
}

// The plan of one call. Queries are cut into query blocks; a group tile holds query blocks of the
// group's members and all tokens that they read, which several splits may share out. A query block
// with more than one partial result is merged by whoever finishes the last of them.
struct QueryBlock {
  Member member;  // column and first_row belong to a tile, not here
  int num_partials = 0;
  int64_t offset = 0;  // of its first partial result, in floats
};

struct GroupTile {
  Tile tile;  // of KV head 0
  int num_splits;
  int first_entry;  // of the members in `entries`
  int first_item;
};

// A query block in a group tile.
struct Entry {
  int query_block;
  int first_partial;  // one for each split of the tile
};

struct Plan {
  std::vector<QueryBlock> query_blocks;
  std::vector<int> first_query_block;  // [num_reqs + 1]
  std::vector<GroupTile> tiles;
  std::vector<Member> members;  // parallel to `entries`
  std::vector<Entry> entries;
  std::vector<int> tile_of_item;  // items: KV heads, then splits of a tile
  int64_t num_partial_floats = 0;
  int max_rows = 0;
  int max_members = 0;
};

Plan make_plan(const AttentionArgs& args);

// Floats from one partial result of a query block to the next.
int64_t partial_stride(const AttentionArgs& args, const Member& member);

// Split `index` of a tile: whole blocks, as equal as they get.
Tile split_tile(const GroupTile& t, int index, int block_size);

}  // namespace choreo
