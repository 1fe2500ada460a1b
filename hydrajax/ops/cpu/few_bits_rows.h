// Products of rows in 8 bits with weights of 8 and 4 bits by vectors of any instruction set (few_bits_isa.h).

#ifndef HYDRAJAX_FEW_BITS_ROWS_H_
#define HYDRAJAX_FEW_BITS_ROWS_H_

#include "few_bits.h"
#include "few_bits_isa.h"

namespace {

constexpr int kGroupsAtOnce = 8;  // whose weights stay in the L1 cache for all rows

// Calls `multiply` with whether the weight has 4 bits, offsets or zeros, and codes of E2M1 numbers, as constants.
template <typename Multiply>
void WithKind(const Weight& weight, const Multiply& multiply) {
  const std::true_type yes;
  const std::false_type no;
  if (weight.exponents != nullptr) {
    multiply(yes, no, yes);
  } else if (weight.offsets != nullptr || weight.zeros != nullptr) {
    weight.four_bits ? multiply(yes, yes, no) : multiply(no, yes, no);
  } else {
    weight.four_bits ? multiply(yes, no, no) : multiply(no, no, no);
  }
}

// Reads scales of a vector of columns, and what is added to their numbers. A zero becomes -zero * scale, which float32 holds
// exactly if the scale is float16.
template <typename Isa, bool HasOffsets, bool Codes>
inline ALWAYS_INLINE void ReadScales(const Weight& weight, int64_t at, typename Isa::Floats& scale,
                                     typename Isa::Floats& offset) {
  using Floats = typename Isa::Floats;
  if constexpr (Codes) {  // 2^(exponent - 128), as numbers of codes are doubled; zero if that is no normal float32
    const auto exponents = *reinterpret_cast<const typename Isa::Bytes*>(weight.exponents + at);
    const auto less = __builtin_convertvector(exponents, typename Isa::Ints) - 1;
    scale = reinterpret_cast<Floats>((less & (less > 0)) << 23);
    return;
  }
  scale = weight.scales != nullptr ? Isa::FromHalves(weight.scales + at) : Isa::Load(weight.wide_scales + at);
  if constexpr (HasOffsets) {
    if (weight.offsets != nullptr) {
      offset = Isa::FromHalves(weight.offsets + at);
    } else {
      float zeros[Isa::kLanes];
      for (int c = 0; c < Isa::kLanes; ++c) zeros[c] = -static_cast<float>(weight.zeros[at + c]);
      offset = Isa::Load(zeros) * scale;
    }
  }
}

// Prefetches the line of scales at a place, and of offsets.
inline ALWAYS_INLINE void PrefetchScales(const Weight& weight, int64_t at) {
  if (weight.scales != nullptr) __builtin_prefetch(weight.scales + at, 0, kL2);
  if (weight.offsets != nullptr) __builtin_prefetch(weight.offsets + at, 0, kL2);
  if (weight.exponents != nullptr) __builtin_prefetch(weight.exponents + at, 0, kL2);
}

// Adds the products of R rows and groups `begin` to `end` of the tiles `t`.
//
// The sums of R rows and V vectors of columns stay in registers, and their weights are unpacked once. The first rows prefetch,
// so that memory is read in time with their products. Inlined, GCC would keep sums in memory.
template <typename Isa, int R, bool FourBits, bool HasOffsets, bool Codes>
NEVER_INLINE void MultiplyRows(const Weight& weight, int64_t t, int64_t begin, int64_t end, const Rows& x, int64_t row,
                               float* sums) {
  using Floats = typename Isa::Floats;
  using Ints = typename Isa::Ints;
  constexpr int kLanes = Isa::kLanes, K = Isa::kTogether;
  constexpr int V = R > Isa::kSums / 2 ? 1 : R > Isa::kSums / 4 ? 2 : 4;
  constexpr int32_t kNibbles = 0x0f0f0f0f;
  constexpr bool kUnsigned = FourBits && !Codes;
  const auto prepared = [](Ints w) ALWAYS_INLINE {
    if constexpr (Codes) w = Isa::OfCodes(w);
    return Isa::template Prepared<kUnsigned>(w);
  };
  constexpr int kBytes = kDepth * kColumns / (FourBits ? 2 : 1);
  for (int column = 0; column < kColumns; column += V * kLanes) {
    Floats totals[R][V];
    float* to = sums + row * kColumns + column;
    UNROLLED for (int r = 0; r < R; ++r) {
      UNROLLED for (int v = 0; v < V; ++v) totals[r][v] = Isa::Load(to + r * kColumns + v * kLanes);
    }
    const uint8_t* tile = TileAt(weight, t, begin) + 4 * column;
    for (int64_t g = begin; g < end; ++g, tile += kBytes) {
      const int64_t first = g * x.rows + row;
      const int8_t* numbers = x.values + first * kDepth;
      Ints products[R][V];
      UNROLLED for (int r = 0; r < R; ++r) {
        UNROLLED for (int v = 0; v < V; ++v) products[r][v] = Isa::template Zero<kUnsigned>(x.sums[first + r]);
      }
      for (int s = 0; s < (FourBits ? kSteps / 2 : kSteps); s += K) {
        Ints w[K * V], high[K * V];
        UNROLLED for (int i = 0; i < K * V; ++i) {
          const uint8_t* from = tile + ((s + i / V) * kColumns + i % V * kLanes) * 4;
          const bool begins_line = i % V * kLanes % 16 == 0;
          if (row == 0 && begins_line) __builtin_prefetch(from + kTilesAhead * kBytes, 0, V * kLanes == kColumns ? kL1 : kL2);
          const Ints packed = Isa::Load(from);
          if constexpr (FourBits) high[i] = prepared(Isa::High(packed));
          w[i] = prepared(FourBits ? packed & kNibbles : packed);
        }
        Isa::template AddRows<Isa, kUnsigned>(products, w, numbers, s);
        if constexpr (FourBits) Isa::template AddRows<Isa, kUnsigned>(products, high, numbers, s + kSteps / 2);
      }
      Isa::Sorted(products);
      UNROLLED for (int v = 0; v < V; ++v) {
        Floats scale, offset;
        const int64_t at = ScalesAt(weight, t, g) + column + v * kLanes;
        if (row == 0) PrefetchScales(weight, at + kTilesAhead * kColumns);
        ReadScales<Isa, HasOffsets, Codes>(weight, at, scale, offset);
        UNROLLED for (int r = 0; r < R; ++r) {
          Floats wide = __builtin_convertvector(Isa::template Total<kUnsigned>(products[r][v]), Floats) * scale;
          if constexpr (HasOffsets) Isa::MultiplyAdd(wide, x.sums[first + r], offset);
          Isa::MultiplyAdd(totals[r][v], x.scales[first + r], wide);
        }
      }
    }
    UNROLLED for (int r = 0; r < R; ++r) {
      UNROLLED for (int v = 0; v < V; ++v) Isa::Store(to + r * kColumns + v * kLanes, totals[r][v]);
    }
  }
}

// Adds the products of rows and the tiles `t` of columns to sums [rows, 64].
template <typename Isa>
void Multiply(const Weight& weight, int64_t t, const Rows& x, float* sums) {
  WithKind(weight, [&](auto four_bits, auto has_offsets, auto codes) {
    for (int64_t g = 0; g < weight.groups; g += kGroupsAtOnce) {
      const int64_t end = std::min<int64_t>(weight.groups, g + kGroupsAtOnce);
      for (int64_t row = 0; row < x.rows; row += Isa::kSums) {
        WithRows<Isa::kSums>(x.rows - row, [&](auto r) {
          MultiplyRows<Isa, r, four_bits, has_offsets, codes>(weight, t, g, end, x, row, sums);
        });
      }
    }
  });
}

}  // namespace

#endif  // HYDRAJAX_FEW_BITS_ROWS_H_
