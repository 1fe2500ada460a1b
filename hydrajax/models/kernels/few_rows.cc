// Matrix products and attention of a decode step with few rows on a CPU.
//
// XLA's CPU products repack the whole weight for every call with more than one row, so eight rows cost two to three times
// as much as one, although both read the same weight bytes. These kernels read each weight once, in place, and keep all
// rows in registers. few_rows.py has measurements.
//
// Each output is summed in one order, independent of the number of rows and threads, so a row's result is the same to the
// last bit in a tree of any size.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_kernels.h"

using Matrix = ffi::Buffer<ffi::F32, 2>;
using Heads = ffi::Buffer<ffi::F32, 4>;

namespace {

constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef int32_t IntLanes __attribute__((vector_size(kLanes * 4), aligned(4)));

constexpr int kColumns = 2 * kLanes;
constexpr int kRows = 8;    // rows in registers at once, 8 x 2 vectors of sums
constexpr int kDepth = 8;   // weight rows read side by side
constexpr int kGroup = 16;  // queries whose scores stand side by side in one vector
constexpr int kKeys = 8;    // keys scored at once

// ---- out[rows, F] = x[rows, D] @ weight[D, F] --------------------------------------------------------------------------

inline ALWAYS_INLINE void Load(Lanes& to, const float* from) { std::memcpy(&to, from, sizeof(Lanes)); }
inline ALWAYS_INLINE void Store(float* to, const Lanes& from) { std::memcpy(to, &from, sizeof(Lanes)); }

// sums[R, 32] += x[R, n] @ weight[n, 32], rows of x `depth` apart and rows of weight `stride`.
template <int R>
inline ALWAYS_INLINE void AddProduct(const float* x, int64_t depth, const float* weight,
                                                      int64_t stride, float* sums, int64_t n) {
  Lanes s[R][2];
  for (int r = 0; r < R; ++r) {
    Load(s[r][0], sums + r * kColumns);
    Load(s[r][1], sums + r * kColumns + kLanes);
  }
  for (int64_t d = 0; d < n; ++d) {
    Lanes w0, w1;
    Load(w0, weight + d * stride);
    Load(w1, weight + d * stride + kLanes);
    for (int r = 0; r < R; ++r) {
      const float a = x[r * depth + d];
      s[r][0] += a * w0;
      s[r][1] += a * w1;
    }
  }
  for (int r = 0; r < R; ++r) {
    Store(sums + r * kColumns, s[r][0]);
    Store(sums + r * kColumns + kLanes, s[r][1]);
  }
}

// The columns from `begin` to `end`, which vectors of 32 do not reach, one by one in the same order.
void ProductOfLastColumns(const float* x, const float* weight, float* out, int64_t rows, int64_t depth,
                          int64_t width, int64_t begin, int64_t end) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = begin; c < end; ++c) {
      float sum = 0;
      for (int64_t d = 0; d < depth; ++d) sum += x[r * depth + d] * weight[d * width + c];
      out[r * width + c] = sum;
    }
  }
}

// Columns `begin` to `end` of the product. `sums` has room for rows x (end - begin) and holds 32 columns of a row side by
// side, then those of the next row: rows a multiple of 4 kB apart, as in `out`, push each other out of the L1 cache.
FOR_EVERY_CPU
void ProductOfColumns(const float* x, const float* weight, float* out, int64_t rows, int64_t depth, int64_t width,
                      int64_t begin, int64_t end, float* sums) {
  const int64_t vectors = begin + (end - begin) / kColumns * kColumns;
  std::memset(sums, 0, sizeof(float) * rows * (vectors - begin));
  alignas(64) float block[kDepth * kColumns];
  for (int64_t d = 0; d < depth; d += kDepth) {
    const int64_t n = std::min<int64_t>(kDepth, depth - d);
    for (int64_t column = begin; column < vectors; column += kColumns) {
      const float* w = weight + d * width + column;
      int64_t stride = width;
      // The hardware prefetcher does not reach far enough in many short streams: prefetch the rows below.
      if (d + 2 * kDepth <= depth) {
        for (int64_t i = kDepth; i < 2 * kDepth; ++i) {
          __builtin_prefetch(w + i * width);
          __builtin_prefetch(w + i * width + kLanes);
        }
      }
      if (rows > kRows) {  // read more than once: copy it to stay in the L1 cache
        for (int64_t i = 0; i < n; ++i) std::memcpy(block + i * kColumns, w + i * width, sizeof(float) * kColumns);
        w = block;
        stride = kColumns;
      }
      for (int64_t row = 0; row < rows; row += kRows) {
        const float* xs = x + row * depth + d;
        float* to = sums + (column - begin) * rows + row * kColumns;
        WithRows<kRows>(rows - row, [=](auto r) ALWAYS_INLINE { AddProduct<r>(xs, depth, w, stride, to, n); });
      }
    }
  }
  for (int64_t column = begin; column < vectors; column += kColumns) {
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(out + row * width + column, sums + (column - begin) * rows + row * kColumns, sizeof(float) * kColumns);
    }
  }
  ProductOfLastColumns(x, weight, out, rows, depth, width, vectors, end);
}

ffi::Error Matmul(ffi::ThreadPool pool, Matrix x, Matrix weight, ffi::Result<Matrix> out) {
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1], width = weight.dimensions()[1];
  if (weight.dimensions()[0] != depth) return ffi::Error::InvalidArgument("few_rows: x and weight do not fit");
  // A share is a multiple of 32 columns and at least 64 kB of weights, below which waking a thread costs more.
  const int64_t units = std::max<int64_t>(1, width / kColumns);
  const int64_t shares = std::max<int64_t>(1, std::min({units, pool.num_threads(), depth * width * 4 / (64 << 10)}));
  InParallel(pool, shares, [&](int64_t i) {
    const int64_t begin = units * i / shares * kColumns;
    const int64_t end = i + 1 == shares ? width : units * (i + 1) / shares * kColumns;
    float* sums = Scratch(rows * (end - begin));
    ProductOfColumns(x.typed_data(), weight.typed_data(), out->typed_data(), rows, depth, width, begin, end, sums);
  });
  return ffi::Error::Success();
}

// ---- out[rows, F] = x[rows, D] @ weight[F, D]^T ------------------------------------------------------------------------

// out[R, C] = x[R, D] @ weight[C, D]^T, rows of out `width` apart.
template <int R, int C>
inline ALWAYS_INLINE void DotProducts(const float* x, const float* weight, float* out, int64_t depth,
                                                       int64_t width) {
  Lanes s[R][C] = {};
  const int64_t vectors = depth / kLanes * kLanes;
  for (int64_t d = 0; d < vectors; d += kLanes) {
    Lanes w[C];
    for (int c = 0; c < C; ++c) {
      Load(w[c], weight + c * depth + d);
      __builtin_prefetch(weight + (c + 2 * C) * depth + d);
    }
    for (int r = 0; r < R; ++r) {
      Lanes a;
      Load(a, x + r * depth + d);
      for (int c = 0; c < C; ++c) s[r][c] += a * w[c];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      float sum = 0;
      for (int lane = 0; lane < kLanes; ++lane) sum += s[r][c][lane];
      for (int64_t d = vectors; d < depth; ++d) sum += x[r * depth + d] * weight[c * depth + d];
      out[r * width + c] = sum;
    }
  }
}

template <int C>
inline ALWAYS_INLINE void DotProductsOfRows(const float* x, const float* weight, float* out,
                                                             int64_t rows, int64_t depth, int64_t width) {
  for (int64_t row = 0; row < rows; row += kRows) {
    const float* xs = x + row * depth;
    float* to = out + row * width;
    WithRows<kRows>(rows - row, [=](auto r) ALWAYS_INLINE { DotProducts<r, C>(xs, weight, to, depth, width); });
  }
}

// Columns `begin` to `end` of the product, which are rows of the weight.
FOR_EVERY_CPU
void ProductWithRows(const float* x, const float* weight, float* out, int64_t rows, int64_t depth, int64_t width,
                     int64_t begin, int64_t end) {
  int64_t f = begin;
  for (; f + 2 <= end; f += 2) DotProductsOfRows<2>(x, weight + f * depth, out + f, rows, depth, width);
  if (f < end) DotProductsOfRows<1>(x, weight + f * depth, out + f, rows, depth, width);
}

ffi::Error MatmulTransposed(ffi::ThreadPool pool, Matrix x, Matrix weight, ffi::Result<Matrix> out) {
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1], width = weight.dimensions()[0];
  if (weight.dimensions()[1] != depth) return ffi::Error::InvalidArgument("few_rows: x and weight do not fit");
  const int64_t shares = std::max<int64_t>(1, std::min(pool.num_threads(), depth * width * 4 / (64 << 10)));
  InParallel(pool, shares, [&](int64_t i) {
    ProductWithRows(x.typed_data(), weight.typed_data(), out->typed_data(), rows, depth, width, width * i / shares,
                    width * (i + 1) / shares);
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

struct Part {
  const float *keys, *values;  // [B, kv, slots, H]
  const bool* visible;         // [B or 1, T or 1, slots]
  int64_t slots, batch_stride, token_stride;
};

struct Shape {
  int64_t batch, kv_heads, queries_per_kv, tokens, head_dim;
};

// The slots from the first to the last visible one of a sequence.
void SeenRange(const Part& part, int64_t b, int64_t tokens, int64_t* first, int64_t* last) {
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

// Up to 16 queries that share a key-value head, over all segments. `scores` has room for 16 x all slots.
FOR_EVERY_CPU
void AttendGroup(const float* const* queries, const int64_t* tokens, float* const* outs, int64_t n, const Part* parts,
                 const int64_t* firsts, const int64_t* lasts, int64_t n_parts, int64_t b, int64_t head_row,
                 int64_t head_dim, float scale, float* scores) {
  alignas(64) float transposed[256 * kGroup];  // [H, 16]
  for (int64_t h = 0; h < head_dim; ++h) {
    for (int64_t i = 0; i < kGroup; ++i) transposed[h * kGroup + i] = i < n ? queries[i][h] * scale : 0.0f;
  }
  Lanes peak = Lanes{} - 1e30f;
  float* at = scores;
  for (int64_t p = 0; p < n_parts; ++p) {
    const Part& part = parts[p];
    const float* keys = part.keys + head_row * part.slots * head_dim;
    for (int64_t s = firsts[p]; s < lasts[p]; s += kKeys) {
      const int64_t count = std::min<int64_t>(kKeys, lasts[p] - s);
      Lanes sums[kKeys] = {};
      for (int64_t ahead = 0; ahead < kKeys * head_dim; ahead += kLanes) {
        __builtin_prefetch(keys + (s + 2 * kKeys) * head_dim + ahead);
      }
      if (count == kKeys) {
        for (int64_t h = 0; h < head_dim; ++h) {
          Lanes q;
          Load(q, transposed + h * kGroup);
          for (int k = 0; k < kKeys; ++k) sums[k] += q * keys[(s + k) * head_dim + h];
        }
      } else {
        for (int64_t h = 0; h < head_dim; ++h) {
          Lanes q;
          Load(q, transposed + h * kGroup);
          for (int k = 0; k < count; ++k) sums[k] += q * keys[(s + k) * head_dim + h];
        }
      }
      for (int64_t k = 0; k < count; ++k) {
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
  for (float* x = scores; x < at; x += kGroup) {
    Lanes s;
    Load(s, x);
    s -= peak;
    Exp(s);
    total += s;
    Store(x, s);
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
        const float* values = parts[p].values + head_row * parts[p].slots * head_dim + h;
        for (int64_t s = firsts[p]; s < lasts[p]; ++s, weights += kGroup) {
          Lanes v0, v1 = {};
          __builtin_prefetch(values + (s + 2 * kKeys) * head_dim);
          __builtin_prefetch(values + (s + 2 * kKeys) * head_dim + kLanes);
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

// queries [B, heads, T, H]; then keys, values and visible of each part. out [B, T, heads * H].
ffi::Error Attend(ffi::ThreadPool pool, Heads queries, ffi::RemainingArgs rest,
                  ffi::Result<ffi::Buffer<ffi::F32, 3>> out) {
  std::vector<Part> parts;
  int64_t kv_heads = 0, all_slots = 0;
  const auto q = queries.dimensions();
  for (size_t i = 0; i + 2 < rest.size(); i += 3) {
    auto keys = rest.get<Heads>(i);
    auto values = rest.get<Heads>(i + 1);
    auto visible = rest.get<ffi::Buffer<ffi::PRED, 3>>(i + 2);
    if (!keys || !values || !visible) return ffi::Error::InvalidArgument("few_rows: a part is not as declared");
    const auto m = visible->dimensions();
    kv_heads = keys->dimensions()[1];
    const int64_t slots = keys->dimensions()[2];
    parts.push_back({keys->typed_data(), values->typed_data(), visible->typed_data(), slots,
                     m[0] == 1 ? 0 : m[1] * m[2], m[1] == 1 ? 0 : m[2]});
    all_slots += slots;
  }
  const int64_t batch = q[0], heads = q[1], tokens = q[2], head_dim = q[3], per_kv = heads / kv_heads;
  if (head_dim > 256 || head_dim % kLanes) return ffi::Error::InvalidArgument("few_rows: head_dim must be 16n <= 256");
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  const int64_t rows = per_kv * tokens, groups = (rows + kGroup - 1) / kGroup;
  InParallel(pool, batch * kv_heads * groups, [&](int64_t job) {
    float* scores = Scratch(all_slots * kGroup + kRows);
    const int64_t head_row = job / groups, b = head_row / kv_heads, kv = head_row % kv_heads;
    const int64_t first_row = job % groups * kGroup, n = std::min<int64_t>(kGroup, rows - first_row);
    const float* query[kGroup];
    float* to[kGroup];
    int64_t token[kGroup];
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = first_row + i, head = kv * per_kv + row / tokens;
      token[i] = row % tokens;
      query[i] = queries.typed_data() + ((b * heads + head) * tokens + token[i]) * head_dim;
      to[i] = out->typed_data() + ((b * tokens + token[i]) * heads + head) * head_dim;
    }
    std::vector<int64_t> firsts(parts.size()), lasts(parts.size());
    for (size_t p = 0; p < parts.size(); ++p) SeenRange(parts[p], b, tokens, &firsts[p], &lasts[p]);
    AttendGroup(query, token, to, n, parts.data(), firsts.data(), lasts.data(), parts.size(), b, head_row, head_dim,
                scale, scores);
  });
  return ffi::Error::Success();
}

// ---- total = x + added; out = total / rms(total) * scale -------------------------------------------------------------------

FOR_EVERY_CPU
void NormRow(const float* x, const float* added, const float* scale, float eps, int64_t width, float* total, float* out) {
  Lanes squares = {};
  const int64_t vectors = width / kLanes * kLanes;
  for (int64_t i = 0; i < vectors; i += kLanes) {
    Lanes sum, more = {};
    Load(sum, x + i);
    if (added != nullptr) Load(more, added + i);
    sum += more;
    Store(total + i, sum);
    squares += sum * sum;
  }
  float square = 0;
  for (int lane = 0; lane < kLanes; ++lane) square += squares[lane];
  for (int64_t i = vectors; i < width; ++i) {
    total[i] = x[i] + (added == nullptr ? 0.0f : added[i]);
    square += total[i] * total[i];
  }
  const float factor = 1.0f / std::sqrt(square / width + eps);
  for (int64_t i = 0; i < width; ++i) out[i] = total[i] * factor * scale[i];
}

// `added` may be missing.
ffi::Error AddNorm(Matrix x, ffi::Buffer<ffi::F32, 1> scale, ffi::RemainingArgs rest, ffi::Result<Matrix> total,
                   ffi::Result<Matrix> out, float eps) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  const float* added = nullptr;
  if (auto given = rest.get<Matrix>(0)) added = given->typed_data();
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = r * width;
    NormRow(x.typed_data() + at, added == nullptr ? nullptr : added + at, scale.typed_data(), eps, width,
            total->typed_data() + at, out->typed_data() + at);
  }
  return ffi::Error::Success();
}

}  // namespace

using Vector = ffi::Buffer<ffi::F32, 1>;
using Output = ffi::Buffer<ffi::F32, 3>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(hydrajax_matmul, Matmul,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Matrix>().Arg<Matrix>().Ret<Matrix>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(hydrajax_matmul_transposed, MatmulTransposed,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Matrix>().Arg<Matrix>().Ret<Matrix>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(hydrajax_attend, Attend,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Heads>().RemainingArgs().Ret<Output>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hydrajax_add_norm, AddNorm,
    ffi::Ffi::Bind().Arg<Matrix>().Arg<Vector>().RemainingArgs().Ret<Matrix>().Ret<Matrix>().Attr<float>("eps"));
