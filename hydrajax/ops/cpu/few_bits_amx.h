// Products of rows in 8 bits with weights of 8 and 4 bits by AMX, which multiplies tiles. The integers are those of vectors, and
// are scaled in the same order (few_bits_rows.h).

#ifndef HYDRAJAX_FEW_BITS_AMX_H_
#define HYDRAJAX_FEW_BITS_AMX_H_

#include "amx.h"

#ifdef HYDRAJAX_AMX

#include "few_bits_rows.h"

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-int8")

namespace {

namespace matrix_unit {

constexpr int kRows = 16;         // of a tile
constexpr int kParts = 4;         // tiles of sums side by side, 16 columns each
constexpr int kGroupsAtOnce = 2;  // whose sums stay in the L1 cache, also if two threads share it

// Sums of products, before they are scaled.
struct alignas(64) Products {
  int32_t of[kGroupsAtOnce][kParts][kRows][16];
};

// Writes the numbers of a tile of 4 bits in bytes, in the order of a tile of 8 bits.
template <bool Codes>
void Unpack(const uint8_t* tile, uint8_t* to) {
  const __m512i nibble = _mm512_set1_epi8(15);
  constexpr int kHalf = kDepth * kColumns / 2;
  const auto number = [&](__m512i shifted) ALWAYS_INLINE {
    const __m512i w = _mm512_and_si512(shifted, nibble);
    return Codes ? reinterpret_cast<__m512i>(Avx512Vnni::OfCodes(reinterpret_cast<Avx512Vnni::Ints>(w))) : w;
  };
  for (int i = 0; i < kHalf; i += 64) {
    const __m512i both = _mm512_loadu_si512(tile + i);
    _mm512_store_si512(to + i, number(both));
    _mm512_store_si512(to + kHalf + i, number(_mm512_srli_epi16(both, 4)));
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

// Scales products of R rows from `row` on, which are rows `of` and following of the tiles, and adds them to sums.
template <int R, bool FourBits, bool HasOffsets, bool Codes>
void AddScaled(const Weight& weight, int64_t t, int64_t begin, int64_t end, const Rows& x, int64_t row, int64_t of,
               const Products& products, float* sums) {
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
      Avx512Vnni::Floats scale, offset;
      ReadScales<Avx512Vnni, HasOffsets, Codes>(weight, ScalesAt(weight, t, g) + part * 16, scale, offset);
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

template <bool FourBits, bool HasOffsets, bool Codes>
void MultiplyColumns(const Weight& weight, int64_t t, const Rows& x, float* sums) {
  constexpr int kBytes = kDepth * kColumns / (FourBits ? 2 : 1);
  alignas(64) uint8_t unpacked[FourBits ? kGroupsAtOnce : 1][kDepth * kColumns];
  Products products;
  const amx::Registers registers(std::min<int64_t>(kRows, x.rows), 16, kDepth);
  for (int64_t g = 0; g < weight.groups; g += kGroupsAtOnce) {
    const int64_t end = std::min<int64_t>(weight.groups, g + kGroupsAtOnce);
    const uint8_t* packed = TileAt(weight, t, g);
    if constexpr (FourBits) {
      for (int64_t i = 0; i < end - g; ++i) Unpack<Codes>(packed + i * kBytes, unpacked[i]);
    }
    for (int64_t row = 0; row < x.rows; row += kRows) {
      // The last tile reaches back to rows that are done: all tiles have the same shape.
      const int64_t first = std::max<int64_t>(0, std::min<int64_t>(row, x.rows - kRows));
      const int8_t* numbers = x.values + (g * x.rows + first) * kDepth;
      MultiplyGroups<FourBits && !Codes>(numbers, x.rows * kDepth, FourBits ? unpacked[0] : packed, kDepth * kColumns,
                                         end - g, products.of);
      const int64_t until = std::min<int64_t>(x.rows, row + kRows);
      for (int64_t r = row; r < until; r += 8) {
        WithRows<8>(until - r, [&](auto n) {
          AddScaled<n, FourBits, HasOffsets, Codes>(weight, t, g, end, x, r, r - first, products, sums);
        });
      }
    }
  }
}

void Multiply(const Weight& weight, int64_t t, const Rows& x, float* sums) {
  const int64_t least_rows = weight.four_bits ? 12 : 6;  // for fewer, vectors are faster
  if (x.rows < least_rows) return ::Multiply<Avx512Vnni>(weight, t, x, sums);
  WithKind(weight, [&](auto four_bits, auto has_offsets, auto codes) {
    MultiplyColumns<four_bits, has_offsets, codes>(weight, t, x, sums);
  });
}

}  // namespace matrix_unit

}  // namespace

#pragma GCC pop_options

#endif  // HYDRAJAX_AMX

#endif  // HYDRAJAX_FEW_BITS_AMX_H_
