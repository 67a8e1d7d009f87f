// SPDX-License-Identifier: Apache-2.0
// The products of an adapter, for a few rows at a time. A row is summed in the same order whichever
// rows stand beside it.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace choreo::CHOREO_ISA {

// acc[r] = sum over d of x[r][d] * weights[d][0 .. NV * kWidth).
template <int R, int NV, typename X, typename W>
static CHOREO_INLINE void multiply_rows(const X* const* x, const W* weights, int64_t stride,
                                        int64_t depth, Vec (&acc)[R][NV]) {
  for (int64_t d = 0; d < depth; ++d, weights += stride) {
    Vec w[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) w[n] = load(weights + n * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec factor = broadcast(to_float(x[r][d]));
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) acc[r][n] += factor * w[n];
    }
  }
}

// shrunk[r][0 .. num_ranks) of R rows, rounded to T.
template <int R, int NV, typename T>
static CHOREO_INLINE void shrink_columns(const AdapterArgs& a, const T* const* x, int column,
                                         T* shrunk) {
  Vec acc[R][NV] = {};
  multiply_rows<R, NV>(x, a.shrink + column, a.num_ranks, a.in_features, acc);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) {
      store(shrunk + r * a.num_ranks + column + n * kWidth, acc[r][n] * a.scale);
    }
  }
}

template <int R, int NV, typename T>
static CHOREO_INLINE void expand_columns(const AdapterSlice& slice, const T* const* shrunk,
                                         int64_t column, T* const* y) {
  Vec acc[R][NV] = {};
  const T* expand = static_cast<const T*>(slice.expand) + column;
  multiply_rows<R, NV>(shrunk, expand, slice.num_columns, slice.num_ranks, acc);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    T* out = y[r] + slice.first_column + column;
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) store(out + n * kWidth, load(out + n * kWidth) + acc[r][n]);
  }
}

// Columns that do not fill a vector.
template <int R, typename T>
static CHOREO_INLINE void expand_rest(const AdapterSlice& slice, const T* const* shrunk,
                                      int64_t column, T* const* y) {
  for (; column < slice.num_columns; ++column) {
    for (int r = 0; r < R; ++r) {
      const T* expand = static_cast<const T*>(slice.expand) + column;
      float sum = 0;
      for (int k = 0; k < slice.num_ranks; ++k, expand += slice.num_columns) {
        sum += to_float(shrunk[r][k]) * to_float(*expand);
      }
      T& out = y[r][slice.first_column + column];
      assign(out, to_float(out) + sum);
    }
  }
}

template <int R, typename T>
static void add_adapter_rows(const AdapterArgs& a, int64_t first, T* scratch) {
  const T* x[R];
  T* y[R];
  for (int r = 0; r < R; ++r) {
    const int64_t row = a.rows[first + r];
    x[r] = static_cast<const T*>(a.x) + row * a.x_stride;
    y[r] = static_cast<T*>(a.y) + row * a.y_stride;
  }
  int rank = 0;
  for (; rank + 2 * kWidth <= a.num_ranks; rank += 2 * kWidth) {
    shrink_columns<R, 2>(a, x, rank, scratch);
  }
  for (; rank < a.num_ranks; rank += kWidth) shrink_columns<R, 1>(a, x, rank, scratch);
  for (int s = 0; s < a.num_slices; ++s) {
    const AdapterSlice& slice = a.slices[s];
    const T* shrunk[R];
    for (int r = 0; r < R; ++r) shrunk[r] = scratch + r * a.num_ranks + slice.first_rank;
    int64_t column = 0;
    for (; column + 2 * kWidth <= slice.num_columns; column += 2 * kWidth) {
      expand_columns<R, 2>(slice, shrunk, column, y);
    }
    for (; column + kWidth <= slice.num_columns; column += kWidth) {
      expand_columns<R, 1>(slice, shrunk, column, y);
    }
    expand_rest<R>(slice, shrunk, column, y);
  }
}

template <typename T>
static void add_adapter_as(const AdapterArgs& a, int64_t begin, int64_t end, T* scratch) {
  static_assert(kAdapterRows == 6);
  for (; begin + 6 <= end; begin += 6) add_adapter_rows<6>(a, begin, scratch);
  switch (end - begin) {
    case 5:
      return add_adapter_rows<5>(a, begin, scratch);
    case 4:
      return add_adapter_rows<4>(a, begin, scratch);
    case 3:
      return add_adapter_rows<3>(a, begin, scratch);
    case 2:
      return add_adapter_rows<2>(a, begin, scratch);
    case 1:
      return add_adapter_rows<1>(a, begin, scratch);
  }
}

static void add_adapter(const AdapterArgs& a, int64_t begin, int64_t end, float* scratch) {
  if (a.dtype == DType::kFloat32) {
    add_adapter_as<float>(a, begin, end, scratch);
  } else {
    add_adapter_as<BFloat16>(a, begin, end, reinterpret_cast<BFloat16*>(scratch));
  }
}

}  // namespace choreo::CHOREO_ISA
