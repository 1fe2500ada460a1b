"""The state that a program is traced with: one context variable with a frozen `Trace`.

Two contexts stay JAX's own, because JAX keys its caches of programs by them: the mesh (`jax.set_mesh`) and
`jax.default_matmul_precision`. They are read here and nowhere else while a program is traced.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import Int, UInt32

from hydrajax.models.arrays import Array
from hydrajax.ops.cpu import library

AMPERE = 8.0  # compute capability that Triton and cuDNN's attention need
ADA = 8.9  # and that converts float8_e4m3fn
DATA, MODEL = "data", "model"  # the axes of a mesh (`hydrajax.sharding`)
TPU_VECTOR_MEMORY = "xla_tpu_scoped_vmem_limit_kib"

# allowed(paths int32 [B, n, d]) -> uint32 [B, n, W]: the tokens that may follow each of n paths of d tokens, the first
# of which is the root. Token t is bit t % 32 of word t // 32. None: all tokens.
Allowed = Callable[[Int[Array, "B n d"]], UInt32[Array, "B n W"] | None]


def _unless_zero(name: str) -> Any:
    """Return a field that is False if this variable of the environment is 0 when the platform is described."""
    return field(default_factory=lambda: os.environ.get(name) != "0")


@dataclass(frozen=True)
class Platform:
    """The platform that programs are traced for. Switches in the environment are read when it is described.

    Attributes:
        name: JAX's name, "cpu", "gpu" or "tpu".
        devices: Number of devices.
        capability: Compute capability of an NVIDIA GPU, such as 9.0; 0.0 for everything else.
        present: The process has these devices, so that kernels are compared with NumPy before they are used.
        cpu_kernels: Use our CPU kernels (HYDRAJAX_CPU_KERNELS=0: do not).
        gpu_kernels: Use our GPU kernels and cuDNN's attention (HYDRAJAX_GPU_KERNELS=0: do not).
        tpu_kernels: Use our TPU kernels (HYDRAJAX_TPU_KERNELS=0: do not).
        cuda_graphs: Run a decode loop as one CUDA graph (HYDRAJAX_CUDA_GRAPHS=0: do not).
        sets_vector_memory: Set the vector memory of a TPU's kernels; False if LIBTPU_INIT_ARGS does.
    """

    name: str
    devices: int
    capability: float = 0.0
    present: bool = False
    cpu_kernels: bool = _unless_zero("HYDRAJAX_CPU_KERNELS")
    gpu_kernels: bool = _unless_zero("HYDRAJAX_GPU_KERNELS")
    tpu_kernels: bool = _unless_zero("HYDRAJAX_TPU_KERNELS")
    cuda_graphs: bool = _unless_zero("HYDRAJAX_CUDA_GRAPHS")
    sets_vector_memory: bool = field(
        default_factory=lambda: TPU_VECTOR_MEMORY not in os.environ.get("LIBTPU_INIT_ARGS", "")
    )

    def replace(self, **changes: Any) -> Platform:
        """Return the platform with other fields."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Trace:
    """Everything that our code reads while a program is traced, apart from the arguments.

    Attributes:
        platform: The described platform; None for the present one.
        sharded_tokens: Shard activations between matmuls by tokens (sequence parallelism, `hydrajax.ops.sharded`).
        allowed: The tokens that a grammar allows in a tree that is being drafted; None for all tokens.
    """

    platform: Platform | None = None
    sharded_tokens: bool = False
    allowed: Allowed | None = None


_trace: ContextVar[Trace] = ContextVar("trace", default=Trace())  # noqa: B039 (frozen)


def current() -> Trace:
    """Return the trace of this thread."""
    return _trace.get()


@contextlib.contextmanager
def tracing(**changes: Any) -> Iterator[None]:
    """Trace programs with these fields of `Trace` changed, in this thread."""
    before = _trace.set(replace(_trace.get(), **changes))
    try:
        yield
    finally:
        _trace.reset(before)


def platform() -> Platform:
    """Return the described platform, or else the present one."""
    return current().platform or _present()


@functools.cache
def _present() -> Platform:
    capability = _capability(jax.devices()[0])
    return Platform(jax.default_backend(), jax.device_count(), capability, present=True)


def _capability(device) -> float:
    try:
        return float(device.compute_capability)
    except (AttributeError, ValueError):  # AMD GPUs have names
        return 0.0


def on_devices(count: int) -> contextlib.AbstractContextManager[None]:
    """Trace programs for some of the present devices, as for a base and a draft on devices of their own."""
    return tracing(platform=platform().replace(devices=count))


def mesh_in_use() -> AbstractMesh | None:
    """Return the mesh that the program is traced for; None for one device, and within the work of one device."""
    mesh = jax.sharding.get_abstract_mesh()
    ours = mesh.axis_names == (DATA, MODEL) and mesh.size > 1
    return mesh if ours and set(mesh.axis_types) == {AxisType.Auto} else None


def off_mesh() -> contextlib.AbstractContextManager[None]:
    """Return a context in which every device computes everything by itself: for arrays that are replicated."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def on_one_device() -> bool:
    """Return whether the trace is of one device's work: the only one, or each of a mesh by itself
    (`hydrajax.ops.sharded`).
    """
    return platform().devices == 1 or set(jax.sharding.get_abstract_mesh().axis_types) == {AxisType.Manual}


def rounds_float32() -> bool:
    """Return whether float32 inputs of a matmul are rounded to bfloat16 (`jax.default_matmul_precision`)."""
    return jax.config.jax_default_matmul_precision == "bfloat16"


def on_cpu() -> bool:
    return platform().name == "cpu"


def on_tpu() -> bool:
    return platform().name == "tpu"


def has_cpu_kernels() -> bool:
    """Return whether programs may contain our CPU kernels: on one device, as XLA cannot partition custom kernels."""
    return on_cpu() and on_one_device() and platform().cpu_kernels and library.available()


def has_few_bits() -> bool:
    """Return whether `hydrajax.lowbit.kernels.few_bits` multiplies with quantised weights.

    All devices of the process count, not those of a program: weights are stored for the kernel.
    """
    return on_cpu() and jax.device_count() == 1 and platform().cpu_kernels and library.available()


def on_ampere() -> bool:
    """Return whether a GPU can run our kernels, and may."""
    return platform().capability >= AMPERE and platform().gpu_kernels


def has_fp8() -> bool:
    """Return whether a GPU's matmuls can read weights in float8_e4m3fn without widening them in memory."""
    return platform().capability >= ADA


def on_turing() -> bool:
    """Return whether an NVIDIA GPU is older than Triton supports, such as a T4."""
    return 0 < platform().capability < AMPERE


def has_triton() -> bool:
    """Return whether programs may contain our GPU kernels: on one GPU, as XLA cannot partition custom kernels."""
    return on_ampere() and on_one_device() and (not platform().present or _kernels_agree("GPU"))


def has_mosaic() -> bool:
    """Return whether programs may contain our TPU kernels: on one TPU, as XLA cannot partition custom kernels."""
    here = on_tpu() and on_one_device() and platform().tpu_kernels
    return here and (not platform().present or _kernels_agree("TPU"))


@functools.cache
def _kernels_agree(device: str) -> bool:
    """Return whether the kernels agree with NumPy on this device; warn if not."""
    from hydrajax.ops.check import disagreement

    found = disagreement(device)
    if found:
        warnings.warn(f"hydrajax: the {device} kernels are not used, XLA's own operations are ({found})", stacklevel=2)
    return found is None
