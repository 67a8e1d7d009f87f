// SPDX-License-Identifier: Apache-2.0
// span_attention for one tile: an online softmax over all spans that the tile's queries see.
#pragma once

#include "chunk.h"
#include "queries.h"
#include "softmax.h"

namespace choreo::CHOREO_ISA {

// From this many groups of rows on, bfloat16 is converted once per chunk and not once per group.
constexpr int kWidenGroups = 3;
constexpr float kLog2e = 1.44269504f;

// Buffers of a tile; `rows` below is rounded up to whole groups of kMaxRows.
struct TileState {
  int rows;         // rows in use
  int num_groups;   // groups of kMaxRows
  int group_heads;  // query heads per KV head
  float* base;      // packed queries, not rotated further
  float* rotated;   // packed queries, rotated by `rotated_delta`
  float* out;       // [rows, head_size], unnormalized
  float* row_max;   // [rows]
  float* row_sum;   // [rows, kWidth], one partial sum per lane
  float* scores;    // [kMaxRows, kChunkColumns]
  float* widened;   // a chunk of keys and values in float32, see widen_chunk
  int rotated_delta;
};

static int64_t scratch_floats(int rows, int head_size) {
  const int64_t padded = round_up_rows(rows);
  return padded * (3 * head_size + kWidth + 1) + kMaxRows * kChunkColumns +
         widened_floats(head_size);
}

static TileState make_state(const AttentionArgs& a, const Tile& tile, float* scratch) {
  TileState s;
  s.group_heads = a.num_heads / a.cache.num_kv_heads;
  s.rows = tile.num_queries * s.group_heads;
  const int padded = round_up_rows(s.rows);
  s.num_groups = padded / kMaxRows;
  const int64_t matrix = static_cast<int64_t>(padded) * a.cache.head_size;
  s.scores = scratch;
  s.widened = s.scores + kMaxRows * kChunkColumns;
  s.base = s.widened + widened_floats(a.cache.head_size);
  s.rotated = s.base + matrix;
  s.out = s.rotated + matrix;
  s.row_sum = s.out + matrix;
  s.row_max = s.row_sum + static_cast<int64_t>(padded) * kWidth;
  s.rotated_delta = 0;
  for (int64_t i = 0; i < matrix; ++i) s.out[i] = 0.0f;
  for (int i = 0; i < padded * kWidth; ++i) s.row_sum[i] = 0.0f;
  for (int i = 0; i < padded; ++i) s.row_max[i] = kNoMaximum;
  return s;
}

// How the rows of a tile see one span. Row r belongs to the tile's query r / group_heads.
struct SpanView {
  const float* query;    // packed
  bool causal;           // own span
  int64_t last_visible;  // own span: last token that the tile's query 0 sees
  int64_t seen_offset;   // ALiBi: position of token 0 less position of the tile's query 0
};

template <typename T>
struct GroupWork {
  const AttentionArgs& a;
  const Tile& tile;
  const TileState& state;
  const SpanView& span;
  const Chunk<T>& chunk;
  const Chunk<T>& next_chunk;  // without pieces at the end of the span
  int key_stride;              // from one dim of a key to the next
  ScoreRule rule;
  int first_row;
};

// Scores of one row in all pieces of a group, finished; returns the row's new maximum.
template <typename T>
static CHOREO_INLINE float finish_row(const GroupWork<T>& w, const Piece<T>* pieces, int num_pieces,
                                      int row, float* scores) {
  const int query = row / w.state.group_heads;
  float slope = 0.0f;
  if (w.rule.has_alibi) {
    const int head = w.tile.kv_head * w.state.group_heads + row % w.state.group_heads;
    slope = w.a.alibi_slopes[head] * kLog2e;
  }
  Vec maximum = broadcast(w.state.row_max[row]);
  for (int i = 0; i < num_pieces; ++i) {
    const Piece<T>& p = pieces[i];
    int64_t visible = p.num_tokens;
    if (w.span.causal) {
      const int64_t limit = w.span.last_visible + query - p.first_token + 1;
      if (visible > limit) visible = limit > 0 ? limit : 0;
    }
    const int64_t distance = w.span.seen_offset + p.first_token - p.lead - query;
    maximum =
        finish_scores(scores + p.column, p.num_columns, p.lead, p.lead + static_cast<int>(visible),
                      w.rule, slope, static_cast<float>(distance), maximum);
  }
  return reduce_max(maximum);
}

constexpr int round_up_lanes(int n) {
  return (n + kWidth - 1) / kWidth * kWidth;
}

// One chunk for R rows: scores, softmax, values.
template <int R, typename T>
static void attend_group(const GroupWork<T>& w) {
  const TileState& s = w.state;
  const int head_size = w.a.cache.head_size;
  Piece<T> pieces[kMaxPieces];
  ValueRun<T> runs[kMaxPieces];
  int num_pieces = 0;
  const int64_t last =
      w.span.last_visible + (w.first_row + R - 1) / s.group_heads;  // of the last row
  for (int i = 0; i < w.chunk.num_pieces; ++i) {
    Piece<T> p = w.chunk.pieces[i];
    if (w.span.causal) {
      if (p.first_token > last) break;
      if (p.num_tokens > last + 1 - p.first_token) {
        p.num_tokens = static_cast<int>(last + 1 - p.first_token);
        p.num_columns = round_up(p.lead + p.num_tokens);
      }
    }
    const T* ahead = i < w.next_chunk.num_pieces ? w.next_chunk.pieces[i].keys : p.values;
    runs[num_pieces] = {p.values, ahead, p.column + p.lead, p.num_tokens};
    pieces[num_pieces++] = p;
  }
  if (num_pieces == 0) return;
  const float* query = w.span.query + static_cast<int64_t>(w.first_row) * head_size;
  for (int i = 0; i < num_pieces; ++i) {
    score_columns<R>(query, pieces[i].keys, head_size, w.key_stride, pieces[i].num_columns,
                     s.scores + pieces[i].column, kChunkColumns);
  }
  const int num_columns = pieces[num_pieces - 1].column + pieces[num_pieces - 1].num_columns;
  float alpha[round_up_lanes(R)] = {};  // old maximum - new maximum, then 2 to its power
  for (int r = 0; r < R; ++r) {
    const int row = w.first_row + r;
    const float maximum = finish_row(w, pieces, num_pieces, row, s.scores + r * kChunkColumns);
    alpha[r] = s.row_max[row] - maximum;
    s.row_max[row] = maximum;
  }
  for (int r = 0; r < R; r += kWidth) store(alpha + r, exp2(load(alpha + r)));
  for (int r = 0; r < R; ++r) {
    const int row = w.first_row + r;
    const Vec sum = load(s.row_sum + row * kWidth) * alpha[r];
    store(s.row_sum + row * kWidth,
          exponentiate(s.scores + r * kChunkColumns, num_columns, s.row_max[row], sum));
  }
  value_rows<R>(s.scores, kChunkColumns, alpha, runs, num_pieces, head_size,
                s.out + static_cast<int64_t>(w.first_row) * head_size);
}

// Calls attend_group<rows>.
template <int R, typename T>
static CHOREO_INLINE void dispatch_rows(int rows, const GroupWork<T>& work) {
  if constexpr (R > 1) {
    if (rows < R) return dispatch_rows<R - 1>(rows, work);
  }
  attend_group<R>(work);
}

// One chunk for all rows of the tile.
template <typename T>
static void attend_groups(GroupWork<T> work) {
  for (; work.first_row < work.state.rows; work.first_row += kMaxRows) {
    const int rest = work.state.rows - work.first_row;
    dispatch_rows<kMaxRows>(rest < kMaxRows ? rest : kMaxRows, work);
  }
}

// Tokens [begin, end) of one span.
template <typename T>
static void attend_span(const AttentionArgs& a, const Tile& tile, TileState& s, int span,
                        int64_t begin, int64_t end) {
  const int own = a.span_start_loc[tile.req + 1] - 1;
  const int q_len = a.query_start_loc[tile.req + 1] - a.query_start_loc[tile.req];
  const int delta = a.position_delta[span];
  const int64_t own_token = a.num_tokens[own] - q_len + tile.query_begin;
  SpanView view;
  view.query = s.base;
  view.causal = span == own;
  view.last_visible = own_token;
  view.seen_offset =
      static_cast<int64_t>(a.stored_position[span]) - delta - (a.stored_position[own] + own_token);
  if (delta != 0 && a.cos_sin != nullptr) {
    if (s.rotated_delta != delta) {
      rotate_queries(s.base, s.num_groups, a.cache.head_size,
                     a.cos_sin + static_cast<int64_t>(span) * a.rotary_dim, a.rotary_dim, a.is_neox,
                     s.rotated);
      s.rotated_delta = delta;
    }
    view.query = s.rotated;
  }
  const ScoreRule rule = {a.softcap * kLog2e, a.alibi_slopes != nullptr};
  const int head_size = a.cache.head_size;
  const int block_size = a.cache.block_size;
  Chunk<T> chunk;
  Chunk<T> next_chunk;
  build_chunk(a, tile, span, begin, end, chunk);
  for (; chunk.num_pieces > 0; chunk = next_chunk) {
    build_chunk(a, tile, span, chunk.end_token, end, next_chunk);
    if constexpr (sizeof(T) < sizeof(float)) {
      if (s.num_groups >= kWidenGroups) {
        Chunk<float> wide;
        widen_chunk(chunk, head_size, block_size, s.widened, wide);
        attend_groups(GroupWork<float>{a, tile, s, view, wide, wide, kChunkColumns, rule, 0});
        continue;
      }
    }
    attend_groups(GroupWork<T>{a, tile, s, view, chunk, next_chunk, block_size, rule, 0});
  }
}

// out [head_size] * factor -> the output of one row.
template <typename T>
static void write_row(const AttentionArgs& a, const Tile& tile, int row, const float* out,
                      float factor) {
  const int group_heads = a.num_heads / a.cache.num_kv_heads;
  const int64_t token = a.query_start_loc[tile.req] + tile.query_begin + row / group_heads;
  const int head = tile.kv_head * group_heads + row % group_heads;
  T* target =
      static_cast<T*>(a.output) + token * a.output_token_stride + head * a.output_head_stride;
  for (int d = 0; d < a.cache.head_size; d += kWidth) store(target + d, load(out + d) * factor);
}

template <typename T>
static void attend_tile_as(const AttentionArgs& a, const Tile& tile, float* scratch,
                           const Partial* partial) {
  TileState s = make_state(a, tile, scratch);
  const float factor = a.softcap != 0.0f ? a.scale / a.softcap : a.scale * kLog2e;
  pack_queries<T>(a, tile, factor, s.base);
  int64_t start = 0;  // of the span, in the request's spans laid end to end
  for (int span = a.span_start_loc[tile.req]; span < a.span_start_loc[tile.req + 1]; ++span) {
    const int64_t size = a.num_tokens[span];
    const int64_t begin = tile.kv_begin > start ? tile.kv_begin - start : 0;
    const int64_t end = tile.kv_end - start < size ? tile.kv_end - start : size;
    if (begin < end) attend_span<T>(a, tile, s, span, begin, end);
    start += size;
  }
  for (int row = 0; row < s.rows; ++row) {
    const float* out = s.out + static_cast<int64_t>(row) * a.cache.head_size;
    const float sum = reduce_sum(load(s.row_sum + row * kWidth));
    if (partial == nullptr) {
      write_row<T>(a, tile, row, out, 1.0f / sum);
      continue;
    }
    float* target = partial->out + static_cast<int64_t>(row) * a.cache.head_size;
    for (int d = 0; d < a.cache.head_size; d += kWidth) store(target + d, load(out + d));
    partial->row_max[row] = s.row_max[row];
    partial->row_sum[row] = sum;
  }
}

template <typename T>
static void merge_partials_as(const AttentionArgs& a, const Tile& tile, const Partial* partials,
                              int num_partials) {
  const int rows = tile.num_queries * (a.num_heads / a.cache.num_kv_heads);
  const int head_size = a.cache.head_size;
  for (int row = 0; row < rows; ++row) {
    float maximum = kNoMaximum;
    for (int i = 0; i < num_partials; ++i) {
      if (partials[i].row_max[row] > maximum) maximum = partials[i].row_max[row];
    }
    // Partial 0 becomes the sum. A partial without visible keys has sum 0 and weight 0 or 1.
    float* total = partials[0].out + static_cast<int64_t>(row) * head_size;
    float sum = 0.0f;
    for (int i = 0; i < num_partials; ++i) {
      const float weight = __builtin_exp2f(partials[i].row_max[row] - maximum);
      const float* out = partials[i].out + static_cast<int64_t>(row) * head_size;
      sum += weight * partials[i].row_sum[row];
      for (int d = 0; d < head_size; d += kWidth) {
        const Vec before = i == 0 ? Vec{} : load(total + d);
        store(total + d, before + load(out + d) * weight);
      }
    }
    write_row<T>(a, tile, row, total, 1.0f / sum);
  }
}

static void attend_tile(const AttentionArgs& a, const Tile& tile, float* scratch,
                        const Partial* partial) {
  if (a.cache.dtype == DType::kFloat32) {
    attend_tile_as<float>(a, tile, scratch, partial);
  } else {
    attend_tile_as<BFloat16>(a, tile, scratch, partial);
  }
}

static void merge_partials(const AttentionArgs& a, const Tile& tile, const Partial* partials,
                           int num_partials) {
  if (a.cache.dtype == DType::kFloat32) {
    merge_partials_as<float>(a, tile, partials, num_partials);
  } else {
    merge_partials_as<BFloat16>(a, tile, partials, num_partials);
  }
}

}  // namespace choreo::CHOREO_ISA
