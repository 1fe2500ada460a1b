// Recurrent layers over the nodes of a tree and over an accepted path, on a CPU, one row of a state at a time.
//
// A row of every node's state stays in the L1 cache, so the states are read once, and a node has the bits that it has alone:
// the matmuls of hydrajax/models/recurrence.py add in another order for every tree, which products in 8 bits amplify.

#include <cstdint>

#include "numbers.h"

namespace {

using Floats3 = ffi::Buffer<ffi::F32, 3>;
using Floats4 = ffi::Buffer<ffi::F32, 4>;
using Ints = ffi::Buffer<ffi::S32, 2>;
using Counts = ffi::Buffer<ffi::S32, 1>;

// The row of S_t = alpha S + u kᵀ from that of S, where u is `value`, or beta (value - alpha S k) with `beta`. It is compiled
// once, so that a node and the accepted token have the same bits, whichever product is fused with the sum.
NEVER_INLINE float Take(const float* from, float* to, const float* key, int64_t width, float alpha, float value,
                        const float* beta) {
  if (beta != nullptr) {
    Lanes sums = {};
    for (int64_t i = 0; i < width; i += kLanes) {
      MultiplyAdd(sums, Loaded(from + i) * alpha, Loaded(key + i));
    }
    value = *beta * (value - SumOf(sums));
  }
  for (int64_t i = 0; i < width; i += kLanes) {
    Lanes row = Loaded(from + i) * alpha;
    MultiplyAdd(row, value, Loaded(key + i));
    Store(to + i, row);
  }
  return value;
}

// Calls work(pair of sequence and head, row of its state) for all, in parallel.
template <typename Work>
void ForRows(ffi::ThreadPool& pool, const Floats4& state, int64_t nodes, const Work& work) {
  const int64_t values = state.dimensions()[2], rows = state.dimensions()[0] * state.dimensions()[1] * values;
  InShares(pool, rows, rows * state.dimensions()[3] * 4 * nodes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i / values, i % values);
  });
}

bool Fits(const Floats4& state, const Floats4& keys, const Floats4& values, const Floats3& alpha, const Floats3& beta) {
  const int64_t batch = keys.dimensions()[0], heads = alpha.dimensions()[1], nodes = keys.dimensions()[2];
  const int64_t width = keys.dimensions()[3], groups = keys.dimensions()[1];
  return width % kLanes == 0 && groups > 0 && heads % groups == 0 && Has(alpha, {batch, heads, nodes}) &&
         Has(beta, {batch, heads, nodes}) && Has(values, {batch, heads, nodes, values.dimensions()[3]}) &&
         Has(state, {batch, heads, values.dimensions()[3], width});
}

// outputs[t] = S_t q_t and written[t] = u_t of each node; parents come first, -1 is the committed state.
ffi::Error Walk(ffi::ThreadPool pool, Floats4 state, Floats4 keys, Floats4 queries, Floats4 values, Floats3 alpha,
                Floats3 beta, Ints parents, ffi::Result<Floats4> outputs, ffi::Result<Floats4> written, bool delta) {
  const int64_t batch = keys.dimensions()[0], groups = keys.dimensions()[1], nodes = keys.dimensions()[2];
  const int64_t width = keys.dimensions()[3], heads = alpha.dimensions()[1], features = values.dimensions()[3];
  if (!Fits(state, keys, values, alpha, beta) || !Has(queries, {batch, groups, nodes, width}) ||
      !Has(parents, {batch, nodes}) || !Has(*outputs, {batch, heads, nodes, features}) ||
      !Has(*written, {batch, heads, nodes, features})) {
    return ffi::Error::InvalidArgument("walk: the arrays of a recurrence do not fit");
  }
  ForRows(pool, state, nodes, [&](int64_t pair, int64_t feature) {
    const int64_t b = pair / heads, shared = (b * groups + pair % heads / (heads / groups)) * nodes * width;
    const float* start = state.typed_data() + (pair * features + feature) * width;
    float* rows = Scratch(nodes * width);
    for (int64_t t = 0; t < nodes; ++t) {
      const int64_t parent = std::min<int64_t>(parents.typed_data()[b * nodes + t], t - 1);
      const int64_t at = pair * nodes + t, out = at * features + feature;
      const float* from = parent < 0 ? start : rows + parent * width;
      written->typed_data()[out] =
          Take(from, rows + t * width, keys.typed_data() + shared + t * width, width, alpha.typed_data()[at],
               values.typed_data()[out], delta ? beta.typed_data() + at : nullptr);
      Lanes sums = {};
      for (int64_t i = 0; i < width; i += kLanes) {
        MultiplyAdd(sums, Loaded(rows + t * width + i), Loaded(queries.typed_data() + shared + t * width + i));
      }
      outputs->typed_data()[out] = SumOf(sums);
    }
  });
  return ffi::Error::Success();
}

// Takes the first counts[b] nodes of the path into each state, in place.
ffi::Error Advance(ffi::ThreadPool pool, Floats4 state, Floats4 keys, Floats4 written, Floats3 alpha, Ints path,
                   Counts counts, ffi::Result<Floats4> after) {
  const int64_t batch = keys.dimensions()[0], groups = keys.dimensions()[1], nodes = keys.dimensions()[2];
  const int64_t width = keys.dimensions()[3], heads = alpha.dimensions()[1], features = written.dimensions()[3];
  const int64_t longest = path.dimensions()[1];
  if (!Fits(state, keys, written, alpha, alpha) || !Has(path, {batch, longest}) || !Has(counts, {batch}) ||
      !Has(*after, {batch, heads, features, width}) || after->untyped_data() != state.untyped_data()) {
    return ffi::Error::InvalidArgument("advance: the arrays of a recurrence do not fit");
  }
  ForRows(pool, state, 1, [&](int64_t pair, int64_t feature) {
    const int64_t b = pair / heads, shared = (b * groups + pair % heads / (heads / groups)) * nodes * width;
    float* row = after->typed_data() + (pair * features + feature) * width;
    for (int64_t r = 0; r < std::min<int64_t>(counts.typed_data()[b], longest); ++r) {
      const int64_t t = std::clamp<int64_t>(path.typed_data()[b * longest + r], 0, nodes - 1);
      Take(row, row, keys.typed_data() + shared + t * width, width, alpha.typed_data()[pair * nodes + t],
           written.typed_data()[(pair * nodes + t) * features + feature], nullptr);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hydrajax_walk, Walk,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats4>().Arg<Floats4>().Arg<Floats4>().Arg<Floats4>().Arg<Floats3>()
        .Arg<Floats3>().Arg<Ints>().Ret<Floats4>().Ret<Floats4>().Attr<bool>("delta"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hydrajax_advance, Advance,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats4>().Arg<Floats4>().Arg<Floats4>().Arg<Floats3>().Arg<Ints>()
        .Arg<Counts>().Ret<Floats4>());
