// SPDX-License-Identifier: Apache-2.0
// Vectors of floats in GCC's vector extension: one source for every instruction set. The variant
// that includes this file has set CHOREO_ISA (a namespace) and CHOREO_VEC_BYTES.
#pragma once

#include <cstdint>

#include "float8.h"

#define CHOREO_INLINE inline __attribute__((always_inline))

namespace choreo::CHOREO_ISA {

constexpr int kWidth = CHOREO_VEC_BYTES / 4;

typedef float Vec __attribute__((vector_size(CHOREO_VEC_BYTES)));
typedef int32_t IntVec __attribute__((vector_size(CHOREO_VEC_BYTES)));
typedef uint32_t UintVec __attribute__((vector_size(CHOREO_VEC_BYTES)));
typedef float UnalignedVec __attribute__((vector_size(CHOREO_VEC_BYTES), aligned(4), may_alias));
typedef uint16_t UnalignedHalf
    __attribute__((vector_size(CHOREO_VEC_BYTES / 2), aligned(2), may_alias));
typedef uint16_t Half __attribute__((vector_size(CHOREO_VEC_BYTES / 2)));

// bfloat16 in memory: the upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

// Subtracting 0 folds to a plain broadcast; adding 0 does not, since it would change -0.
static CHOREO_INLINE Vec broadcast(float x) {
  return x - Vec{};
}

static CHOREO_INLINE Vec load(const float* p) {
  return *reinterpret_cast<const UnalignedVec*>(p);
}

static CHOREO_INLINE Vec load(const BFloat16* p) {
  // GCC 12 splits the portable conversion of wide vectors in two and joins the halves again.
#if CHOREO_VEC_BYTES == 64
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const UintVec wide = reinterpret_cast<UintVec>(_mm512_cvtepu16_epi32(half));
#elif CHOREO_VEC_BYTES == 32
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const UintVec wide = reinterpret_cast<UintVec>(_mm256_cvtepu16_epi32(half));
#else
  const Half half = *reinterpret_cast<const UnalignedHalf*>(p);
  const UintVec wide = __builtin_convertvector(half, UintVec);
#endif
  return reinterpret_cast<Vec>(wide << 16);
}

// `load` gives numbers in this unit, a power of two, which scales take in for nothing.
template <typename T>
constexpr float kUnit = 1.0f;

#if CHOREO_VEC_BYTES >= 32

// float8 is converted as float16 that lacks bits of the fraction; that of E4M3 has another bias.
template <>
constexpr float kUnit<Float8E4M3> = 256.0f;

typedef int16_t Bits16 __attribute__((vector_size(CHOREO_VEC_BYTES / 2)));

// kWidth bytes, each with its sign in all upper bits.
static CHOREO_INLINE Bits16 load_bytes(const void* p) {
#if CHOREO_VEC_BYTES == 64
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return reinterpret_cast<Bits16>(_mm256_cvtepi8_epi16(bytes));
#else
  const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(p));
  return reinterpret_cast<Bits16>(_mm_cvtepi8_epi16(bytes));
#endif
}

static CHOREO_INLINE Vec widen_halves(Bits16 bits) {
#if CHOREO_VEC_BYTES == 64
  return reinterpret_cast<Vec>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(bits)));
#else
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(bits)));
#endif
}

static CHOREO_INLINE Vec load(const Float8E5M2* p) {
  return widen_halves(load_bytes(p) << 8);
}

// A carry out of exponent and fraction, 0x7f + 1, makes the upper bit of float16's exponent: NaN.
static CHOREO_INLINE Vec load(const Float8E4M3* p) {
  const Bits16 bytes = load_bytes(p);
  const Bits16 carry = ((bytes & 0x7f) + 1) & 0x80;
  return widen_halves(((bytes << 7) & static_cast<int16_t>(0xbfff)) | (carry << 7));
}

#else

static CHOREO_INLINE Vec load(const Float8E4M3* p) {
  Vec v;
  for (int i = 0; i < kWidth; ++i) v[i] = kE4M3Table[p[i].bits];
  return v;
}

static CHOREO_INLINE Vec load(const Float8E5M2* p) {
  Vec v;
  for (int i = 0; i < kWidth; ++i) v[i] = kE5M2Table[p[i].bits];
  return v;
}

#endif

static CHOREO_INLINE void store(float* p, Vec v) {
  *reinterpret_cast<UnalignedVec*>(p) = v;
}

// Rounds to nearest even, as torch does. NaN payloads may change, NaN stays NaN or becomes inf.
static CHOREO_INLINE void store(BFloat16* p, Vec v) {
  const UintVec bits = reinterpret_cast<UintVec>(v);
  const UintVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  *reinterpret_cast<UnalignedHalf*>(p) = __builtin_convertvector(rounded, Half);
}

static CHOREO_INLINE float to_float(float x) {
  return x;
}

static CHOREO_INLINE float to_float(BFloat16 x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16);
}

static CHOREO_INLINE void assign(float& to, float x) {
  to = x;
}

static CHOREO_INLINE void assign(BFloat16& to, float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  to.bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static CHOREO_INLINE Vec max(Vec a, Vec b) {
  return a > b ? a : b;
}

static CHOREO_INLINE Vec min(Vec a, Vec b) {
  return a < b ? a : b;
}

static CHOREO_INLINE Vec iota() {
  Vec v;
  for (int i = 0; i < kWidth; ++i) v[i] = static_cast<float>(i);
  return v;
}

// Lane i of the result is lane i ^ step of v.
template <int step>
static CHOREO_INLINE Vec swap_lanes(Vec v) {
  IntVec lanes;
  for (int i = 0; i < kWidth; ++i) lanes[i] = i ^ step;
  return __builtin_shuffle(v, lanes);
}

// Lane j of v[i] becomes lane i of v[j].
template <int step = kWidth / 2>
static CHOREO_INLINE void transpose(Vec (&v)[kWidth]) {
  if constexpr (step > 0) {
    // Of each square of 2 * step rows and lanes, the two halves off the diagonal change places.
    IntVec low, high;
    for (int i = 0; i < kWidth; ++i) {
      low[i] = i & step ? kWidth + i - step : i;
      high[i] = i & step ? kWidth + i : i + step;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      if (i & step) continue;
      const Vec a = v[i];
      const Vec b = v[i + step];
      v[i] = __builtin_shuffle(a, b, low);
      v[i + step] = __builtin_shuffle(a, b, high);
    }
    transpose<step / 2>(v);
  }
}

template <int step = kWidth / 2>
static CHOREO_INLINE float reduce_max(Vec v) {
  if constexpr (step > 0) return reduce_max<step / 2>(max(v, swap_lanes<step>(v)));
  return v[0];
}

template <int step = kWidth / 2>
static CHOREO_INLINE float reduce_sum(Vec v) {
  if constexpr (step > 0) return reduce_sum<step / 2>(v + swap_lanes<step>(v));
  return v[0];
}

// 2^x for x <= 127, exactly 0 below -125 (masked scores are -inf, and denormals are slow).
// Relative error below 2e-7: degree-6 minimax polynomial on [-0.5, 0.5].
static CHOREO_INLINE Vec exp2(Vec x) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: the sum's low bits are round(x)
  const Vec clamped = max(x, broadcast(-125.0f));
  const Vec shifted = clamped + magic;
  const Vec f = clamped - (shifted - magic);
  Vec p = broadcast(1.534581200e-4f);
  p = p * f + 1.339993136e-3f;
  p = p * f + 9.618488958e-3f;
  p = p * f + 5.550328777e-2f;
  p = p * f + 2.402264689e-1f;
  p = p * f + 6.931472057e-1f;
  p = p * f + 1.0f;
  const IntVec exponent = reinterpret_cast<IntVec>(shifted) << 23;
  const Vec result = reinterpret_cast<Vec>(reinterpret_cast<IntVec>(p) + exponent);
  return x < broadcast(-125.0f) ? Vec{} : result;
}

// tanh by exp2; absolute error below 2e-7.
static CHOREO_INLINE Vec tanh(Vec x) {
  const Vec twice_log2e = broadcast(2.8853901f);
  const Vec e = exp2(min(max(x, broadcast(-20.0f)), broadcast(20.0f)) * twice_log2e);
  return (e - 1.0f) / (e + 1.0f);
}

}  // namespace choreo::CHOREO_ISA
