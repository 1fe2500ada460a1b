// What the CPU kernels share: checks of buffers, threads and scratch space.

#ifndef HYDRAJAX_CPU_KERNELS_H_
#define HYDRAJAX_CPU_KERNELS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

#define ALWAYS_INLINE __attribute__((always_inline))
#define NEVER_INLINE __attribute__((noinline))
// A loop over vectors, which stay in registers only if their numbers are constants.
#ifdef __clang__
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

namespace {

constexpr int kL1 = 3, kL2 = 2;  // caches to prefetch into: L1 only line by line, in the order of memory

// No kernel reads a buffer whose dtype and sizes it has not checked: JAX passes whatever parameters a user has.
template <typename Buffer>
bool Has(const Buffer& x, std::initializer_list<int64_t> sizes) {
  return std::equal(x.dimensions().begin(), x.dimensions().end(), sizes.begin(), sizes.end());
}

// Runs work(0) ... work(n - 1) on the caller and on the pool's free threads. The caller takes whatever no thread has begun,
// so this never waits for a thread that does not come.
template <typename Work>
void InParallel(ffi::ThreadPool& pool, int64_t n, const Work& work) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), n) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < n; ++i) work(i);
    return;
  }
  auto shared = std::make_shared<Shared>();
  // A late helper finds nothing left and touches neither `work` nor what it refers to.
  auto take = [shared, n, &work]() {
    for (int64_t i; (i = shared->next.fetch_add(1)) < n;) {
      work(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(take)(take));
  take();
  for (int64_t waits = 1; shared->done.load(std::memory_order_acquire) < n; ++waits) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (waits % 1024 == 0) std::this_thread::yield();  // the helper may be waiting for this core
  }
}

// Shares of whole units of work for the pool's threads, each at least 64 kB, below which waking a thread costs more.
inline int64_t Shares(const ffi::ThreadPool& pool, int64_t units, int64_t bytes) {
  return std::max<int64_t>(1, std::min({units, pool.num_threads(), bytes / (64 << 10)}));
}

// Calls work(begin, end) for shares of the units, in parallel.
template <typename Work>
void InShares(ffi::ThreadPool& pool, int64_t units, int64_t bytes, const Work& work) {
  const int64_t shares = Shares(pool, units, bytes);
  InParallel(pool, shares, [&](int64_t i) { work(units * i / shares, units * (i + 1) / shares); });
}

enum Room { kOfWork, kOfX, kOfTiles, kOfHalves, kOfExperts };

// Aligned scratch space for n floats, reused by a thread; each room has its own.
template <Room = kOfWork>
float* Scratch(int64_t n) {
  static thread_local std::vector<float> room;
  constexpr int64_t kLine = 16;
  if (static_cast<int64_t>(room.size()) < n + kLine) room.resize(n + kLine);
  const auto address = reinterpret_cast<uintptr_t>(room.data());
  return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

// Calls `product` with the number of rows, R at most, as a constant, so that the compiler keeps all in registers.
template <int R, typename Product>
inline ALWAYS_INLINE void WithRows(int64_t rows, const Product& product) {
  if constexpr (R == 1) {
    product(std::integral_constant<int, 1>());
  } else if (rows >= R) {
    product(std::integral_constant<int, R>());
  } else {
    WithRows<R - 1>(rows, product);
  }
}

// Rows to take at once, at most R: as many each time, since few rows leave the multipliers idle.
inline int64_t RowsAtOnce(int64_t rows, int64_t most) {
  const int64_t times = std::max<int64_t>(1, (rows + most - 1) / most);
  return std::max<int64_t>(1, (rows + times - 1) / times);
}

}  // namespace

#endif  // HYDRAJAX_CPU_KERNELS_H_
