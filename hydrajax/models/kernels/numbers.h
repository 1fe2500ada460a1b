// Numbers of the CPU kernels for float32 and bfloat16, in vectors of 16. bfloat16 is widened in registers, which is exact, and
// all sums are in float32.

#ifndef HYDRAJAX_NUMBERS_H_
#define HYDRAJAX_NUMBERS_H_

#include <cstdint>
#include <cstring>

#include "cpu_kernels.h"

namespace {

constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t IntLanes __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint32_t BitLanes __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint16_t HalfLanes __attribute__((vector_size(kLanes * 2), aligned(2)));

struct BFloat16 {  // the upper half of a float32
  uint16_t bits;
};

// bfloat16 bits of float32 bits, in one number or in lanes: to the nearest, ties to even; NaN stays NaN.
template <typename Bits>
inline ALWAYS_INLINE void Round(Bits& bits) {
  const Bits nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  bits = (bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 | 0x40) : nearest;
}

// Not by memcpy: GCC 12 then keeps two copies of each sum, and more than 8 rows do not fit in registers.
inline ALWAYS_INLINE void Load(Lanes& to, const float* from) { to = *reinterpret_cast<const Lanes*>(from); }
inline ALWAYS_INLINE void Load(Lanes& to, const BFloat16* from) {
  HalfLanes halves;
  std::memcpy(&halves, from, sizeof(halves));
  const BitLanes bits = __builtin_convertvector(halves, BitLanes) << 16;
  std::memcpy(&to, &bits, sizeof(to));
}

inline ALWAYS_INLINE void Store(float* to, const Lanes& from) { *reinterpret_cast<Lanes*>(to) = from; }
inline ALWAYS_INLINE void Store(BFloat16* to, const Lanes& from) {
  BitLanes bits;
  std::memcpy(&bits, &from, sizeof(bits));
  Round(bits);
  const HalfLanes halves = __builtin_convertvector(bits, HalfLanes);
  std::memcpy(to, &halves, sizeof(halves));
}

inline ALWAYS_INLINE float Wide(float x) { return x; }
inline ALWAYS_INLINE float Wide(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

inline ALWAYS_INLINE void Set(float& to, float x) { to = x; }
inline ALWAYS_INLINE void Set(BFloat16& to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  Round(bits);
  to.bits = static_cast<uint16_t>(bits);
}

// The sum of all lanes, pair by pair: one after another they would take as long as the products.
inline ALWAYS_INLINE float SumOf(const Lanes& x) {
  typedef float Half __attribute__((vector_size(kLanes * 2), aligned(4)));
  typedef float Quarter __attribute__((vector_size(kLanes), aligned(4)));
  Half halves[2];
  std::memcpy(halves, &x, sizeof(x));
  const Half half = halves[0] + halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, &half, sizeof(half));
  const Quarter quarter = quarters[0] + quarters[1];
  return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
}

// Prefetches n numbers, into the L1 cache or, those that are read much later, into the L2 cache.
constexpr int kL1 = 3, kL2 = 2;
template <int kCache = kL1, typename T>
inline ALWAYS_INLINE void Prefetch(const T* from, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(from + i, 0, kCache);
}

FOR_EVERY_CPU
void Widen(const BFloat16* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = Wide(from[i]);
}

// A buffer's numbers as float32; a copy of bfloat16 lies in this thread's scratch space for x.
const float* Widened(const ffi::AnyBuffer& x) {
  if (x.element_type() == ffi::F32) return x.typed_data<float>();
  const int64_t n = static_cast<int64_t>(x.element_count());
  float* wide = Scratch<kOfX>(n);
  Widen(x.reinterpret_data<BFloat16>(), wide, n);
  return wide;
}

bool IsNumbers(const ffi::AnyBuffer& x, size_t rank) {
  return (x.element_type() == ffi::F32 || x.element_type() == ffi::BF16) && x.dimensions().size() == rank;
}

// Calls `work` with a pointer to a buffer's numbers.
template <typename Work>
inline void WithNumbers(const ffi::AnyBuffer& x, const Work& work) {
  if (x.element_type() == ffi::F32) {
    work(x.typed_data<float>());
  } else {
    work(x.reinterpret_data<BFloat16>());
  }
}

}  // namespace

#endif  // HYDRAJAX_NUMBERS_H_
