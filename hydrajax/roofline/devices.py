"""Devices: published peaks, and measured rates."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hydrajax.roofline.traced import Operator

Rates = tuple[tuple[int, float], ...]  # (rows of the left matrix, FLOP/s), rows rising


@dataclass(frozen=True)
class Device:
    """A roofline: no operator takes less than its operations at ``flops`` or its traffic at ``bandwidth``.

    flops: FLOP/s of dense matrix products in 16 bits. bandwidth: bytes per second of its memory. weight_rates,
    attention_rates: FLOP/s by the number of rows, where they were measured; a CPU has no single peak.
    """

    name: str
    flops: float
    bandwidth: float
    weight_rates: Rates = ()
    attention_rates: Rates = ()

    def rate(self, operator: Operator) -> float:
        """FLOP/s for this operator: between measured rows on a straight line of logarithms, constant beyond them."""
        rates = {"weights": self.weight_rates, "attention": self.attention_rates}.get(operator.kind)
        if not rates:
            return self.flops
        rows, flops = np.log(np.array(rates)).T
        return float(np.exp(np.interp(math.log(operator.rows), rows, flops)))

    def seconds(self, operator: Operator) -> float:
        """All ``count`` of them."""
        return operator.count * max(operator.flops / self.rate(operator), operator.bytes / self.bandwidth)

    def memory_bound(self, operator: Operator) -> bool:
        """Whether it is left of the roofline's ridge: at the device's peak its traffic takes longer."""
        return operator.bytes / self.bandwidth >= operator.flops / self.flops


# Every device that is known: dense 16-bit peak and memory bandwidth as the makers' data sheets have them (of the TPU
# v4i as `jax.experimental.pallas.tpu` has them), and what matches jax's ``device_kind``; the first match counts.
_TABLE = (
    (Device("A100-PCIe", 312e12, 1935e9), "A100.*PCIe"),  # 80GB, as in the caption of medusa's figure 9
    (Device("A100", 312e12, 2039e9), "A100"),  # 80GB SXM
    (Device("H100-PCIe", 756e12, 2000e9), "H100 PCIe"),
    (Device("H100-NVL", 835e12, 3938e9), "H100 NVL"),
    (Device("H100", 989e12, 3350e9), "H100"),  # SXM
    (Device("H200-NVL", 835e12, 4800e9), "H200 NVL"),
    (Device("H200", 989e12, 4800e9), "H200"),  # SXM
    (Device("GH200", 989e12, 4000e9), "GH200"),  # 96GB
    (Device("L4", 121e12, 300e9), "L4"),
    (Device("T4", 65e12, 320e9), "T4"),  # float16
    (Device("TPUv4i", 137e12, 614e9), "TPU v4 lite"),
    (Device("TPUv4", 275e12, 1228e9), "TPU v4"),
    (Device("TPUv5e", 197e12, 819e9), "TPU v5 lite|TPU v5e"),
    (Device("TPUv5p", 459e12, 2765e9), "TPU v5|TPU v5p"),
    (Device("TPUv6e", 918e12, 1640e9), "TPU v6 lite|TPU v6e"),
)
DEVICES = {device.name: device for device, _ in _TABLE}


def device_of(kind: str) -> Device | None:
    """Return the device that jax calls ``kind`` (`jax.Device.device_kind`), None for one that the table lacks.

    A CPU is not in it: its peak depends on its clock and its neighbours.
    """
    matches = (device for device, part in _TABLE if re.search(rf"(?i)\b({part})(?![0-9a-z])", kind))
    return next(matches, None)


def average(devices: Sequence[Device]) -> Device:
    """The geometric mean of measurements of one device, on the same rows."""

    def rates(name: str) -> Rates:
        columns = zip(*(getattr(device, name) for device in devices), strict=True)
        return tuple((column[0][0], statistics.geometric_mean(rate for _, rate in column)) for column in columns)

    return Device(
        devices[0].name,
        statistics.geometric_mean(device.flops for device in devices),
        statistics.geometric_mean(device.bandwidth for device in devices),
        rates("weight_rates"),
        rates("attention_rates"),
    )


def drift(devices: Sequence[Device]) -> float:
    """How many times faster the fastest of these measurements is than the slowest, in the rate that changed most."""
    everything = [(*d.weight_rates, *d.attention_rates, (0, d.bandwidth)) for d in devices]
    columns = zip(*everything, strict=True)
    return max(max(rate for _, rate in column) / min(rate for _, rate in column) for column in columns)
