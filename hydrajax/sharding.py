"""Map logical axes to mesh axes.

Parameters are declared with logical axes (`hydrajax.models.layers.declare`). A mesh has the axes ``data`` (batch) and
``model`` (tensor parallelism); an axis that the mesh does not divide evenly is replicated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from hydrajax import ops
from hydrajax.compilation import keep_collectives_out
from hydrajax.errors import HydrajaxError
from hydrajax.models.layout import Parameter, Stack
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.ops.sharded import DATA, MODEL

# Each block of a layer shards its first matmul over outputs (qkv, gate_up) and its second over inputs (out, down), so
# a layer needs two all-reduces. "width" is not sharded, except as in `sharding`.
RULES = {"vocab": "model", "heads": "model", "kv_heads": "model", "mlp": "model", "experts": "model", "width": None}


# Arguments of JAX's constructors for every mesh: with Auto axes the compiler places collectives.
AXES = {"axis_names": (DATA, MODEL), "axis_types": (AxisType.Auto,) * 2}


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """Return a mesh over the first ``data * model`` devices, with Auto axes."""
    wanted, present, n_processes = data * model, len(jax.devices()), jax.process_count()
    if n_processes > 1 and wanted != present:
        raise HydrajaxError(
            f"mesh: got data={data} x model={model}, expected all {present} devices of {n_processes} processes"
        )
    if data < 1 or model < 1 or wanted > present:
        raise HydrajaxError(f"mesh: got data={data} x model={model}, expected 1 to {present} devices")
    devices = jax.devices()[:wanted]
    keep_collectives_out(devices)
    return jax.make_mesh((data, model), **AXES, devices=devices)


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
        """True if the draft has its own devices."""
        return self.draft is not None

    def homes(self) -> tuple[Sharding, Sharding]:
        """Return the shardings of replicated arrays: for those of the base, and for those of the draft."""
        base = jax.device_put(0).sharding if self.base is None else replicated(self.base)
        return base, base if self.draft is None else replicated(self.draft)

    def place_base(self, array: np.ndarray | Parameter | Stack, axes: tuple[str | None, ...] | None) -> jax.Array:
        """Place an array of the base with these logical axes."""
        return placer(self.base)(array, axes)

    def place_draft_model(
        self, array: np.ndarray | Parameter | Stack, axes: tuple[str | None, ...] | None
    ) -> jax.Array:
        """Place an array of a draft model with these logical axes."""
        if self.split:
            return placer(self.draft)(array, axes)
        return placer(self.base)(array, axes if self.shard_draft else None)


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Return a context in which programs are traced for a mesh, so that our kernels run on each of its devices
    (`hydrajax.ops.sharded`).
    """
    if mesh is None or mesh.size == 1:
        return contextlib.nullcontext()
    try:
        return jax.set_mesh(mesh)
    except ValueError:  # within `jax.vmap` or `jax.grad`
        return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


class JitOnMesh:
    """A jitted function that is traced for a mesh."""

    def __init__(self, mesh: Mesh | None, function: Callable, **settings: Any):
        self._mesh, self._jitted = mesh, jax.jit(function, **settings)

    def __call__(self, *args: Any, **settings: Any) -> Any:
        with on_mesh(self._mesh):
            return self._jitted(*args, **settings)

    def lower(self, *args: Any, **settings: Any) -> Any:
        """Lower it; see `jax.jit`."""
        with on_mesh(self._mesh):
            return self._jitted.lower(*args, **settings)


def jit_on(mesh: Mesh | None, function: Callable, **settings: Any) -> Any:
    """Return a jitted function that is traced for a mesh; ``settings`` are those of `jax.jit`."""
    return jax.jit(function, **settings) if mesh is None else JitOnMesh(mesh, function, **settings)


def mesh_of(params: Any) -> Mesh | None:
    """Return the mesh that arrays are sharded over, which is that of the first one; None for one device."""
    home = getattr(next(iter(jax.tree.leaves(params)), None), "sharding", None)
    return home.mesh if isinstance(home, NamedSharding) and isinstance(home.mesh, Mesh) else None


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
    return jax.make_mesh((1, count), **AXES, devices=devices[-count:])


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

    Fewer key-value heads than devices are allowed: the fused qkv is then sharded over its inputs.
    """
    model, heads = mesh.shape.get("model", 1), config.n_heads
    if heads % model:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise HydrajaxError(f"mesh: got model={model}, expected a divisor of the base's {heads} heads: {fitting}")


def by_rows(mesh: Mesh, arrays: Any) -> Any:
    """Shard a pytree of arrays over the mesh's ``data`` axis by their first axis.

    Scalars, sharded arrays such as a KV cache, and uneven batches are unchanged.
    """
    groups = mesh.shape.get("data", 1)
    if groups == 1:
        return arrays
    home = NamedSharding(mesh, PartitionSpec("data"))
    distributed = _distribute_rows if mesh.is_multi_process else jax.device_put

    def place(x):
        is_sharded = isinstance(x, jax.Array) and not x.sharding.is_fully_replicated
        return distributed(x, home) if np.ndim(x) and len(x) % groups == 0 and not is_sharded else x

    return jax.tree.map(place, arrays)


def _distribute_rows(rows: Any, home: NamedSharding) -> jax.Array:
    """Shard rows, which may be random keys, over the devices of several processes that all have them."""
    if isinstance(rows, jax.Array) and not rows.is_fully_addressable:
        return jax.device_put(rows, home)
    if isinstance(rows, jax.Array) and jnp.issubdtype(rows.dtype, jax.dtypes.prng_key):
        bits = distribute(np.asarray(jax.random.key_data(rows)), home)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(rows))
    return distribute(np.asarray(rows), home)


def placer(mesh: Mesh | None) -> Callable[[np.ndarray | Parameter | Stack, tuple | None], jax.Array]:
    """Return ``place(array, logical_axes)``, which shards an array over the mesh, or uses the default device.

    On a mesh, the slices of this process's devices are read one by one, each once. The array lies in memory as this
    platform's matmuls read it (`hydrajax.ops.stored_order`).
    """
    if mesh is None:
        return lambda x, axes: _stored(jax.device_put(np.asarray(x) if isinstance(x, Parameter | Stack) else x), axes)
    keep_collectives_out(list(mesh.devices.flat))  # the caller may have made the mesh
    return lambda x, axes: _stored(_place_slices(x, sharding(mesh, x.shape, axes)), axes)


def _place_slices(array: np.ndarray | Parameter | Stack, home: NamedSharding) -> jax.Array:
    """Shard an array slice by slice. The host holds two at a time: one is read while the other is sent.

    `jax.make_array_from_callback` would hold all, and read one again for each device with a copy of it.
    """
    holders: dict[str, tuple[tuple[slice, ...], list[jax.Device]]] = {}  # by slice, which Python 3.11 cannot hash
    for device, index in home.addressable_devices_indices_map(array.shape).items():
        holders.setdefault(str(index), (index, []))[1].append(device)
    placed = []
    for index, devices in holders.values():
        part = array[index]
        jax.block_until_ready(placed)
        placed += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(array.shape, home, placed)


def _stored(array: jax.Array, axes: Iterable[str | None] | None) -> jax.Array:
    return laid_out(array, in_order(array.sharding, ops.stored_order(array.shape, array.dtype, axes)))


def in_order(home: Sharding, order: tuple[int, ...] | None) -> Sharding | Format:
    """Return the sharding with an order of axes in memory; None: JAX's own."""
    return home if order is None else Format(Layout(order), home)


def laid_out(arrays: Any, homes: Any) -> Any:
    """Return placed arrays in the order that `in_order` has added to their shardings."""
    return jax.tree.map(lambda x, home: jax.device_put(x, home) if isinstance(home, Format) else x, arrays, homes)


def distribute(array: np.ndarray, home: NamedSharding) -> jax.Array:
    """Shard a host array; each process supplies the slices of its own devices."""
    return jax.make_array_from_callback(array.shape, home, lambda index: array[index])
