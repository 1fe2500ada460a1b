"""Descriptions of GPUs for XLA's CUDA compiler, to compile on machines without one.

`pip install 'jax[cuda12]'` (or ``cuda13``) installs the compiler on any machine. Nothing is autotuned: XLA takes its
default kernels. The descriptions have versions of driver and libraries, without which XLA makes no CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable

from jax._src.mesh import AbstractDevice  # named in an error message of JAX, but not public
from jax.experimental import topologies
from placed_shapes import abstract_devices, placed_shapes

from hydrajax.models.platforms import Platform

_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{name}"
"""

# Bytes per second and of memory, from NVIDIA's data sheets. Both have 132 multiprocessors.
NAMES = {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3"}
DEVICES = {
    "h200": _HOPPER.format(name=NAMES["h200"], bandwidth=4_800_000_000_000, memory=151_397_597_184),
    "h100": _HOPPER.format(name=NAMES["h100"], bandwidth=3_350_000_000_000, memory=85_017_493_504),
}
PLATFORM = Platform("gpu", 1, 9.0)


def placed_on(device: str, count: int) -> Callable:
    """Return `placed_shapes` for this many described devices of one host."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=DEVICES[device], topology=f"1x{count}x1")
    return placed_shapes(topology.devices)


def described(device: str, count: int = 1):
    """Return a context that tells Pallas the device, which jax 0.11 requires, and the package that several share."""
    return abstract_devices(AbstractDevice(NAMES[device], 132, "gpu"), count)
