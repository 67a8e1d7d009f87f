// SPDX-License-Identifier: Apache-2.0
// What one call of span_attention computes, cut into tiles for the threads to take: the same for
// all layers of a shape in a step.
#pragma once

#include <vector>

#include "kernels.h"

namespace choreo {

// Buffers are laid out in whole cache lines.
inline int64_t round_to_line(int64_t floats) {
  return (floats + 15) / 16 * 16;
}

// What tiles depend on besides the step.
struct LayerShape {
  int num_heads;
  int num_kv_heads;
  int head_size;
  int value_size;
  int num_threads;
  int window;

  int group_heads() const { return num_heads / num_kv_heads; }
  bool operator==(const LayerShape& other) const {
    return num_heads == other.num_heads && num_kv_heads == other.num_kv_heads &&
           head_size == other.head_size && value_size == other.value_size &&
           num_threads == other.num_threads && window == other.window;
  }
};

// The work of one call. Queries are cut into query blocks; a group tile holds query blocks of the
// group's members and all tokens that they read, which several splits may share out. A query block
// with more than one partial result is merged by whoever finishes the last of them.
struct QueryBlock {
  Member member;  // column and first_row belong to a tile, not here
  int num_partials = 0;
  int num_chosen = 0;  // the first ones, of spans that count by other weights
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

struct Tiles {
  LayerShape shape;
  std::vector<QueryBlock> query_blocks;
  std::vector<int> first_query_block;  // [num_reqs + 1]
  std::vector<GroupTile> list;
  std::vector<Member> members;  // parallel to `entries`
  std::vector<Entry> entries;
  std::vector<int> tile_of_item;  // items: KV heads, then splits of a tile
  int64_t num_partial_floats = 0;
  int max_rows = 0;
  int max_members = 0;
};

Tiles make_tiles(const LayerShape& shape, const Step& step);

// Floats from one partial result of a query block to the next.
int64_t partial_stride(const LayerShape& shape, const Member& member);

// Split `index` of a tile: whole blocks, as equal as they get.
Tile split_tile(const GroupTile& t, int index, int block_size);

}  // namespace choreo
