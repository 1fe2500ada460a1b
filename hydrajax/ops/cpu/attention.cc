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

constexpr int kGroup = 16;     // queries that read keys and values together
constexpr int kKeys = kLanes;  // keys whose scores stand side by side
#if defined(__AVX512F__)
constexpr int kFew = 8;   // queries, at most, whose scores are sums over lanes
constexpr int kSide = 4;  // keys scored at once for many queries
constexpr int kRows = 6;  // queries whose weighted sums of values are in registers,
constexpr int kWide = 4;  // with this many vectors of features
#else
constexpr int kFew = 4, kSide = 1, kRows = 3, kWide = 2;
#endif
constexpr int kAhead = 16;     // keys and values prefetched before they are read
constexpr int kLongestHead = 512;
constexpr float kHidden = 1e30f;

// Keys and values of type K: float, BFloat16, or int8_t with a factor for each vector.
template <typename K>
struct Part {
  const K *keys, *values;                    // [B, kv, slots, H]
  const float *key_factors, *value_factors;  // [B, kv, slots], or null
  const bool* visible;                       // [B or 1, T or 1, slots]
  int64_t slots, batch_stride, token_stride;
};

// The parts of a sequence, of which the slots from `firsts` to `lasts` are read.
template <typename K>
struct Seen {
  const Part<K>* parts;
  const int64_t *firsts, *lasts;
  int64_t n_parts, b, head_row;
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

#if defined(__AVX512F__)
// Lanes of a, then of b, which begin at 16.
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define LANES_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // GCC before 12
#define LANES_OF(a, b, ...) __builtin_shuffle(a, b, (NativeInts){__VA_ARGS__})
#endif
#endif

// The sums of 16 vectors, side by side, in the order of `SumOf`.
inline ALWAYS_INLINE Lanes SumsOf(const float* vectors) {
#if defined(__AVX512F__)
  Lanes v[kKeys / 2];
  UNROLLED for (int i = 0; i < 8; ++i) {
    const Lanes a = Loaded(vectors + i * kLanes), b = Loaded(vectors + (i + 8) * kLanes);
    v[i] = LANES_OF(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           LANES_OF(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  UNROLLED for (int i = 0; i < 4; ++i) {
    v[i] = LANES_OF(v[i], v[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           LANES_OF(v[i], v[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  UNROLLED for (int i = 0; i < 2; ++i) {
    v[i] = LANES_OF(v[i], v[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           LANES_OF(v[i], v[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  return LANES_OF(v[0], v[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         LANES_OF(v[0], v[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#else
  alignas(64) float sums[kKeys];
  for (int i = 0; i < kKeys; ++i) sums[i] = SumOf(Loaded(vectors + i * kLanes));
  return Loaded(sums);
#endif
}

// The first n of 16 numbers; the other lanes are 0.
template <typename Number>
inline ALWAYS_INLINE Lanes FirstOf(const Number* from, int64_t n) {
  if (n == kKeys) return Loaded(from);
  Number numbers[kKeys] = {};
  std::memcpy(numbers, from, sizeof(Number) * n);
  return Loaded(numbers);
}

// Scores of R queries, a row of `scores` for each. Lanes are features: a key's products are added at the end.
template <int R, typename K>
inline ALWAYS_INLINE void ScoresOfFew(const float* queries, const int64_t* tokens, const Seen<K>& seen, int64_t head_dim,
                                      float* scores, int64_t stride) {
  alignas(64) float products[R * kKeys * kLanes] = {};
  for (int64_t p = 0; p < seen.n_parts; ++p) {
    const Part<K>& part = seen.parts[p];
    const K* all_keys = part.keys + seen.head_row * part.slots * head_dim;
    const K* all_values = part.values + seen.head_row * part.slots * head_dim;
    for (int64_t s = seen.firsts[p]; s < seen.lasts[p]; s += kKeys) {
      const int64_t count = std::min<int64_t>(kKeys, seen.lasts[p] - s);
      for (int64_t k = 0; k < count; ++k) {
        const K* key = all_keys + (s + k) * head_dim;
        Prefetch(key + kAhead * head_dim, head_dim);
        Prefetch<kL2>(all_values + (s + k) * head_dim, head_dim);
        Lanes sums[R] = {};
        for (int64_t h = 0; h < head_dim; h += kLanes) {
          const Lanes features = Loaded(key + h);
          UNROLLED for (int r = 0; r < R; ++r) MultiplyAdd(sums[r], Loaded(queries + r * head_dim + h), features);
        }
        UNROLLED for (int r = 0; r < R; ++r) Store(products + (r * kKeys + k) * kLanes, sums[r]);
      }
      const bool* visible = part.visible + seen.b * part.batch_stride + s;
      for (int r = 0; r < R; ++r) {
        Lanes sums = SumsOf(products + r * kKeys * kLanes);
        if constexpr (kHasFactors<K>) sums *= FirstOf(part.key_factors + seen.head_row * part.slots + s, count);
        const auto* row = reinterpret_cast<const int8_t*>(visible + tokens[r] * part.token_stride);
        Store(scores + r * stride, sums + (FirstOf(row, count) - 1.0f) * kHidden);
      }
      scores += count;
    }
  }
  // `ExpOfRow` reads whole vectors: without these, also lanes that no key has written.
  for (int r = 0; r < R; ++r) Store(scores + r * stride, Lanes{} - kHidden);
}

// exp(score - peak) in place of the scores of one query, which hidden ones must follow. Returns their sum, in the order of
// the keys, after the sink's.
inline ALWAYS_INLINE float ExpOfRow(float* scores, int64_t n_keys, float sink) {
  Lanes peaks = Lanes{} - kHidden;
  for (int64_t i = 0; i < n_keys; i += kLanes) {
    peaks = Max(Loaded(scores + i), peaks);
  }
  alignas(64) float peak[kLanes];
  Store(peak, peaks);
  peaks = Lanes{} + std::max(sink, *std::max_element(peak, peak + kLanes));
  Lanes of_sink = Lanes{} + sink - peaks;
  Exp(of_sink);
  Store(peak, of_sink);
  float total = peak[0];
  for (int64_t i = 0; i < n_keys; i += kLanes) {
    Lanes x = Loaded(scores + i) - peaks;
    Exp(x);
    Store(scores + i, x);
    const int64_t count = std::min<int64_t>(kLanes, n_keys - i);
    for (int64_t k = 0; k < count; ++k) total += scores[i + k];
  }
  return total;
}

// The same for 16 queries side by side.
inline ALWAYS_INLINE Lanes ExpOfColumns(float* scores, int64_t n_keys, const Lanes& sinks, const Lanes& of_scores) {
  const Lanes peaks = Max(sinks, of_scores);
  Lanes total = sinks - peaks;
  Exp(total);
  for (int64_t k = 0; k < n_keys; ++k, scores += kGroup) {
    Lanes x = Loaded(scores) - peaks;
    Exp(x);
    total += x;
    Store(scores, x);
  }
  return total;
}

// n numbers in float32; narrower ones are copied to `room`, n a multiple of 16.
inline ALWAYS_INLINE const float* WideRows(const float* from, int64_t, float*) { return from; }
template <typename K>
inline ALWAYS_INLINE const float* WideRows(const K* from, int64_t n, float* room) {
  for (int64_t i = 0; i < n; i += kLanes) Store(room + i, Loaded(from + i));
  return room;
}

// Scores of up to 16 queries [H, 16] with up to 4 keys. Lanes are queries; products are added in the order of `SumsOf`.
inline ALWAYS_INLINE void ScoresOfKeys(const float* queries, const float* keys, int64_t count, int64_t head_dim,
                                       Lanes* scores) {
  const float* key[kSide];
  for (int k = 0; k < kSide; ++k) key[k] = keys + std::min<int64_t>(k, count - 1) * head_dim;
  Lanes sums[4][kSide];
  UNROLLED for (int i = 0; i < 4; ++i) {
    Lanes apart[4][kSide] = {};  // features i, i + 4, i + 8 and i + 12 of each 16
    for (int64_t h = i; h < head_dim; h += kLanes) {
      UNROLLED for (int j = 0; j < 4; ++j) {
        const Lanes query = Loaded(queries + (h + 4 * j) * kGroup);
        UNROLLED for (int k = 0; k < kSide; ++k) MultiplyAdd(apart[j][k], key[k][h + 4 * j], query);
      }
    }
    for (int k = 0; k < kSide; ++k) sums[i][k] = (apart[0][k] + apart[2][k]) + (apart[1][k] + apart[3][k]);
  }
  for (int k = 0; k < kSide; ++k) scores[k] = (sums[0][k] + sums[2][k]) + (sums[1][k] + sums[3][k]);
}

// Scores of up to 16 queries [H, 16], side by side for each key; returns the peaks.
template <typename K>
inline ALWAYS_INLINE Lanes ScoresOfMany(const float* queries, const int64_t* tokens, int64_t n, const Seen<K>& seen,
                                        int64_t head_dim, float* scores) {
  alignas(64) float room[kSide * kLongestHead];
  Lanes peaks = Lanes{} - kHidden;
  for (int64_t p = 0; p < seen.n_parts; ++p) {
    const Part<K>& part = seen.parts[p];
    const K* all_keys = part.keys + seen.head_row * part.slots * head_dim;
    for (int64_t s = seen.firsts[p]; s < seen.lasts[p]; s += kSide) {
      const int64_t count = std::min<int64_t>(kSide, seen.lasts[p] - s);
      Prefetch(all_keys + (s + kAhead) * head_dim, kSide * head_dim);
      Lanes sums[kSide];
      ScoresOfKeys(queries, WideRows(all_keys + s * head_dim, count * head_dim, room), count, head_dim, sums);
      for (int64_t k = 0; k < count; ++k, scores += kGroup) {
        if constexpr (kHasFactors<K>) sums[k] *= part.key_factors[seen.head_row * part.slots + s + k];
        const bool* visible = part.visible + seen.b * part.batch_stride + s + k;
        if (part.token_stride == 0) {
          if (!*visible) sums[k] = Lanes{} - kHidden;
        } else {
          int8_t shown[kGroup] = {};
          for (int64_t i = 0; i < n; ++i) shown[i] = visible[tokens[i] * part.token_stride];
          sums[k] += (FirstOf(shown, kGroup) - 1.0f) * kHidden;
        }
        peaks = Max(sums[k], peaks);
        Store(scores, sums[k]);
      }
    }
  }
  return peaks;
}

// sums[R, V * 16]: values weighted for R queries, V vectors of features from h on. A query's weights are `key_step` apart.
template <int R, int V, typename K>
inline ALWAYS_INLINE void WeightedSums(const Seen<K>& seen, int64_t head_dim, int64_t h, const float* weights,
                                       int64_t query_step, int64_t key_step, float* sums) {
  Lanes s[R][V] = {};
  for (int64_t p = 0; p < seen.n_parts; ++p) {
    const K* value = seen.parts[p].values + (seen.head_row * seen.parts[p].slots + seen.firsts[p]) * head_dim + h;
    for (int64_t n = seen.lasts[p] - seen.firsts[p]; n > 0; --n, value += head_dim, weights += key_step) {
      Lanes v[V];
      UNROLLED for (int c = 0; c < V; ++c) Load(v[c], value + c * kLanes);
      Prefetch(value + kAhead * head_dim, V * kLanes);
      UNROLLED for (int r = 0; r < R; ++r) {
        const float weight = weights[r * query_step];
        UNROLLED for (int c = 0; c < V; ++c) MultiplyAdd(s[r][c], weight, v[c]);
      }
    }
  }
  UNROLLED for (int r = 0; r < R; ++r) {
    UNROLLED for (int c = 0; c < V; ++c) Store(sums + (r * V + c) * kLanes, s[r][c]);
  }
}

// V vectors of features from h on of n results, in `out` [n, H].
template <int V, typename K>
inline ALWAYS_INLINE void StoreSums(const Seen<K>& seen, int64_t head_dim, int64_t h, const float* weights,
                                    int64_t query_step, int64_t key_step, const float* totals, float* out, int64_t n) {
  alignas(64) float sums[kRows * V * kLanes];
  for (int64_t first = 0; first < n; first += kRows) {
    const int64_t rows = std::min<int64_t>(kRows, n - first);
    const float* of_rows = weights + first * query_step;
    WithRows<kRows>(rows, [&](auto r) ALWAYS_INLINE {
      WeightedSums<r, V>(seen, head_dim, h, of_rows, query_step, key_step, sums);
    });
    for (int64_t r = 0; r < rows; ++r) {
      for (int c = 0; c < V; ++c) {
        Store(out + (first + r) * head_dim + h + c * kLanes, Loaded(sums + (r * V + c) * kLanes) / totals[first + r]);
      }
    }
  }
}

// out[n, H] of up to 16 queries that share a key-value head, over all parts. The scaled queries are [n, H] if they are few,
// else [H, 16]. `sinks` are 16, of which n are read, and `scores` has room for 16 x (all slots + 16).
template <typename K>
void AttendGroup(const float* queries, const int64_t* tokens, const float* sinks, float* out, int64_t n, const Seen<K>& seen,
                 int64_t head_dim, float* scores) {
  alignas(64) float totals[kGroup];
  int64_t n_keys = 0;
  for (int64_t p = 0; p < seen.n_parts; ++p) n_keys += std::max<int64_t>(0, seen.lasts[p] - seen.firsts[p]);
  const bool few = n <= kFew;
  const int64_t query_step = few ? n_keys + kKeys : 1, key_step = few ? 1 : kGroup;
  if (few) {
    WithRows<kFew>(n, [&](auto r) ALWAYS_INLINE {
      ScoresOfFew<r>(queries, tokens, seen, head_dim, scores, query_step);
    });
    for (int64_t i = 0; i < n; ++i) totals[i] = ExpOfRow(scores + i * query_step, n_keys, sinks[i]);
  } else {
    const Lanes peaks = ScoresOfMany(queries, tokens, n, seen, head_dim, scores);
    Store(totals, ExpOfColumns(scores, n_keys, Loaded(sinks), peaks));
  }
  for (int64_t i = 0; i < n; ++i) totals[i] = totals[i] > 0.0f ? totals[i] : 1.0f;  // nothing visible gives 0, not NaN
  if constexpr (kHasFactors<K>) {
    float* weights = scores;
    for (int64_t p = 0; p < seen.n_parts; ++p) {
      const float* factors = seen.parts[p].value_factors + seen.head_row * seen.parts[p].slots;
      for (int64_t s = seen.firsts[p]; s < seen.lasts[p]; ++s, weights += key_step) {
        for (int64_t i = 0; i < n; ++i) weights[i * query_step] *= factors[s];
      }
    }
  }
  int64_t h = 0;
  for (; h + kWide * kLanes <= head_dim; h += kWide * kLanes) {
    StoreSums<kWide>(seen, head_dim, h, scores, query_step, key_step, totals, out, n);
  }
  if (kWide > 2 && h + 2 * kLanes <= head_dim) {
    StoreSums<2>(seen, head_dim, h, scores, query_step, key_step, totals, out, n);
    h += 2 * kLanes;
  }
  if (h < head_dim) StoreSums<1>(seen, head_dim, h, scores, query_step, key_step, totals, out, n);
}

// queries [B, heads, T, H]; then keys, values and visible of each part, keys and values with their factors [B, kv, slots, 1]
// if there are any; perhaps a sink of each head, a logit without a value. out [B, T, heads * H].
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
    const int64_t slots = keys->dimensions()[2];
    if (i == 0) kv_heads = keys->dimensions()[1];
    bool fits = Has(*keys, {q[0], kv_heads, slots, q[3]}) && Has(*values, {q[0], kv_heads, slots, q[3]}) &&
                Has(*visible, {m[0] == 1 ? 1 : q[0], m[1] == 1 ? 1 : q[2], slots});
    if constexpr (kHasFactors<K>) {
      for (const size_t at : {i + 1, i + 3}) fits &= Has(*rest.get<ffi::AnyBuffer>(at), {q[0], kv_heads, slots, 1});
    }
    if (!fits) return ffi::Error::InvalidArgument("attention: a part and the queries do not fit");
    parts.push_back({static_cast<const K*>(keys->untyped_data()), static_cast<const K*>(values->untyped_data()),
                     factors[0], factors[1], visible->typed_data(), slots, m[0] == 1 ? 0 : m[1] * m[2],
                     m[1] == 1 ? 0 : m[2]});
    all_slots += slots;
  }
  const int64_t batch = q[0], heads = q[1], tokens = q[2], head_dim = q[3];
  const auto sinks = rest.get<ffi::Buffer<ffi::F32, 1>>(rest.size() - 1);
  const bool with_sinks = sinks && Has(*sinks, {heads});
  const bool fits = kv_heads > 0 && heads % kv_heads == 0 && Has(out, {batch, tokens, heads * head_dim});
  if (!fits || rest.size() % kArrays != with_sinks) {
    return ffi::Error::InvalidArgument("attention: the parts, the heads and the result do not fit");
  }
  const int64_t per_kv = heads / kv_heads;
  if (head_dim > kLongestHead || head_dim % kLanes) {
    return ffi::Error::InvalidArgument("attention: head_dim must be 16n <= 256");
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  const int64_t rows = per_kv * tokens, groups = (rows + kGroup - 1) / kGroup;
  InParallel(pool, batch * kv_heads * groups, [&](int64_t job) {
    float* scores = Scratch(kGroup * (all_slots + kKeys));
    alignas(64) float query[kGroup * kLongestHead], sums[kGroup * kLongestHead], of_sinks[kGroup] = {};
    const int64_t head_row = job / groups, b = head_row / kv_heads, kv = head_row % kv_heads;
    const int64_t first_row = job % groups * kGroup, n = std::min<int64_t>(kGroup, rows - first_row);
    // Queries that are many lie side by side, with zeros for those that are missing.
    const int64_t step = n <= kFew ? head_dim : 1, feature_step = n <= kFew ? 1 : kGroup;
    if (n > kFew && n < kGroup) std::memset(query, 0, sizeof(float) * kGroup * head_dim);
    int64_t head[kGroup], token[kGroup];
    for (int64_t i = 0; i < n; ++i) {
      head[i] = kv * per_kv + (first_row + i) / tokens, token[i] = (first_row + i) % tokens;
      of_sinks[i] = with_sinks ? sinks->typed_data()[head[i]] : -INFINITY;
      const T* from = static_cast<const T*>(queries.untyped_data()) + ((b * heads + head[i]) * tokens + token[i]) * head_dim;
      for (int64_t h = 0; h < head_dim; ++h) query[i * step + h * feature_step] = Wide(from[h]) * scale;
    }
    std::vector<int64_t> firsts(parts.size()), lasts(parts.size());
    for (size_t p = 0; p < parts.size(); ++p) SeenRange(parts[p], b, tokens, &firsts[p], &lasts[p]);
    const Seen<K> seen = {parts.data(), firsts.data(), lasts.data(), static_cast<int64_t>(parts.size()), b, head_row};
    AttendGroup(query, token, of_sinks, sums, n, seen, head_dim, scores);
    for (int64_t i = 0; i < n; ++i) {
      T* to = static_cast<T*>(out.untyped_data()) + ((b * tokens + token[i]) * heads + head[i]) * head_dim;
      for (int64_t h = 0; h < head_dim; ++h) Set(to[h], sums[i * head_dim + h]);
    }
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
