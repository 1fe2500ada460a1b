// Matrix products and attention of a decode step with few rows on a CPU.
//
// XLA's CPU products repack the whole weight for every call with more than one row, so eight rows cost two to three times
// as much as one, although both read the same weight bytes. These kernels read each weight once, in place, and keep all
// rows in registers. few_rows.py has measurements.
//
// Each output is summed in one order, which depends on the weight's shape and type and not on the number of rows or threads,
// so a row's result is the same to the last bit in a tree of any size.
//
// Numbers are float32 or bfloat16. bfloat16 is widened in registers, which is exact, and all sums are in float32. Where the
// CPU has AMX, it multiplies bfloat16 by bfloat16 (amx.h).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "amx.h"
#include "cpu_kernels.h"
#include "experts.h"

namespace {

constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t IntLanes __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint32_t BitLanes __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint16_t HalfLanes __attribute__((vector_size(kLanes * 2), aligned(2)));
typedef int16_t ShortLanes __attribute__((vector_size(kLanes * 2), aligned(2)));
typedef int8_t ByteLanes __attribute__((vector_size(kLanes), aligned(1)));

struct BFloat16 {  // the upper half of a float32
  uint16_t bits;
};

constexpr int kColumns = 2 * kLanes;
constexpr int kRows = 8;    // rows in registers at once, if there are more than fit
constexpr int kDepth = 16;  // weight rows read side by side, at most
constexpr int kNarrow = 1024, kLarge = 1 << 20;  // most columns and fewest bytes of a weight that threads divide by its rows
constexpr int kGroup = 16;  // queries whose scores stand side by side in one vector
constexpr int kKeys = 8;    // keys scored at once
constexpr int kAhead = 16;  // rows of a transposed weight prefetched into the L2 cache
constexpr int kLongestHead = 256;

// ---- float32 and bfloat16 ------------------------------------------------------------------------------------------------

// bfloat16 bits of float32 bits, in one number or in lanes: to the nearest, ties to even; NaN stays NaN.
template <typename Bits>
inline ALWAYS_INLINE void Round(Bits& bits) {
  const Bits nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  bits = (bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 | 0x40) : nearest;
}

// Not by memcpy: GCC 12 then keeps two copies of each sum, and more than 8 rows do not fit in registers.
inline ALWAYS_INLINE void Load(Lanes& to, const float* from) { to = *reinterpret_cast<const Lanes*>(from); }
inline ALWAYS_INLINE void Load(Lanes& to, const BFloat16* from) {
  HalfLanes halves;
  std::memcpy(&halves, from, sizeof(halves));
  const BitLanes bits = __builtin_convertvector(halves, BitLanes) << 16;
  std::memcpy(&to, &bits, sizeof(to));
}

inline ALWAYS_INLINE void Load(Lanes& to, const int8_t* from) {
  ByteLanes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  const ShortLanes shorts = __builtin_convertvector(bytes, ShortLanes);  // GCC 12 would take bytes to int32 one by one
  to = __builtin_convertvector(__builtin_convertvector(shorts, IntLanes), Lanes);
}

inline ALWAYS_INLINE void Store(float* to, const Lanes& from) { *reinterpret_cast<Lanes*>(to) = from; }
inline ALWAYS_INLINE void Store(BFloat16* to, const Lanes& from) {
  BitLanes bits;
  std::memcpy(&bits, &from, sizeof(bits));
  Round(bits);
  const HalfLanes halves = __builtin_convertvector(bits, HalfLanes);
  std::memcpy(to, &halves, sizeof(halves));
}

inline ALWAYS_INLINE float Wide(float x) { return x; }
inline ALWAYS_INLINE float Wide(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

inline ALWAYS_INLINE void Set(float& to, float x) { to = x; }
inline ALWAYS_INLINE void Set(BFloat16& to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  Round(bits);
  to.bits = static_cast<uint16_t>(bits);
}

// The sum of all lanes, pair by pair: one after another they would take as long as the products.
inline ALWAYS_INLINE float SumOf(const Lanes& x) {
  typedef float Half __attribute__((vector_size(kLanes * 2), aligned(4)));
  typedef float Quarter __attribute__((vector_size(kLanes), aligned(4)));
  Half halves[2];
  std::memcpy(halves, &x, sizeof(x));
  const Half half = halves[0] + halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, &half, sizeof(half));
  const Quarter quarter = quarters[0] + quarters[1];
  return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
}

// Prefetches n numbers, into the L1 cache or, those that are read much later, into the L2 cache.
constexpr int kL1 = 3, kL2 = 2;
template <int kCache = kL1, typename T>
inline ALWAYS_INLINE void Prefetch(const T* from, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(from + i, 0, kCache);
}

FOR_EVERY_CPU
void Widen(const BFloat16* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = Wide(from[i]);
}

// A buffer's numbers as float32; a copy of bfloat16 lies in this thread's scratch space for x.
const float* Widened(const ffi::AnyBuffer& x) {
  if (x.element_type() == ffi::F32) return x.typed_data<float>();
  const int64_t n = static_cast<int64_t>(x.element_count());
  float* wide = Scratch<kOfX>(n);
  Widen(x.reinterpret_data<BFloat16>(), wide, n);
  return wide;
}

bool IsNumbers(const ffi::AnyBuffer& x, size_t rank) {
  return (x.element_type() == ffi::F32 || x.element_type() == ffi::BF16) && x.dimensions().size() == rank;
}

// Calls `work` with a pointer to a buffer's numbers.
template <typename Work>
inline void WithNumbers(const ffi::AnyBuffer& x, const Work& work) {
  if (x.element_type() == ffi::F32) {
    work(x.typed_data<float>());
  } else {
    work(x.reinterpret_data<BFloat16>());
  }
}

// ---- out[rows, F] = x[rows, D] @ weight[D, F] --------------------------------------------------------------------------

// Rows of x that fit in registers. 28 of 32 vectors are then sums. bfloat16 weights have fewer, so that a build takes half as
// long: on CPUs that are fast with them AMX takes their place.
template <typename W>
constexpr int kMostRows = std::is_same_v<W, float> ? 14 : kRows;

// sums[R, 32] += x[R, n] @ weight[n, 32], rows of x `depth` apart and rows of weight `stride`. Each weight row prefetches the
// one `ahead` numbers after it: in between the products, since a burst of prefetches would hold them up.
template <int R, bool kPrefetch, typename W>
inline ALWAYS_INLINE void AddProduct(const float* x, int64_t depth, const W* weight, int64_t stride, float* sums,
                                     int64_t n, int64_t ahead) {
  Lanes s[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    Load(s[r][0], sums + r * kColumns);
    Load(s[r][1], sums + r * kColumns + kLanes);
  }
  for (int64_t d = 0; d < n; ++d) {
    Lanes w0, w1;
    Load(w0, weight + d * stride);
    Load(w1, weight + d * stride + kLanes);
    if (kPrefetch) Prefetch<kL2>(weight + d * stride + ahead, kColumns);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float a = x[r * depth + d];
      s[r][0] += a * w0;
      s[r][1] += a * w1;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    Store(sums + r * kColumns, s[r][0]);
    Store(sums + r * kColumns + kLanes, s[r][1]);
  }
}

// The columns from `begin` to `end`, which vectors of 32 do not reach, one by one in the same order.
template <typename W, typename Out>
void ProductOfLastColumns(const float* x, const W* weight, Out* out, int64_t rows, int64_t depth, int64_t width,
                          int64_t begin, int64_t end) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = begin; c < end; ++c) {
      float sum = 0;
      for (int64_t d = 0; d < depth; ++d) sum += x[r * depth + d] * Wide(weight[d * width + c]);
      Set(out[r * width + c], sum);
    }
  }
}

// Columns `begin` to `end` of the product of the weight's rows `top` to `bottom` with these features of x. `sums` has room
// for rows x (end - begin) and holds 32 columns of a row side by side, then those of the next row: rows a multiple of 4 kB
// apart, as in `out`, push each other out of the L1 cache.
template <typename W>
FOR_EVERY_CPU
void ProductOfColumns(const float* x, const W* weight, int64_t rows, int64_t depth, int64_t width, int64_t begin,
                      int64_t end, int64_t top, int64_t bottom, float* sums) {
  const int64_t vectors = begin + (end - begin) / kColumns * kColumns;
  std::memset(sums, 0, sizeof(float) * rows * (vectors - begin));
  alignas(64) float block[kDepth * kColumns];
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
        WithRows<kMostRows<W>>(rows, [=](auto r) ALWAYS_INLINE { AddProduct<r, true>(xs, depth, w, width, to, n, ahead); });
        continue;
      }
      // Read more than once: a copy in float32 stays in the L1 cache.
      for (int64_t i = 0; i < n; ++i) {
        Prefetch<kL2>(w + i * width + ahead, kColumns);
        for (int64_t c = 0; c < kColumns; c += kLanes) {
          Lanes numbers;
          Load(numbers, w + i * width + c);
          Store(block + i * kColumns + c, numbers);
        }
      }
      const float* copy = block;
      for (int64_t row = 0; row < rows; row += kRows, xs += kRows * depth, to += kRows * kColumns) {
        WithRows<kRows>(rows - row,
                        [=](auto r) ALWAYS_INLINE { AddProduct<r, false>(xs, depth, copy, kColumns, to, n, 0); });
      }
    }
  }
}

// sums += more, n a multiple of 16.
FOR_EVERY_CPU
void AddTo(float* sums, const float* more, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    Lanes a, b;
    Load(a, sums + i);
    Load(b, more + i);
    Store(sums + i, a + b);
  }
}

// Copies sums to rows of out. They hold `side` columns of a row side by side, then those of the next of `room` rows.
template <typename Out>
FOR_EVERY_CPU
void StoreColumns(const float* sums, int64_t side, int64_t room, Out* out, int64_t rows, int64_t width, int64_t begin,
                  int64_t end) {
  for (int64_t column = begin; column < end; column += side, sums += room * side) {
    const int64_t n = std::min(side, end - column);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t c = 0; c < n; c += kLanes) {
        Lanes numbers;
        Load(numbers, sums + row * side + c);
        Store(out + row * width + column + c, numbers);
      }
    }
  }
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
  const int64_t room = RoomInTiles(rows), units = width / kTile, shares = Shares(pool, units, weight.size_bytes());
  uint16_t* xs = reinterpret_cast<uint16_t*>(Scratch<kOfTiles>(room * depth / 2));
  amx::PackRows(x.reinterpret_data<uint16_t>(), rows, room, depth, xs);
  const BFloat16* w = weight.reinterpret_data<BFloat16>();
  InParallel(pool, shares, [&](int64_t i) {
    const int64_t begin = units * i / shares * kTile, end = units * (i + 1) / shares * kTile;
    float* sums = Scratch(room * (end - begin + amx::kColumns));
    amx::ProductOfColumns(xs, &w->bits, room, depth, width, begin, end, sums);
    WithNumbers(out, [&](auto* to) {
      StoreColumns(sums, amx::kColumns, room, to, rows, width, begin, end);
      if (i + 1 == shares && end < width) ProductOfLastColumns(Widened(x), w, to, rows, depth, width, end, width);
    });
  });
}

#endif

ffi::Error Matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> out) {
  if (!IsNumbers(x, 2) || !IsNumbers(weight, 2) || !IsNumbers(*out, 2) || weight.dimensions()[0] != x.dimensions()[1]) {
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
      const int64_t units = std::max<int64_t>(1, width / kColumns), shares = Shares(pool, units, weight.size_bytes());
      InParallel(pool, shares, [&](int64_t i) {
        const int64_t begin = units * i / shares * kColumns;
        const int64_t end = i + 1 == shares ? width : units * (i + 1) / shares * kColumns;
        float* sums = Scratch(rows * (end - begin));
        ProductOfColumns(xs, w, rows, depth, width, begin, end, 0, depth, sums);
        const int64_t vectors = end - (end - begin) % kColumns;
        StoreColumns(sums, kColumns, rows, to, rows, width, begin, vectors);
        ProductOfLastColumns(xs, w, to, rows, depth, width, vectors, end);
      });
    });
  });
  return ffi::Error::Success();
}

// ---- out[pair, F] = x[row of pair, D] @ weight[expert of pair, D, F] ---------------------------------------------------

template <typename W, typename Out>
void ProductsOfExperts(ffi::ThreadPool& pool, const RowsByExpert& rows, const float* xs, const W* weights, int64_t depth,
                       int64_t width, Out* out) {
  const int64_t units = std::max<int64_t>(1, width / kColumns), n = rows.groups.size();
  const int64_t shares = SharesOfExpert(pool, n, units, depth * width * sizeof(W));
  InParallel(pool, n * shares, [&](int64_t i) {
    const ExpertRows& of = rows.groups[i / shares];
    const int64_t part = i % shares, begin = units * part / shares * kColumns;
    const int64_t end = part + 1 == shares ? width : units * (part + 1) / shares * kColumns;
    const int64_t vectors = end - (end - begin) % kColumns;
    const float* x = xs + of.begin * depth;
    const W* weight = weights + of.expert * depth * width;
    float* sums = Scratch(of.count() * (end - begin));
    ProductOfColumns(x, weight, of.count(), depth, width, begin, end, 0, depth, sums);
    for (int64_t r = 0; r < of.count(); ++r) {
      Out* to = out + rows.pairs[of.begin + r] * width;
      StoreColumns(sums + r * kColumns, kColumns, of.count(), to, 1, width, begin, vectors);
      ProductOfLastColumns(x + r * depth, weight, to, 1, depth, width, vectors, end);
    }
  });
}

#ifdef HYDRAJAX_AMX

template <typename Out>
void ProductsOfExpertsInTiles(ffi::ThreadPool& pool, const RowsByExpert& rows, const uint16_t* xs, const uint16_t* weights,
                              int64_t depth, int64_t width, Out* out) {
  constexpr int64_t kTile = 16;
  const int64_t units = width / kTile, n = rows.groups.size();
  const int64_t shares = SharesOfExpert(pool, n, units, depth * width * sizeof(uint16_t));
  std::vector<int64_t> starts(n + 1, 0);
  for (int64_t g = 0; g < n; ++g) starts[g + 1] = starts[g] + RoomInTiles(rows.groups[g].count()) * depth;
  uint16_t* packed = reinterpret_cast<uint16_t*>(Scratch<kOfTiles>(starts[n] / 2));
  for (int64_t g = 0; g < n; ++g) {
    const ExpertRows& of = rows.groups[g];
    amx::PackRows(xs + of.begin * depth, of.count(), RoomInTiles(of.count()), depth, packed + starts[g]);
  }
  InParallel(pool, n * shares, [&](int64_t i) {
    const ExpertRows& of = rows.groups[i / shares];
    const int64_t part = i % shares, room = RoomInTiles(of.count());
    const int64_t begin = units * part / shares * kTile, end = units * (part + 1) / shares * kTile;
    float* sums = Scratch(room * (end - begin + amx::kColumns));
    amx::ProductOfColumns(packed + starts[i / shares], weights + of.expert * depth * width, room, depth, width, begin, end,
                          sums);
    for (int64_t r = 0; r < of.count(); ++r) {
      StoreColumns(sums + r * amx::kColumns, amx::kColumns, room, out + rows.pairs[of.begin + r] * width, 1, width, begin,
                   end);
    }
  });
}

#endif

// x [R, D], or [pairs, D]; experts [R, k], of which those outside 0 to E - 1 give zeros; weight [E, D, F]; out [R * k, F].
ffi::Error MatmulExperts(ffi::ThreadPool pool, ffi::AnyBuffer x, ExpertIds experts, ffi::AnyBuffer weight,
                         ffi::Result<ffi::AnyBuffer> out) {
  const int64_t n = static_cast<int64_t>(experts.element_count());
  if (!IsNumbers(x, 2) || !IsNumbers(weight, 3) || !IsNumbers(*out, 2) || weight.dimensions()[1] != x.dimensions()[1] ||
      out->dimensions()[0] != n || x.dimensions()[0] < 1 || n % x.dimensions()[0]) {
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
    WithNumbers(weight, [&](const auto* w) { ProductsOfExperts(pool, rows, xs, w, depth, width, to); });
  });
  return ffi::Error::Success();
}

// ---- out[rows, F] = x[rows, D] @ weight[F, D]^T ------------------------------------------------------------------------

// out[R, C] = x[R, D] @ weight[C, D]^T, rows of out `width` apart.
template <int R, int C, typename W>
inline ALWAYS_INLINE void DotProducts(const float* x, const W* weight, float* out, int64_t depth, int64_t width) {
  Lanes s[R][C] = {};
  const int64_t vectors = depth / kLanes * kLanes;
  for (int64_t d = 0; d < vectors; d += kLanes) {
    Lanes w[C];
    for (int c = 0; c < C; ++c) {
      Load(w[c], weight + c * depth + d);
      __builtin_prefetch(weight + (c + kAhead) * depth + d, 0, 2);
      __builtin_prefetch(weight + (c + C) * depth + d);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      Lanes a;
      Load(a, x + r * depth + d);
      for (int c = 0; c < C; ++c) s[r][c] += a * w[c];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      float sum = SumOf(s[r][c]);
      for (int64_t d = vectors; d < depth; ++d) sum += x[r * depth + d] * Wide(weight[c * depth + d]);
      out[r * width + c] = sum;
    }
  }
}

// At most kMost rows at once.
template <int kMost, int C, typename W>
inline ALWAYS_INLINE void DotProductsOfRows(const float* x, const W* weight, float* out, int64_t rows, int64_t depth,
                                            int64_t width) {
  for (int64_t row = 0; row < rows; row += kMost) {
    const float* xs = x + row * depth;
    float* to = out + row * width;
    WithRows<kMost>(rows - row, [=](auto r) ALWAYS_INLINE { DotProducts<r, C>(xs, weight, to, depth, width); });
  }
}

// Columns `begin` to `end` of the product, which are rows of the weight.
template <typename W>
FOR_EVERY_CPU
void ProductWithRows(const float* x, const W* weight, float* out, int64_t rows, int64_t depth, int64_t width,
                     int64_t begin, int64_t end) {
  const int64_t pairs = begin + (end - begin) / 2 * 2;
  // Rows that are read more than once are widened once.
  float* copy = rows > kMostRows<W> && !std::is_same_v<W, float> ? Scratch(2 * depth) : nullptr;
  for (int64_t f = begin; f < pairs; f += 2) {
    const W* w = weight + f * depth;
    if (rows <= kMostRows<W>) {
      DotProductsOfRows<kMostRows<W>, 2>(x, w, out + f, rows, depth, width);
    } else if (copy == nullptr) {
      DotProductsOfRows<kRows, 2>(x, w, out + f, rows, depth, width);
    } else {
      for (int64_t i = 0; i < 2 * depth; ++i) copy[i] = Wide(w[i]);
      DotProductsOfRows<kRows, 2>(x, static_cast<const float*>(copy), out + f, rows, depth, width);
    }
  }
  if (pairs < end) DotProductsOfRows<1, 1>(x, weight + pairs * depth, out + pairs, rows, depth, width);
}

#ifdef HYDRAJAX_AMX

void MatmulTransposedInTiles(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const ffi::AnyBuffer& weight,
                             int64_t shares, float* out) {
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1], width = weight.dimensions()[0];
  const int64_t room = RoomInTiles(rows), step = std::min<int64_t>(room, amx::kRows), groups = room / step;
  const int64_t units = width / amx::kRows;
  const uint16_t* w = weight.reinterpret_data<uint16_t>();
  uint16_t* packed = reinterpret_cast<uint16_t*>(Scratch<kOfTiles>(depth / amx::kDepth * groups * amx::kTile / 2));
  amx::PackTransposed(x.reinterpret_data<uint16_t>(), rows, room, depth, step, packed);
  InParallel(pool, shares, [&](int64_t i) {
    const int64_t begin = units * i / shares * amx::kRows, end = units * (i + 1) / shares * amx::kRows;
    amx::ProductWithRows(packed, w, rows, groups, step, depth, width, begin, end, out);
    if (i + 1 == shares && end < width) {
      ProductWithRows(Widened(x), weight.reinterpret_data<BFloat16>(), out, rows, depth, width, end, width);
    }
  });
}

#endif

ffi::Error MatmulTransposed(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                            ffi::Result<ffi::Buffer<ffi::F32, 2>> out) {
  if (!IsNumbers(x, 2) || !IsNumbers(weight, 2) || weight.dimensions()[1] != x.dimensions()[1]) {
    return ffi::Error::InvalidArgument("few_rows: x and weight do not fit");
  }
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1], width = weight.dimensions()[0];
  const int64_t shares = Shares(pool, width, weight.size_bytes());
#ifdef HYDRAJAX_AMX
  if (InTiles(x, weight)) {
    MatmulTransposedInTiles(pool, x, weight, shares, out->typed_data());
    return ffi::Error::Success();
  }
#endif
  const float* xs = Widened(x);
  InParallel(pool, shares, [&](int64_t i) {
    const int64_t begin = width * i / shares, end = width * (i + 1) / shares;
    WithNumbers(weight, [&](const auto* w) {
      ProductWithRows(xs, w, out->typed_data(), rows, depth, width, begin, end);
    });
  });
  return ffi::Error::Success();
}

// ---- attention -------------------------------------------------------------------------------------------------------

// exp for x <= 0, relative error below 2e-7; 0 below -87, where float32 leaves its normal range.
inline ALWAYS_INLINE void Exp(Lanes& x) {
  const Lanes floor_at = Lanes{} - 87.0f;
  const auto tiny = x < floor_at;
  x = tiny ? floor_at : x;
  // x = n ln 2 + r: 1.5 * 2^23 added and taken off again rounds to the nearest integer.
  const float shift = 12582912.0f;
  const Lanes n = (x * 1.44269504088896341f + shift) - shift;
  const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const IntLanes bits = (__builtin_convertvector(n, IntLanes) + 127) << 23;
  Lanes power;
  std::memcpy(&power, &bits, sizeof(power));
  x = tiny ? Lanes{} : p * power;
}

// Keys and values of type K: float, BFloat16, or int8_t with a factor for each vector.
template <typename K>
struct Part {
  const K *keys, *values;                    // [B, kv, slots, H]
  const float *key_factors, *value_factors;  // [B, kv, slots], or null
  const bool* visible;                       // [B or 1, T or 1, slots]
  int64_t slots, batch_stride, token_stride;
};

struct Shape {
  int64_t batch, kv_heads, queries_per_kv, tokens, head_dim;
};

template <typename K>
constexpr bool kHasFactors = std::is_same_v<K, int8_t>;

// The slots from the first to the last visible one of a sequence.
template <typename K>
void SeenRange(const Part<K>& part, int64_t b, int64_t tokens, int64_t* first, int64_t* last) {
  *first = part.slots;
  *last = 0;
  for (int64_t t = 0; t < (part.token_stride ? tokens : 1); ++t) {
    const bool* row = part.visible + b * part.batch_stride + t * part.token_stride;
    const bool* seen = static_cast<const bool*>(std::memchr(row, 1, part.slots));
    if (seen == nullptr) continue;
    *first = std::min<int64_t>(*first, seen - row);
    int64_t end = part.slots;
    while (!row[end - 1]) --end;
    *last = std::max(*last, end);
  }
}

// n numbers in float32; narrower ones are copied to `room`, n a multiple of 16.
inline ALWAYS_INLINE const float* WideRows(const float* from, int64_t, float*) { return from; }
template <typename K>
inline ALWAYS_INLINE const float* WideRows(const K* from, int64_t n, float* room) {
  for (int64_t i = 0; i < n; i += kLanes) {
    Lanes numbers;
    Load(numbers, from + i);
    Store(room + i, numbers);
  }
  return room;
}

// Up to 16 queries that share a key-value head, over all segments. `scores` has room for 16 x all slots.
template <typename T, typename K>
FOR_EVERY_CPU
void AttendGroup(const T* const* queries, const int64_t* tokens, T* const* outs, int64_t n, const Part<K>* parts,
                 const int64_t* firsts, const int64_t* lasts, int64_t n_parts, int64_t b, int64_t head_row,
                 int64_t head_dim, float scale, float* scores) {
  alignas(64) float transposed[kLongestHead * kGroup];  // [H, 16]
  alignas(64) float room[kKeys * kLongestHead];
  for (int64_t h = 0; h < head_dim; ++h) {
    for (int64_t i = 0; i < kGroup; ++i) transposed[h * kGroup + i] = i < n ? Wide(queries[i][h]) * scale : 0.0f;
  }
  Lanes peak = Lanes{} - 1e30f;
  float* at = scores;
  for (int64_t p = 0; p < n_parts; ++p) {
    const Part<K>& part = parts[p];
    const K* all_keys = part.keys + head_row * part.slots * head_dim;
    for (int64_t s = firsts[p]; s < lasts[p]; s += kKeys) {
      const int64_t count = std::min<int64_t>(kKeys, lasts[p] - s);
      Lanes sums[kKeys] = {};
      Prefetch(all_keys + (s + 2 * kKeys) * head_dim, kKeys * head_dim);
      const float* keys = WideRows(all_keys + s * head_dim, count * head_dim, room);
      if (count == kKeys) {
        for (int64_t h = 0; h < head_dim; ++h) {
          Lanes q;
          Load(q, transposed + h * kGroup);
          for (int k = 0; k < kKeys; ++k) sums[k] += q * keys[k * head_dim + h];
        }
      } else {
        for (int64_t h = 0; h < head_dim; ++h) {
          Lanes q;
          Load(q, transposed + h * kGroup);
          for (int k = 0; k < count; ++k) sums[k] += q * keys[k * head_dim + h];
        }
      }
      for (int64_t k = 0; k < count; ++k) {
        if constexpr (kHasFactors<K>) sums[k] *= part.key_factors[head_row * part.slots + s + k];
        const bool* visible = part.visible + b * part.batch_stride + s + k;
        if (part.token_stride == 0) {
          if (!*visible) sums[k] = Lanes{} - 1e30f;
        } else {
          alignas(64) float hidden[kGroup];
          for (int64_t i = 0; i < kGroup; ++i) {
            hidden[i] = i < n && visible[tokens[i] * part.token_stride] ? 0.0f : -1e30f;
          }
          Lanes add;
          Load(add, hidden);
          sums[k] += add;
        }
        peak = sums[k] > peak ? sums[k] : peak;
        Store(at, sums[k]);
        at += kGroup;
      }
    }
  }
  Lanes total = {};
  float* x = scores;
  for (int64_t p = 0; p < n_parts; ++p) {
    for (int64_t s = firsts[p]; s < lasts[p]; ++s, x += kGroup) {
      Lanes weights;
      Load(weights, x);
      weights -= peak;
      Exp(weights);
      total += weights;
      if constexpr (kHasFactors<K>) weights *= parts[p].value_factors[head_row * parts[p].slots + s];
      Store(x, weights);
    }
  }
  total = total > 0.0f ? total : Lanes{} + 1.0f;  // a padding token without visible keys gives zeros, not NaN
  alignas(64) float totals[kGroup];
  Store(totals, total);
  // Weighted sums of values, eight queries by 32 features at a time.
  for (int64_t first = 0; first < n; first += kRows) {
    const int64_t rows = std::min<int64_t>(kRows, n - first);
    for (int64_t h = 0; h < head_dim; h += 2 * kLanes) {
      Lanes sums[kRows][2] = {};
      const bool both = h + 2 * kLanes <= head_dim;
      const float* weights = scores + first;
      for (int64_t p = 0; p < n_parts; ++p) {
        const K* values = parts[p].values + head_row * parts[p].slots * head_dim + h;
        for (int64_t s = firsts[p]; s < lasts[p]; ++s, weights += kGroup) {
          Lanes v0, v1 = {};
          Prefetch(values + (s + 2 * kKeys) * head_dim, 2 * kLanes);
          Load(v0, values + s * head_dim);
          if (both) Load(v1, values + s * head_dim + kLanes);
          for (int r = 0; r < kRows; ++r) {
            sums[r][0] += weights[r] * v0;
            sums[r][1] += weights[r] * v1;
          }
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        Store(outs[first + r] + h, sums[r][0] / totals[first + r]);
        if (both) Store(outs[first + r] + h + kLanes, sums[r][1] / totals[first + r]);
      }
    }
  }
}

// queries [B, heads, T, H]; then keys, values and visible of each part, keys and values with their factors [B, kv, slots, 1]
// if there are any. out [B, T, heads * H].
template <typename T, ffi::DataType type, typename K>
ffi::Error AttendIn(ffi::ThreadPool pool, ffi::AnyBuffer queries, ffi::RemainingArgs rest, ffi::AnyBuffer out) {
  constexpr size_t kWithFactors = kHasFactors<K> ? 2 : 1, kArrays = 2 * kWithFactors + 1;
  std::vector<Part<K>> parts;
  int64_t kv_heads = 0, all_slots = 0;
  const auto q = queries.dimensions();
  for (size_t i = 0; i + kArrays <= rest.size(); i += kArrays) {
    auto keys = rest.get<ffi::Buffer<type, 4>>(i), values = rest.get<ffi::Buffer<type, 4>>(i + kWithFactors);
    auto visible = rest.get<ffi::Buffer<ffi::PRED, 3>>(i + kArrays - 1);
    if (!keys || !values || !visible) return ffi::Error::InvalidArgument("few_rows: a part is not as declared");
    const float* factors[2] = {};
    if constexpr (kHasFactors<K>) {
      auto of_keys = rest.get<ffi::Buffer<ffi::F32, 4>>(i + 1), of_values = rest.get<ffi::Buffer<ffi::F32, 4>>(i + 3);
      if (!of_keys || !of_values) return ffi::Error::InvalidArgument("few_rows: a part's factors are not as declared");
      factors[0] = of_keys->typed_data(), factors[1] = of_values->typed_data();
    }
    const auto m = visible->dimensions();
    kv_heads = keys->dimensions()[1];
    const int64_t slots = keys->dimensions()[2];
    parts.push_back({static_cast<const K*>(keys->untyped_data()), static_cast<const K*>(values->untyped_data()),
                     factors[0], factors[1], visible->typed_data(), slots, m[0] == 1 ? 0 : m[1] * m[2],
                     m[1] == 1 ? 0 : m[2]});
    all_slots += slots;
  }
  const int64_t batch = q[0], heads = q[1], tokens = q[2], head_dim = q[3], per_kv = heads / kv_heads;
  if (head_dim > kLongestHead || head_dim % kLanes) {
    return ffi::Error::InvalidArgument("few_rows: head_dim must be 16n <= 256");
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  const int64_t rows = per_kv * tokens, groups = (rows + kGroup - 1) / kGroup;
  InParallel(pool, batch * kv_heads * groups, [&](int64_t job) {
    float* scores = Scratch(all_slots * kGroup + kRows);
    const int64_t head_row = job / groups, b = head_row / kv_heads, kv = head_row % kv_heads;
    const int64_t first_row = job % groups * kGroup, n = std::min<int64_t>(kGroup, rows - first_row);
    const T* query[kGroup];
    T* to[kGroup];
    int64_t token[kGroup];
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = first_row + i, head = kv * per_kv + row / tokens;
      token[i] = row % tokens;
      query[i] = static_cast<const T*>(queries.untyped_data()) + ((b * heads + head) * tokens + token[i]) * head_dim;
      to[i] = static_cast<T*>(out.untyped_data()) + ((b * tokens + token[i]) * heads + head) * head_dim;
    }
    std::vector<int64_t> firsts(parts.size()), lasts(parts.size());
    for (size_t p = 0; p < parts.size(); ++p) SeenRange(parts[p], b, tokens, &firsts[p], &lasts[p]);
    AttendGroup(query, token, to, n, parts.data(), firsts.data(), lasts.data(), parts.size(), b, head_row, head_dim,
                scale, scores);
  });
  return ffi::Error::Success();
}

// Keys and values may have fewer bits than the queries, whose dtype the result has.
ffi::Error Attend(ffi::ThreadPool pool, ffi::AnyBuffer queries, ffi::RemainingArgs rest,
                  ffi::Result<ffi::AnyBuffer> out) {
  if (!IsNumbers(queries, 4) || !IsNumbers(*out, 3) || out->element_type() != queries.element_type()) {
    return ffi::Error::InvalidArgument("few_rows: the queries are not as declared");
  }
  const auto keys = rest.get<ffi::AnyBuffer>(0);
  if (!keys) return ffi::Error::InvalidArgument("few_rows: a part is not as declared");
  const ffi::DataType stored = keys->element_type();
  if (queries.element_type() == ffi::BF16) {
    if (stored == ffi::S8) return AttendIn<BFloat16, ffi::S8, int8_t>(pool, queries, rest, *out);
    return AttendIn<BFloat16, ffi::BF16, BFloat16>(pool, queries, rest, *out);
  }
  if (stored == ffi::S8) return AttendIn<float, ffi::S8, int8_t>(pool, queries, rest, *out);
  if (stored == ffi::BF16) return AttendIn<float, ffi::BF16, BFloat16>(pool, queries, rest, *out);
  return AttendIn<float, ffi::F32, float>(pool, queries, rest, *out);
}

// ---- total = x + added; out = total / rms(total) * scale -------------------------------------------------------------------

// The sum is rounded before its squares are added up, so they are those of the residual stream.
template <typename T>
FOR_EVERY_CPU
void NormRow(const T* x, const T* added, const T* scale, float eps, int64_t width, T* total, T* out) {
  Lanes squares = {};
  const int64_t vectors = width / kLanes * kLanes;
  for (int64_t i = 0; i < vectors; i += kLanes) {
    Lanes sum, more = {};
    Load(sum, x + i);
    if (added != nullptr) Load(more, added + i);
    Store(total + i, sum + more);
    Load(sum, total + i);
    squares += sum * sum;
  }
  float square = 0;
  for (int lane = 0; lane < kLanes; ++lane) square += squares[lane];
  for (int64_t i = vectors; i < width; ++i) {
    Set(total[i], Wide(x[i]) + (added == nullptr ? 0.0f : Wide(added[i])));
    square += Wide(total[i]) * Wide(total[i]);
  }
  const float factor = 1.0f / std::sqrt(square / width + eps);
  for (int64_t i = 0; i < vectors; i += kLanes) {
    Lanes sum, by;
    Load(sum, total + i);
    Load(by, scale + i);
    Store(out + i, sum * factor * by);
  }
  for (int64_t i = vectors; i < width; ++i) Set(out[i], Wide(total[i]) * factor * Wide(scale[i]));
}

// `added` may be missing. All have one dtype.
ffi::Error AddNorm(ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> total,
                   ffi::Result<ffi::AnyBuffer> out, float eps) {
  const auto given = rest.get<ffi::AnyBuffer>(0);
  const ffi::AnyBuffer added = given ? *given : x;
  for (const ffi::AnyBuffer& matrix : {x, added, *total, *out}) {
    if (!IsNumbers(matrix, 2) || matrix.element_type() != scale.element_type()) {
      return ffi::Error::InvalidArgument("few_rows: the rows of a norm are not as declared");
    }
  }
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  WithNumbers(x, [&](auto* numbers) {
    using T = std::remove_pointer_t<decltype(numbers)>;
    for (int64_t at = 0; at < rows * width; at += width) {
      NormRow<T>(numbers + at, given ? static_cast<T*>(added.untyped_data()) + at : nullptr,
                 static_cast<T*>(scale.untyped_data()), eps, width, static_cast<T*>(total->untyped_data()) + at,
                 static_cast<T*>(out->untyped_data()) + at);
    }
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(hydrajax_attend, Attend,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Any>().RemainingArgs().Ret<Any>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hydrajax_add_norm, AddNorm,
    ffi::Ffi::Bind().Arg<Any>().Arg<Any>().RemainingArgs().Ret<Any>().Ret<Any>().Attr<float>("eps"));
