// Matrix products of a decode step with few rows on a CPU.
//
// XLA's CPU products repack the whole weight for every call with more than one row, so eight rows cost two to three times
// as much as one, although both read the same weight bytes. These kernels read each weight once, in place, and keep all
// rows in registers. few_rows.py has measurements.
//
// Each output is summed in one order, which depends on the weight's shape and type and not on the number of rows or threads,
// so a row's result is the same to the last bit in a tree of any size.
//
// Numbers are float32 or bfloat16 (numbers.h). Where the CPU has AMX, it multiplies bfloat16 by bfloat16 (amx.h).

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "amx.h"
#include "experts.h"
#include "numbers.h"

namespace {

#if defined(__AVX512F__)
constexpr int kVectors = 2;  // of columns read side by side
constexpr int kRows = 8;     // rows in registers at once, if there are more than fit
constexpr int kDotRows = 8;  // the same for dot products
constexpr int kDotColumns = 16;  // for which these rows of x stay in the L1 cache
#else
constexpr int kVectors = 1, kRows = 6, kDotRows = 3, kDotColumns = 2;
#endif
constexpr int kColumns = kVectors * kLanes;
constexpr int kDepth = 16;  // weight rows read side by side, at most
constexpr int kNarrow = 1024, kLarge = 1 << 20;  // most columns and fewest bytes of a weight that threads divide by its rows
constexpr int kAhead = 16;  // rows of a transposed weight prefetched into the L2 cache, for pairs of rows
constexpr int kAheadBytes = 4096;  // of a transposed weight, for single rows

// ---- out[rows, F] = x[rows, D] @ weight[D, F] --------------------------------------------------------------------------

// Rows of x that fit in registers. 28 of 32 vectors are then sums, with AVX2 12 of 16. bfloat16 weights have fewer, so that
// a build takes half as long: on CPUs that are fast with them AMX takes their place.
template <typename W>
constexpr int kMostRows = kNative == kLanes && std::is_same_v<W, float> ? 14 : kRows;
template <typename W>
constexpr int kMostDotRows = kNative == kLanes ? kMostRows<W> : kDotRows;

enum Pass { kOnly, kFirst, kLater };  // over a weight, of a few rows of x each

int64_t UnitsOf(int64_t width) { return std::max<int64_t>(1, width / kColumns); }

// sums[R, C] += x[R, n] @ weight[n, C], C = kColumns, rows of x `depth` apart and rows of weight `stride`. The first pass writes
// the weights, in float32, to `copy`. In it each weight row prefetches the one `ahead` numbers after it: in between the products,
// since a burst of prefetches would hold them up.
template <int R, Pass kPass, typename W>
inline ALWAYS_INLINE void AddProduct(const float* x, int64_t depth, const W* weight, int64_t stride, float* sums,
                                     int64_t n, int64_t ahead = 0, float* copy = nullptr) {
  Lanes s[R][kVectors];
  UNROLLED for (int r = 0; r < R; ++r) {
    UNROLLED for (int v = 0; v < kVectors; ++v) Load(s[r][v], sums + r * kColumns + v * kLanes);
  }
  for (int64_t d = 0; d < n; ++d) {
    Lanes w[kVectors];
    UNROLLED for (int v = 0; v < kVectors; ++v) Load(w[v], weight + d * stride + v * kLanes);
    if constexpr (kPass != kLater) Prefetch<kL2>(weight + d * stride + ahead, kColumns);
    if constexpr (kPass == kFirst) {
      UNROLLED for (int v = 0; v < kVectors; ++v) Store(copy + d * kColumns + v * kLanes, w[v]);
    }
    UNROLLED for (int r = 0; r < R; ++r) {
      const float a = x[r * depth + d];
      UNROLLED for (int v = 0; v < kVectors; ++v) MultiplyAdd(s[r][v], a, w[v]);
    }
  }
  UNROLLED for (int r = 0; r < R; ++r) {
    UNROLLED for (int v = 0; v < kVectors; ++v) Store(sums + r * kColumns + v * kLanes, s[r][v]);
  }
}

// The same with more rows than fit in registers. Weights are read more than once, so a copy in float32 stays in the L1 cache.
template <typename W>
NEVER_INLINE void AddProductOfMany(const float* x, int64_t rows, int64_t depth, const W* weight, int64_t stride,
                                   float* sums, int64_t n, int64_t ahead) {
  alignas(64) float block[kDepth * kColumns];
  float* copy = block;
  const int64_t at_once = RowsAtOnce(rows, kRows);
  WithRows<kRows>(at_once, [=](auto r) ALWAYS_INLINE {
    AddProduct<r, kFirst>(x, depth, weight, stride, sums, n, ahead, copy);
  });
  for (int64_t row = at_once; row < rows; row += at_once) {
    const float* xs = x + row * depth;
    float* to = sums + row * kColumns;
    WithRows<kRows>(std::min(at_once, rows - row), [=](auto r) ALWAYS_INLINE {
      AddProduct<r, kLater, float>(xs, depth, copy, kColumns, to, n);
    });
  }
}

// The columns from `begin` to `end`, which whole vectors do not reach, one by one in the same order.
template <typename W, typename Out>
void ProductOfLastColumns(const float* x, const W* weight, Out* out, int64_t rows, int64_t depth, int64_t width,
                          int64_t begin, int64_t end, const int64_t* places = nullptr) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = begin; c < end; ++c) {
      float sum = 0;
      for (int64_t d = 0; d < depth; ++d) MultiplyAdd(sum, x[r * depth + d], Wide(weight[d * width + c]));
      Set(out[PlaceOf(r, places) * width + c], sum);
    }
  }
}

// Columns `begin` to `end` of the product of the weight's rows `top` to `bottom` with these features of x. `sums` has room
// for rows x (end - begin) and holds C columns of a row side by side, then those of the next row: rows a multiple of 4 kB
// apart, as in `out`, push each other out of the L1 cache.
template <typename W>
void ProductOfColumns(const float* x, const W* weight, int64_t rows, int64_t depth, int64_t width, int64_t begin,
                      int64_t end, int64_t top, int64_t bottom, float* sums) {
  const int64_t vectors = begin + (end - begin) / kColumns * kColumns;
  std::memset(sums, 0, sizeof(float) * rows * (vectors - begin));
  // Sums are read and written once for this many weight rows. Few rows of x are faster with half of them: weight rows that
  // are a multiple of 4 kB apart compete for the same lines of the L1 cache.
  const int64_t step = rows < kRows ? kDepth / 2 : kDepth;
  for (int64_t d = top; d < bottom; d += step) {
    const int64_t n = std::min<int64_t>(step, bottom - d);
    // The hardware prefetcher does not reach far enough in many short streams: prefetch the rows below. They would leave
    // the L1 cache before they are read.
    const int64_t ahead = d + 2 * step <= bottom ? step * width : 0;
    for (int64_t column = begin; column < vectors; column += kColumns) {
      const W* w = weight + d * width + column;
      const float* xs = x + d;
      float* to = sums + (column - begin) * rows;
      if (rows <= kMostRows<W>) {
        WithRows<kMostRows<W>>(rows, [=](auto r) ALWAYS_INLINE {
          AddProduct<r, kOnly>(xs, depth, w, width, to, n, ahead);
        });
      } else {
        AddProductOfMany(xs, rows, depth, w, width, to, n, ahead);
      }
    }
  }
}

// sums += more, n a multiple of 16.
void AddTo(float* sums, const float* more, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    Store(sums + i, Loaded(sums + i) + Loaded(more + i));
  }
}

// Copies sums to rows of out. They hold `side` columns of a row side by side, then those of the next of `room` rows.
template <typename Out>
void StoreColumns(const float* sums, int64_t side, int64_t room, Out* out, int64_t rows, int64_t width, int64_t begin,
                  int64_t end, const int64_t* places = nullptr) {
  for (int64_t column = begin; column < end; column += side, sums += room * side) {
    const int64_t n = std::min(side, end - column);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t c = 0; c < n; c += kLanes) {
        Store(out + PlaceOf(row, places) * width + column + c, Loaded(sums + row * side + c));
      }
    }
  }
}

// Units `begin` to `end` of the columns of a product, and the columns after the last unit.
template <typename W, typename Out>
void ProductOfUnits(const float* x, const W* weight, Out* out, int64_t rows, int64_t depth, int64_t width, int64_t begin,
                    int64_t end, const int64_t* places = nullptr) {
  const int64_t first = begin * kColumns, last = end == UnitsOf(width) ? width : end * kColumns;
  const int64_t vectors = last - (last - first) % kColumns;
  float* sums = Scratch(rows * (last - first));
  ProductOfColumns(x, weight, rows, depth, width, first, last, 0, depth, sums);
  StoreColumns(sums, kColumns, rows, out, rows, width, first, vectors, places);
  ProductOfLastColumns(x, weight, out, rows, depth, width, vectors, last, places);
}

// The product of a narrow weight, as the sum of two: of its upper and its lower rows. Two threads then read one stretch of
// memory each. Half of the columns would be streams of a kilobyte, too short for the hardware's prefetcher.
template <typename W, typename Out>
void ProductOfHalves(ffi::ThreadPool& pool, const float* x, const W* weight, Out* out, int64_t rows, int64_t depth,
                     int64_t width) {
  const int64_t units = width / kColumns, vectors = units * kColumns, size = rows * vectors;
  const int64_t shares = (Shares(pool, 2 * units, static_cast<int64_t>(sizeof(W)) * depth * width) + 1) / 2;
  float* sums = Scratch<kOfHalves>(2 * size);
  InParallel(pool, 2 * shares, [&](int64_t i) {
    const int64_t half = i / shares, begin = units * (i % shares) / shares * kColumns;
    const int64_t end = units * (i % shares + 1) / shares * kColumns;
    ProductOfColumns(x, weight, rows, depth, width, begin, end, depth / 2 * half, half ? depth : depth / 2,
                     sums + half * size + begin * rows);
  });
  AddTo(sums, sums + size, size);
  StoreColumns(sums, kColumns, rows, out, rows, width, 0, vectors);
  ProductOfLastColumns(x, weight, out, rows, depth, width, vectors, width);
}

#ifdef HYDRAJAX_AMX

// Whether tiles multiply x by a weight: always for all rows, so that the order of sums does not depend on their number.
bool InTiles(const ffi::AnyBuffer& x, const ffi::AnyBuffer& weight) {
  return x.element_type() == ffi::BF16 && weight.element_type() == ffi::BF16 &&
         x.dimensions()[1] % amx::kDepth == 0 && amx::Available();
}

// Rows in tiles: fewer than 16, or a multiple of it.
int64_t RoomInTiles(int64_t rows) { return rows < amx::kRows ? rows : (rows + amx::kRows - 1) / amx::kRows * amx::kRows; }

void MatmulInTiles(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const ffi::AnyBuffer& weight, ffi::AnyBuffer& out) {
  constexpr int64_t kTile = 16;
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1], width = weight.dimensions()[1];
  const int64_t room = RoomInTiles(rows), units = width / kTile;
  uint16_t* xs = reinterpret_cast<uint16_t*>(Scratch<kOfTiles>(room * depth / 2));
  amx::PackRows(x.reinterpret_data<uint16_t>(), rows, room, depth, xs);
  const BFloat16* w = weight.reinterpret_data<BFloat16>();
  InShares(pool, units, weight.size_bytes(), [&](int64_t first, int64_t last) {
    const int64_t begin = first * kTile, end = last * kTile;
    float* sums = Scratch(room * (end - begin + amx::kColumns));
    amx::ProductOfColumns(xs, &w->bits, room, depth, width, begin, end, sums);
    WithNumbers(out, [&](auto* to) {
      StoreColumns(sums, amx::kColumns, room, to, rows, width, begin, end);
      if (last == units && end < width) ProductOfLastColumns(Widened(x), w, to, rows, depth, width, end, width);
    });
  });
}

#endif

ffi::Error Matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> out) {
  if (!IsNumbers(x, 2) || !IsNumbers(weight, 2) || !IsNumbers(*out, 2) || weight.dimensions()[0] != x.dimensions()[1] ||
      !Has(*out, {x.dimensions()[0], weight.dimensions()[1]})) {
    return ffi::Error::InvalidArgument("few_rows: x and weight do not fit");
  }
#ifdef HYDRAJAX_AMX
  if (InTiles(x, weight)) {
    MatmulInTiles(pool, x, weight, *out);
    return ffi::Error::Success();
  }
#endif
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1], width = weight.dimensions()[1];
  const float* xs = Widened(x);
  WithNumbers(weight, [&](const auto* w) {
    WithNumbers(*out, [&](auto* to) {
      if (width <= kNarrow && static_cast<int64_t>(weight.size_bytes()) >= kLarge) {
        ProductOfHalves(pool, xs, w, to, rows, depth, width);
        return;
      }
      InShares(pool, UnitsOf(width), weight.size_bytes(), [&](int64_t begin, int64_t end) {
        ProductOfUnits(xs, w, to, rows, depth, width, begin, end);
      });
    });
  });
  return ffi::Error::Success();
}

// ---- out[pair, F] = x[row of pair, D] @ weight[expert of pair, D, F] ---------------------------------------------------

#ifdef HYDRAJAX_AMX

template <typename Out>
void ProductsOfExpertsInTiles(ffi::ThreadPool& pool, const RowsByExpert& rows, const uint16_t* xs, const uint16_t* weights,
                              int64_t depth, int64_t width, Out* out) {
  constexpr int64_t kTile = 16;
  const int64_t n = rows.groups.size();
  std::vector<int64_t> starts(n + 1, 0);
  for (int64_t g = 0; g < n; ++g) starts[g + 1] = starts[g] + RoomInTiles(rows.groups[g].count()) * depth;
  uint16_t* packed = reinterpret_cast<uint16_t*>(Scratch<kOfTiles>(starts[n] / 2));
  for (int64_t g = 0; g < n; ++g) {
    const ExpertRows& of = rows.groups[g];
    amx::PackRows(xs + of.begin * depth, of.count(), RoomInTiles(of.count()), depth, packed + starts[g]);
  }
  const int64_t bytes = depth * width * sizeof(uint16_t);
  ForExperts(pool, rows, width / kTile, bytes, [&](const ExpertRows& of, int64_t first, int64_t last) {
    const int64_t begin = first * kTile, end = last * kTile, room = RoomInTiles(of.count());
    const uint16_t* x = packed + starts[&of - rows.groups.data()];
    float* sums = Scratch(room * (end - begin + amx::kColumns));
    amx::ProductOfColumns(x, weights + of.expert * depth * width, room, depth, width, begin, end, sums);
    StoreColumns(sums, amx::kColumns, room, out, of.count(), width, begin, end, rows.pairs.data() + of.begin);
  });
}

#endif

// x [R, D], or [pairs, D]; experts [R, k], of which those outside 0 to E - 1 give zeros; weight [E, D, F]; out [R * k, F].
ffi::Error MatmulExperts(ffi::ThreadPool pool, ffi::AnyBuffer x, ExpertIds experts, ffi::AnyBuffer weight,
                         ffi::Result<ffi::AnyBuffer> out) {
  const int64_t n = static_cast<int64_t>(experts.element_count());
  if (!IsNumbers(x, 2) || !IsNumbers(weight, 3) || !IsNumbers(*out, 2) || weight.dimensions()[1] != x.dimensions()[1] ||
      !Has(*out, {n, weight.dimensions()[2]}) || x.dimensions()[0] < 1 || n % x.dimensions()[0]) {
    return ffi::Error::InvalidArgument("few_rows: x and the experts' weights do not fit");
  }
  const int64_t depth = x.dimensions()[1], width = weight.dimensions()[2], per_row = n / x.dimensions()[0];
  const RowsByExpert rows = ByExpert(experts.typed_data(), n, weight.dimensions()[0]);
  const int64_t size = static_cast<int64_t>(rows.pairs.size()) * depth;
  WithNumbers(*out, [&](auto* to) {
    ClearOthers(rows, n, width, to);
#ifdef HYDRAJAX_AMX
    if (InTiles(x, weight) && width % 16 == 0) {
      uint16_t* xs = reinterpret_cast<uint16_t*>(Scratch<kOfExperts>(size / 2));
      CopyRows(x.reinterpret_data<uint16_t>(), rows.pairs, per_row, depth, xs);
      ProductsOfExpertsInTiles(pool, rows, xs, weight.reinterpret_data<uint16_t>(), depth, width, to);
      return;
    }
#endif
    float* xs = Scratch<kOfExperts>(size);
    CopyRows(Widened(x), rows.pairs, per_row, depth, xs);
    WithNumbers(weight, [&](const auto* w) {
      const int64_t bytes = depth * width * sizeof(*w);
      ForExperts(pool, rows, UnitsOf(width), bytes, [&](const ExpertRows& of, int64_t begin, int64_t end) {
        ProductOfUnits(xs + of.begin * depth, w + of.expert * depth * width, to, of.count(), depth, width, begin, end,
                       rows.pairs.data() + of.begin);
      });
    });
  });
  return ffi::Error::Success();
}

// ---- out[rows, F] = x[rows, D] @ weight[F, D]^T ------------------------------------------------------------------------

// out[R, C] = x[R, D] @ weight[C, D]^T, rows of out `width` apart. Single columns are read from memory in order; of several, the
// first pass prefetches those that come next.
template <int R, int C, bool kFirstPass, typename W>
inline ALWAYS_INLINE void DotProducts(const float* x, const W* weight, float* out, int64_t depth, int64_t width) {
  constexpr int kParts = kLanes / kNative;
  Native s[R][C][kParts] = {};
  const int64_t vectors = depth / kLanes * kLanes;
  for (int64_t d = 0; d < vectors; d += kLanes) {
    UNROLLED for (int c = 0; c < C; ++c) {
      if constexpr (C == 1) {
        __builtin_prefetch(weight + d + kAheadBytes / sizeof(W), 0, kL2);
      } else if constexpr (kFirstPass) {
        __builtin_prefetch(weight + (c + kAhead) * depth + d, 0, kL2);
        __builtin_prefetch(weight + (c + C) * depth + d);
      }
    }
    UNROLLED for (int p = 0; p < kParts; ++p) {  // one after the other, so that a part of x and of each weight is in registers
      Native w[C];
      UNROLLED for (int c = 0; c < C; ++c) Load(w[c], weight + c * depth + d + p * kNative);
      UNROLLED for (int r = 0; r < R; ++r) {
        Native a;
        Load(a, x + r * depth + d + p * kNative);
        InRegister(a);
        UNROLLED for (int c = 0; c < C; ++c) MultiplyAdd(s[r][c][p], a, w[c]);
      }
    }
  }
  UNROLLED for (int r = 0; r < R; ++r) {
    UNROLLED for (int c = 0; c < C; ++c) {
      Lanes lanes;
      std::memcpy(&lanes, s[r][c], sizeof(lanes));
      float sum = SumOf(lanes);
      for (int64_t d = vectors; d < depth; ++d) MultiplyAdd(sum, x[r * depth + d], Wide(weight[c * depth + d]));
      out[r * width + c] = sum;
    }
  }
}

// Columns `begin` to `end` of the product with more rows than fit in registers, `at_once` in a pass.
template <int C, typename W>
NEVER_INLINE void DotProductsOfMany(const float* x, const W* weight, float* out, int64_t rows, int64_t depth,
                                    int64_t width, int64_t begin, int64_t end, int64_t at_once) {
  for (int64_t row = 0; row < rows; row += at_once, x += at_once * depth, out += at_once * width) {
    WithRows<kDotRows>(std::min(at_once, rows - row), [=](auto r) ALWAYS_INLINE {
      for (int64_t f = begin; f < end; f += C) {
        if (row == 0) {
          DotProducts<r, C, true>(x, weight + f * depth, out + f, depth, width);
        } else {
          DotProducts<r, C, false>(x, weight + f * depth, out + f, depth, width);
        }
      }
    });
  }
}

// Columns `begin` to `end` of the product, which are rows of the weight.
template <typename W>
void ProductWithRows(const float* x, const W* weight, float* out, int64_t rows, int64_t depth, int64_t width,
                     int64_t begin, int64_t end) {
  if (rows == 1) {  // it waits for memory only, which is fastest in one stream
    for (int64_t f = begin; f < end; ++f) DotProducts<1, 1, true>(x, weight + f * depth, out + f, depth, width);
    return;
  }
  const int64_t pairs = begin + (end - begin) / 2 * 2, at_once = RowsAtOnce(rows, kDotRows);
  if (rows <= kMostDotRows<W>) {
    WithRows<kMostDotRows<W>>(rows, [=](auto r) ALWAYS_INLINE {
      for (int64_t f = begin; f < pairs; f += 2) {
        DotProducts<r, 2, true>(x, weight + f * depth, out + f, depth, width);
      }
    });
  } else {
    for (int64_t f = begin; f < pairs; f += kDotColumns) {
      DotProductsOfMany<2>(x, weight, out, rows, depth, width, f, std::min(f + kDotColumns, pairs), at_once);
    }
  }
  if (pairs < end) DotProductsOfMany<1>(x, weight, out, rows, depth, width, pairs, end, at_once);
}

#ifdef HYDRAJAX_AMX

void MatmulTransposedInTiles(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const ffi::AnyBuffer& weight, float* out) {
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1], width = weight.dimensions()[0];
  const int64_t room = RoomInTiles(rows), step = std::min<int64_t>(room, amx::kRows), groups = room / step;
  const int64_t units = width / amx::kRows;
  const uint16_t* w = weight.reinterpret_data<uint16_t>();
  uint16_t* packed = reinterpret_cast<uint16_t*>(Scratch<kOfTiles>(depth / amx::kDepth * groups * amx::kTile / 2));
  amx::PackTransposed(x.reinterpret_data<uint16_t>(), rows, room, depth, step, packed);
  InShares(pool, units, weight.size_bytes(), [&](int64_t first, int64_t last) {
    const int64_t end = last * amx::kRows;
    amx::ProductWithRows(packed, w, rows, groups, step, depth, width, first * amx::kRows, end, out);
    if (last == units && end < width) {
      ProductWithRows(Widened(x), weight.reinterpret_data<BFloat16>(), out, rows, depth, width, end, width);
    }
  });
}

#endif

ffi::Error MatmulTransposed(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                            ffi::Result<ffi::Buffer<ffi::F32, 2>> out) {
  if (!IsNumbers(x, 2) || !IsNumbers(weight, 2) || weight.dimensions()[1] != x.dimensions()[1] ||
      !Has(*out, {x.dimensions()[0], weight.dimensions()[0]})) {
    return ffi::Error::InvalidArgument("few_rows: x and weight do not fit");
  }
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1], width = weight.dimensions()[0];
#ifdef HYDRAJAX_AMX
  if (InTiles(x, weight)) {
    MatmulTransposedInTiles(pool, x, weight, out->typed_data());
    return ffi::Error::Success();
  }
#endif
  const float* xs = Widened(x);
  InShares(pool, width, weight.size_bytes(), [&](int64_t begin, int64_t end) {
    WithNumbers(weight, [&](const auto* w) {
      ProductWithRows(xs, w, out->typed_data(), rows, depth, width, begin, end);
    });
  });
  return ffi::Error::Success();
}

}  // namespace

using Any = ffi::AnyBuffer;
using Logits = ffi::Buffer<ffi::F32, 2>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(hydrajax_matmul, Matmul,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Any>().Arg<Any>().Ret<Any>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hydrajax_matmul_experts, MatmulExperts,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Any>().Arg<ExpertIds>().Arg<Any>().Ret<Any>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(hydrajax_matmul_transposed, MatmulTransposed,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Any>().Arg<Any>().Ret<Logits>());
