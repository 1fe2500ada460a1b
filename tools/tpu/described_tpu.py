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

from typing import NamedTuple

import jax
from jax._src.mesh import AbstractDevice  # named in an error message of JAX, but not public
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, SingleDeviceSharding

from hydrajax.models import backend
from hydrajax.roofline.devices import Device, device_of

PLATFORM = backend.Platform("tpu", 1)


class Chip(NamedTuple):
    """A TPU.

    Attributes:
        kind: JAX's name of it.
        topology: The smallest that libtpu describes.
        hertz: The clock of the compiler's estimates: that at which the matrix units reach the data sheet's operations.
    """

    kind: str
    topology: str
    hertz: float

    @property
    def device(self) -> Device:
        """Its rates, from the data sheet."""
        return device_of(self.kind)


CHIPS = {
    "v5e": Chip("TPU v5 lite", "2x2", 1.5e9),
    "v5p": Chip("TPU v5p", "2x2x1", 1.75e9),
    "v6e": Chip("TPU v6 lite", "2x2", 1.75e9),
}


def placed_on(chip: str):
    """Return a function that places a pytree of shapes on the described device, weights in the order that it reads."""
    topology = topologies.get_topology_desc(f"{chip}:{CHIPS[chip].topology}", "tpu")
    home = SingleDeviceSharding(topology.devices[0])

    def placed(x):
        order = backend.stored_order(x.shape)
        where = home if order is None else Format(Layout(order), home)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return lambda params, *rest: (
        jax.tree.map(placed, params),
        *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home), rest),
    )


def described(chip: str):
    """Return a context that tells Pallas the device."""
    device = AbstractDevice(CHIPS[chip].kind, 1, "tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
