"""Map logical axes to mesh axes.

Parameters are declared with logical axes (`hydrajax.models.layers.declare`). A mesh has the axes ``data`` (batch) and
``model`` (tensor parallelism); an axis that the mesh does not divide evenly is replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from hydrajax.compilation import keep_collectives_out
from hydrajax.errors import HydrajaxError
from hydrajax.models import backend
from hydrajax.models.llama_config import LlamaConfig

# Each block of a layer shards its first matmul over outputs (qkv, gate_up) and its second over inputs (out, down), so
# a layer needs two all-reduces. "width" is not sharded, except as in `sharding`.
RULES = {"vocab": "model", "heads": "model", "kv_heads": "model", "mlp": "model", "width": None}


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """Return a mesh over the first ``data * model`` devices, with Auto axes (the compiler places collectives)."""
    wanted, present, n_processes = data * model, len(jax.devices()), jax.process_count()
    if n_processes > 1 and wanted != present:
        raise HydrajaxError(
            f"mesh: got data={data} x model={model}, expected all {present} devices of {n_processes} processes"
        )
    if data < 1 or model < 1 or wanted > present:
        raise HydrajaxError(f"mesh: got data={data} x model={model}, expected 1 to {present} devices")
    devices = jax.devices()[:wanted]
    keep_collectives_out(devices)
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)


@dataclass(frozen=True)
class Placement:
    """Devices of the base and the draft, chosen when a model is loaded.

    Attributes:
        base: mesh to shard the base and draft heads over; None for the default device.
        draft: mesh to shard a draft model over if it has its own devices (`hydrajax.ssd`); None for the base's devices.
        shard_draft: shard a draft model over the base's mesh too, in place of a copy on every device.

    Raises:
        HydrajaxError: if base and draft share a device, and for ``shard_draft`` with ``draft``.
    """

    base: Mesh | None = None
    draft: Mesh | None = None
    shard_draft: bool = False

    def __post_init__(self):
        if not self.split:
            return
        if self.shard_draft:
            raise HydrajaxError(
                "shard_draft: has no effect with draft_devices, over which the draft model is sharded; leave it out"
            )
        base, draft = self.homes()
        if shared := base.device_set & draft.device_set:
            names = ", ".join(sorted(map(str, shared)))
            raise HydrajaxError(f"draft_devices: base and draft share {names}, expected separate devices")

    @property
    def split(self) -> bool:
        """Whether the draft has its own devices."""
        return self.draft is not None

    def homes(self) -> tuple[Sharding, Sharding]:
        """Return the shardings of replicated arrays: for those of the base, and for those of the draft."""
        base = jax.device_put(0).sharding if self.base is None else replicated(self.base)
        return base, base if self.draft is None else replicated(self.draft)

    def place_base(self, array: np.ndarray, axes: tuple[str | None, ...] | None) -> jax.Array:
        """Place an array of the base with these logical axes."""
        return placer(self.base)(array, axes)

    def place_draft_model(self, array: np.ndarray, axes: tuple[str | None, ...] | None) -> jax.Array:
        """Place an array of a draft model with these logical axes."""
        if self.split:
            return placer(self.draft)(array, axes)
        return placer(self.base)(array, axes if self.shard_draft else None)

    def place_heads(self, params: Any, boxed: Callable[[], Any]) -> Any:
        """Place draft heads on the base's devices; ``boxed`` returns them boxed with their logical axes, by which they
        are sharded as the base is.
        """
        place = placer(self.base)
        if self.base is None:
            return jax.tree.map(lambda array: place(array, None), params)
        return jax.tree.map(lambda box, array: place(np.asarray(array), box.names), boxed(), params, is_leaf=_is_boxed)


def last_devices(count: int, mesh: Mesh | None = None) -> Mesh:
    """Return a mesh of the last ``count`` devices, for `Placement.draft`.

    Args:
        count: number of devices.
        mesh: the base's; None for a base on the first device.

    Raises:
        HydrajaxError: if the base leaves fewer devices.
    """
    devices = jax.devices()
    if jax.process_count() > 1:
        raise HydrajaxError(f"draft_devices: got {jax.process_count()} processes, expected 1")
    taken = set(devices[:1]) if mesh is None else set(mesh.devices.flat)
    free = len(devices) - 1 - max(i for i, device in enumerate(devices) if device in taken)
    if not 1 <= count <= free:
        used = f"the base uses {len(devices) - free} of {len(devices)} devices"
        raise HydrajaxError(f"draft_devices: got {count}, expected at most {free}: {used}")
    keep_collectives_out(devices[-count:])
    return jax.make_mesh((1, count), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices[-count:])


def sharding(mesh: Mesh, shape: tuple[int, ...], logical_axes: tuple[str | None, ...] | None) -> NamedSharding:
    """Return the sharding of an array from the logical names of its axes; None replicates it.

    A matrix that the rules cannot shard (52 heads over 8 devices) is sharded over its width instead, which costs an
    all-reduce but saves the memory of a copy on every device.
    """
    names = logical_axes or ()
    spec = []
    for size, name in zip(shape, names, strict=False):
        axis = RULES[name] if name else None
        spec.append(axis if axis and size % mesh.shape[axis] == 0 else None)
    if len(shape) > 1 and "width" in names and not any(spec):
        at = names.index("width")
        spec[at] = "model" if shape[at] % mesh.shape["model"] == 0 else None
    return NamedSharding(mesh, PartitionSpec(*spec))


def tree_shardings(mesh: Mesh, boxed):
    """Return the shardings of parameters boxed with their logical axes (`models.llama.abstract_base`)."""
    return jax.tree.map(lambda box: sharding(mesh, box.value.shape, box.names), boxed, is_leaf=_is_boxed)


def _is_boxed(x: Any) -> bool:
    return isinstance(x, nn.LogicallyPartitioned)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def check_divides(mesh: Mesh, config: LlamaConfig) -> None:
    """Raise `HydrajaxError` if the devices cannot share the base's attention heads evenly.

    Fewer key-value heads than devices are allowed: the fused qkv is then divided over its inputs.
    """
    model, heads = mesh.shape.get("model", 1), config.n_heads
    if heads % model:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise HydrajaxError(f"mesh: got model={model}, expected a divisor of the base's {heads} heads: {fitting}")


def by_rows(mesh: Mesh, arrays: Any) -> Any:
    """Divide a pytree of arrays over the mesh's ``data`` axis by their first axis; one that does not divide, or a
    scalar, stays as it is.
    """
    groups = mesh.shape.get("data", 1)
    if groups == 1:
        return arrays
    home = NamedSharding(mesh, PartitionSpec("data"))
    return jax.tree.map(lambda x: jax.device_put(x, home) if np.ndim(x) and len(x) % groups == 0 else x, arrays)


def placer(mesh: Mesh | None) -> Callable[[np.ndarray, tuple | None], jax.Array]:
    """Return ``place(host_array, logical_axes)``, which shards an array over the mesh, or uses the default device.

    The array lies in memory as this platform's products read it (`hydrajax.models.backend.stored_order`).
    """
    if mesh is None:
        return lambda array, _: _in_stored_order(jax.device_put(array))
    keep_collectives_out(list(mesh.devices.flat))  # the caller may have made the mesh
    return lambda array, axes: _in_stored_order(distribute(array, sharding(mesh, array.shape, axes)))


def _in_stored_order(array: jax.Array) -> jax.Array:
    order = backend.stored_order(array.shape)
    return array if order is None else jax.device_put(array, Format(Layout(order), array.sharding))


def distribute(array: np.ndarray, home: NamedSharding) -> jax.Array:
    """Shard a host array; each process supplies the slices of its own devices."""
    return jax.make_array_from_callback(array.shape, home, lambda index: array[index])
