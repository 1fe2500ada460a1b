// Numbers of the CPU kernels for float32 and bfloat16, in vectors of 16. bfloat16 is widened in registers, which is exact, and
// all sums are in float32.

#ifndef HYDRAJAX_NUMBERS_H_
#define HYDRAJAX_NUMBERS_H_

#include <cstdint>
#include <cstring>

#include "cpu_kernels.h"

#if defined(__ARM_NEON) && defined(__aarch64__)
#define HYDRAJAX_NEON 1  // GCC 12 converts vectors of 8 bytes number by number
#include <arm_neon.h>
#endif

namespace {

constexpr int kLanes = 16;

// A vector as wide as the CPU's registers. GCC computes with wider ones number by number.
#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
typedef float Native __attribute__((vector_size(kNative * 4), aligned(4), may_alias));
typedef int32_t NativeInts __attribute__((vector_size(kNative * 4), aligned(4)));
typedef uint32_t NativeBits __attribute__((vector_size(kNative * 4), aligned(4)));
typedef uint16_t NativeHalves __attribute__((vector_size(kNative * 2), aligned(2)));
typedef int16_t NativeShorts __attribute__((vector_size(kNative * 2), aligned(2)));
typedef int8_t NativeBytes __attribute__((vector_size(kNative), aligned(1)));

template <typename Half>
struct Pair {
  Half low, high;
};

#if defined(__AVX512F__)
typedef Native Lanes;
#elif defined(__AVX__)
typedef Pair<Native> Lanes;
#else
typedef Pair<Pair<Native>> Lanes;
#endif

template <typename V>
inline constexpr int64_t kSize = sizeof(V) / sizeof(float);

#define OF_PAIRS(op)                                                                  \
  template <typename V>                                                               \
  inline ALWAYS_INLINE Pair<V> operator op(const Pair<V>& a, const Pair<V>& b) {      \
    return {a.low op b.low, a.high op b.high};                                        \
  }                                                                                   \
  template <typename V>                                                               \
  inline ALWAYS_INLINE Pair<V> operator op(const Pair<V>& a, float b) {               \
    return {a.low op b, a.high op b};                                                 \
  }                                                                                   \
  template <typename V, typename Other>                                               \
  inline ALWAYS_INLINE Pair<V>& operator op##=(Pair<V>& a, const Other& b) {          \
    return a = a op b;                                                                \
  }
OF_PAIRS(+)
OF_PAIRS(-)
OF_PAIRS(*)
OF_PAIRS(/)
#undef OF_PAIRS

// sum += a * b, rounded once where the CPU can, for single numbers as for vectors.
inline ALWAYS_INLINE void MultiplyAdd(float& sum, float a, float b) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  sum = __builtin_fmaf(a, b, sum);
#else
  sum += a * b;
#endif
}
inline ALWAYS_INLINE void MultiplyAdd(Native& sum, float a, const Native& b) { sum += a * b; }
inline ALWAYS_INLINE void MultiplyAdd(Native& sum, const Native& a, const Native& b) { sum += a * b; }
template <typename V>
inline ALWAYS_INLINE void MultiplyAdd(Pair<V>& sum, float a, const Pair<V>& b) {
  MultiplyAdd(sum.low, a, b.low);
  MultiplyAdd(sum.high, a, b.high);
}
template <typename V>
inline ALWAYS_INLINE void MultiplyAdd(Pair<V>& sum, const Pair<V>& a, const Pair<V>& b) {
  MultiplyAdd(sum.low, a.low, b.low);
  MultiplyAdd(sum.high, a.high, b.high);
}

// Keeps a vector in its register. GCC would read it from memory again for each use, and wait for memory.
inline ALWAYS_INLINE void InRegister(Native& x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#else
  static_cast<void>(x);
#endif
}

inline ALWAYS_INLINE Native Max(const Native& a, const Native& b) { return a > b ? a : b; }
template <typename V>
inline ALWAYS_INLINE Pair<V> Max(const Pair<V>& a, const Pair<V>& b) {
  return {Max(a.low, b.low), Max(a.high, b.high)};
}

// exp for x <= 0, relative error below 2e-7; 0 below -87.7, beyond float32's normal range.
inline ALWAYS_INLINE void Exp(Native& x) {
  x = Max(Native{} - 88.03f, x);  // in this order NaN stays NaN
  // x = n ln 2 + r: 1.5 * 2^23 added and taken off again rounds to the nearest integer.
  const float shift = 12582912.0f;
  const Native n = (x * 1.44269504088896341f + shift) - shift;
  const Native r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Native p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const NativeInts bits = (__builtin_convertvector(n, NativeInts) + 127) << 23;  // 0, and so the result, for n = -127
  Native power;
  std::memcpy(&power, &bits, sizeof(power));
  x = p * power;
}
template <typename V>
inline ALWAYS_INLINE void Exp(Pair<V>& x) {
  Exp(x.low);
  Exp(x.high);
}

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
inline ALWAYS_INLINE void Load(Native& to, const float* from) { to = *reinterpret_cast<const Native*>(from); }
inline ALWAYS_INLINE void Load(Native& to, const BFloat16* from) {
#ifdef HYDRAJAX_NEON
  to = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&from->bits), 16));
#else
  NativeHalves halves;
  std::memcpy(&halves, from, sizeof(halves));
  const NativeBits bits = __builtin_convertvector(halves, NativeBits) << 16;
  std::memcpy(&to, &bits, sizeof(to));
#endif
}
inline ALWAYS_INLINE void Load(Native& to, const int8_t* from) {
#ifdef HYDRAJAX_NEON
  uint32_t four;
  std::memcpy(&four, from, sizeof(four));
  to = vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
#else
  NativeBytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  const NativeShorts shorts = __builtin_convertvector(bytes, NativeShorts);  // GCC 12 would take bytes to int32 one by one
  to = __builtin_convertvector(__builtin_convertvector(shorts, NativeInts), Native);
#endif
}
template <typename V, typename T>
inline ALWAYS_INLINE void Load(Pair<V>& to, const T* from) {
  Load(to.low, from);
  Load(to.high, from + kSize<V>);
}

template <typename T>
inline ALWAYS_INLINE Lanes Loaded(const T* from) {
  Lanes to;
  Load(to, from);
  return to;
}

inline ALWAYS_INLINE void Store(float* to, const Native& from) { *reinterpret_cast<Native*>(to) = from; }
inline ALWAYS_INLINE void Store(BFloat16* to, const Native& from) {
  NativeBits bits;
  std::memcpy(&bits, &from, sizeof(bits));
  Round(bits);
#ifdef HYDRAJAX_NEON
  vst1_u16(&to->bits, vmovn_u32(bits));
#else
  const NativeHalves halves = __builtin_convertvector(bits, NativeHalves);
  std::memcpy(to, &halves, sizeof(halves));
#endif
}
template <typename V, typename T>
inline ALWAYS_INLINE void Store(T* to, const Pair<V>& from) {
  Store(to, from.low);
  Store(to + kSize<V>, from.high);
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

// The sum of all lanes: first those 8 apart are added, then those 4, 2 and 1 apart. One after another they would take as long
// as the products.
inline ALWAYS_INLINE float SumOf(const Native& x) {
  typedef float Four __attribute__((vector_size(16), aligned(4)));
  constexpr int kFours = kNative / 4;
  Four four[kFours];
  const char* lanes = reinterpret_cast<const char*>(&x);
  UNROLLED for (int i = 0; i < kFours; ++i) std::memcpy(&four[i], lanes + i * sizeof(Four), sizeof(Four));
  if constexpr (kFours == 4) four[0] += four[2], four[1] += four[3];
  if constexpr (kFours > 1) four[0] += four[1];
  return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}
template <typename V>
inline ALWAYS_INLINE float SumOf(const Pair<V>& x) {
  return SumOf(x.low + x.high);
}

// Prefetches n numbers, into the L1 cache or, those that are read much later, into the L2 cache.
template <int kCache = kL1, typename T>
inline ALWAYS_INLINE void Prefetch(const T* from, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(from + i, 0, kCache);
}

// A buffer's numbers as float32; a copy of bfloat16 lies in this thread's scratch space for x.
inline const float* Widened(const ffi::AnyBuffer& x) {
  if (x.element_type() == ffi::F32) return x.typed_data<float>();
  const int64_t n = static_cast<int64_t>(x.element_count());
  float* wide = Scratch<kOfX>(n);
  const BFloat16* numbers = x.reinterpret_data<BFloat16>();
  for (int64_t i = 0; i < n; ++i) wide[i] = Wide(numbers[i]);
  return wide;
}

inline bool IsNumbers(const ffi::AnyBuffer& x, size_t rank) {
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
