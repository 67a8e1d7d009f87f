// SPDX-License-Identifier: Apache-2.0
// span_attention for one tile: an online softmax over the pieces that its members read.
#pragma once

#include "chunk.h"
#include "queries.h"
#include "softmax.h"
#include "window.h"

namespace choreo::CHOREO_ISA {

// From this many groups of rows on, a chunk is converted once and not once per group.
template <typename T>
constexpr int kWidenGroups = 3;
constexpr float kLog2e = 1.44269504f;

// Buffers of a tile; `rows` below is rounded up to whole groups of kMaxRows.
struct TileState {
  int rows;                // rows in use
  int num_groups;          // groups of kMaxRows
  int group_heads;         // query heads per KV head
  float* base;             // packed queries, not rotated further
  float* rotated;          // packed queries, each member's rotated by its `rotated_delta`
  int32_t* rotated_delta;  // [rows], an entry per member
  float* out;              // [rows, value_size], unnormalized
  float* row_max;          // [rows]
  float* row_sum;          // [rows, kWidth], one partial sum per lane
  float* distance;         // [rows], position of the piece's token 0 less that of the row
  float* scores;           // [kMaxRows, kChunkColumns]
  float* widened;          // a chunk of keys and values in float32, see widen_chunk
  bool is_rotated;         // `rotated` holds something
};

static int64_t scratch_floats(int rows, const CacheView& cache) {
  const int64_t padded = round_up_rows(rows);
  return padded * (2 * cache.head_size + cache.value_size + kWidth + 3) + kMaxRows * kChunkColumns +
         widened_floats(cache);
}

static TileState make_state(const AttentionArgs& a, const Tile& tile, float* scratch) {
  TileState s;
  s.group_heads = a.num_heads / a.cache.num_kv_heads;
  s.rows = tile.num_rows;
  const int padded = round_up_rows(s.rows);
  s.num_groups = padded / kMaxRows;
  const int64_t matrix = static_cast<int64_t>(padded) * a.cache.head_size;
  const int64_t out_floats = static_cast<int64_t>(padded) * a.cache.value_size;
  s.scores = scratch;
  s.widened = s.scores + kMaxRows * kChunkColumns;
  s.base = s.widened + widened_floats(a.cache);
  s.rotated = s.base + matrix;
  s.out = s.rotated + matrix;
  s.row_sum = s.out + out_floats;
  s.row_max = s.row_sum + static_cast<int64_t>(padded) * kWidth;
  s.distance = s.row_max + padded;
  s.rotated_delta = reinterpret_cast<int32_t*>(s.distance + padded);
  s.is_rotated = false;
  for (int64_t i = 0; i < out_floats; ++i) s.out[i] = 0.0f;
  for (int i = 0; i < padded * kWidth; ++i) s.row_sum[i] = 0.0f;
  for (int i = 0; i < padded; ++i) s.row_max[i] = kNoMaximum;
  return s;
}

// A piece as the rows of a tile see it. Each member reads it in a span of its own.
struct PieceView {
  const int32_t* span;   // [num_members], in the order of the group's columns
  const int32_t* begin;  // [num_members], the piece's token 0 in that span
  const float* query;    // packed
  bool causal;           // own span
  int64_t last_visible;  // own span: last token that the tile's query 0 sees
};

template <typename T>
struct GroupWork {
  const AttentionArgs& a;
  const Tile& tile;
  const TileState& state;
  const PieceView& piece;
  const Chunk<T>& chunk;
  const Chunk<T>& next_chunk;  // without strips at the end of the piece
  int key_stride;              // from one dim of a key to the next
  int value_stride;            // from one value to the next
  ScoreRule rule;
  int first_row;
};

// First token that a row sees, counted from token 0 of the piece.
template <typename T>
static CHOREO_INLINE int64_t first_seen(const GroupWork<T>& w, int row) {
  return 1 - w.a.window - static_cast<int64_t>(w.state.distance[row]);
}

// Scores of one row in all strips of a chunk, finished; returns the row's new maximum.
template <typename T>
static CHOREO_INLINE float finish_row(const GroupWork<T>& w, const Strip<T>* strips, int num_strips,
                                      int row, float* scores) {
  float slope = 0.0f;
  if (w.rule.has_alibi) {
    const int head = w.tile.kv_head * w.state.group_heads + row % w.state.group_heads;
    slope = w.a.alibi_slopes[head] * kLog2e * w.rule.inverse_temperature;
  }
  Vec maximum = broadcast(w.state.row_max[row]);
  for (int i = 0; i < num_strips; ++i) {
    const Strip<T>& p = strips[i];
    int64_t visible = p.num_tokens;
    if (w.piece.causal) {
      const int64_t limit = w.piece.last_visible + row / w.state.group_heads - p.first_token + 1;
      if (visible > limit) visible = limit > 0 ? limit : 0;
    }
    int64_t hidden = 0;
    if (w.a.window != 0) {
      hidden = first_seen(w, row) - p.first_token;
      hidden = hidden < 0 ? 0 : hidden < visible ? hidden : visible;
    }
    const float distance =
        w.rule.has_alibi ? w.state.distance[row] + static_cast<float>(p.first_token - p.lead) : 0;
    maximum = finish_scores(scores + p.column, p.num_columns, p.lead + static_cast<int>(hidden),
                            p.lead + static_cast<int>(visible), w.rule, slope, distance, maximum);
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
  Strip<T> strips[kMaxStrips];
  ValueRun<T> runs[kMaxStrips];
  int num_strips = 0;
  const int64_t last =
      w.piece.last_visible + (w.first_row + R - 1) / s.group_heads;  // of the last row
  int64_t first = 0;
  if (w.a.window != 0) {
    first = first_seen(w, w.first_row);
    for (int r = 1; r < R; ++r) {
      const int64_t of_row = first_seen(w, w.first_row + r);
      if (of_row < first) first = of_row;
    }
  }
  for (int i = 0; i < w.chunk.num_strips; ++i) {
    Strip<T> p = w.chunk.strips[i];
    if (p.first_token + p.num_tokens <= first) continue;
    if (w.piece.causal) {
      if (p.first_token > last) break;
      if (p.num_tokens > last + 1 - p.first_token) {
        p.num_tokens = static_cast<int>(last + 1 - p.first_token);
        p.num_columns = round_up(p.lead + p.num_tokens);
      }
    }
    const T* ahead = i < w.next_chunk.num_strips ? w.next_chunk.strips[i].keys : p.values;
    runs[num_strips] = {p.values, ahead, p.column + p.lead, p.num_tokens};
    strips[num_strips++] = p;
  }
  if (num_strips == 0) return;
  const float* query = w.piece.query + static_cast<int64_t>(w.first_row) * head_size;
  for (int i = 0; i < num_strips; ++i) {
    score_columns<R>(query, strips[i].keys, head_size, w.key_stride, strips[i].num_columns,
                     s.scores + strips[i].column, kChunkColumns);
  }
  const int begin = strips[0].column;
  const int num_columns =
      strips[num_strips - 1].column + strips[num_strips - 1].num_columns - begin;
  float alpha[round_up_lanes(R)] = {};  // old maximum - new maximum, then 2 to its power
  for (int r = 0; r < R; ++r) {
    const int row = w.first_row + r;
    const float maximum = finish_row(w, strips, num_strips, row, s.scores + r * kChunkColumns);
    alpha[r] = s.row_max[row] - maximum;
    s.row_max[row] = maximum;
  }
  for (int r = 0; r < R; r += kWidth) store(alpha + r, exp2(load(alpha + r)));
  for (int r = 0; r < R; ++r) {
    const int row = w.first_row + r;
    const Vec sum = load(s.row_sum + row * kWidth) * alpha[r];
    store(s.row_sum + row * kWidth,
          exponentiate(s.scores + r * kChunkColumns + begin, num_columns, s.row_max[row], sum));
  }
  const int value_size = w.a.cache.value_size;
  value_rows<R>(s.scores, kChunkColumns, alpha, runs, num_strips, value_size, w.value_stride,
                s.out + static_cast<int64_t>(w.first_row) * value_size);
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

// Rotates the queries of each member for its span of the piece; returns the packed queries.
static const float* rotate_members(const AttentionArgs& a, const Tile& tile, TileState& s,
                                   const PieceView& piece) {
  bool is_turned = false;
  for (int m = 0; m < tile.num_members; ++m) {
    is_turned |= a.position_delta[piece.span[tile.members[m].column]] != 0;
  }
  if (!is_turned || a.cos_sin == nullptr) return s.base;
  for (int m = 0; m < tile.num_members; ++m) {
    const Member& member = tile.members[m];
    const int span = piece.span[member.column];
    const int delta = a.position_delta[span];
    if (s.is_rotated && s.rotated_delta[m] == delta) continue;
    rotate_rows(s.base, member.first_row, member.num_queries * s.group_heads, a.cache.head_size,
                a.cache.rotary_offset(), a.cos_sin + static_cast<int64_t>(span) * a.rotary_dim,
                delta == 0 ? 0 : a.rotary_dim, a.is_neox, s.rotated);
    s.rotated_delta[m] = delta;
  }
  s.is_rotated = true;
  return s.rotated;
}

// Fills `distance`, for ALiBi and windows.
static void measure_distances(const AttentionArgs& a, const Tile& tile, TileState& s,
                              const PieceView& piece) {
  for (int m = 0; m < tile.num_members; ++m) {
    const Member& member = tile.members[m];
    const int64_t first =
        first_distance(a, member, piece.span[member.column], piece.begin[member.column]);
    for (int i = 0; i < member.num_queries * s.group_heads; ++i) {
      s.distance[member.first_row + i] = static_cast<float>(first - i / s.group_heads);
    }
  }
}

// One over the temperature of the scores; tiles of chosen spans are of one request.
static float tile_inverse_temperature(const AttentionArgs& a, const Tile& tile) {
  if (tile.group < a.reads.first_chosen) return 1.0f;
  return 1.0f / a.temperature[tile.members[0].req];
}

// Tokens [begin, end) of one piece.
template <typename T>
static void attend_piece(const AttentionArgs& a, const Tile& tile, TileState& s, PieceView piece,
                         int64_t begin, int64_t end) {
  const Member& first = tile.members[0];  // all members read the same slots
  const PieceRange range = {
      first.req, a.first_slot[piece.span[first.column]] + int64_t{piece.begin[first.column]}, begin,
      end};
  const float inverse_temperature = tile_inverse_temperature(a, tile);
  const ScoreRule rule = {a.softcap * kLog2e * inverse_temperature, a.alibi_slopes != nullptr,
                          inverse_temperature};
  piece.query = rotate_members(a, tile, s, piece);
  piece.last_visible = own_token(a, first);
  if (rule.has_alibi || a.window != 0) measure_distances(a, tile, s, piece);
  const int key_stride = a.cache.block_size;
  const int value_stride = a.cache.value_stride();
  Chunk<T> chunk;
  Chunk<T> next_chunk;
  build_chunk(a, tile.kv_head, range, begin, chunk);
  for (; chunk.num_strips > 0; chunk = next_chunk) {
    build_chunk(a, tile.kv_head, range, chunk.end_token, next_chunk);
    if (a.cache.is_latent || (sizeof(T) < sizeof(float) && s.num_groups >= kWidenGroups<T>)) {
      Chunk<float> wide;
      const int wide_stride = widen_chunk(chunk, a.cache, s.widened, wide);
      attend_groups(
          GroupWork<float>{a, tile, s, piece, wide, wide, kChunkColumns, wide_stride, rule, 0});
      continue;
    }
    attend_groups(
        GroupWork<T>{a, tile, s, piece, chunk, next_chunk, key_stride, value_stride, rule, 0});
  }
}

// All pieces of the tile's group, as far as its tokens go.
template <typename T>
static void attend_pieces(const AttentionArgs& a, const Tile& tile, TileState& s) {
  const Reads& reads = a.reads;
  const int width = reads.member_start_loc[tile.group + 1] - reads.member_start_loc[tile.group];
  int64_t read = reads.read_start_loc[tile.group];
  int64_t start = 0;  // of what is seen of the piece, in the group's pieces laid end to end
  const auto attend = [&](const PieceView& piece, int64_t num_tokens) {
    const int64_t hidden = hidden_tokens(a, a.window, tile.members, tile.num_members, piece.span,
                                         piece.begin, num_tokens);
    const int64_t num_seen = num_tokens - hidden;
    const int64_t begin = tile.kv_begin > start ? tile.kv_begin - start : 0;
    const int64_t end = tile.kv_end - start < num_seen ? tile.kv_end - start : num_seen;
    if (begin < end) attend_piece<T>(a, tile, s, piece, hidden + begin, hidden + end);
    start += num_seen;
  };
  for (int p = reads.piece_start_loc[tile.group]; p < reads.piece_start_loc[tile.group + 1]; ++p) {
    attend({reads.read_span + read, reads.read_begin + read, nullptr, false, 0},
           reads.piece_tokens[p]);
    read += width;
  }
  if (tile.group >= a.num_reqs) return;
  const int32_t own = a.span_start_loc[tile.group + 1] - 1;
  const int32_t begin = 0;
  attend({&own, &begin, nullptr, true, 0}, a.num_tokens[own]);
}

// out [value_size] * factor -> the output of one row of a member, counted from its first.
template <typename T>
static void write_row(const AttentionArgs& a, const Member& member, int kv_head, int row,
                      const float* out, float factor) {
  const int group_heads = a.num_heads / a.cache.num_kv_heads;
  const int64_t token = a.query_start_loc[member.req] + member.query_begin + row / group_heads;
  const int head = kv_head * group_heads + row % group_heads;
  T* target =
      static_cast<T*>(a.output) + token * a.output_token_stride + head * a.output_head_stride;
  for (int d = 0; d < a.cache.value_size; d += kWidth) store(target + d, load(out + d) * factor);
}

// What the sink adds to the sum of a row whose maximum is given.
static CHOREO_INLINE float sink_weight(const AttentionArgs& a, int kv_head, int row,
                                       float maximum) {
  if (a.sinks == nullptr) return 0.0f;
  const int group_heads = a.num_heads / a.cache.num_kv_heads;
  const float sink = a.sinks[kv_head * group_heads + row % group_heads];
  return __builtin_exp2f(sink * kLog2e - maximum);
}

// By what the sum of values, as `load` gives them, is to be multiplied.
template <typename T>
static CHOREO_INLINE float value_factor(const AttentionArgs& a) {
  return a.value_scale * kUnit<T>;
}

template <typename Q, typename T>
static void write_member(const AttentionArgs& a, const Tile& tile, const TileState& s,
                         const Member& member, float* partial) {
  const int rows = member.num_queries * s.group_heads;
  const int value_size = a.cache.value_size;
  for (int i = 0; i < rows; ++i) {
    const int row = member.first_row + i;
    const float* out = s.out + static_cast<int64_t>(row) * value_size;
    const float sum = reduce_sum(load(s.row_sum + row * kWidth));
    if (partial == nullptr) {
      const float sink = sink_weight(a, tile.kv_head, i, s.row_max[row]);
      write_row<Q>(a, member, tile.kv_head, i, out, value_factor<T>(a) / (sum + sink));
      continue;
    }
    float* target = partial + static_cast<int64_t>(i) * value_size;
    for (int d = 0; d < value_size; d += kWidth) store(target + d, load(out + d));
    float* maxima = partial + static_cast<int64_t>(rows) * value_size;
    maxima[i] = s.row_max[row];
    maxima[rows + i] = sum;
  }
}

// Queries and outputs are of Q, keys and values of T.
template <typename Q, typename T>
static void attend_tile_as(const AttentionArgs& a, const Tile& tile, float* scratch,
                           float* const* partials) {
  TileState s = make_state(a, tile, scratch);
  const float scale = a.scale * a.key_scale * kUnit<T>;
  const float factor =
      a.softcap != 0.0f ? scale / a.softcap : scale * kLog2e * tile_inverse_temperature(a, tile);
  for (int m = 0; m < tile.num_members; ++m) {
    pack_queries<Q>(a, tile.kv_head, tile.members[m], factor, s.base);
  }
  attend_pieces<T>(a, tile, s);
  for (int m = 0; m < tile.num_members; ++m) {
    write_member<Q, T>(a, tile, s, tile.members[m], partials[m]);
  }
}

// By what the weight 2^(maximum - common maximum) of each chosen partial result of a row is to be
// multiplied, base 2: their common log-sum-exp L becomes factor * L.
static float chosen_shift(const AttentionArgs& a, const Member& member, const float* maxima,
                          const float* sums, int64_t stride, int num_chosen) {
  float maximum = kNoMaximum;
  for (int i = 0; i < num_chosen; ++i) {
    if (maxima[i * stride] > maximum) maximum = maxima[i * stride];
  }
  float sum = 0.0f;
  for (int i = 0; i < num_chosen; ++i) {
    sum += __builtin_exp2f(maxima[i * stride] - maximum) * sums[i * stride];
  }
  if (sum == 0.0f) return 0.0f;  // nothing of them is seen
  return (a.factor[member.req] - 1.0f) * (maximum + __builtin_log2f(sum));
}

template <typename Q, typename T>
static void merge_partials_as(const AttentionArgs& a, const Member& member, int kv_head,
                              float* partials, int64_t stride, int num_partials, int num_chosen) {
  const int rows = member.num_queries * (a.num_heads / a.cache.num_kv_heads);
  const int value_size = a.cache.value_size;
  float* maxima = partials + static_cast<int64_t>(rows) * value_size;
  const float* sums = maxima + rows;
  for (int row = 0; row < rows; ++row) {
    if (num_chosen > 0) {
      const float shift = chosen_shift(a, member, maxima + row, sums + row, stride, num_chosen);
      for (int i = 0; i < num_chosen; ++i) maxima[i * stride + row] += shift;
    }
    float maximum = kNoMaximum;
    for (int i = 0; i < num_partials; ++i) {
      if (maxima[i * stride + row] > maximum) maximum = maxima[i * stride + row];
    }
    // Partial 0 becomes the sum. A partial without visible keys has sum 0 and weight 0 or 1.
    float* total = partials + static_cast<int64_t>(row) * value_size;
    float sum = 0.0f;
    for (int i = 0; i < num_partials; ++i) {
      const float weight = __builtin_exp2f(maxima[i * stride + row] - maximum);
      const float* out = total + i * stride;
      sum += weight * sums[i * stride + row];
      for (int d = 0; d < value_size; d += kWidth) {
        const Vec before = i == 0 ? Vec{} : load(total + d);
        store(total + d, before + load(out + d) * weight);
      }
    }
    sum += sink_weight(a, kv_head, row, maximum);
    write_row<Q>(a, member, kv_head, row, total, value_factor<T>(a) / sum);
  }
}

// Types of queries and outputs, and of keys and values.
template <typename Q, typename T>
struct Types {};

// Calls `run` with the types of a call.
template <typename Run>
static CHOREO_INLINE void dispatch_types(const AttentionArgs& a, const Run& run) {
  const auto with_query = [&]<typename Q>(Types<Q, Q> same) {
    switch (a.cache.dtype) {
      case DType::kFloat8E4M3:
        return run(Types<Q, Float8E4M3>());
      case DType::kFloat8E5M2:
        return run(Types<Q, Float8E5M2>());
      default:
        return run(same);
    }
  };
  if (a.dtype == DType::kFloat32) {
    with_query(Types<float, float>());
  } else {
    with_query(Types<BFloat16, BFloat16>());
  }
}

static void attend_tile(const AttentionArgs& a, const Tile& tile, float* scratch,
                        float* const* partials) {
  dispatch_types(a, [&]<typename Q, typename T>(Types<Q, T>) {
    attend_tile_as<Q, T>(a, tile, scratch, partials);
  });
}

static void merge_partials(const AttentionArgs& a, const Member& member, int kv_head,
                           float* partials, int64_t stride, int num_partials, int num_chosen) {
  dispatch_types(a, [&]<typename Q, typename T>(Types<Q, T>) {
    merge_partials_as<Q, T>(a, member, kv_head, partials, stride, num_partials, num_chosen);
  });
}

}  // namespace choreo::CHOREO_ISA
