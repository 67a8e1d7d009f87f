// SPDX-License-Identifier: Apache-2.0
#include "launcher.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"

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

// A growing, 64-byte aligned buffer. Kept per calling thread, since fresh pages cost more than a
// small attention call.
class Workspace {
 public:
  float* reserve(int64_t floats) {
    if (floats > capacity_) {
      const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
      buffer_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
      capacity_ = buffer_ ? floats : 0;
      if (!buffer_) throw std::bad_alloc();
    }
    return buffer_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> buffer_;
  int64_t capacity_ = 0;
};

int64_t round_to_line(int64_t floats) {
  return (floats + 15) / 16 * 16;
}

// Queries that share one tile, and how many tiles share its tokens.
struct Group {
  Tile tile;  // all tokens that the last query sees
  int num_splits;
  int first_partial;
};

struct Plan {
  std::vector<Group> groups;
  std::vector<int> group_of_item;
  int num_partials = 0;
  int max_rows = 0;
};

int64_t tile_cost(const Tile& tile, int group_heads) {
  // Reading keys and values costs about as much as computing four rows.
  return (tile.kv_end - tile.kv_begin) * (tile.num_queries * group_heads + 4);
}

// Queries per tile, the same for all requests of a call.
int choose_tile_queries(const AttentionArgs& a) {
  const int group_heads = a.num_heads / a.cache.num_kv_heads;
  const int64_t all_rows = static_cast<int64_t>(a.query_start_loc[a.num_reqs]) * a.num_heads;
  const int64_t balanced = all_rows / (at::get_num_threads() * kTilesPerThread);
  const int64_t most = std::min(kMaxTileRows, kMaxTileFloats / a.cache.head_size);
  const int64_t rows = std::min(std::max<int64_t>(balanced, kMinTileRows), most);
  return std::max(1, static_cast<int>(rows) / group_heads);
}

void add_request_groups(const AttentionArgs& a, int req, int tile_queries,
                        std::vector<Group>& groups) {
  const int q_len = a.query_start_loc[req + 1] - a.query_start_loc[req];
  int64_t kv_len = 0;
  for (int j = a.span_start_loc[req]; j < a.span_start_loc[req + 1]; ++j) kv_len += a.num_tokens[j];
  // Last queries first: they see most, and the longest work should not start last.
  const int num_tiles = (q_len + tile_queries - 1) / tile_queries;
  for (int t = num_tiles - 1; t >= 0; --t) {
    const int begin = t * tile_queries;
    const int num_queries = std::min(tile_queries, q_len - begin);
    const int64_t visible = kv_len - (q_len - begin - num_queries);
    for (int head = 0; head < a.cache.num_kv_heads; ++head) {
      groups.push_back({{req, head, begin, num_queries, 0, visible}, 1, 0});
    }
  }
}

Plan make_plan(const AttentionArgs& a) {
  Plan plan;
  const int tile_queries = choose_tile_queries(a);
  for (int req = 0; req < a.num_reqs; ++req) {
    add_request_groups(a, req, tile_queries, plan.groups);
  }
  const int group_heads = a.num_heads / a.cache.num_kv_heads;
  int64_t total = 0;
  for (const Group& g : plan.groups) total += tile_cost(g.tile, group_heads);
  const int num_threads = at::get_num_threads();
  const int64_t target = num_threads == 1 ? total : total / (num_threads * kTilesPerThread);
  for (size_t i = 0; i < plan.groups.size(); ++i) {
    Group& g = plan.groups[i];
    const int64_t wanted = tile_cost(g.tile, group_heads) / std::max<int64_t>(target, 1);
    const int64_t possible = g.tile.kv_end / kMinSplitTokens;
    g.num_splits = static_cast<int>(std::max<int64_t>(1, std::min(wanted, possible)));
    g.first_partial = plan.num_partials;
    if (g.num_splits > 1) plan.num_partials += g.num_splits;
    plan.group_of_item.insert(plan.group_of_item.end(), g.num_splits, static_cast<int>(i));
    plan.max_rows = std::max(plan.max_rows, g.tile.num_queries * group_heads);
  }
  return plan;
}

// Split `index` of a group: whole blocks, as equal as they get.
Tile split_tile(const Group& g, int index, int block_size) {
  Tile tile = g.tile;
  const int64_t blocks = (g.tile.kv_end + block_size - 1) / block_size;
  tile.kv_begin = blocks * index / g.num_splits * block_size;
  tile.kv_end = std::min(g.tile.kv_end, blocks * (index + 1) / g.num_splits * block_size);
  return tile;
}

void check_block(int32_t block, const CacheView& cache) {
  if (block < 0 || block >= cache.num_blocks) {
    throw std::out_of_range("block id " + std::to_string(block) + " lies outside the cache of " +
                            std::to_string(cache.num_blocks) + " blocks");
  }
}

void check_blocks(const AttentionArgs& a) {
  for (int req = 0; req < a.num_reqs; ++req) {
    const int32_t* row = a.block_table + req * a.block_table_stride;
    for (int j = a.span_start_loc[req]; j < a.span_start_loc[req + 1]; ++j) {
      const int64_t first = a.first_slot[j];
      const int64_t last = (first + a.num_tokens[j] - 1) / a.cache.block_size;
      if (first < 0 || last >= a.max_blocks) {
        throw std::out_of_range("span " + std::to_string(j) + " reaches beyond its block table");
      }
      for (int64_t b = first / a.cache.block_size; b <= last; ++b) check_block(row[b], a.cache);
    }
  }
}

// Everything that the threads of one call share.
class Run {
 public:
  Run(const AttentionArgs& args, const Kernels& kernels)
      : args_(args), kernels_(kernels), plan_(make_plan(args)), open_splits_(plan_.groups.size()) {
    const int head_size = args.cache.head_size;
    scratch_floats_ = round_to_line(kernels.scratch_floats(plan_.max_rows, head_size));
    partial_floats_ = round_to_line(static_cast<int64_t>(plan_.max_rows) * (head_size + 2));
    num_threads_ = std::min<int64_t>(at::get_num_threads(), plan_.group_of_item.size());
    static thread_local Workspace workspace;
    scratch_ =
        workspace.reserve(num_threads_ * scratch_floats_ + plan_.num_partials * partial_floats_);
    float* partials = scratch_ + num_threads_ * scratch_floats_;
    for (int i = 0; i < plan_.num_partials; ++i, partials += partial_floats_) {
      float* row_max = partials + static_cast<int64_t>(plan_.max_rows) * head_size;
      partials_.push_back({partials, row_max, row_max + plan_.max_rows});
    }
    for (size_t i = 0; i < plan_.groups.size(); ++i) open_splits_[i] = plan_.groups[i].num_splits;
  }

  void execute() {
    at::parallel_for(0, num_threads_, 1, [this](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; ++thread) {
        work(scratch_ + thread * scratch_floats_);
      }
    });
  }

 private:
  void work(float* scratch) {
    const int num_items = static_cast<int>(plan_.group_of_item.size());
    for (int item = next_item_++; item < num_items; item = next_item_++) {
      const int index = plan_.group_of_item[item];
      const Group& group = plan_.groups[index];
      if (group.num_splits == 1) {
        kernels_.attend_tile(args_, group.tile, scratch, nullptr);
        continue;
      }
      const int split = item - first_item(item, index);
      const Tile tile = split_tile(group, split, args_.cache.block_size);
      const Partial* partials = partials_.data() + group.first_partial;
      kernels_.attend_tile(args_, tile, scratch, partials + split);
      // Whoever finishes last merges; the counter orders the partial results before the merge.
      if (open_splits_[index].fetch_sub(1) == 1) {
        kernels_.merge_partials(args_, group.tile, partials, group.num_splits);
      }
    }
  }

  int first_item(int item, int index) const {
    while (item > 0 && plan_.group_of_item[item - 1] == index) --item;
    return item;
  }

  const AttentionArgs& args_;
  const Kernels& kernels_;
  Plan plan_;
  std::vector<std::atomic<int>> open_splits_;
  std::vector<Partial> partials_;
  std::atomic<int> next_item_{0};
  int64_t num_threads_ = 0;
  int64_t scratch_floats_ = 0;
  int64_t partial_floats_ = 0;
  float* scratch_ = nullptr;
};

}  // namespace

void run_span_attention(const AttentionArgs& args) {
  check_blocks(args);
  if (args.num_reqs == 0 || args.query_start_loc[args.num_reqs] == 0) return;
  Run(args, active_kernels()).execute();
}

void run_reposition_keys(const RepositionArgs& args) {
  for (int move = 0; move < args.num_moves; ++move) {
    check_block(args.src_blocks[move], args.cache);
    check_block(args.dst_blocks[move], args.cache);
  }
  const Kernels& kernels = active_kernels();
  const int64_t heads = args.cache.num_kv_heads;
  at::parallel_for(0, args.num_moves * heads, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      kernels.reposition_block(args, static_cast<int>(i / heads), static_cast<int>(i % heads));
    }
  });
}

}  // namespace choreo
