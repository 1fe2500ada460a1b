"""Descriptions of GPUs for XLA's CUDA compiler, to compile on machines without one.

`pip install 'jax[cuda12]'` (or ``cuda13``) installs the compiler on any machine. Nothing is autotuned: XLA takes its
default kernels. The descriptions have versions of driver and libraries, without which XLA makes no CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jax._src.mesh import AbstractDevice  # named in an error message of JAX, but not public
from jax.experimental import topologies
from placed_shapes import abstract_devices, placed_shapes

from hydrajax.ops.trace import Platform

_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{name}"
"""


class Gpu(NamedTuple):
    """A GPU, from NVIDIA's data sheets and programming guide.

    Attributes:
        name: JAX's name of it.
        capability: Compute capability.
        cores: Multiprocessors.
        fpus: Units for float32 of a multiprocessor.
        threads: At most, on a multiprocessor.
        shared, optin: Bytes of shared memory of a multiprocessor, and of a block at most.
        cache: Bytes of the L2 cache.
        clock: GHz.
        bandwidth: Bytes per second.
        memory: Bytes.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    fpus: int
    threads: int
    shared: int
    optin: int
    cache: int
    clock: float
    bandwidth: int
    memory: int

    @property
    def target(self) -> str:
        """The description as XLA reads it."""
        major, minor = self.capability
        return _TARGET.format(major=major, minor=minor, **self._asdict())


_HOPPER = Gpu("", (9, 0), 132, 128, 2048, 233_472, 232_448, 52_428_800, 1.98, 0, 0)
DEVICES = {
    "h200": _HOPPER._replace(name="NVIDIA H200", bandwidth=4_800_000_000_000, memory=151_397_597_184),
    "h100": _HOPPER._replace(name="NVIDIA H100 80GB HBM3", bandwidth=3_350_000_000_000, memory=85_017_493_504),
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 167_936, 166_912, 41_943_040, 1.41, 2_039_000_000_000,
        85_097_971_712,
    ),
    "t4": Gpu("Tesla T4", (7, 5), 40, 64, 1024, 65_536, 65_536, 4_194_304, 1.59, 320_000_000_000, 15_828_320_256),
}  # fmt: skip


def platform(device: str, count: int) -> Platform:
    """Return the platform that programs for this many devices are traced for."""
    major, minor = DEVICES[device].capability
    return Platform("gpu", count, major + minor / 10)


def placed_on(device: str, count: int) -> Callable:
    """Return `placed_shapes` for this many described devices of one host."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=DEVICES[device].target, topology=f"1x{count}x1"
    )
    return placed_shapes(topology.devices)


def described(device: str, count: int = 1):
    """Return a context that tells Pallas the device, which jax 0.11 requires, and the package that several share."""
    return abstract_devices(AbstractDevice(DEVICES[device].name, DEVICES[device].cores, "gpu"), count)
