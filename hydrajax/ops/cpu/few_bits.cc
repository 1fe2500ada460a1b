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
#include "few_bits_amx.h"
#include "few_bits_rows.h"

namespace {

using Matrix = ffi::Buffer<ffi::F32, 2>;

// ---- out[rows, width] = x[rows, depth] @ weight ----------------------------------------------------------------------------

struct Code {
  // Adds the products of rows and the tiles `t` of columns to sums [rows, 64].
  void (*multiply)(const Weight& weight, int64_t t, const Rows& x, float* sums);
  bool pairs;  // of rows: PairRows
};

// Code for the first instruction set that this CPU has. HYDRAJAX_PLAIN_CPU_KERNELS in the environment chooses the one that it
// names, or plain code.
template <typename Isa, typename... Others>
Code FirstOf() {
  if constexpr (sizeof...(Others) > 0) {
    const char* name = std::getenv("HYDRAJAX_PLAIN_CPU_KERNELS");
    if ((name != nullptr && std::strcmp(name, Isa::kName) != 0) || !Isa::Available()) return FirstOf<Others...>();
  }
  return {Multiply<Isa>, Isa::kPairs};
}

Code BestCode() {
#ifdef HYDRAJAX_AMX
  if (Avx512Vnni::Available() && amx::Available(amx::kInt8)) return {matrix_unit::Multiply, false};
#endif
#if defined(HYDRAJAX_AVX512)
  static const Code best = FirstOf<Avx512Vnni, AvxVnni, Avx2, Plain>();
#elif defined(HYDRAJAX_AVX2)
  static const Code best = FirstOf<AvxVnni, Avx2, Plain>();
#elif defined(HYDRAJAX_NEON_I8MM)
  static const Code best = FirstOf<NeonI8mm, NeonDot, Plain>();
#elif defined(HYDRAJAX_NEON_DOT)
  static const Code best = FirstOf<NeonDot, Plain>();
#else
  static const Code best = FirstOf<Plain>();
#endif
  return best;
}

// Tiles `begin` to `end` of the columns. Row r of the product is row r of `out`, or row `places[r]`.
void ProductOfTiles(Code code, const float* x, int64_t depth, const Weight& weight, float* out, int64_t rows,
                    int64_t begin, int64_t end, const int64_t* places = nullptr) {
  const int64_t groups = weight.groups, in_rows = std::min<int64_t>(kMostRows, rows);
  const int64_t value_floats = in_rows * groups * kDepth / 4, n_sums = in_rows * kColumns;
  float* sums = Scratch(n_sums + value_floats + 2 * in_rows * groups);
  float* values = sums + n_sums;
  Rows quantized = {reinterpret_cast<int8_t*>(values), values + value_floats, values + value_floats + in_rows * groups, 0};
  for (int64_t row = 0; row < rows; row += kMostRows) {
    const int64_t n = quantized.rows = std::min<int64_t>(kMostRows, rows - row);
    QuantizeRows(x + row * depth, depth, quantized);
    if (code.pairs) PairRows(quantized, groups);
    for (int64_t t = begin; t < end; ++t) {
      std::memset(sums, 0, sizeof(float) * n * kColumns);
      code.multiply(weight, t, quantized, sums);
      const int64_t columns = std::min<int64_t>(kColumns, weight.width - t * kColumns);
      for (int64_t r = 0; r < n; ++r) {
        float* to = out + PlaceOf(row + r, places) * weight.width + t * kColumns;
        std::memcpy(to, sums + r * kColumns, sizeof(float) * columns);
      }
    }
  }
}

// Describes `count` weights of one shape side by side, of which the first is returned. `scales` are theirs, perhaps followed
// by float16 offsets or by zeros of 8 bits; or they are exponents of 8 bits.
ffi::ErrorOr<Weight> WeightOf(int64_t depth, int64_t width, int64_t count, const ffi::AnyBuffer& tiles,
                              const ffi::RemainingArgs& scales) {
  const int64_t groups = (depth + kDepth - 1) / kDepth, units = UnitsOf(width);
  const bool four_bits = tiles.element_type() == ffi::U8;
  const int64_t bytes = count * units * groups * kColumns * kDepth / (four_bits ? 2 : 1);
  const auto scale = scales.get<ffi::AnyBuffer>(0), offset = scales.get<ffi::AnyBuffer>(1);
  const auto is_one_of = [](const auto& buffer, ffi::DataType a, ffi::DataType b) {
    return buffer->element_type() == a || buffer->element_type() == b;
  };
  const bool codes = four_bits && scale && !offset && scale->element_type() == ffi::U8;
  if (!scale || static_cast<int64_t>(tiles.element_count()) != bytes || !is_one_of(&tiles, ffi::U8, ffi::S8) ||
      !(codes || is_one_of(scale, ffi::F16, ffi::F32)) || (offset && !is_one_of(offset, ffi::F16, ffi::U8))) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("few_bits: x and the weight do not fit"));
  }
  const auto n_scales = static_cast<int64_t>(scale->element_count());
  const int64_t scale_groups = n_scales / std::max<int64_t>(1, count * units * kColumns);
  int log = 0;
  const auto groups_of_scales = [&] { return (groups + (1 << log) - 1) >> log; };
  while (log < kMostLogTilesPerScale && groups_of_scales() > scale_groups) ++log;
  if (groups_of_scales() * count * units * kColumns != n_scales ||
      (offset && static_cast<int64_t>(offset->element_count()) != n_scales)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("few_bits: the weight and its scales do not fit"));
  }
  const auto halves = [](const ffi::AnyBuffer& buffer) {
    return buffer.element_type() == ffi::F16 ? static_cast<const uint16_t*>(buffer.untyped_data()) : nullptr;
  };
  Weight weight = {static_cast<const uint8_t*>(tiles.untyped_data()), groups, width, four_bits, scale_groups, log};
  weight.scales = halves(*scale);
  if (codes) weight.exponents = static_cast<const uint8_t*>(scale->untyped_data());
  if (!codes && weight.scales == nullptr) weight.wide_scales = static_cast<const float*>(scale->untyped_data());
  if (offset) {
    weight.offsets = halves(*offset);
    if (weight.offsets == nullptr) weight.zeros = static_cast<const uint8_t*>(offset->untyped_data());
  }
  return weight;
}

int64_t BytesOf(const Weight& weight) {
  return UnitsOf(weight.width) * weight.groups * TileBytes(weight);
}

ffi::Error MatmulFewBits(ffi::ThreadPool pool, Matrix x, ffi::AnyBuffer tiles, ffi::RemainingArgs scales,
                         ffi::Result<Matrix> out) {
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1], width = out->dimensions()[1];
  if (out->dimensions()[0] != rows) return ffi::Error::InvalidArgument("few_bits: x and the result do not fit");
  const auto found = WeightOf(depth, width, 1, tiles, scales);
  if (!found) return found.error();
  const Weight& weight = *found;
  const Code code = BestCode();
  InShares(pool, UnitsOf(width), rows * BytesOf(weight), [&](int64_t begin, int64_t end) {
    ProductOfTiles(code, x.typed_data(), depth, weight, out->typed_data(), rows, begin, end);
  });
  return ffi::Error::Success();
}

// The weight at place `i` of those that `first` is the first of.
Weight WeightAt(const Weight& first, int64_t i) {
  Weight weight = first;
  const int64_t numbers = UnitsOf(weight.width) * weight.scale_groups * kColumns;
  weight.tiles += i * BytesOf(weight);
  if (weight.scales) weight.scales += i * numbers;
  if (weight.wide_scales) weight.wide_scales += i * numbers;
  if (weight.offsets) weight.offsets += i * numbers;
  if (weight.zeros) weight.zeros += i * numbers;
  if (weight.exponents) weight.exponents += i * numbers;
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
  const Code code = BestCode();
  const RowsByExpert rows = ByExpert(experts.typed_data(), n, n_experts);
  ClearOthers(rows, n, width, out->typed_data());
  float* xs = Scratch<kOfExperts>(static_cast<int64_t>(rows.pairs.size()) * depth);
  CopyRows(static_cast<const float*>(x.typed_data()), rows.pairs, n / x.dimensions()[0], depth, xs);
  ForExperts(pool, rows, UnitsOf(width), BytesOf(*found), [&](const ExpertRows& of, int64_t begin, int64_t end) {
    ProductOfTiles(code, xs + of.begin * depth, depth, WeightAt(*found, of.expert), out->typed_data(), of.count(), begin,
                   end, rows.pairs.data() + of.begin);
  });
  return ffi::Error::Success();
}

}  // namespace

using Any = ffi::AnyBuffer;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hydrajax_matmul_few_bits, MatmulFewBits,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Matrix>().Arg<Any>().RemainingArgs().Ret<Matrix>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hydrajax_matmul_few_bits_experts, MatmulFewBitsExperts,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Matrix>().Arg<ExpertIds>().Arg<Any>().RemainingArgs().Ret<Matrix>());
