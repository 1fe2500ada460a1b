// The most likely tokens of each row of logits and their log-probabilities, on a CPU. XLA selects and sums in four passes, of
// which the selection is a scalar loop over the vocabulary.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "numbers.h"

namespace {

constexpr int64_t kBlock = 256;  // numbers whose maximum is kept

// The largest number from `begin` to `end`, NaN passed over.
float Largest(const float* row, int64_t begin, int64_t end) {
  const int64_t vectors = begin + (end - begin) / kLanes * kLanes;
  Lanes most = Lanes{} - std::numeric_limits<float>::infinity();
  for (int64_t i = begin; i < vectors; i += kLanes) most = Max(Loaded(row + i), most);
  float lanes[kLanes], largest = -std::numeric_limits<float>::infinity();
  Store(lanes, most);
  for (const float x : lanes) largest = x > largest ? x : largest;
  for (int64_t i = vectors; i < end; ++i) largest = row[i] > largest ? row[i] : largest;
  return largest;
}

// log(sum(exp(row - peak)))
float LogOfSum(const float* row, int64_t size, float peak) {
  const int64_t vectors = size / kLanes * kLanes;
  Lanes total = {};
  for (int64_t i = 0; i < vectors; i += kLanes) {
    Lanes x = Loaded(row + i) - peak;
    Exp(x);
    total += x;
  }
  float sum = SumOf(total);
  for (int64_t i = vectors; i < size; ++i) sum += std::exp(row[i] - peak);
  return std::log(sum);
}

// Whether the number at `index` is before the last chosen one, or it: larger, or equal and earlier.
bool IsChosen(const float* row, int64_t index, const int32_t* chosen, int64_t n) {
  if (n == 0) return false;
  const int64_t last = chosen[n - 1];
  return row[index] > row[last] || (row[index] == row[last] && index <= last);
}

// The indices of the k largest numbers in descending order, ties by index. Only the block of a chosen number is searched.
void Choose(const float* row, int64_t size, int64_t k, float* largest, int32_t* chosen) {
  const int64_t blocks = (size + kBlock - 1) / kBlock;
  for (int64_t n = 0; n < k; ++n) {
    int64_t best = 0;
    for (int64_t block = 1; block < blocks; ++block) best = largest[block] > largest[best] ? block : best;
    const int64_t begin = best * kBlock, end = std::min(size, begin + kBlock);
    int64_t found = begin;
    while (found < end - 1 && (row[found] != largest[best] || IsChosen(row, found, chosen, n))) ++found;
    chosen[n] = static_cast<int32_t>(found);
    largest[best] = -std::numeric_limits<float>::infinity();
    for (int64_t i = begin; i < end; ++i) {
      if (row[i] > largest[best] && !IsChosen(row, i, chosen, n + 1)) largest[best] = row[i];
    }
  }
}

using Logits = ffi::Buffer<ffi::F32, 2>;
using Tokens = ffi::Buffer<ffi::S32, 2>;

// logits [R, V]; tokens and log_p [R, k], k at most V and a block: no block can then run out of numbers before the others.
ffi::Error Likeliest(ffi::ThreadPool pool, Logits logits, ffi::Result<Tokens> tokens, ffi::Result<Logits> log_p) {
  const int64_t rows = logits.dimensions()[0], size = logits.dimensions()[1], k = tokens->dimensions()[1];
  if (k < 1 || k > std::min(size, kBlock) || !Has(*tokens, {rows, k}) || !Has(*log_p, {rows, k})) {
    return ffi::Error::InvalidArgument("likeliest: the results do not fit the logits");
  }
  InShares(pool, rows, logits.size_bytes(), [&](int64_t first, int64_t last) {
    float* largest = Scratch((size + kBlock - 1) / kBlock);
    for (int64_t r = first; r < last; ++r) {
      const float* row = logits.typed_data() + r * size;
      int32_t* chosen = tokens->typed_data() + r * k;
      for (int64_t begin = 0; begin < size; begin += kBlock) {
        largest[begin / kBlock] = Largest(row, begin, std::min(size, begin + kBlock));
      }
      Choose(row, size, k, largest, chosen);
      const float peak = row[chosen[0]], log_sum = LogOfSum(row, size, peak);
      for (int64_t n = 0; n < k; ++n) log_p->typed_data()[r * k + n] = row[chosen[n]] - peak - log_sum;
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hydrajax_likeliest, Likeliest,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Logits>().Ret<Tokens>().Ret<Logits>());
