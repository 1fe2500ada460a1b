"""The platform that programs are traced for, and which of our kernels may run on it."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import jax
from jax.sharding import AxisType

from hydrajax.models.kernels import few_rows as kernels

AMPERE = 8.0  # compute capability that Triton and cuDNN's attention need
ADA = 8.9  # and that converts float8_e4m3fn


class Platform(NamedTuple):
    """The platform that programs are traced for.

    Attributes:
        name: JAX's name, "cpu", "gpu" or "tpu".
        devices: Number of devices.
        capability: Compute capability of an NVIDIA GPU, such as 9.0; 0.0 for everything else.
    """

    name: str
    devices: int
    capability: float = 0.0


_described: ContextVar[Platform | None] = ContextVar("platform", default=None)  # each thread traces for its own


def platform() -> Platform:
    """Return the described platform, or else the present one."""
    return _described.get() or _present()


@functools.cache
def _present() -> Platform:
    return Platform(jax.default_backend(), jax.device_count(), _capability(jax.devices()[0]))


def _capability(device) -> float:
    try:
        return float(device.compute_capability)
    except (AttributeError, ValueError):  # AMD GPUs have names
        return 0.0


@contextlib.contextmanager
def traced_for(described: Platform) -> Iterator[None]:
    """Trace programs for an absent platform, for compilers that know a device by description only."""
    before = _described.set(described)
    try:
        yield
    finally:
        _described.reset(before)


def on_devices(count: int) -> contextlib.AbstractContextManager[None]:
    """Trace programs for some of the present devices, as for a base and a draft on devices of their own."""
    return traced_for(platform()._replace(devices=count))


def on_one_device() -> bool:
    """Return whether what is traced now runs on one device: the only one, or each of a mesh by itself
    (`hydrajax.models.per_device`).
    """
    return platform().devices == 1 or set(jax.sharding.get_abstract_mesh().axis_types) == {AxisType.Manual}


def on_cpu() -> bool:
    return platform().name == "cpu"


def on_tpu() -> bool:
    return platform().name == "tpu"


def has_cpu_kernels() -> bool:
    """Return whether programs may contain our CPU kernels: on one device, as XLA cannot partition custom kernels."""
    return on_cpu() and on_one_device() and kernels.available()


def has_few_bits() -> bool:
    """Return whether `hydrajax.lowbit.kernels.few_bits` computes products with quantised weights.

    All devices of the process count, not those of a program: weights are stored for the kernel.
    """
    return on_cpu() and jax.device_count() == 1 and kernels.available()


def on_ampere() -> bool:
    """Return whether a GPU can run our kernels; HYDRAJAX_GPU_KERNELS=0 in the environment disables them."""
    return platform().capability >= AMPERE and os.environ.get("HYDRAJAX_GPU_KERNELS") != "0"


def has_fp8() -> bool:
    """Return whether a GPU's products can read weights in float8_e4m3fn without widening them in memory."""
    return platform().capability >= ADA


def on_turing() -> bool:
    """Return whether an NVIDIA GPU is older than Triton supports, such as a T4."""
    return 0 < platform().capability < AMPERE


def has_triton() -> bool:
    """Return whether programs may contain our GPU kernels: on one GPU, as XLA cannot partition custom kernels."""
    return on_ampere() and on_one_device() and (_described.get() is not None or _kernels_agree("GPU"))


def has_mosaic() -> bool:
    """Return whether programs may contain our TPU kernel: on one TPU; HYDRAJAX_TPU_KERNELS=0 disables it."""
    here = on_tpu() and on_one_device() and os.environ.get("HYDRAJAX_TPU_KERNELS") != "0"
    return here and (_described.get() is not None or _kernels_agree("TPU"))


@functools.cache
def _kernels_agree(device: str) -> bool:
    """Return whether the kernels agree with NumPy on this device; warn if not."""
    from hydrajax.models.kernels.check import disagreement

    found = disagreement(device)
    if found:
        warnings.warn(f"hydrajax: the {device} kernels are not used, XLA's own operations are ({found})", stacklevel=2)
    return found is None
