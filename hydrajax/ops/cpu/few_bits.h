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
constexpr int kMostLogTilesPerScale = 2;
constexpr int kMostRows = 64;   // whose sums stay in the L1 cache
constexpr int kTilesAhead = 8;  // prefetched: the hardware stops at the end of a page

// Tiles [columns / 64, depth / 32], each of [8 steps][64 columns][4 numbers]: int8; or in 4 bits [4][64][4] bytes, with the
// numbers of step s in the low bits of part s and those of step s + 4 in the high bits.
//
// A number w stands for w * scale + offset, or (w - zero) * scale; with exponents, a code of 4 bits for the E2M1 number that it
// is, times 2^(exponent - 127) (MXFP4). Scales and the like serve 1, 2 or 4 tiles of a column each.
struct Weight {
  const uint8_t* tiles;
  int64_t groups, width;
  bool four_bits;
  int64_t scale_groups;
  int log_tiles_per_scale;  // a shift, since divisions take as long as ten products
  // [columns / 64, scale_groups, 64]: float16 or float32 scales, float16 offsets, zeros. Other pointers are null.
  const uint16_t* scales;
  const float* wide_scales;
  const uint16_t* offsets;
  const uint8_t* zeros;
  const uint8_t* exponents;
};

// Twice the E2M1 number of each code.
alignas(16) constexpr int8_t kTwiceOfCode[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

int64_t UnitsOf(int64_t width) { return (width + kColumns - 1) / kColumns; }  // tiles side by side

int64_t TileBytes(const Weight& weight) { return kDepth * kColumns / (weight.four_bits ? 2 : 1); }

const uint8_t* TileAt(const Weight& weight, int64_t t, int64_t group) {
  return weight.tiles + (t * weight.groups + group) * TileBytes(weight);
}

// The place of a tile's scales.
int64_t ScalesAt(const Weight& weight, int64_t t, int64_t group) {
  return (t * weight.scale_groups + (group >> weight.log_tiles_per_scale)) * kColumns;
}

// Rows of x in 8 bits, in groups of 32 that are padded with zeros.
struct Rows {
  int8_t* values;  // [groups, rows, 32]
  float* scales;   // [groups, rows]
  float* sums;     // [groups, rows], of the values
  int64_t rows;
};

// Rounds a group of x: its largest number becomes 127. NaN and infinity stay so by their scale.
inline ALWAYS_INLINE void QuantizeGroup(const float* in, int8_t* out, float& scale, float& sum) {
  int32_t bits[kDepth], largest_bits = 0;
  std::memcpy(bits, in, sizeof(bits));
  for (int i = 0; i < kDepth; ++i) largest_bits = std::max(largest_bits, bits[i] & 0x7fffffff);
  float largest, shifted[kDepth];
  std::memcpy(&largest, &largest_bits, sizeof(largest));
  const float inverse = largest > 1e-35f ? 127.0f / largest : 0.0f;
  for (int i = 0; i < kDepth; ++i) shifted[i] = in[i] * inverse + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
  std::memcpy(bits, shifted, sizeof(bits));
  uint32_t total = 0;  // of NaN's bits it wraps around
  for (int i = 0; i < kDepth; ++i) {
    bits[i] -= 0x4b400000;
    total += static_cast<uint32_t>(bits[i]);
  }
  for (int i = 0; i < kDepth; ++i) out[i] = static_cast<int8_t>(bits[i]);
  scale = largest / 127.0f;
  sum = inverse > 0 ? static_cast<float>(static_cast<int32_t>(total)) : 0;
}

void QuantizeRows(const float* x, int64_t depth, const Rows& to) {
  for (int64_t r = 0; r < to.rows; ++r, x += depth) {
    int64_t at = r;
    int64_t d = 0;
    for (; d + kDepth <= depth; d += kDepth, at += to.rows) {
      QuantizeGroup(x + d, to.values + at * kDepth, to.scales[at], to.sums[at]);
    }
    if (d < depth) {
      float in[kDepth] = {};
      std::memcpy(in, x + d, sizeof(float) * (depth - d));
      QuantizeGroup(in, to.values + at * kDepth, to.scales[at], to.sums[at]);
    }
  }
}

// Puts every two rows of a group side by side, 8 numbers of one and then of the other. A last row without another stays.
void PairRows(const Rows& x, int64_t groups) {
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t row = 0; row + 1 < x.rows; row += 2) {
      int8_t *to = x.values + (g * x.rows + row) * kDepth, pair[2 * kDepth];
      std::memcpy(pair, to, sizeof(pair));
      for (int i = 0; i < 8; ++i) std::memcpy(to + 8 * i, pair + i % 2 * kDepth + i / 2 * 8, 8);
    }
  }
}

}  // namespace

#endif  // HYDRAJAX_FEW_BITS_H_
