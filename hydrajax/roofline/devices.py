"""Device rates: published peaks and measurements."""

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
    """A roofline: an operator takes at least its operations / ``flops`` and at least its traffic / ``bandwidth``.

    Attributes:
        flops: FLOP/s of dense 16-bit matrix products.
        bandwidth: Bytes per second of memory.
        weight_rates, attention_rates: Measured FLOP/s by number of rows, for devices without a single peak, such as
            CPUs.
    """

    name: str
    flops: float
    bandwidth: float
    weight_rates: Rates = ()
    attention_rates: Rates = ()

    def rate(self, operator: Operator) -> float:
        """Return the FLOP/s for this operator, interpolated between measured rows on a log-log scale."""
        rates = {"weights": self.weight_rates, "attention": self.attention_rates}.get(operator.kind)
        if not rates:
            return self.flops
        rows, flops = np.log(np.array(rates)).T
        return float(np.exp(np.interp(math.log(operator.rows), rows, flops)))

    def seconds(self, operator: Operator) -> float:
        """Return the seconds of all ``count`` operators."""
        return operator.count * max(operator.flops / self.rate(operator), operator.bytes / self.bandwidth)

    def memory_bound(self, operator: Operator) -> bool:
        """Return True if the operator's memory traffic takes longer than its operations (left of the ridge)."""
        return operator.bytes / self.bandwidth >= operator.flops / self.flops


# Dense 16-bit peak and memory bandwidth from the makers' data sheets (TPU v4i: `jax.experimental.pallas.tpu`), with a
# pattern for jax's ``device_kind``; the first match counts.
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
    (Device("TPUv7x", 1153e12, 3690e9), "TPU7x|TPU v7x"),  # one of the two devices of a chip
)
DEVICES = {device.name: device for device, _ in _TABLE}


def device_of(kind: str) -> Device | None:
    """Return the device with this `jax.Device.device_kind`; None if the table does not have it, as for CPUs."""
    matches = (device for device, part in _TABLE if re.search(rf"(?i)\b({part})(?![0-9a-z])", kind))
    return next(matches, None)


def average(devices: Sequence[Device]) -> Device:
    """Return the geometric mean of measurements of one device, on the same numbers of rows."""

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
    """Return the ratio of the fastest to the slowest measurement, for the rate that changed most."""
    everything = [(*d.weight_rates, *d.attention_rates, (0, d.bandwidth)) for d in devices]
    columns = zip(*everything, strict=True)
    return max(max(rate for _, rate in column) / min(rate for _, rate in column) for column in columns)
