"""Descriptions of TPUs for XLA's TPU compiler, to compile on machines without one.

``pip install 'jax[tpu]'`` installs the compiler (libtpu, 140 MB) on any machine. Its optimised HLO carries an estimate
of the cycles of every kernel.
"""

from __future__ import annotations

import os

# Before JAX looks for devices: there are none, and libtpu would search for them for minutes.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no device to share

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax._src.mesh import AbstractDevice  # named in an error message of JAX, but not public
from jax.experimental import topologies
from placed_shapes import abstract_devices, placed_shapes

from hydrajax.bench.roofline.devices import Device, device_of
from hydrajax.ops import trace


class Chip(NamedTuple):
    """A TPU.

    Attributes:
        kind: JAX's name of it.
        topology: The smallest that libtpu describes.
        eight: The topology of eight chips.
        hertz: The clock of the compiler's estimates: that at which the matrix units reach the data sheet's operations.
    """

    kind: str
    topology: str
    eight: str
    hertz: float

    @property
    def device(self) -> Device:
        """Its rates, from the data sheet."""
        return device_of(self.kind)


CHIPS = {
    "v5e": Chip("TPU v5 lite", "2x2", "2x4", 1.5e9),
    "v5p": Chip("TPU v5p", "2x2x1", "2x2x2", 1.75e9),
    "v6e": Chip("TPU v6 lite", "2x2", "2x4", 1.75e9),
}


def platform(chip: str, count: int) -> trace.Platform:
    """Return the platform that programs for this many chips are traced for."""
    return trace.Platform("tpu", count)


def devices_of(chip: str, count: int) -> Sequence[jax.Device]:
    """Return one described device, or eight."""
    topology = CHIPS[chip].topology if count == 1 else CHIPS[chip].eight
    return topologies.get_topology_desc(f"{chip}:{topology}", "tpu").devices[:count]


def placed_on(chip: str, count: int) -> Callable:
    """Return `placed_shapes` for one described device, or eight."""
    return placed_shapes(devices_of(chip, count))


def described(chip: str, count: int = 1):
    """Return a context that tells Pallas the device, and the package that several share the model."""
    return abstract_devices(AbstractDevice(CHIPS[chip].kind, 1, "tpu"), count)
