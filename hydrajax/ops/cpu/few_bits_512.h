// Integer products in vectors of 512 bits for few_bits.cc: AVX-512 with VNNI, which multiplies four pairs and adds them in
// one instruction, and for several rows AMX, which multiplies tiles. Both have the same integers and scale them in one order.

#ifndef HYDRAJAX_FEW_BITS_512_H_
#define HYDRAJAX_FEW_BITS_512_H_

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_VNNI_CODE 1

#include <immintrin.h>

#include "amx.h"
#include "few_bits.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512vnni")

namespace {

// Calls `multiply` with whether the weight has 4 bits, and whether it has offsets or zeros, as constants.
template <typename Multiply>
void WithKind(const Weight& weight, const Multiply& multiply) {
  const std::true_type yes;
  const std::false_type no;
  if (weight.offsets != nullptr || weight.zeros != nullptr) {
    weight.four_bits ? multiply(yes, yes) : multiply(no, yes);
  } else {
    weight.four_bits ? multiply(yes, no) : multiply(no, no);
  }
}

namespace vnni {

constexpr int kLanes = 16;
constexpr int kGroupsAtOnce = 8;  // whose weights stay in the L1 cache for all rows

// QuantizeRows, to the last bit.
void Quantize(const float* x, int64_t depth, const Rows& to) {
  const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
  const __m512 rounding = _mm512_set1_ps(12582912.0f);
  for (int64_t r = 0; r < to.rows; ++r, x += depth) {
    for (int64_t g = 0; g * kDepth < depth; ++g) {
      const int64_t left = std::min<int64_t>(kDepth, depth - g * kDepth);
      const uint32_t here = left == kDepth ? ~0u : (1u << left) - 1;
      const __m512 low = _mm512_maskz_loadu_ps(here & 0xffff, x + g * kDepth);
      const __m512 high = _mm512_maskz_loadu_ps(here >> 16, x + g * kDepth + kLanes);
      const __m512i larger = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(low), no_sign),
                                              _mm512_and_si512(_mm512_castps_si512(high), no_sign));
      const int32_t bits = _mm512_reduce_max_epi32(larger);
      float largest;
      std::memcpy(&largest, &bits, sizeof(largest));
      const __m512 inverse = _mm512_set1_ps(largest > 1e-35f ? 127.0f / largest : 0.0f);
      auto round = [&](__m512 numbers) ALWAYS_INLINE {
        const __m512i shifted = _mm512_castps_si512(_mm512_fmadd_ps(numbers, inverse, rounding));
        return _mm512_sub_epi32(shifted, _mm512_castps_si512(rounding));
      };
      const __m512i first = round(low), second = round(high);
      const int64_t at = g * to.rows + r;
      __m128i* values = reinterpret_cast<__m128i*>(static_cast<int8_t*>(to.values) + at * kDepth);
      _mm_storeu_si128(values, _mm512_cvtepi32_epi8(first));
      _mm_storeu_si128(values + 1, _mm512_cvtepi32_epi8(second));
      to.scales[at] = largest / 127.0f;
      to.sums[at] = static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(first, second)));
    }
  }
}

inline __m512 FromHalves(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Reads scales of 16 columns, and what is added to their numbers: see plain::WidenScales.
template <bool HasOffsets>
inline void Read(const Weight& weight, int64_t at, __m512& scale, __m512& offset) {
  scale = weight.scales != nullptr ? FromHalves(weight.scales + at) : _mm512_loadu_ps(weight.wide_scales + at);
  if constexpr (HasOffsets) {
    if (weight.offsets != nullptr) {
      offset = FromHalves(weight.offsets + at);
    } else {
      const __m128i zeros = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weight.zeros + at));
      const __m512i minus = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_cvtepu8_epi32(zeros));
      offset = _mm512_mul_ps(_mm512_cvtepi32_ps(minus), scale);
    }
  }
}

// Adds the products of up to R rows and groups `begin` to `end` of the tiles `t`.
//
// R rows of V vectors are summed in registers, and their weights are unpacked once. The multipliers are busy for 8 of 11
// instructions (10 without offsets); the others are those that scale a group's sums.
template <int R, bool FourBits, bool HasOffsets>
void MultiplyRows(const Weight& weight, int64_t t, int64_t begin, int64_t end, const Rows& x, int64_t row, float* sums) {
  if constexpr (R > 1) {
    if (x.rows - row < R) return MultiplyRows<R - 1, FourBits, HasOffsets>(weight, t, begin, end, x, row, sums);
  }
  constexpr int V = R > 4 ? 1 : R > 2 ? 2 : 4;
  constexpr int kBytes = kDepth * kColumns / (FourBits ? 2 : 1);
  const __m512i nibble = _mm512_set1_epi8(15), flip = _mm512_set1_epi8(-128);
  for (int column = 0; column < kColumns; column += V * kLanes) {
    __m512 totals[R][V];
    float* to = sums + row * kColumns + column;
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) totals[r][v] = _mm512_loadu_ps(to + r * kColumns + v * kLanes);
    }
    const uint8_t* tile = TileAt(weight, t, begin) + 4 * column;
    for (int64_t g = begin; g < end; ++g, tile += kBytes) {
      const int64_t first = g * x.rows + row;
      const int8_t* numbers = static_cast<const int8_t*>(x.values) + first * kDepth;
      __m512i products[R][V];
      for (int r = 0; r < R; ++r) {
        // The instruction multiplies unsigned by signed bytes: 128 is added to int8 weights, and 128 times the sum of x is
        // taken off.
        const int32_t start = FourBits ? 0 : -128 * static_cast<int32_t>(x.sums[first + r]);
        for (int v = 0; v < V; ++v) products[r][v] = _mm512_set1_epi32(start);
      }
      auto add = [&](int step, const __m512i* w) ALWAYS_INLINE {
        for (int r = 0; r < R; ++r) {
          int32_t four;
          std::memcpy(&four, numbers + r * kDepth + 4 * step, sizeof(four));
          for (int v = 0; v < V; ++v) products[r][v] = _mm512_dpbusd_epi32(products[r][v], w[v], _mm512_set1_epi32(four));
        }
      };
      for (int s = 0; s < (FourBits ? kSteps / 2 : kSteps); ++s) {
        __m512i w[V], high[V];
        for (int v = 0; v < V; ++v) {
          const uint8_t* from = tile + (s * kColumns + v * kLanes) * 4;
          if (row == 0) __builtin_prefetch(from + kTilesAhead * kBytes, 0, V * kLanes == kColumns ? kL1 : kL2);
          w[v] = _mm512_loadu_si512(from);
          if constexpr (FourBits) {
            high[v] = _mm512_and_si512(_mm512_srli_epi16(w[v], 4), nibble);
            w[v] = _mm512_and_si512(w[v], nibble);
          } else {
            w[v] = _mm512_xor_si512(w[v], flip);
          }
        }
        add(s, w);
        if constexpr (FourBits) add(s + kSteps / 2, high);
      }
      for (int v = 0; v < V; ++v) {
        __m512 scale, offset;
        Read<HasOffsets>(weight, ScalesAt(weight, t, g) + column + v * kLanes, scale, offset);
        for (int r = 0; r < R; ++r) {
          __m512 wide = _mm512_mul_ps(_mm512_cvtepi32_ps(products[r][v]), scale);
          if constexpr (HasOffsets) wide = _mm512_fmadd_ps(_mm512_set1_ps(x.sums[first + r]), offset, wide);
          totals[r][v] = _mm512_fmadd_ps(_mm512_set1_ps(x.scales[first + r]), wide, totals[r][v]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) _mm512_storeu_ps(to + r * kColumns + v * kLanes, totals[r][v]);
    }
  }
}

template <bool FourBits, bool HasOffsets>
void MultiplyColumns(const Weight& weight, int64_t t, const Rows& x, float* sums) {
  for (int64_t g = 0; g < weight.groups; g += kGroupsAtOnce) {
    const int64_t end = std::min<int64_t>(weight.groups, g + kGroupsAtOnce);
    for (int64_t row = 0; row < x.rows; row += 8) MultiplyRows<8, FourBits, HasOffsets>(weight, t, g, end, x, row, sums);
  }
}

void Multiply(const Weight& weight, int64_t t, const Rows& x, float* sums) {
  WithKind(weight, [&](auto four_bits, auto has_offsets) {
    MultiplyColumns<four_bits, has_offsets>(weight, t, x, sums);
  });
}

}  // namespace vnni

#ifdef HYDRAJAX_AMX
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-int8")

namespace matrix_unit {

constexpr int kRows = 16;         // of a tile
constexpr int kParts = 4;         // tiles of sums side by side, 16 columns each
constexpr int kGroupsAtOnce = 2;  // whose sums stay in the L1 cache, also if two threads share it

// Sums of products, before they are scaled.
struct alignas(64) Products {
  int32_t of[kGroupsAtOnce][kParts][kRows][16];
};

// Writes the numbers of a tile of 4 bits in bytes, in the order of a tile of 8 bits.
void Unpack(const uint8_t* tile, uint8_t* to) {
  const __m512i nibble = _mm512_set1_epi8(15);
  constexpr int kHalf = kDepth * kColumns / 2;
  for (int i = 0; i < kHalf; i += 64) {
    const __m512i both = _mm512_loadu_si512(tile + i);
    _mm512_store_si512(to + i, _mm512_and_si512(both, nibble));
    _mm512_store_si512(to + kHalf + i, _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble));
  }
}

// Multiplies rows of x by `groups` of weights [8 steps][64 columns][4], `next` bytes apart. 4-bit weights are unsigned.
//
// A product's sums are stored three products later, when they are there, just before their registers get others.
template <bool FourBits>
inline ALWAYS_INLINE void MultiplyGroups(const int8_t* x, int64_t next_x, const uint8_t* weights, int64_t next,
                                         int64_t groups, int32_t (*to)[kParts][kRows][16]) {
  constexpr int kStride = 4 * kColumns;
  amx::Written();
  for (int64_t i = 0; i < groups; ++i, x += next_x, weights += next, ++to) {
    _tile_loadd(4, x, kDepth);
    _tile_loadd(5, weights, kStride);
    if (i > 0) _tile_stored(1, to[-1][1], 64);
    _tile_zero(0);
    if constexpr (FourBits) { _tile_dpbsud(0, 4, 5); } else { _tile_dpbssd(0, 4, 5); }
    _tile_loadd(6, weights + 64, kStride);
    if (i > 0) _tile_stored(2, to[-1][2], 64);
    _tile_zero(1);
    if constexpr (FourBits) { _tile_dpbsud(1, 4, 6); } else { _tile_dpbssd(1, 4, 6); }
    _tile_loadd(7, weights + 128, kStride);
    if (i > 0) _tile_stored(3, to[-1][3], 64);
    _tile_zero(2);
    if constexpr (FourBits) { _tile_dpbsud(2, 4, 7); } else { _tile_dpbssd(2, 4, 7); }
    _tile_loadd(5, weights + 192, kStride);
    _tile_stored(0, to[0][0], 64);
    _tile_zero(3);
    if constexpr (FourBits) { _tile_dpbsud(3, 4, 5); } else { _tile_dpbssd(3, 4, 5); }
  }
  _tile_stored(1, to[-1][1], 64);
  _tile_stored(2, to[-1][2], 64);
  _tile_stored(3, to[-1][3], 64);
}

// Scales products of up to R rows from `row` on, which are rows `of` and following of the tiles, and adds them to sums.
template <int R, bool FourBits, bool HasOffsets>
void AddScaled(const Weight& weight, int64_t t, int64_t begin, int64_t end, const Rows& x, int64_t row, int64_t until,
               int64_t of, const Products& products, float* sums) {
  if constexpr (R > 1) {
    if (until - row < R) {
      return AddScaled<R - 1, FourBits, HasOffsets>(weight, t, begin, end, x, row, until, of, products, sums);
    }
  }
  for (int part = 0; part < kParts; ++part) {
    float* to = sums + row * kColumns + part * 16;
    __m512 totals[R];
    for (int r = 0; r < R; ++r) totals[r] = _mm512_loadu_ps(to + r * kColumns);
    for (int64_t g = begin; g < end; ++g) {
      const int64_t first = g * x.rows + row;
      if (row == 0) {
        constexpr int64_t kBytes = kDepth * kColumns / (FourBits ? 2 : 1);
        const uint8_t* ahead = TileAt(weight, t, g + kTilesAhead) + part * (kBytes / kParts);
        for (int64_t b = 0; b < kBytes / kParts; b += 64) __builtin_prefetch(ahead + b, 0, kL2);
      }
      __m512 scale, offset;
      vnni::Read<HasOffsets>(weight, ScalesAt(weight, t, g) + part * 16, scale, offset);
      for (int r = 0; r < R; ++r) {
        const __m512i sum = _mm512_load_si512(products.of[g - begin][part][of + r]);
        __m512 wide = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
        if constexpr (HasOffsets) wide = _mm512_fmadd_ps(_mm512_set1_ps(x.sums[first + r]), offset, wide);
        totals[r] = _mm512_fmadd_ps(_mm512_set1_ps(x.scales[first + r]), wide, totals[r]);
      }
    }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(to + r * kColumns, totals[r]);
  }
}

template <bool FourBits, bool HasOffsets>
void MultiplyColumns(const Weight& weight, int64_t t, const Rows& x, float* sums) {
  constexpr int kBytes = kDepth * kColumns / (FourBits ? 2 : 1);
  alignas(64) uint8_t unpacked[FourBits ? kGroupsAtOnce : 1][kDepth * kColumns];
  Products products;
  const amx::Registers registers(std::min<int64_t>(kRows, x.rows), 16, kDepth);
  for (int64_t g = 0; g < weight.groups; g += kGroupsAtOnce) {
    const int64_t end = std::min<int64_t>(weight.groups, g + kGroupsAtOnce);
    const uint8_t* packed = TileAt(weight, t, g);
    if constexpr (FourBits) {
      for (int64_t i = 0; i < end - g; ++i) Unpack(packed + i * kBytes, unpacked[i]);
    }
    for (int64_t row = 0; row < x.rows; row += kRows) {
      // The last tile reaches back to rows that are done: all tiles have the same shape.
      const int64_t first = std::max<int64_t>(0, std::min<int64_t>(row, x.rows - kRows));
      const int8_t* numbers = static_cast<const int8_t*>(x.values) + (g * x.rows + first) * kDepth;
      MultiplyGroups<FourBits>(numbers, x.rows * kDepth, FourBits ? unpacked[0] : packed, kDepth * kColumns, end - g,
                               products.of);
      const int64_t until = std::min<int64_t>(x.rows, row + kRows);
      for (int64_t r = row; r < until; r += 8) {
        AddScaled<8, FourBits, HasOffsets>(weight, t, g, end, x, r, until, r - first, products, sums);
      }
    }
  }
}

void Multiply(const Weight& weight, int64_t t, const Rows& x, float* sums) {
  const int64_t least_rows = weight.four_bits ? 12 : 6;  // for fewer, vectors are faster
  if (x.rows < least_rows) return vnni::Multiply(weight, t, x, sums);
  WithKind(weight, [&](auto four_bits, auto has_offsets) {
    MultiplyColumns<four_bits, has_offsets>(weight, t, x, sums);
  });
}

}  // namespace matrix_unit

#pragma GCC pop_options
#endif

}  // namespace

#pragma GCC pop_options
#endif

#endif  // HYDRAJAX_FEW_BITS_512_H_
