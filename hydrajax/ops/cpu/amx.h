// Products of bfloat16 matrices by AMX, the matrix unit of Intel's servers since 2023, on Linux.
//
// One instruction multiplies tiles: C[16, 16] += A[16, 32] @ B[32, 16], 8192 products in the time of 16 vector
// instructions. A tile of C has a row for each row of A and sums it over the depth in one order, whatever the other rows
// are. So a row has the same bits in a tree of any size, if one row takes this path too.

#ifndef HYDRAJAX_AMX_H_
#define HYDRAJAX_AMX_H_

#include <cstdint>
#include <cstdlib>

#if defined(__AVX512F__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#define HYDRAJAX_AMX 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace amx {

constexpr int kRows = 16;   // of a tile
constexpr int kDepth = 32;  // of a product of two tiles
constexpr int kTiles = 4;   // of sums, side by side: the eight registers also hold operands
constexpr int kColumns = kTiles * 16;

#ifdef HYDRAJAX_AMX
#define IN_TILES __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw")))

// What may be multiplied, as the CPU's flag for it.
enum Numbers : unsigned { kBfloat16 = 1u << 22, kInt8 = 1u << 25 };

// Whether this CPU and its system have AMX for these numbers. The system reserves the registers when a process asks for them.
inline bool Available(Numbers numbers = kBfloat16) {
  static const unsigned flags = [] {
    if (std::getenv("HYDRAJAX_PLAIN_CPU_KERNELS") != nullptr) return 0u;
    unsigned a, b, c, d;
    constexpr unsigned kTile = 1u << 24, kVectorsOf16Bit = 1u << 30;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0u;
    if (!(d & kTile) || !(b & kVectorsOf16Bit)) return 0u;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? d : 0u;
  }();
  return flags & numbers;
}

// GCC's intrinsics do not say that they read memory. This keeps what was written before them from moving behind them.
inline void Written() { __asm__ volatile("" ::: "memory"); }

// The registers for a thread's products: A has `a_rows` rows of `a_bytes` bytes, B `b_columns` columns. Tiles 0 to 3 are for
// sums, 4 for A, the others for B.
class Registers {
 public:
  IN_TILES Registers(int a_rows, int b_columns, int a_bytes = 2 * kDepth) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; ++i) {
      const bool is_a = i == 4;
      shapes.bytes[i] = is_a ? a_bytes : 4 * b_columns;
      shapes.rows[i] = is_a || i < kTiles ? a_rows : a_bytes / 4;
    }
    Written();
    _tile_loadconfig(&shapes);
  }
  IN_TILES ~Registers() { _tile_release(); }
};

// Sums of tiles 0 to `tiles` - 1, `from` 16 columns apart and its rows `stride` floats, or zeros.
IN_TILES inline void LoadSums(const float* from, int64_t tiles, int64_t stride) {
  Written();
  _tile_loadd(0, from, 4 * stride);
  if (tiles > 1) _tile_loadd(1, from + 16, 4 * stride);
  if (tiles > 2) _tile_loadd(2, from + 32, 4 * stride);
  if (tiles > 3) _tile_loadd(3, from + 48, 4 * stride);
}

IN_TILES inline void ZeroSums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

IN_TILES inline void StoreSums(float* to, int64_t tiles, int64_t stride) {
  _tile_stored(0, to, 4 * stride);
  if (tiles > 1) _tile_stored(1, to + 16, 4 * stride);
  if (tiles > 2) _tile_stored(2, to + 32, 4 * stride);
  if (tiles > 3) _tile_stored(3, to + 48, 4 * stride);
}

// Adds the product of A, whose rows are `stride` numbers apart, and of tiles of B, `next` numbers apart.
IN_TILES inline void AddProducts(const uint16_t* a, int64_t stride, const uint16_t* b, int64_t tiles, int64_t next) {
  Written();
  _tile_loadd(4, a, 2 * stride);
  _tile_loadd(5, b, 64);
  _tile_dpbf16ps(0, 4, 5);
  if (tiles > 1) {
    _tile_loadd(6, b + next, 64);
    _tile_dpbf16ps(1, 4, 6);
  }
  if (tiles > 2) {
    _tile_loadd(7, b + 2 * next, 64);
    _tile_dpbf16ps(2, 4, 7);
  }
  if (tiles > 3) {
    _tile_loadd(5, b + 3 * next, 64);
    _tile_dpbf16ps(3, 4, 5);
  }
}

constexpr int kTile = kDepth * 16;  // numbers of a tile of B

// Packs weight[32, 16 * tiles], whose rows are `stride` apart, in tiles of B: numbers of two rows side by side. Prefetches
// the same block at `ahead`.
IN_TILES inline void Pack(const uint16_t* weight, int64_t stride, int64_t tiles, const uint16_t* ahead,
                          uint16_t* packed) {
  alignas(64) static constexpr uint16_t kSideBySide[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                           8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_load_si512(kSideBySide), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (int64_t d = 0; d < kDepth; d += 2) {
    uint16_t* to = packed + d * 16;
    for (int64_t tile = 0; tile < tiles; tile += 2) {
      const uint16_t* row = weight + d * stride + tile * 16;
      const __mmask32 here = tile + 1 < tiles ? 0xffffffff : 0xffff;
      const __m512i upper = _mm512_maskz_loadu_epi16(here, row), lower = _mm512_maskz_loadu_epi16(here, row + stride);
      __builtin_prefetch(ahead + d * stride + tile * 16);
      __builtin_prefetch(ahead + (d + 1) * stride + tile * 16);
      _mm512_store_si512(to + tile * kTile, _mm512_permutex2var_epi16(upper, first, lower));
      _mm512_store_si512(to + (tile + 1) * kTile, _mm512_permutex2var_epi16(upper, second, lower));
    }
  }
}

// Packs x[rows, depth] and rows of zeros up to `room` in tiles of A, one depth of 32 after the other: rows far apart push
// each other out of the cache.
inline void PackRows(const uint16_t* x, int64_t rows, int64_t room, int64_t depth, uint16_t* packed) {
  for (int64_t d = 0; d < depth; d += kDepth) {
    for (int64_t row = 0; row < room; ++row, packed += kDepth) {
      for (int64_t i = 0; i < kDepth; ++i) packed[i] = row < rows ? x[row * depth + d + i] : 0;
    }
  }
}

// sums of x[rows, depth] @ weight[depth, width] for columns `begin` to `end`, multiples of 16. x is in tiles (PackRows).
// `sums` holds up to 64 columns of a row side by side, then those of the next row. Rows are at most 16, or a multiple.
IN_TILES inline void ProductOfColumns(const uint16_t* x, const uint16_t* weight, int64_t rows, int64_t depth,
                                      int64_t width, int64_t begin, int64_t end, float* sums) {
  alignas(64) uint16_t packed[kTiles * kTile];
  const int64_t step = rows < kRows ? rows : kRows;
  const Registers registers(step, 16);
  for (int64_t d = 0; d < depth; d += kDepth) {
    for (int64_t column = begin; column < end; column += kColumns) {
      const uint16_t* w = weight + d * width + column;
      const int64_t tiles = end - column < kColumns ? (end - column) / 16 : kTiles;
      const bool last_columns = column + kColumns >= end, last_rows = d + kDepth >= depth;
      const uint16_t* ahead = !last_columns ? w + kColumns : last_rows ? w : weight + (d + kDepth) * width + begin;
      Pack(w, width, tiles, ahead, packed);
      for (int64_t row = 0; row < rows; row += step) {
        float* to = sums + (column - begin) * rows + row * kColumns;
        if (d == 0) {
          ZeroSums();
        } else {
          LoadSums(to, tiles, kColumns);
        }
        AddProducts(x + d * rows + row * kDepth, kDepth, packed, tiles, kTile);
        StoreSums(to, tiles, kColumns);
      }
    }
  }
}

// Packs x[rows, depth] and rows of zeros up to `room` transposed in tiles of B of `step` columns, a depth of 32 after the
// other: [depth / 32, groups of `step` rows, 16, 16, 2]. `room` is a multiple of `step`.
inline void PackTransposed(const uint16_t* x, int64_t rows, int64_t room, int64_t depth, int64_t step,
                           uint16_t* packed) {
  const int64_t groups = room / step;
  for (int64_t row = 0; row < room; ++row) {
    uint16_t* to = packed + row / step * kTile + row % step * 2;
    for (int64_t d = 0; d < depth; d += 2) {
      uint16_t* pair = to + d / kDepth * groups * kTile + d % kDepth * 16;
      pair[0] = row < rows ? x[row * depth + d] : 0;
      pair[1] = row < rows ? x[row * depth + d + 1] : 0;
    }
  }
}

// out[:rows, begin:end] of x @ weight[width, depth]^T: the transposed product of weight rows as they lie and of packed x.
// `begin` and `end` are multiples of 16.
IN_TILES inline void ProductWithRows(const uint16_t* packed, const uint16_t* weight, int64_t rows, int64_t groups,
                                     int64_t step, int64_t depth, int64_t width, int64_t begin, int64_t end, float* out) {
  alignas(64) float sums[kRows * kColumns];
  const Registers registers(kRows, step);
  for (int64_t f = begin; f < end; f += kRows) {
    const uint16_t* w = weight + f * depth;
    ZeroSums();
    for (int64_t d = 0; d < depth; d += kDepth) {
      if (f + kRows < end) {
        for (int64_t i = 0; i < kRows; ++i) __builtin_prefetch(w + (kRows + i) * depth + d);
      }
      AddProducts(w + d, depth, packed + d / kDepth * groups * kTile, groups, kTile);
    }
    StoreSums(sums, groups, kColumns);
    for (int64_t row = 0; row < rows; ++row) {
      const float* column = sums + row / step * 16 + row % step;
      for (int64_t i = 0; i < kRows; ++i) out[row * width + f + i] = column[i * kColumns];
    }
  }
}

#else

enum Numbers : unsigned { kBfloat16, kInt8 };

inline bool Available(Numbers = kBfloat16) { return false; }

#endif
}  // namespace amx

#endif  // HYDRAJAX_AMX_H_
