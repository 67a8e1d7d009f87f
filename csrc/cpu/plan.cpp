// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <ATen/Parallel.h>

#include <algorithm>

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

int group_heads(const AttentionArgs& a) {
  return a.num_heads / a.cache.num_kv_heads;
}

int64_t tile_cost(const Tile& tile) {
  // Reading keys and values costs about as much as computing four rows.
  return (tile.kv_end - tile.kv_begin) * (tile.num_rows + 4);
}

// Rows per tile at most, the same for all groups of a call.
int choose_tile_rows(const AttentionArgs& a) {
  const int64_t all_rows = static_cast<int64_t>(a.query_start_loc[a.num_reqs]) * a.num_heads;
  const int64_t balanced = all_rows / (at::get_num_threads() * kTilesPerThread);
  const int64_t most = std::min(kMaxTileRows, kMaxTileFloats / a.cache.head_size);
  return static_cast<int>(std::min(std::max<int64_t>(balanced, kMinTileRows), most));
}

void cut_queries(const AttentionArgs& a, int tile_rows, Plan& plan) {
  const int most = std::max(1, tile_rows / group_heads(a));
  for (int req = 0; req < a.num_reqs; ++req) {
    plan.first_query_block.push_back(static_cast<int>(plan.query_blocks.size()));
    const int q_len = a.query_start_loc[req + 1] - a.query_start_loc[req];
    // Last queries first: they see most, and the longest work should not start last.
    for (int t = (q_len + most - 1) / most - 1; t >= 0; --t) {
      plan.query_blocks.push_back({{req, 0, t * most, std::min(most, q_len - t * most), 0}, 0, 0});
    }
  }
  plan.first_query_block.push_back(static_cast<int>(plan.query_blocks.size()));
}

// Closes the tile that holds all members from `first_entry` on.
void add_tile(const AttentionArgs& a, int group, int first_entry, int num_rows, Plan& plan) {
  const int num_members = static_cast<int>(plan.entries.size()) - first_entry;
  if (num_members == 0) return;
  const Reads& reads = a.reads;
  int64_t tokens = 0;
  for (int p = reads.piece_start_loc[group]; p < reads.piece_start_loc[group + 1]; ++p) {
    tokens += reads.piece_tokens[p];
  }
  if (group < a.num_reqs) {
    const Member& member = plan.members[first_entry];
    const int q_len = a.query_start_loc[group + 1] - a.query_start_loc[group];
    const int unseen = q_len - member.query_begin - member.num_queries;
    tokens += a.num_tokens[a.span_start_loc[group + 1] - 1] - unseen;
  }
  plan.tiles.push_back({{group, 0, nullptr, num_members, num_rows, 0, tokens}, 1, first_entry, 0});
  plan.max_rows = std::max(plan.max_rows, num_rows);
  plan.max_members = std::max(plan.max_members, num_members);
}

// A tile with an own span has one member, since what is visible of it depends on the query.
void add_group(const AttentionArgs& a, int group, int tile_rows, Plan& plan) {
  const int begin = a.reads.member_start_loc[group];
  const int end = a.reads.member_start_loc[group + 1];
  int first_entry = static_cast<int>(plan.entries.size());
  int rows = 0;
  for (int m = begin; m < end; ++m) {
    const int req = a.reads.member_req[m];
    for (int q = plan.first_query_block[req]; q < plan.first_query_block[req + 1]; ++q) {
      Member member = plan.query_blocks[q].member;
      const int more = member.num_queries * group_heads(a);
      if (rows > 0 && (group < a.num_reqs || rows + more > tile_rows)) {
        add_tile(a, group, first_entry, rows, plan);
        first_entry = static_cast<int>(plan.entries.size());
        rows = 0;
      }
      member.column = m - begin;
      member.first_row = rows;
      plan.members.push_back(member);
      plan.entries.push_back({q, 0});
      rows += more;
    }
  }
  add_tile(a, group, first_entry, rows, plan);
}

// Cuts long tiles and counts the partial results.
void split_tiles(const AttentionArgs& a, Plan& plan) {
  const int num_heads = a.cache.num_kv_heads;
  int64_t total = 0;
  for (const GroupTile& t : plan.tiles) total += tile_cost(t.tile) * num_heads;
  const int num_threads = at::get_num_threads();
  const int64_t target = num_threads == 1 ? total : total / (num_threads * kTilesPerThread);
  for (size_t i = 0; i < plan.tiles.size(); ++i) {
    GroupTile& t = plan.tiles[i];
    const int64_t wanted = tile_cost(t.tile) / std::max<int64_t>(target, 1);
    const int64_t possible = t.tile.kv_end / kMinSplitTokens;
    t.num_splits = static_cast<int>(std::max<int64_t>(1, std::min(wanted, possible)));
    t.first_item = static_cast<int>(plan.tile_of_item.size());
    plan.tile_of_item.insert(plan.tile_of_item.end(), t.num_splits * num_heads,
                             static_cast<int>(i));
    t.tile.members = plan.members.data() + t.first_entry;
    for (int e = t.first_entry; e < t.first_entry + t.tile.num_members; ++e) {
      QueryBlock& block = plan.query_blocks[plan.entries[e].query_block];
      plan.entries[e].first_partial = block.num_partials;
      block.num_partials += t.num_splits;
    }
  }
  for (QueryBlock& block : plan.query_blocks) {
    if (block.num_partials == 1) continue;
    block.offset = plan.num_partial_floats;
    plan.num_partial_floats += partial_stride(a, block.member) * block.num_partials * num_heads;
  }
}

}  // namespace

int64_t partial_stride(const AttentionArgs& a, const Member& member) {
  return round_to_line(partial_floats(member.num_queries * group_heads(a), a.cache.head_size));
}

Plan make_plan(const AttentionArgs& a) {
  Plan plan;
  const int tile_rows = choose_tile_rows(a);
  cut_queries(a, tile_rows, plan);
  // What several requests read comes first: it is the longest work.
  for (int group = a.reads.num_groups - 1; group >= 0; --group) {
    add_group(a, group, tile_rows, plan);
  }
  split_tiles(a, plan);
  return plan;
}

Tile split_tile(const GroupTile& t, int index, int block_size) {
  Tile tile = t.tile;
  const int64_t blocks = (t.tile.kv_end + block_size - 1) / block_size;
  tile.kv_begin = blocks * index / t.num_splits * block_size;
  tile.kv_end = std::min(t.tile.kv_end, blocks * (index + 1) / t.num_splits * block_size);
  return tile;
}

}  // namespace choreo
