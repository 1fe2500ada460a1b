// Matrix products with weights of 8 and 4 bits on a CPU, for any number of rows.
//
// Each row of x is rounded to 8 bits in groups of 32 numbers, so that a group's products and their sums are integers. XLA
// would widen the whole weight to float32 in memory in every step. few_bits.py describes the weights' layout and has
// measurements.
//
// The integers are exact on every CPU, and groups are added in one order, independent of the number of rows and threads, so
// a row's result is the same to the last bit in a tree of any size.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "cpu_kernels.h"
#include "experts.h"
#include "few_bits.h"
#include "few_bits_256.h"
#include "few_bits_512.h"

namespace {

using Matrix = ffi::Buffer<ffi::F32, 2>;

// ---- every CPU: integers as floats, which are exact below 2^24 -------------------------------------------------------------

namespace plain {

constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));

void Quantize(const float* x, int64_t depth, const Rows& to) { QuantizeRows<float>(x, depth, to); }

// float16 without infinities and NaN.
inline ALWAYS_INLINE Lanes FromHalves(const uint16_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  const Bits bits = __builtin_convertvector(halves, Bits);
  const Bits size = (bits & 0x7fff) << 13;
  // XLA's threads take a denormal float32 for zero. A denormal float16 is made from a normal one.
  const Bits raised = size + (113 << 23);
  Lanes small;
  std::memcpy(&small, &raised, sizeof(small));
  small -= 0x1p-14f;
  Bits wide;
  std::memcpy(&wide, &small, sizeof(wide));
  wide = (size < 1 << 23 ? wide : size + (112 << 23)) | (bits & 0x8000) << 16;
  std::memcpy(&small, &wide, sizeof(small));
  return small;
}

// Widens the scales from `at` on. A zero becomes -zero * scale, which float32 holds exactly if the scale is float16.
void WidenScales(const Weight& weight, int64_t at, Scales& to) {
  if (weight.scales == nullptr) {
    std::memcpy(to.scales, weight.wide_scales + at, sizeof(to.scales));
  } else {
    for (int c = 0; c < kColumns; c += kLanes) {
      const Lanes wide = FromHalves(weight.scales + at + c);
      std::memcpy(to.scales + c, &wide, sizeof(wide));
    }
  }
  to.has_offsets = weight.offsets != nullptr || weight.zeros != nullptr;
  if (weight.offsets != nullptr) {
    for (int c = 0; c < kColumns; c += kLanes) {
      const Lanes wide = FromHalves(weight.offsets + at + c);
      std::memcpy(to.offsets + c, &wide, sizeof(wide));
    }
  } else if (weight.zeros != nullptr) {
    for (int c = 0; c < kColumns; ++c) to.offsets[c] = -static_cast<float>(weight.zeros[at + c]) * to.scales[c];
  }
}

// Widens a tile to floats [32 numbers][64 columns].
inline ALWAYS_INLINE void Widen(const uint8_t* tile, bool four_bits, float* wide) {
  for (int s = 0; s < (four_bits ? kSteps / 2 : kSteps); ++s) {
    int32_t fours[kColumns];
    std::memcpy(fours, tile + s * sizeof(fours), sizeof(fours));
    for (int k = 0; k < 4; ++k) {
      float* to = wide + (4 * s + k) * kColumns;
      if (four_bits) {
        for (int c = 0; c < kColumns; ++c) to[c] = static_cast<float>(fours[c] >> 8 * k & 15);
        float* high = to + kDepth / 2 * kColumns;
        for (int c = 0; c < kColumns; ++c) high[c] = static_cast<float>(fours[c] >> (8 * k + 4) & 15);
      } else {
        for (int c = 0; c < kColumns; ++c) {
          const int32_t left = static_cast<int32_t>(static_cast<uint32_t>(fours[c]) << (24 - 8 * k));
          to[c] = static_cast<float>(left >> 24);
        }
      }
    }
  }
}

template <int R>
inline ALWAYS_INLINE void MultiplyRows(const Tile& tile, const float* wide, const Rows& x, int64_t group, int64_t row,
                                       float* sums) {
  const int64_t first = group * x.rows + row;
  const float* numbers = static_cast<const float*>(x.values) + first * kDepth;
  for (int c = 0; c < kColumns; c += 2 * kLanes) {
    Lanes products[R][2] = {};
    for (int d = 0; d < kDepth; ++d) {
      Lanes w[2];
      std::memcpy(w, wide + d * kColumns + c, sizeof(w));
      for (int r = 0; r < R; ++r) {
        const float number = numbers[r * kDepth + d];
        products[r][0] += number * w[0];
        products[r][1] += number * w[1];
      }
    }
    for (int r = 0; r < R; ++r) {
      const int64_t at = first + r;
      for (int v = 0; v < 2; ++v) {
        float* place = sums + (row + r) * kColumns + c + v * kLanes;
        Lanes sum = products[r][v], to, scale, offset;
        std::memcpy(&to, place, sizeof(to));
        std::memcpy(&scale, tile.scales + c + v * kLanes, sizeof(scale));
        sum *= scale;
        if (tile.offsets != nullptr) {
          std::memcpy(&offset, tile.offsets + c + v * kLanes, sizeof(offset));
          sum += x.sums[at] * offset;
        }
        to += x.scales[at] * sum;
        std::memcpy(place, &to, sizeof(to));
      }
    }
  }
}

void MultiplyTile(const Weight& weight, const Tile& tile, const Rows& x, int64_t group, float* sums) {
  alignas(64) float wide[kDepth * kColumns];
  Widen(tile.values, weight.four_bits, wide);
  for (int64_t row = 0; row < x.rows; row += 8) {
    WithRows<8>(x.rows - row, [&](auto r) ALWAYS_INLINE { MultiplyRows<r>(tile, wide, x, group, row, sums); });
  }
}

// Adds the products of rows and the tiles `t` of columns to sums [rows, 64].
template <auto MultiplyTile>
void MultiplyColumns(const Weight& weight, int64_t t, const Rows& x, float* sums) {
  alignas(64) Scales scales;
  for (int64_t g = 0; g < weight.groups; ++g) {
    const uint8_t* packed = TileAt(weight, t, g);
    for (int64_t b = 0; b < TileBytes(weight); b += 64) {
      __builtin_prefetch(packed + b + kTilesAhead * TileBytes(weight), 0, kL2);
    }
    if (g % weight.tiles_per_scale == 0) WidenScales(weight, ScalesAt(weight, t, g), scales);
    const Tile tile = {packed, scales.scales, scales.has_offsets ? scales.offsets : nullptr};
    MultiplyTile(weight, tile, x, g, sums);
  }
}

}  // namespace plain

// ---- AVX2 and AVX-VNNI: few_bits_256.h -------------------------------------------------------------------------------------

#ifdef HAS_256_BIT_CODE
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace narrow {

constexpr int kLanes = 8;    // columns of a vector
constexpr int kVectors = 2;  // side by side: with four rows their sums take half of the registers

void Quantize(const float* x, int64_t depth, const Rows& to) { QuantizeRows<int8_t>(x, depth, to); }

template <typename Isa, bool FourBits, int R>
inline ALWAYS_INLINE void MultiplyRows(const Tile& tile, const Rows& x, int64_t group, int64_t row, int column,
                                       float* sums) {
  const int8_t* a[R];
  __m256i products[R][kVectors];
  for (int r = 0; r < R; ++r) {
    const int64_t at = group * x.rows + row + r;
    a[r] = static_cast<const int8_t*>(x.values) + at * kDepth;
    for (int v = 0; v < kVectors; ++v) products[r][v] = Isa::template Zero<FourBits>(x.sums[at]);
  }
  auto add = [&](int step, const __m256i* w) ALWAYS_INLINE {
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, a[r] + 4 * step, sizeof(four));
      const __m256i numbers = _mm256_set1_epi32(four);
      for (int v = 0; v < kVectors; ++v) Isa::template Add<FourBits>(products[r][v], w[v], numbers);
    }
  };
#pragma GCC unroll 1  // sums stay in registers
  for (int s = 0; s < (FourBits ? kSteps / 2 : kSteps); ++s) {
    __m256i w[kVectors], high[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const uint8_t* from = tile.values + (s * kColumns + column + v * kLanes) * 4;
      w[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      if constexpr (FourBits) {
        high[v] = _mm256_and_si256(_mm256_srli_epi16(w[v], 4), _mm256_set1_epi8(15));
        w[v] = _mm256_and_si256(w[v], _mm256_set1_epi8(15));
      }
    }
    add(s, w);
    if constexpr (FourBits) add(s + kSteps / 2, high);
  }
  for (int v = 0; v < kVectors; ++v, column += kLanes) {
    const __m256 scale = _mm256_loadu_ps(tile.scales + column);
    const __m256 offset = tile.offsets != nullptr ? _mm256_loadu_ps(tile.offsets + column) : _mm256_setzero_ps();
    for (int r = 0; r < R; ++r) {
      const int64_t at = group * x.rows + row + r;
      float* to = sums + (row + r) * kColumns + column;
      __m256 wide = _mm256_cvtepi32_ps(Isa::template Total<FourBits>(products[r][v]));
      wide = _mm256_mul_ps(wide, scale);
      if (tile.offsets != nullptr) wide = _mm256_fmadd_ps(_mm256_set1_ps(x.sums[at]), offset, wide);
      _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_set1_ps(x.scales[at]), wide, _mm256_loadu_ps(to)));
    }
  }
}

template <typename Isa, bool FourBits>
void MultiplyTile(const Tile& tile, const Rows& x, int64_t group, float* sums) {
  for (int column = 0; column < kColumns; column += kVectors * kLanes) {
    int64_t row = 0;
    for (; row + 4 <= x.rows; row += 4) MultiplyRows<Isa, FourBits, 4>(tile, x, group, row, column, sums);
    if (x.rows - row == 3) MultiplyRows<Isa, FourBits, 3>(tile, x, group, row, column, sums);
    if (x.rows - row == 2) MultiplyRows<Isa, FourBits, 2>(tile, x, group, row, column, sums);
    if (x.rows - row == 1) MultiplyRows<Isa, FourBits, 1>(tile, x, group, row, column, sums);
  }
}

template <typename Isa>
void MultiplyAnyTile(const Weight& weight, const Tile& tile, const Rows& x, int64_t group, float* sums) {
  (weight.four_bits ? MultiplyTile<Isa, true> : MultiplyTile<Isa, false>)(tile, x, group, sums);
}

}  // namespace narrow

#pragma GCC pop_options
#endif

// ---- out[rows, width] = x[rows, depth] @ weight ----------------------------------------------------------------------------

struct Code {
  int64_t bytes;  // of T
  void (*quantize)(const float* x, int64_t depth, const Rows& to);
  // Adds the products of rows and the tiles `t` of columns to sums [rows, 64].
  void (*multiply)(const Weight& weight, int64_t t, const Rows& x, float* sums);
};

// The best code for this CPU. HYDRAJAX_PLAIN_CPU_KERNELS in the environment chooses the one that it names, or plain code.
const Code& BestCode() {
  static const Code best = [] {
    const char* name = std::getenv("HYDRAJAX_PLAIN_CPU_KERNELS");
    auto chosen = [&](const char* code) { return name == nullptr || std::strcmp(name, code) == 0; };
#ifdef HAS_VNNI_CODE
    const bool vnni = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
#ifdef HYDRAJAX_AMX
    if (vnni && amx::Available(amx::kInt8)) return Code{sizeof(int8_t), vnni::Quantize, matrix_unit::Multiply};
#endif
    if (vnni && chosen("avx512vnni")) return Code{sizeof(int8_t), vnni::Quantize, vnni::Multiply};
#endif
#ifdef HAS_256_BIT_CODE
    auto code = [](auto isa) {
      return Code{sizeof(int8_t), narrow::Quantize, plain::MultiplyColumns<narrow::MultiplyAnyTile<decltype(isa)>>};
    };
    if (AvxVnni::Available() && chosen(AvxVnni::kName)) return code(AvxVnni());
    if (Avx2::Available() && chosen(Avx2::kName)) return code(Avx2());
#endif
    static_cast<void>(chosen);
    return Code{sizeof(float), plain::Quantize, plain::MultiplyColumns<plain::MultiplyTile>};
  }();
  return best;
}

// Tiles `begin` to `end` of the columns. Row r of the product is row r of `out`, or row `places[r]`.
void ProductOfTiles(const Code& code, const float* x, int64_t depth, const Weight& weight, float* out, int64_t rows,
                    int64_t begin, int64_t end, const int64_t* places = nullptr) {
  const int64_t groups = weight.groups, in_rows = std::min<int64_t>(kMostRows, rows);
  const int64_t value_floats = in_rows * groups * kDepth * code.bytes / 4, n_sums = in_rows * kColumns;
  float* sums = Scratch(n_sums + value_floats + 2 * in_rows * groups);
  float* values = sums + n_sums;
  Rows quantized = {values, values + value_floats, values + value_floats + in_rows * groups, 0};
  for (int64_t row = 0; row < rows; row += kMostRows) {
    const int64_t n = quantized.rows = std::min<int64_t>(kMostRows, rows - row);
    code.quantize(x + row * depth, depth, quantized);
    for (int64_t t = begin; t < end; ++t) {
      std::memset(sums, 0, sizeof(float) * n * kColumns);
      code.multiply(weight, t, quantized, sums);
      const int64_t columns = std::min<int64_t>(kColumns, weight.width - t * kColumns);
      for (int64_t r = 0; r < n; ++r) {
        const float* from = sums + r * kColumns;
        float* to = out + (places ? places[row + r] : row + r) * weight.width + t * kColumns;
        std::memcpy(to, from, sizeof(float) * columns);
      }
    }
  }
}

// Describes `count` weights of one shape side by side, of which the first is returned. `scales` are theirs, perhaps followed
// by float16 offsets or by zeros of 8 bits.
ffi::ErrorOr<Weight> WeightOf(int64_t depth, int64_t width, int64_t count, const ffi::AnyBuffer& tiles,
                              const ffi::RemainingArgs& scales) {
  const int64_t groups = (depth + kDepth - 1) / kDepth, units = (width + kColumns - 1) / kColumns;
  const bool four_bits = tiles.element_type() == ffi::U8;
  const int64_t bytes = count * units * groups * kColumns * kDepth / (four_bits ? 2 : 1);
  const auto scale = scales.get<ffi::AnyBuffer>(0), offset = scales.get<ffi::AnyBuffer>(1);
  const auto is_one_of = [](const auto& buffer, ffi::DataType a, ffi::DataType b) {
    return buffer->element_type() == a || buffer->element_type() == b;
  };
  if (!scale || static_cast<int64_t>(tiles.element_count()) != bytes || !is_one_of(&tiles, ffi::U8, ffi::S8) ||
      !is_one_of(scale, ffi::F16, ffi::F32) || (offset && !is_one_of(offset, ffi::F16, ffi::U8))) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("few_bits: x and the weight do not fit"));
  }
  const auto n_scales = static_cast<int64_t>(scale->element_count());
  const int64_t scale_groups = n_scales / std::max<int64_t>(1, count * units * kColumns);
  int64_t tiles_per_scale = 1;
  while (tiles_per_scale < kMostTilesPerScale && (groups + tiles_per_scale - 1) / tiles_per_scale > scale_groups) {
    tiles_per_scale *= 2;
  }
  if ((groups + tiles_per_scale - 1) / tiles_per_scale * count * units * kColumns != n_scales ||
      (offset && static_cast<int64_t>(offset->element_count()) != n_scales)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("few_bits: the weight and its scales do not fit"));
  }
  const auto halves = [](const ffi::AnyBuffer& buffer) {
    return buffer.element_type() == ffi::F16 ? static_cast<const uint16_t*>(buffer.untyped_data()) : nullptr;
  };
  Weight weight = {static_cast<const uint8_t*>(tiles.untyped_data()), groups, width, four_bits, scale_groups,
                   tiles_per_scale};
  weight.scales = halves(*scale);
  if (weight.scales == nullptr) weight.wide_scales = static_cast<const float*>(scale->untyped_data());
  if (offset) {
    weight.offsets = halves(*offset);
    if (weight.offsets == nullptr) weight.zeros = static_cast<const uint8_t*>(offset->untyped_data());
  }
  return weight;
}

int64_t BytesOf(const Weight& weight) {
  return (weight.width + kColumns - 1) / kColumns * weight.groups * kColumns * kDepth / (weight.four_bits ? 2 : 1);
}

ffi::Error MatmulFewBits(ffi::ThreadPool pool, Matrix x, ffi::AnyBuffer tiles, ffi::RemainingArgs scales,
                         ffi::Result<Matrix> out) {
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1], width = out->dimensions()[1];
  if (out->dimensions()[0] != rows) return ffi::Error::InvalidArgument("few_bits: x and the result do not fit");
  const auto found = WeightOf(depth, width, 1, tiles, scales);
  if (!found) return found.error();
  const Weight& weight = *found;
  const Code& code = BestCode();
  const int64_t units = (width + kColumns - 1) / kColumns;
  // A share is at least 64 kB of weights for a row, below which waking a thread costs more.
  const int64_t shares = Shares(pool, units, rows * BytesOf(weight));
  InParallel(pool, shares, [&](int64_t i) {
    ProductOfTiles(code, x.typed_data(), depth, weight, out->typed_data(), rows, units * i / shares,
                   units * (i + 1) / shares);
  });
  return ffi::Error::Success();
}

// The weight at place `i` of those that `first` is the first of.
Weight WeightAt(const Weight& first, int64_t i) {
  Weight weight = first;
  const int64_t numbers = (weight.width + kColumns - 1) / kColumns * weight.scale_groups * kColumns;
  weight.tiles += i * BytesOf(weight);
  if (weight.scales) weight.scales += i * numbers;
  if (weight.wide_scales) weight.wide_scales += i * numbers;
  if (weight.offsets) weight.offsets += i * numbers;
  if (weight.zeros) weight.zeros += i * numbers;
  return weight;
}

// x [R, D], or [pairs, D]; experts [R, k], of which those outside 0 to E - 1 give zeros; tiles and scales of E weights side by
// side; out [R * k, F].
ffi::Error MatmulFewBitsExperts(ffi::ThreadPool pool, Matrix x, ExpertIds experts, ffi::AnyBuffer tiles,
                                ffi::RemainingArgs scales, ffi::Result<Matrix> out) {
  const int64_t n = static_cast<int64_t>(experts.element_count()), depth = x.dimensions()[1];
  const int64_t width = out->dimensions()[1], n_experts = tiles.dimensions().size() ? tiles.dimensions().front() : 0;
  if (x.dimensions()[0] < 1 || n % x.dimensions()[0] || out->dimensions()[0] != n) {
    return ffi::Error::InvalidArgument("few_bits: x and the experts do not fit");
  }
  const auto found = WeightOf(depth, width, n_experts, tiles, scales);
  if (!found) return found.error();
  const Code& code = BestCode();
  const RowsByExpert rows = ByExpert(experts.typed_data(), n, n_experts);
  ClearOthers(rows, n, width, out->typed_data());
  float* xs = Scratch<kOfExperts>(static_cast<int64_t>(rows.pairs.size()) * depth);
  CopyRows(static_cast<const float*>(x.typed_data()), rows.pairs, n / x.dimensions()[0], depth, xs);
  const int64_t units = (width + kColumns - 1) / kColumns, n_groups = rows.groups.size();
  const int64_t shares = SharesOfExpert(pool, n_groups, units, BytesOf(*found));
  InParallel(pool, n_groups * shares, [&](int64_t i) {
    const ExpertRows& of = rows.groups[i / shares];
    const int64_t part = i % shares;
    ProductOfTiles(code, xs + of.begin * depth, depth, WeightAt(*found, of.expert), out->typed_data(), of.count(),
                   units * part / shares, units * (part + 1) / shares, rows.pairs.data() + of.begin);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hydrajax_matmul_few_bits, MatmulFewBits,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Matrix>().Arg<ffi::AnyBuffer>().RemainingArgs().Ret<Matrix>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(hydrajax_matmul_few_bits_experts, MatmulFewBitsExperts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Matrix>()
                                  .Arg<ExpertIds>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<Matrix>());
