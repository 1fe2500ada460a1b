"""The part of the build that pyproject.toml cannot say: the CPU kernels, where there is a compiler for them."""

import importlib.util
import platform
from pathlib import Path

from setuptools import Extension, setup

KERNELS = "hydrajax/ops/cpu"
SOURCES = "few_rows", "few_bits", "attention", "add_norm", "append_rows", "likeliest", "recurrence"
SOURCES += "call_host", "runs_here"
HEADERS = "amx", "cpu_kernels", "experts", "few_bits", "few_bits_amx", "few_bits_isa", "few_bits_rows", "numbers"
AVX2 = "-mavx2", "-mfma", "-mf16c", "-mbmi2"
AVX512 = *AVX2, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"
# One library for each set of instructions; hydrajax/ops/cpu/library.py loads the best that the CPU has. They are
# built one after the other, as their object files have the same names. Compilers for Apple's ARM use its dot products.
# -Xarch_arm64 keeps the flag after it from the other half of a universal binary.
I8MM = "-march=armv8.2-a+dotprod+i8mm"
LIBRARIES = {"_cpu": ()}
if platform.machine() in ("x86_64", "AMD64"):
    LIBRARIES = {"_cpu_avx512": AVX512, "_cpu_avx2": AVX2}
elif platform.machine() == "aarch64":
    LIBRARIES = {"_cpu_i8mm": (I8MM,), "_cpu_dotprod": ("-march=armv8.2-a+dotprod",), "_cpu": ()}
elif platform.machine() == "arm64":  # macOS
    LIBRARIES = {"_cpu_i8mm": ("-Xarch_arm64", I8MM), "_cpu": ()}

# jaxlib brings the headers of XLA's foreign function interface. It is found and not imported, which would be slow.
jaxlib = importlib.util.find_spec("jaxlib")
includes = [str(Path(folder, "include")) for folder in jaxlib.submodule_search_locations] if jaxlib else []
libraries = [
    Extension(
        f"{KERNELS.replace('/', '.')}.{name}",
        sources=[f"{KERNELS}/{source}.cc" for source in SOURCES],
        depends=["setup.py", *(f"{KERNELS}/{header}.h" for header in HEADERS)],  # other sources need another build
        include_dirs=includes,
        language="c++",
        extra_compile_args=[
            "-std=c++17",
            "-O3",
            "-g0",
            "-fno-gcse-after-reload",
            "-fno-math-errno",
            "-Wno-psabi",
            *flags,
        ],
        optional=True,  # XLA does the same, slower, so a machine without a compiler can do without
    )
    for name, flags in LIBRARIES.items()
]

setup(ext_modules=libraries if jaxlib else [])
