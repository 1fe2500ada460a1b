"""Device rates: published peaks."""

import re
from dataclasses import dataclass

from hydrajax.bench.roofline.operators import Operator

# Seconds, the same for all devices: nobody publishes it. NCCL takes 6 us for small sums of two H100 (NVIDIA/nccl issue
# 1259), and 20 us over PCIe (haohervchb/sglang-V100 pull request 2, four V100).
COLLECTIVE_LATENCY = 10e-6


@dataclass(frozen=True)
class Device:
    """A roofline: an operator takes at least its operations / ``flops`` and at least its traffic / ``bandwidth``.

    Attributes:
        flops: FLOP/s of dense 16-bit matrix products.
        bandwidth: Bytes per second of memory.
        memory: Bytes of memory.
        link: Bytes per second that a device sends to others of a ring in one machine or slice; None if unknown.
        latency: Seconds of a collective in addition to those of its bytes, assumed.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float | None = None
    link: float | None = None
    latency: float = COLLECTIVE_LATENCY

    def seconds(self, operator: Operator) -> float:
        """Return the seconds of all ``count`` operators."""
        if operator.kind == "collective":
            assert self.link is not None
            return operator.count * (self.latency + operator.bytes / self.link)
        return operator.count * max(operator.flops / self.flops, operator.bytes / self.bandwidth)

    def memory_bound(self, operator: Operator) -> bool:
        """Return True if the operator's memory traffic takes longer than its operations (left of the ridge)."""
        return operator.kind != "collective" and operator.bytes / self.bandwidth >= operator.flops / self.flops


# Bytes per second in one direction, from the makers' data sheets. With NVLink 3 and 4 every pair of eight GPUs is
# connected at the full rate. Without it, and with bridges that join two or four, a ring of eight crosses PCIe.
# A ring of TPUs, as in a slice of 2 x 4, uses two of a chip's four or six links. All links in both directions: v5e 400
# GB/s, v6e 800, v4 600, v5p 1200 (cloud.google.com/tpu/docs; v6e's page had 3584 Gbit/s in one direction before).
NVLINK_4, NVLINK_3, PCIE_5, PCIE_4, PCIE_3 = 450e9, 300e9, 64e9, 32e9, 16e9


def _device(name: str, flops: float, bandwidth: float, gigabytes: float, link: float | None) -> Device:
    return Device(name, flops, bandwidth, memory=gigabytes * 1e9, link=link)


# Dense 16-bit peak, memory bandwidth and memory from the makers' data sheets (TPU v4i:
# `jax.experimental.pallas.tpu`), with a pattern for jax's ``device_kind``; the first match counts.
_TABLE = (
    (_device("A100-PCIe", 312e12, 1935e9, 80, PCIE_4), "A100.*PCIe"),  # 80GB, as in the caption of medusa's figure 9
    (_device("A100", 312e12, 2039e9, 80, NVLINK_3), "A100"),  # 80GB SXM
    (_device("H100-PCIe", 756e12, 2000e9, 80, PCIE_5), "H100 PCIe"),
    (_device("H100-NVL", 835e12, 3938e9, 94, PCIE_5), "H100 NVL"),
    (_device("H100", 989e12, 3350e9, 80, NVLINK_4), "H100"),  # SXM
    (_device("H200-NVL", 835e12, 4800e9, 141, PCIE_5), "H200 NVL"),
    (_device("H200", 989e12, 4800e9, 141, NVLINK_4), "H200"),  # SXM
    (_device("GH200", 989e12, 4000e9, 96, NVLINK_4), "GH200"),  # 96GB
    (_device("L4", 121e12, 300e9, 24, PCIE_4), "L4"),
    (_device("T4", 65e12, 320e9, 16, PCIE_3), "T4"),  # float16
    (_device("TPUv4i", 137e12, 614e9, 8, None), "TPU v4 lite"),
    (_device("TPUv4", 275e12, 1228e9, 32, 100e9), "TPU v4"),
    (_device("TPUv5e", 197e12, 819e9, 16, 100e9), "TPU v5 lite|TPU v5e"),
    (_device("TPUv5p", 459e12, 2765e9, 95, 200e9), "TPU v5|TPU v5p"),
    (_device("TPUv6e", 918e12, 1640e9, 32, 200e9), "TPU v6 lite|TPU v6e"),
    # One of the two devices of a chip of 192 GB and 1200 GB/s, whose links both use.
    (_device("TPUv7x", 1153e12, 3690e9, 96, 100e9), "TPU7x|TPU v7x"),
)
DEVICES = {device.name: device for device, _ in _TABLE}


def device_of(kind: str) -> Device | None:
    """Return the device with this `jax.Device.device_kind`; None if the table does not have it, as for CPUs."""
    matches = (device for device, part in _TABLE if re.search(rf"(?i)\b({part})(?![0-9a-z])", kind))
    return next(matches, None)
