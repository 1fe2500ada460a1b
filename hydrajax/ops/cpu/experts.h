// Rows of a batch by the expert that they are multiplied with.

#ifndef HYDRAJAX_EXPERTS_H_
#define HYDRAJAX_EXPERTS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_kernels.h"

namespace {

using ExpertIds = ffi::Buffer<ffi::S32, 2>;  // [R, k]

// Places `begin` to `end` of `RowsByExpert::pairs` belong to one expert.
struct ExpertRows {
  int64_t expert, begin, end;
  int64_t count() const { return end - begin; }
};

// Pairs of a token and an expert, sorted by the expert: the rows of a product's result.
struct RowsByExpert {
  std::vector<int64_t> pairs;
  std::vector<ExpertRows> groups;  // of the experts that have rows
};

// Pairs whose expert is not one of `n_experts` are left out.
inline RowsByExpert ByExpert(const int32_t* experts, int64_t n, int64_t n_experts) {
  std::vector<int64_t> ends(n_experts + 1, 0);
  for (int64_t i = 0; i < n; ++i) {
    if (experts[i] >= 0 && experts[i] < n_experts) ++ends[experts[i] + 1];
  }
  RowsByExpert found;
  for (int64_t e = 0; e < n_experts; ++e) {
    const int64_t begin = ends[e];
    ends[e + 1] += begin;
    if (ends[e + 1] > begin) found.groups.push_back({e, begin, ends[e + 1]});
  }
  found.pairs.resize(ends[n_experts]);
  for (int64_t i = 0; i < n; ++i) {
    if (experts[i] >= 0 && experts[i] < n_experts) found.pairs[ends[experts[i]]++] = i;
  }
  return found;
}

// Copies the rows of x that pairs read, `per_row` pairs each, in the order of the pairs.
template <typename T>
void CopyRows(const T* x, const std::vector<int64_t>& pairs, int64_t per_row, int64_t depth, T* to) {
  for (const int64_t pair : pairs) {
    std::memcpy(to, x + pair / per_row * depth, sizeof(T) * depth);
    to += depth;
  }
}

// Sets the result of pairs that were left out to zero.
template <typename T>
void ClearOthers(const RowsByExpert& rows, int64_t n, int64_t width, T* out) {
  if (static_cast<int64_t>(rows.pairs.size()) == n) return;
  std::vector<bool> present(n, false);
  for (const int64_t pair : rows.pairs) present[pair] = true;
  for (int64_t i = 0; i < n; ++i) {
    if (!present[i]) std::memset(static_cast<void*>(out + i * width), 0, sizeof(T) * width);
  }
}

// The row of a result that row r of an expert is; without places, r.
inline int64_t PlaceOf(int64_t r, const int64_t* places) { return places ? places[r] : r; }

// Calls work(rows of an expert, begin, end) for shares of the units of its columns, in parallel. An expert's whole matrix is one
// stretch of memory, so it is divided only where the experts alone would leave threads without work.
template <typename Work>
void ForExperts(ffi::ThreadPool& pool, const RowsByExpert& rows, int64_t units, int64_t bytes, const Work& work) {
  const int64_t n = rows.groups.size(), threads = pool.num_threads();
  const int64_t shares = n % threads == 0 || n >= 4 * threads ? 1 : Shares(pool, units, bytes);
  InParallel(pool, n * shares, [&](int64_t i) {
    const int64_t part = i % shares;
    work(rows.groups[i / shares], units * part / shares, units * (part + 1) / shares);
  });
}

}  // namespace

#endif  // HYDRAJAX_EXPERTS_H_
