// Integer products in vectors of 256 bits for few_bits.cc, on CPUs with AVX2 or AVX-VNNI.
//
// An instruction set multiplies bytes of a weight by bytes of x and adds the products of four neighbours: the numbers of a
// column. Weights of 4 bits are 0 to 15, those of 8 bits -128 to 127, numbers of x -127 to 127, and a group has 32 of each.
// Sums of a group are exact in both:
//
// AVX2 adds two products in 16 bits, with saturation above 32767.
//   4 bits: two products are at most 2 * 15 * 127 = 3810 in size. A group has eight such pairs in each 16 bits, 30480.
//   8 bits: the instruction takes unsigned by signed bytes, so the weight's sign is moved to x. Two products are at most
//           2 * 128 * 127 = 32512. They are widened to 32 bits before the next ones are added.
// AVX-VNNI adds four products in 32 bits. 128 is added to 8-bit weights, and 128 times the sum of x is taken off.

#ifndef HYDRAJAX_FEW_BITS_256_H_
#define HYDRAJAX_FEW_BITS_256_H_

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define HAS_256_BIT_CODE 1

#include <cstdint>

#include <immintrin.h>

#include "cpu_kernels.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace {

struct Avx2 {
  static constexpr const char* kName = "avx2";
  static bool Available() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }

  // Sums of no products, given the sum of a group's x.
  template <bool FourBits>
  static ALWAYS_INLINE __m256i Zero(float) {
    return _mm256_setzero_si256();
  }

  template <bool FourBits>
  static ALWAYS_INLINE void Add(__m256i& sums, __m256i w, __m256i x) {
    if constexpr (FourBits) {
      sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(w, x));
    } else {
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
      sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
  }

  // The group's sums in 32 bits.
  template <bool FourBits>
  static ALWAYS_INLINE __m256i Total(__m256i sums) {
    return FourBits ? _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) : sums;
  }
};

struct AvxVnni {
  static constexpr const char* kName = "avxvnni";
  static bool Available() { return Avx2::Available() && __builtin_cpu_supports("avxvnni"); }

  template <bool FourBits>
  static ALWAYS_INLINE __m256i Zero(float sum_of_x) {
    return _mm256_set1_epi32(FourBits ? 0 : -128 * static_cast<int32_t>(sum_of_x));
  }

  template <bool FourBits>
  static ALWAYS_INLINE void Add(__m256i& sums, __m256i w, __m256i x) {
    if constexpr (!FourBits) w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    // Not the compiler's function for it, which only code for AVX-VNNI alone may call.
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(w), "x"(x));
  }

  template <bool FourBits>
  static ALWAYS_INLINE __m256i Total(__m256i sums) {
    return sums;
  }
};

}  // namespace

#pragma GCC pop_options
#endif

#endif  // HYDRAJAX_FEW_BITS_256_H_
