"""Place shapes on described devices, as `hydrajax.loading` places arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding

from hydrajax import ops
from hydrajax.sharding import AXES, in_order, sharding


def abstract_devices(device, count: int):
    """Return a context in which programs are traced for this `AbstractDevice`, or for a mesh of several
    (`hydrajax.sharding.on_mesh`).
    """
    mesh = AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(
        mesh if count == 1 else AbstractMesh((1, count), **AXES, abstract_device=device)
    )


def placed_shapes(devices: Sequence) -> Callable:
    """Return a function that places pytrees of shapes on these devices.

    The first pytree are weights. Several devices share those that are boxed with their logical axes, and each weight
    lies in memory as the platform's products read it. Everything else lies on every device.
    """
    mesh = Mesh(np.array(devices).reshape(1, -1), **AXES)

    def home_of(shape, axes):
        return SingleDeviceSharding(devices[0]) if len(devices) == 1 else sharding(mesh, shape, axes)

    def weight(leaf):
        x, axes = (leaf.value, leaf.names) if isinstance(leaf, nn.LogicallyPartitioned) else (leaf, None)
        home = in_order(home_of(x.shape, axes), ops.stored_order(x.shape, x.dtype, axes))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home)

    def other(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home_of(x.shape, None))

    def place(boxed, *rest):
        weights = jax.tree.map(weight, boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))
        return weights, *jax.tree.map(other, rest)

    return place
