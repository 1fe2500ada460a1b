// Attention of a decode step's few queries over the KV cache and the tree, on a CPU.
//
// Keys and values are read once for all queries that share them, from the first to the last visible slot. Queries are float32 or
// bfloat16, keys and values these or 8 bits with a factor for each vector; scores and sums are in float32. A query's result does
// not depend on the others.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"

namespace {

typedef int16_t ShortLanes __attribute__((vector_size(kLanes * 2), aligned(2)));
typedef int8_t ByteLanes __attribute__((vector_size(kLanes), aligned(1)));
constexpr int kGroup = 16;  // queries whose scores stand side by side in one vector
constexpr int kKeys = 8;    // keys scored at once
constexpr int kRows = 8;    // queries whose weighted sums of values are in registers
constexpr int kLongestHead = 256;

inline ALWAYS_INLINE void Load(Lanes& to, const int8_t* from) {
  ByteLanes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  const ShortLanes shorts = __builtin_convertvector(bytes, ShortLanes);  // GCC 12 would take bytes to int32 one by one
  to = __builtin_convertvector(__builtin_convertvector(shorts, IntLanes), Lanes);
}

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
    if (!keys || !values || !visible) return ffi::Error::InvalidArgument("attention: a part is not as declared");
    const float* factors[2] = {};
    if constexpr (kHasFactors<K>) {
      auto of_keys = rest.get<ffi::Buffer<ffi::F32, 4>>(i + 1), of_values = rest.get<ffi::Buffer<ffi::F32, 4>>(i + 3);
      if (!of_keys || !of_values) return ffi::Error::InvalidArgument("attention: a part's factors are not as declared");
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
    return ffi::Error::InvalidArgument("attention: head_dim must be 16n <= 256");
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
    return ffi::Error::InvalidArgument("attention: the queries are not as declared");
  }
  const auto keys = rest.get<ffi::AnyBuffer>(0);
  if (!keys) return ffi::Error::InvalidArgument("attention: a part is not as declared");
  const ffi::DataType stored = keys->element_type();
  if (queries.element_type() == ffi::BF16) {
    if (stored == ffi::S8) return AttendIn<BFloat16, ffi::S8, int8_t>(pool, queries, rest, *out);
    return AttendIn<BFloat16, ffi::BF16, BFloat16>(pool, queries, rest, *out);
  }
  if (stored == ffi::S8) return AttendIn<float, ffi::S8, int8_t>(pool, queries, rest, *out);
  if (stored == ffi::BF16) return AttendIn<float, ffi::BF16, BFloat16>(pool, queries, rest, *out);
  return AttendIn<float, ffi::F32, float>(pool, queries, rest, *out);
}

}  // namespace

using Any = ffi::AnyBuffer;

XLA_FFI_DEFINE_HANDLER_SYMBOL(hydrajax_attend, Attend,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Any>().RemainingArgs().Ret<Any>());
