// SPDX-License-Identifier: Apache-2.0
#include "launcher.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "isa.h"
#include "reads.h"

namespace choreo {
namespace {

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

thread_local Workspace workspace;

// Everything that the threads of one call share.
class Run {
 public:
  Run(const AttentionArgs& args, const Tiles& tiles, const Kernels& kernels)
      : args_(args),
        kernels_(kernels),
        tiles_(tiles),
        num_heads_(args.cache.num_kv_heads),
        open_(tiles_.query_blocks.size() * num_heads_) {
    scratch_floats_ = round_to_line(kernels.scratch_floats(tiles_.max_rows, args.cache));
    num_threads_ = std::min<int64_t>(at::get_num_threads(), tiles_.tile_of_item.size());
    scratch_ = workspace.reserve(num_threads_ * scratch_floats_ + tiles_.num_partial_floats);
    partials_ = scratch_ + num_threads_ * scratch_floats_;
    for (size_t i = 0; i < open_.size(); ++i) {
      open_[i] = tiles_.query_blocks[i / num_heads_].num_partials;
    }
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
    std::vector<float*> targets(tiles_.max_members);
    const int num_items = static_cast<int>(tiles_.tile_of_item.size());
    for (int item = next_item_++; item < num_items; item = next_item_++) {
      const GroupTile& t = tiles_.list[tiles_.tile_of_item[item]];
      const int head = (item - t.first_item) / t.num_splits;
      const int split = (item - t.first_item) % t.num_splits;
      Tile tile = split_tile(t, split, args_.cache.block_size);
      tile.kv_head = head;
      for (int m = 0; m < tile.num_members; ++m) {
        const Entry& entry = tiles_.entries[t.first_entry + m];
        targets[m] = partial(entry.query_block, head, entry.first_partial + split);
      }
      kernels_.attend_tile(args_, tile, scratch, targets.data());
      for (int m = 0; m < tile.num_members; ++m) {
        finish(tiles_.entries[t.first_entry + m].query_block, head);
      }
    }
  }

  // Where a partial result goes; null if it is the only one, and so the output.
  float* partial(int query_block, int head, int index) const {
    const QueryBlock& block = tiles_.query_blocks[query_block];
    if (block.num_partials == 1) return nullptr;
    return partials_ + block.offset +
           partial_stride(tiles_.shape, block.member) * (head * block.num_partials + index);
  }

  // Whoever finishes last merges; the counter orders the partial results before the merge.
  void finish(int query_block, int head) {
    const QueryBlock& block = tiles_.query_blocks[query_block];
    if (block.num_partials == 1) return;
    if (open_[query_block * num_heads_ + head].fetch_sub(1) != 1) return;
    kernels_.merge_partials(args_, block.member, head, partial(query_block, head, 0),
                            partial_stride(tiles_.shape, block.member), block.num_partials,
                            block.num_chosen);
  }

  const AttentionArgs& args_;
  const Kernels& kernels_;
  const Tiles& tiles_;
  int num_heads_;
  std::vector<std::atomic<int>> open_;  // [query blocks, KV heads], partial results to come
  std::atomic<int> next_item_{0};
  int64_t num_threads_ = 0;
  int64_t scratch_floats_ = 0;
  float* scratch_ = nullptr;
  float* partials_ = nullptr;
};

}  // namespace

void run_span_attention(const AttentionArgs& args, const Tiles& tiles) {
  if (args.num_reqs == 0 || args.query_start_loc[args.num_reqs] == 0) return;
  Run(args, tiles, active_kernels()).execute();
}

void run_reposition_keys(const RepositionArgs& args) {
  for (int move = 0; move < args.num_moves; ++move) {
    check_block(args.src_blocks[move], args.cache.num_blocks);
    check_block(args.dst_blocks[move], args.cache.num_blocks);
  }
  const Kernels& kernels = active_kernels();
  const int64_t heads = args.cache.num_kv_heads;
  at::parallel_for(0, args.num_moves * heads, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      kernels.reposition_block(args, static_cast<int>(i / heads), static_cast<int>(i % heads));
    }
  });
}

void run_add_adapter(const AdapterArgs& args) {
  const Kernels& kernels = active_kernels();
  at::parallel_for(0, args.num_rows, kAdapterRows, [&](int64_t begin, int64_t end) {
    kernels.add_adapter(args, begin, end, workspace.reserve(kAdapterRows * args.num_ranks));
  });
}

}  // namespace choreo
