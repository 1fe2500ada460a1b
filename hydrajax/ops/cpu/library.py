"""The library of CPU kernels, which is built at installation if there is a C++ compiler."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
from pathlib import Path

import jax

# By preference; setup.py builds those that a kind of CPU may have.
LIBRARIES = "_cpu_avx512", "_cpu_avx2", "_cpu_i8mm", "_cpu_dotprod", "_cpu"
TARGETS = (
    "hydrajax_matmul",
    "hydrajax_matmul_transposed",
    "hydrajax_attend",
    "hydrajax_add_norm",
    "hydrajax_matmul_few_bits",
    "hydrajax_matmul_experts",
    "hydrajax_matmul_few_bits_experts",
    "hydrajax_append_rows",
    "hydrajax_likeliest",
    "hydrajax_walk",
    "hydrajax_advance",
    "hydrajax_call_host",
)


@functools.cache
def available() -> bool:
    """Return whether the kernels can be called; loads and registers them the first time."""
    path = library()
    if path is None:
        return False
    loaded = ctypes.CDLL(str(path))
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
    return True


def is_avx512() -> bool:
    """Return whether `library` is built for AVX-512."""
    path = library()
    return path is not None and path.name.startswith("_cpu_avx512")


@functools.cache
def library() -> Path | None:
    """Return the path of the compiled library for this CPU, or None without one."""
    names = (name + suffix for name in LIBRARIES for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    paths = (Path(__file__).with_name(name) for name in names)
    return next((path for path in paths if path.is_file() and _runs_here(path)), None)


def _runs_here(path: Path) -> bool:
    try:
        return bool(ctypes.CDLL(str(path)).hydrajax_runs_here())
    except OSError:  # built for another system
        return False
