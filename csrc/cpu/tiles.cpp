// SPDX-License-Identifier: Apache-2.0
#include "tiles.h"

#include <algorithm>

#include "window.h"

namespace choreo {
namespace {

// Rows (queries * heads per KV head) of a tile: more reuse keys and values better, but packed
// queries and outputs must stay in the L2 cache. 256 queries over 4096 tokens, 32 / 8 heads of
// size 128, Zen 5, one thread: 96 rows 77 GFLOP/s, 192 rows 108, 384 rows 136.
constexpr int kMaxTileRows = 384;
constexpr int kMaxTileFloats = kMaxTileRows * 128;
// Short prefills are cut into smaller tiles, down to this, for all threads to have work.
constexpr int kMinTileRows = 96;
// Tiles per thread to aim for, so that uneven ones balance out.
constexpr int kTilesPerThread = 4;
// Fewer tokens than this are not worth a partial result and its merge.
constexpr int64_t kMinSplitTokens = 256;

int64_t tile_cost(const Tile& tile) {
  // Reading keys and values costs about as much as computing four rows.
  return (tile.kv_end - tile.kv_begin) * (tile.num_rows + 4);
}

// Rows per tile at most, the same for all groups of a call.
int choose_tile_rows(const LayerShape& shape, const Step& step) {
  const int64_t all_rows = int64_t{step.query_start_loc[step.num_reqs]} * shape.num_heads;
  const int64_t balanced = all_rows / (shape.num_threads * kTilesPerThread);
  const int64_t most = std::min(kMaxTileRows, kMaxTileFloats / shape.head_size);
  return static_cast<int>(std::min(std::max<int64_t>(balanced, kMinTileRows), most));
}

void cut_queries(const LayerShape& shape, const Step& step, int tile_rows, Tiles& tiles) {
  const int most = std::max(1, tile_rows / shape.group_heads());
  for (int req = 0; req < step.num_reqs; ++req) {
    tiles.first_query_block.push_back(static_cast<int>(tiles.query_blocks.size()));
    const int q_len = step.query_start_loc[req + 1] - step.query_start_loc[req];
    // Last queries first: they see most, and the longest work should not start last.
    for (int t = (q_len + most - 1) / most - 1; t >= 0; --t) {
      tiles.query_blocks.push_back({{req, 0, t * most, std::min(most, q_len - t * most), 0}});
    }
  }
  tiles.first_query_block.push_back(static_cast<int>(tiles.query_blocks.size()));
}

// Tokens that one member at least sees.
int64_t count_seen(const Step& step, int window, int group, const Member* members,
                   int num_members) {
  const Reads& reads = step.reads;
  const int width = reads.member_start_loc[group + 1] - reads.member_start_loc[group];
  int64_t read = reads.read_start_loc[group];
  int64_t seen = 0;
  const auto add = [&](const int32_t* span, const int32_t* begin, int64_t tokens) {
    seen += tokens - hidden_tokens(step, window, members, num_members, span, begin, tokens);
  };
  for (int p = reads.piece_start_loc[group]; p < reads.piece_start_loc[group + 1]; ++p) {
    add(reads.read_span + read, reads.read_begin + read, reads.piece_tokens[p]);
    read += width;
  }
  if (group < step.num_reqs) {
    const int q_len = step.query_start_loc[group + 1] - step.query_start_loc[group];
    const int unseen = q_len - members->query_begin - members->num_queries;
    const int32_t own = step.span_start_loc[group + 1] - 1;
    const int32_t begin = 0;
    add(&own, &begin, step.num_tokens[own] - unseen);
  }
  return seen;
}

// Closes the tile that holds all members from `first_entry` on; drops it if they see nothing.
void add_tile(const LayerShape& shape, const Step& step, int group, int first_entry, int num_rows,
              Tiles& tiles) {
  const int num_members = static_cast<int>(tiles.entries.size()) - first_entry;
  if (num_members == 0) return;
  const Member* members = tiles.members.data() + first_entry;
  const int64_t tokens = count_seen(step, shape.window, group, members, num_members);
  if (tokens == 0) {
    tiles.members.resize(first_entry);
    tiles.entries.resize(first_entry);
    return;
  }
  tiles.list.push_back({{group, 0, nullptr, num_members, num_rows, 0, tokens}, 1, first_entry, 0});
  tiles.max_rows = std::max(tiles.max_rows, num_rows);
  tiles.max_members = std::max(tiles.max_members, num_members);
}

// A tile with an own span has one member, since what is visible of it depends on the query.
void add_group(const LayerShape& shape, const Step& step, int group, int tile_rows, Tiles& tiles) {
  const int begin = step.reads.member_start_loc[group];
  const int end = step.reads.member_start_loc[group + 1];
  int first_entry = static_cast<int>(tiles.entries.size());
  int rows = 0;
  for (int m = begin; m < end; ++m) {
    const int req = step.reads.member_req[m];
    for (int q = tiles.first_query_block[req]; q < tiles.first_query_block[req + 1]; ++q) {
      Member member = tiles.query_blocks[q].member;
      const int more = member.num_queries * shape.group_heads();
      if (rows > 0 && (group < step.num_reqs || rows + more > tile_rows)) {
        add_tile(shape, step, group, first_entry, rows, tiles);
        first_entry = static_cast<int>(tiles.entries.size());
        rows = 0;
      }
      member.column = m - begin;
      member.first_row = rows;
      tiles.members.push_back(member);
      tiles.entries.push_back({q, 0});
      rows += more;
    }
  }
  add_tile(shape, step, group, first_entry, rows, tiles);
}

// Cuts long tiles and counts the partial results.
void split_tiles(const LayerShape& shape, const Step& step, Tiles& tiles) {
  const int num_heads = shape.num_kv_heads;
  int64_t total = 0;
  for (const GroupTile& t : tiles.list) total += tile_cost(t.tile) * num_heads;
  const int num_threads = shape.num_threads;
  const int64_t target = num_threads == 1 ? total : total / (num_threads * kTilesPerThread);
  for (size_t i = 0; i < tiles.list.size(); ++i) {
    GroupTile& t = tiles.list[i];
    const int64_t wanted = tile_cost(t.tile) / std::max<int64_t>(target, 1);
    const int64_t possible = t.tile.kv_end / kMinSplitTokens;
    t.num_splits = static_cast<int>(std::max<int64_t>(1, std::min(wanted, possible)));
    t.first_item = static_cast<int>(tiles.tile_of_item.size());
    tiles.tile_of_item.insert(tiles.tile_of_item.end(), t.num_splits * num_heads,
                              static_cast<int>(i));
    t.tile.members = tiles.members.data() + t.first_entry;
    for (int e = t.first_entry; e < t.first_entry + t.tile.num_members; ++e) {
      QueryBlock& block = tiles.query_blocks[tiles.entries[e].query_block];
      tiles.entries[e].first_partial = block.num_partials;
      block.num_partials += t.num_splits;
      if (t.tile.group >= step.reads.first_chosen) block.num_chosen = block.num_partials;
    }
  }
  for (QueryBlock& block : tiles.query_blocks) {
    if (block.num_partials == 1) continue;
    block.offset = tiles.num_partial_floats;
    tiles.num_partial_floats +=
        partial_stride(shape, block.member) * block.num_partials * num_heads;
  }
}

}  // namespace

int64_t partial_stride(const LayerShape& shape, const Member& member) {
  return round_to_line(partial_floats(member.num_queries * shape.group_heads(), shape.value_size));
}

Tiles make_tiles(const LayerShape& shape, const Step& step) {
  Tiles tiles;
  tiles.shape = shape;
  const int tile_rows = choose_tile_rows(shape, step);
  cut_queries(shape, step, tile_rows, tiles);
  // What several requests read comes first: it is the longest work. What counts by other weights
  // comes before that, so that a query block's first partial results are those.
  for (int group = step.reads.num_groups - 1; group >= 0; --group) {
    add_group(shape, step, group, tile_rows, tiles);
  }
  split_tiles(shape, step, tiles);
  return tiles;
}

Tile split_tile(const GroupTile& t, int index, int block_size) {
  Tile tile = t.tile;
  const int64_t blocks = (t.tile.kv_end + block_size - 1) / block_size;
  tile.kv_begin = blocks * index / t.num_splits * block_size;
  tile.kv_end = std::min(t.tile.kv_end, blocks * (index + 1) / t.num_splits * block_size);
  return tile;
}

}  // namespace choreo
