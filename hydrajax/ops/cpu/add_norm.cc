// The sum of a layer's output and the residual stream, and its RMS norm, on a CPU: total = x + added and
// out = total / rms(total) * scale.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "numbers.h"

namespace {

// The sum is rounded before its squares are added up, so they are those of the residual stream.
template <typename T>
void NormRow(const T* x, const T* added, const T* scale, float eps, int64_t width, T* total, T* out) {
  Lanes squares = {};
  const int64_t vectors = width / kLanes * kLanes;
  for (int64_t i = 0; i < vectors; i += kLanes) {
    const Lanes more = added == nullptr ? Lanes{} : Loaded(added + i);
    Store(total + i, Loaded(x + i) + more);
    const Lanes sum = Loaded(total + i);
    squares += sum * sum;
  }
  float square = SumOf(squares);
  for (int64_t i = vectors; i < width; ++i) {
    Set(total[i], Wide(x[i]) + (added == nullptr ? 0.0f : Wide(added[i])));
    square += Wide(total[i]) * Wide(total[i]);
  }
  const float factor = 1.0f / std::sqrt(square / width + eps);
  for (int64_t i = 0; i < vectors; i += kLanes) {
    Store(out + i, Loaded(total + i) * factor * Loaded(scale + i));
  }
  for (int64_t i = vectors; i < width; ++i) Set(out[i], Wide(total[i]) * factor * Wide(scale[i]));
}

// `added` may be missing. All have one dtype.
ffi::Error AddNorm(ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> total,
                   ffi::Result<ffi::AnyBuffer> out, float eps) {
  const auto given = rest.get<ffi::AnyBuffer>(0);
  const ffi::AnyBuffer added = given ? *given : x;
  for (const ffi::AnyBuffer& matrix : {x, added, *total, *out}) {
    if (!IsNumbers(matrix, 2) || matrix.element_type() != scale.element_type() || !Has(scale, {x.dimensions()[1]}) ||
        !Has(matrix, {x.dimensions()[0], x.dimensions()[1]})) {
      return ffi::Error::InvalidArgument("add_norm: the rows of a norm are not as declared");
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hydrajax_add_norm, AddNorm,
    ffi::Ffi::Bind().Arg<Any>().Arg<Any>().RemainingArgs().Ret<Any>().Ret<Any>().Attr<float>("eps"));
