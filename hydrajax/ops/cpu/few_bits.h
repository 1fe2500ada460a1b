// What all code for products with weights of 8 and 4 bits shares (few_bits.cc): the layout of weights and of rounded rows.

#ifndef HYDRAJAX_FEW_BITS_H_
#define HYDRAJAX_FEW_BITS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu_kernels.h"

namespace {

constexpr int kDepth = 32;    // numbers of a group
constexpr int kColumns = 64;  // of a tile
constexpr int kSteps = kDepth / 4;
constexpr int kMostTilesPerScale = 4;
constexpr int kMostRows = 64;   // whose sums stay in the L1 cache
constexpr int kTilesAhead = 8;  // prefetched: the hardware stops at the end of a page
constexpr int kL1 = 3, kL2 = 2;  // caches to prefetch into: L1 only line by line, in the order of memory

// Tiles [columns / 64, depth / 32], each of [8 steps][64 columns][4 numbers]: int8; or in 4 bits [4][64][4] bytes, with the
// numbers of step s in the low bits of part s and those of step s + 4 in the high bits.
//
// A number w stands for w * scale + offset, or (w - zero) * scale. Scales and the like serve 1, 2 or 4 tiles of a column each.
struct Weight {
  const uint8_t* tiles;
  int64_t groups, width;
  bool four_bits;
  int64_t scale_groups, tiles_per_scale;
  // [columns / 64, scale_groups, 64]: float16 or float32 scales, float16 offsets, zeros. Other pointers are null.
  const uint16_t* scales;
  const float* wide_scales;
  const uint16_t* offsets;
  const uint8_t* zeros;
};

int64_t TileBytes(const Weight& weight) { return kDepth * kColumns / (weight.four_bits ? 2 : 1); }

const uint8_t* TileAt(const Weight& weight, int64_t t, int64_t group) {
  return weight.tiles + (t * weight.groups + group) * TileBytes(weight);
}

// The place of a tile's scales.
int64_t ScalesAt(const Weight& weight, int64_t t, int64_t group) {
  return (t * weight.scale_groups + group / weight.tiles_per_scale) * kColumns;
}

// Of a tile's columns, widened once for all rows.
struct Scales {
  float scales[kColumns], offsets[kColumns];
  bool has_offsets;
};

struct Tile {
  const uint8_t* values;
  const float *scales, *offsets;  // offsets may be null
};

// Rows of x in 8 bits, in groups of 32 that are padded with zeros. T is int8_t or float.
struct Rows {
  void* values;   // T [groups, rows, 32]
  float* scales;  // [groups, rows]
  float* sums;    // [groups, rows], of the values
  int64_t rows;
};

// Rounds rows of x: a group's largest number becomes 127. NaN and infinity stay so by their scale.
template <typename T>
inline ALWAYS_INLINE void QuantizeRows(const float* x, int64_t depth, const Rows& to) {
  T* values = static_cast<T*>(to.values);
  for (int64_t r = 0; r < to.rows; ++r) {
    for (int64_t g = 0; g * kDepth < depth; ++g) {
      float in[kDepth] = {};
      std::memcpy(in, x + r * depth + g * kDepth, sizeof(float) * std::min<int64_t>(kDepth, depth - g * kDepth));
      int32_t bits[kDepth], largest_bits = 0;
      std::memcpy(bits, in, sizeof(bits));
      for (int i = 0; i < kDepth; ++i) largest_bits = std::max(largest_bits, bits[i] & 0x7fffffff);
      float largest;
      std::memcpy(&largest, &largest_bits, sizeof(largest));
      const float inverse = largest > 1e-35f ? 127.0f / largest : 0.0f;
      const int64_t at = g * to.rows + r;
      T* out = values + at * kDepth;
      int32_t sum = 0;
      for (int i = 0; i < kDepth; ++i) {
        const float shifted = in[i] * inverse + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
        int32_t rounded;
        std::memcpy(&rounded, &shifted, sizeof(rounded));
        rounded -= 0x4b400000;
        out[i] = static_cast<T>(static_cast<int8_t>(rounded));
        sum += static_cast<int8_t>(rounded);
      }
      to.scales[at] = largest / 127.0f;
      to.sums[at] = static_cast<float>(sum);
    }
  }
}

}  // namespace

#endif  // HYDRAJAX_FEW_BITS_H_
