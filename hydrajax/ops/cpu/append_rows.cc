// Writes the accepted tokens' keys and values of all layers into their caches, in place.
//
// XLA's CPU writes into a bfloat16 array by converting the whole of it to float32 and back, in every step, and into the
// rows of a batch by a scatter. few_rows.py has measurements.

#include <cstring>
#include <vector>

#include "cpu_kernels.h"

namespace {

using Index = ffi::Buffer<ffi::S32, 2>;
using Starts = ffi::Buffer<ffi::S32, 1>;

struct Written {
  const char* block;  // [B, kv, T, H]
  char* cache;        // [B, kv, S, H]
  int64_t row_bytes;  // of H numbers
};

// Token index[b, r] of each block goes to slot starts[b] + r of its cache. `rest` holds the n caches, which are the results,
// and then n blocks.
ffi::Error AppendRows(ffi::ThreadPool pool, Index index, Starts starts, ffi::RemainingArgs rest,
                      ffi::RemainingRets results) {
  const size_t n = results.size();
  if (n == 0 || rest.size() != 2 * n) return ffi::Error::InvalidArgument("append_rows: caches and blocks do not fit");
  std::vector<Written> arrays;
  ffi::AnyBuffer::Dimensions shape, fed;
  int64_t rows_bytes = 0;  // of one row of each array
  for (size_t i = 0; i < n; ++i) {
    auto cache = results.get<ffi::AnyBuffer>(i);
    const auto old = rest.get<ffi::AnyBuffer>(i), block = rest.get<ffi::AnyBuffer>(n + i);
    if (!cache || !old || !block) return ffi::Error::InvalidArgument("append_rows: an array is not as declared");
    if (i == 0) shape = (*cache)->dimensions(), fed = block->dimensions();
    const ffi::DataType type = block->element_type();
    if (shape.size() != 4 || fed.size() != 4 || block->dimensions().size() != 4 || type != old->element_type() ||
        type != (*cache)->element_type() || !Has(*block, {shape[0], shape[1], fed[2], block->dimensions()[3]}) ||
        !Has(*old, {shape[0], shape[1], shape[2], block->dimensions()[3]}) ||
        !Has(**cache, {shape[0], shape[1], shape[2], block->dimensions()[3]})) {
      return ffi::Error::InvalidArgument("append_rows: a cache and its block do not fit");
    }
    if ((*cache)->untyped_data() != old->untyped_data()) {
      return ffi::Error::Internal("append_rows: a result is not its cache, although it was declared so");
    }
    const int64_t row_bytes = static_cast<int64_t>(ffi::ByteWidth(type)) * block->dimensions()[3];
    arrays.push_back(
        {static_cast<char*>(block->untyped_data()), static_cast<char*>((*cache)->untyped_data()), row_bytes});
    rows_bytes += row_bytes;
  }
  const int64_t batch = shape[0], heads = shape[1], slots = shape[2], tokens = fed[2], rows = index.dimensions()[1];
  if (rows > slots || tokens < 1 || !Has(index, {batch, rows}) || !Has(starts, {batch})) {
    return ffi::Error::InvalidArgument("append_rows: the rows do not fit");
  }
  InShares(pool, n, batch * heads * rows * rows_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto [block, cache, row_bytes] = arrays[i];
      for (int64_t b = 0; b < batch; ++b) {
        // As XLA does, move a write that does not fit, and take the nearest token for one that is not there.
        const int64_t start = std::max<int64_t>(0, std::min<int64_t>(starts.typed_data()[b], slots - rows));
        for (int64_t head = b * heads; head < (b + 1) * heads; ++head) {
          for (int64_t r = 0; r < rows; ++r) {
            const int64_t token = std::clamp<int64_t>(index.typed_data()[b * rows + r], 0, tokens - 1);
            std::memcpy(cache + (head * slots + start + r) * row_bytes, block + (head * tokens + token) * row_bytes,
                        row_bytes);
          }
        }
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hydrajax_append_rows, AppendRows,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Index>().Arg<Starts>().RemainingArgs().RemainingRets());
