// SPDX-License-Identifier: Apache-2.0
// Numbers of 8 bits in memory, and what they are: torch's float8_e4m3fn and float8_e5m2.
#pragma once

#include <array>
#include <cstdint>

namespace choreo {

// Sign, 4 bits of exponent (bias 7), 3 of fraction; no infinities, 0x7f and 0xff are NaN.
struct Float8E4M3 {
  uint8_t bits;
};

// Sign, 5 bits of exponent (bias 15), 2 of fraction: the upper half of a float16.
struct Float8E5M2 {
  uint8_t bits;
};

// All 256 numbers of a format, by their bits.
template <int kFractionBits>
constexpr std::array<float, 256> float8_table() {
  constexpr int kBias = kFractionBits == 3 ? 7 : 15;
  constexpr int kExponents = 1 << (7 - kFractionBits);
  constexpr int kFractions = 1 << kFractionBits;
  std::array<float, 256> table{};
  for (int bits = 0; bits < 256; ++bits) {
    const int exponent = bits >> kFractionBits & (kExponents - 1);
    const int fraction = bits & (kFractions - 1);
    float number = static_cast<float>(exponent == 0 ? fraction : fraction + kFractions);
    // Denormals have the exponent of the smallest normal numbers.
    const int power = (exponent == 0 ? 1 : exponent) - kBias - kFractionBits;
    for (int i = 0; i < power; ++i) number *= 2.0f;
    for (int i = 0; i > power; --i) number *= 0.5f;
    const bool is_special = exponent == kExponents - 1;
    if (kFractionBits == 3 && is_special && fraction == kFractions - 1) number = __builtin_nanf("");
    if (kFractionBits == 2 && is_special) {
      number = fraction == 0 ? __builtin_inff() : __builtin_nanf("");
    }
    table[bits] = bits < 128 ? number : -number;
  }
  return table;
}

inline constexpr std::array<float, 256> kE4M3Table = float8_table<3>();
inline constexpr std::array<float, 256> kE5M2Table = float8_table<2>();

}  // namespace choreo
