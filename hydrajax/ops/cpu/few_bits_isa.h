// Instruction sets for products of integers, for few_bits_rows.h.
//
// An instruction set multiplies bytes of a weight by bytes of x and adds the products of four neighbours: the numbers of a
// column. Weights of 4 bits are 0 to 15, those of 8 bits -128 to 127, numbers of x -127 to 127, and a group has 32 of each. Sums
// of a group are exact in all of them. An instruction set has
//
//   kLanes      columns of a vector
//   kSums       vectors of sums at once: with as many totals in float32 they take most of the registers
//   kTogether   vectors of weights, one below the other, that AddRows takes: more than one if a vector of x serves them all
//   kPairs      whether x is in pairs of rows (PairRows)
//   High        the upper 4 bits of each byte
//   Zero        sums of no products, given the sum of a group's x
//   Prepared    a vector of weights as Add takes it, made once for all rows
//   Add         adds the products of a vector of weights and four numbers of x
//   OfCodes     twice the numbers of E2M1 codes, of 8 bits from then on
//   AddRows     the same for all rows and columns
//   Sorted      moves the sums of AddRows to their rows and columns
//   Total       a group's sums in 32 bits
//   FromHalves  a vector of float16 numbers, none of which is infinite or NaN
//   MultiplyAdd sum += a * b, rounded once: of two products in a sum, compilers differ in which one they fuse

#ifndef HYDRAJAX_FEW_BITS_ISA_H_
#define HYDRAJAX_FEW_BITS_ISA_H_

#include <cstdint>
#include <cstring>

#include "few_bits.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HYDRAJAX_AVX2 1
#ifdef __AVX512F__
#define HYDRAJAX_AVX512 1
#endif
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#define HYDRAJAX_NEON_DOT 1
#ifdef __ARM_FEATURE_MATMUL_INT8
#define HYDRAJAX_NEON_I8MM 1
#endif
#include <arm_neon.h>
#endif

namespace {

template <int Lanes>
struct Vectors {
  static constexpr int kLanes = Lanes, kTogether = 1;
  static constexpr bool kPairs = false;
  static bool Available() { return true; }
  typedef float Floats __attribute__((vector_size(Lanes * 4), aligned(4), may_alias));
  typedef int32_t Ints __attribute__((vector_size(Lanes * 4), aligned(4), may_alias));
  typedef uint32_t Bits __attribute__((vector_size(Lanes * 4), aligned(4), may_alias));
  typedef uint16_t Halves __attribute__((vector_size(Lanes * 2), aligned(2), may_alias));
  typedef uint8_t Bytes __attribute__((vector_size(Lanes * 1), aligned(1), may_alias));

  static ALWAYS_INLINE Floats Load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
  static ALWAYS_INLINE Ints Load(const uint8_t* from) { return *reinterpret_cast<const Ints*>(from); }
  static ALWAYS_INLINE void Store(float* to, Floats from) { *reinterpret_cast<Floats*>(to) = from; }

  static ALWAYS_INLINE Ints OfCodes(Ints codes) {
    int8_t bytes[Lanes * 4];
    std::memcpy(bytes, &codes, sizeof(codes));
    for (int i = 0; i < Lanes * 4; ++i) bytes[i] = kTwiceOfCode[bytes[i]];
    std::memcpy(&codes, bytes, sizeof(codes));
    return codes;
  }
  static ALWAYS_INLINE Ints High(Ints bytes) { return bytes >> 4 & 0x0f0f0f0f; }
  template <bool FourBits>
  static ALWAYS_INLINE Ints Zero(float) {
    return Ints{};
  }
  template <bool FourBits>
  static ALWAYS_INLINE Ints Prepared(Ints w) {
    return w;
  }
  template <typename Isa, bool FourBits, int R, int V>
  static ALWAYS_INLINE void AddRows(Ints (&sums)[R][V], const Ints (&w)[V], const int8_t* x, int step) {
    UNROLLED for (int r = 0; r < R; ++r) {
      const int8_t* four = x + r * kDepth + 4 * step;
      UNROLLED for (int v = 0; v < V; ++v) Isa::template Add<FourBits>(sums[r][v], w[v], four);
    }
  }
  template <int R, int V>
  static ALWAYS_INLINE void Sorted(Ints (&)[R][V]) {}
  template <bool FourBits>
  static ALWAYS_INLINE Ints Total(Ints sums) {
    return sums;
  }
};

inline ALWAYS_INLINE int32_t FourNumbers(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof(four));
  return four;
}

struct Plain : Vectors<4> {
  static constexpr int kSums = 4;

  template <bool FourBits>
  static ALWAYS_INLINE void Add(Ints& sums, Ints w, const int8_t* x) {
    for (int k = 0; k < 4; ++k) sums += (reinterpret_cast<Ints>(reinterpret_cast<Bits>(w) << (24 - 8 * k)) >> 24) * x[k];
  }
  static ALWAYS_INLINE void MultiplyAdd(Floats& sum, float a, Floats b) {
    for (int i = 0; i < kLanes; ++i) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
      sum[i] = __builtin_fmaf(a, b[i], sum[i]);
#else
      sum[i] += a * b[i];
#endif
    }
  }
  static ALWAYS_INLINE Floats FromHalves(const uint16_t* from) {
    const Bits bits = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Bits);
    const Bits size = (bits & 0x7fff) << 13;
    // XLA's threads take a denormal float32 for zero. A denormal float16 is made from a normal one.
    const Floats small = reinterpret_cast<Floats>(size + (113 << 23)) - 0x1p-14f;
    const Bits wide = size < 1 << 23 ? reinterpret_cast<Bits>(small) : size + (112 << 23);
    return reinterpret_cast<Floats>(wide | (bits & 0x8000) << 16);
  }
};

#ifdef HYDRAJAX_AVX2

struct Avx : Vectors<8> {
  static constexpr int kSums = 4;

  static ALWAYS_INLINE Floats FromHalves(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static ALWAYS_INLINE Ints OfCodes(Ints codes) {
    const __m256i table = _mm256_broadcastsi128_si256(*reinterpret_cast<const __m128i*>(kTwiceOfCode));
    return reinterpret_cast<Ints>(_mm256_shuffle_epi8(table, reinterpret_cast<__m256i>(codes)));
  }
  static ALWAYS_INLINE void MultiplyAdd(Floats& sum, float a, Floats b) {
    sum = _mm256_fmadd_ps(_mm256_set1_ps(a), b, sum);
  }
};

// Adds two products in 16 bits, with saturation above 32767.
//   4 bits: two products are at most 2 * 15 * 127 = 3810 in size. A group has eight such pairs in each 16 bits, 30480.
//   8 bits: the instruction takes unsigned by signed bytes, so the weight's sign is moved to x. Two products are at most
//           2 * 128 * 127 = 32512. They are widened to 32 bits before the next ones are added.
struct Avx2 : Avx {
  static constexpr const char* kName = "avx2";

  template <bool FourBits>
  static ALWAYS_INLINE void Add(Ints& sums, Ints w, const int8_t* x) {
    const __m256i weights = reinterpret_cast<__m256i>(w), numbers = _mm256_set1_epi32(FourNumbers(x));
    __m256i total = reinterpret_cast<__m256i>(sums);
    if constexpr (FourBits) {
      total = _mm256_add_epi16(total, _mm256_maddubs_epi16(weights, numbers));
    } else {
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(numbers, weights));
      total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    sums = reinterpret_cast<Ints>(total);
  }
  template <bool FourBits>
  static ALWAYS_INLINE Ints Total(Ints sums) {
    if constexpr (!FourBits) return sums;
    return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(sums), _mm256_set1_epi16(1)));
  }
};

// Adds four products of unsigned and signed bytes in 32 bits: 128 is added to 8-bit weights, and 128 times the sum of x is taken
// off.
template <typename Base>
struct Vnni : Base {
  using typename Base::Ints;

  template <bool FourBits>
  static ALWAYS_INLINE Ints Zero(float sum_of_x) {
    return Ints{} + (FourBits ? 0 : -128 * static_cast<int32_t>(sum_of_x));
  }
  template <bool FourBits>
  static ALWAYS_INLINE Ints Prepared(Ints w) {
    return FourBits ? w : w ^ static_cast<int32_t>(0x80808080);
  }
};

// The instructions are written out, since compilers have functions for them only in code that needs the instruction set.

struct AvxVnni : Vnni<Avx> {
  static constexpr const char* kName = "avxvnni";
  static constexpr int kSums = 8;  // the totals in memory: with four sums each would wait for the one before
  static bool Available() {
    unsigned a, b, c, d;
    return kAssembled && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1 << 4;
  }

  template <bool FourBits>
  static ALWAYS_INLINE void Add(Ints& sums, Ints w, const int8_t* x) {
    const Ints numbers = Ints{} + FourNumbers(x);
    if constexpr (kAssembled) asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(w), "x"(numbers));
  }

#if defined(__clang__) || __GNUC__ >= 11
  static constexpr bool kAssembled = true;
#else
  static constexpr bool kAssembled = false;  // compilers before the instruction have assemblers before it
#endif
};

#ifdef HYDRAJAX_AVX512

struct Avx512 : Vectors<16> {
  static constexpr int kSums = 8;

  static ALWAYS_INLINE Floats FromHalves(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static ALWAYS_INLINE Ints OfCodes(Ints codes) {
    const __m512i table = _mm512_broadcast_i32x4(*reinterpret_cast<const __m128i*>(kTwiceOfCode));
    return reinterpret_cast<Ints>(_mm512_shuffle_epi8(table, reinterpret_cast<__m512i>(codes)));
  }
  static ALWAYS_INLINE void MultiplyAdd(Floats& sum, float a, Floats b) {
    sum = _mm512_fmadd_ps(_mm512_set1_ps(a), b, sum);
  }
};

struct Avx512Vnni : Vnni<Avx512> {
  static constexpr const char* kName = "avx512vnni";
  static bool Available() { return __builtin_cpu_supports("avx512vnni"); }

  template <bool FourBits>
  static ALWAYS_INLINE void Add(Ints& sums, Ints w, const int8_t* x) {
    const Ints numbers = Ints{} + FourNumbers(x);
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(w), "v"(numbers));
  }
};

#endif
#endif

#ifdef HYDRAJAX_NEON_DOT

struct NeonDot : Vectors<4> {
  static constexpr const char* kName = "neondot";
  static constexpr int kSums = 8, kTogether = 4;

  static ALWAYS_INLINE Ints High(Ints bytes) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(bytes), 4)); }
  template <int k, int V>
  static ALWAYS_INLINE void AddStep(Ints (&sums)[V], const Ints* w, int8x16_t x) {
    UNROLLED for (int v = 0; v < V; ++v) sums[v] = vdotq_laneq_s32(sums[v], vreinterpretq_s8_s32(w[k * V + v]), x, k);
  }
  template <int V>
  static ALWAYS_INLINE void AddRow(Ints (&sums)[V], const Ints* w, const int8_t* x) {
    const int8x16_t numbers = vld1q_s8(x);
    AddStep<0>(sums, w, numbers);
    AddStep<1>(sums, w, numbers);
    AddStep<2>(sums, w, numbers);
    AddStep<3>(sums, w, numbers);
  }
  template <typename, bool, int R, int V>
  static ALWAYS_INLINE void AddRows(Ints (&sums)[R][V], const Ints (&w)[4 * V], const int8_t* x, int step) {
    UNROLLED for (int r = 0; r < R; ++r) AddRow(sums[r], w, x + r * kDepth + 4 * step);
  }
  static ALWAYS_INLINE Ints OfCodes(Ints codes) {
    return vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(kTwiceOfCode), vreinterpretq_u8_s32(codes)));
  }
  static ALWAYS_INLINE Floats FromHalves(const uint16_t* from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
  }
  static ALWAYS_INLINE void MultiplyAdd(Floats& sum, float a, Floats b) { sum = vfmaq_n_f32(sum, b, a); }
};

#endif

#ifdef HYDRAJAX_NEON_I8MM

// Multiplies two rows by two columns, eight numbers of each, so sums are in squares of two rows and two columns until they are
// sorted. A row without another has dot products.
struct NeonI8mm : NeonDot {
  static constexpr const char* kName = "neoni8mm";
  static constexpr bool kPairs = true;

  template <typename, bool, int R, int V>
  static ALWAYS_INLINE void AddRows(Ints (&sums)[R][V], const Ints (&w)[4 * V], const int8_t* x, int step) {
    UNROLLED for (int r = 0; r + 1 < R; r += 2) {
      UNROLLED for (int k = 0; k < 4; k += 2) {
        const int8x16_t pair = vld1q_s8(x + r * kDepth + 8 * (step + k));
        UNROLLED for (int v = 0; v < V; ++v) {
          const int32x4_t upper = w[k * V + v], lower = w[(k + 1) * V + v];
          sums[r][v] = vmmlaq_s32(sums[r][v], pair, vreinterpretq_s8_s32(vzip1q_s32(upper, lower)));
          sums[r + 1][v] = vmmlaq_s32(sums[r + 1][v], pair, vreinterpretq_s8_s32(vzip2q_s32(upper, lower)));
        }
      }
    }
    if constexpr (R % 2) AddRow(sums[R - 1], w, x + (R - 1) * kDepth + 4 * step);
  }
  template <int R, int V>
  static ALWAYS_INLINE void Sorted(Ints (&sums)[R][V]) {
    UNROLLED for (int r = 0; r + 1 < R; r += 2) {
      UNROLLED for (int v = 0; v < V; ++v) {
        const int64x2_t left = vreinterpretq_s64_s32(sums[r][v]), right = vreinterpretq_s64_s32(sums[r + 1][v]);
        sums[r][v] = vreinterpretq_s32_s64(vzip1q_s64(left, right));
        sums[r + 1][v] = vreinterpretq_s32_s64(vzip2q_s64(left, right));
      }
    }
  }
};

#endif

}  // namespace

#endif  // HYDRAJAX_FEW_BITS_ISA_H_
