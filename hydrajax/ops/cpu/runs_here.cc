// Whether this CPU has the instructions that the library was compiled for (setup.py).

#if defined(__ARM_FEATURE_DOTPROD) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#ifndef HWCAP2_I8MM  // headers before Linux 5.7
#define HWCAP2_I8MM (1 << 13)
#endif
#elif defined(__ARM_FEATURE_MATMUL_INT8) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

extern "C" int hydrajax_runs_here() {
#if defined(__AVX512F__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
#elif defined(__ARM_FEATURE_DOTPROD) && defined(__linux__)
#ifdef __ARM_FEATURE_MATMUL_INT8
  if (!(getauxval(AT_HWCAP2) & HWCAP2_I8MM)) return 0;
#endif
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__ARM_FEATURE_MATMUL_INT8) && defined(__APPLE__)
  int found = 0;
  size_t size = sizeof(found);
  return sysctlbyname("hw.optional.arm.FEAT_I8MM", &found, &size, nullptr, 0) == 0 && found;
#else
  return 1;
#endif
}
