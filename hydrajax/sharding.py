"""Logical axis names to mesh axes; the only file that knows device meshes.

Parameters are declared with logical axes (`hydrajax.models.layers.declare`). A mesh has the axes ``data`` (batch) and
``model`` (tensor parallelism); what a mesh axis does not divide evenly is replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from hydrajax.compilation import keep_collectives_out
from hydrajax.errors import HydrajaxError

# One matmul per layer is split over its output (qkv, gate_up, lm head) and one over its input (out, down), so a
# layer needs two all-reduces. "width" is never split.
RULES = {"vocab": "model", "heads": "model", "kv_heads": "model", "mlp": "model", "width": None}


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """A ``data x model`` mesh over the first devices, with Auto axes (the compiler places collectives)."""
    wanted, present, n_processes = data * model, len(jax.devices()), jax.process_count()
    if n_processes > 1 and wanted != present:
        raise HydrajaxError(
            f"mesh: data={data} x model={model} are {wanted} devices; {n_processes} processes must use all {present}"
        )
    if data < 1 or model < 1 or wanted > present:
        raise HydrajaxError(f"mesh: data={data} x model={model} needs {wanted} devices, {present} present")
    devices = jax.devices()[:wanted]
    keep_collectives_out(devices)
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)


@dataclass(frozen=True)
class Placement:
    """Where base and draft lie. It is given when a model is loaded, and never found out from its arrays.

    Attributes:
        base: the mesh over which the base is sharded; None for the default device.
        draft: the mesh of a draft model with devices of its own, over which it is sharded (`hydrajax.ssd`); None to
            keep the draft with the base.
        shard_draft: shard a draft model that is with the base over its mesh, like the base. Other drafts are copied to
            every device.

    Raises:
        HydrajaxError: where base and draft have a device in common, and for ``shard_draft`` with a mesh of the draft's
            own.
    """

    base: Mesh | None = None
    draft: Mesh | None = None
    shard_draft: bool = False

    def __post_init__(self):
        if not self.split:
            return
        if self.shard_draft:
            raise HydrajaxError("shard_draft: says nothing with draft_devices, over which a draft model is sharded")
        base, draft = self.homes()
        if shared := base.device_set & draft.device_set:
            names = ", ".join(sorted(map(str, shared)))
            raise HydrajaxError(f"draft_devices: base and draft must lie on devices of their own, both are on {names}")

    @property
    def split(self) -> bool:
        """Whether the draft has devices of its own."""
        return self.draft is not None

    def homes(self) -> tuple[Sharding, Sharding]:
        """Return where arrays that are not sharded belong: those beside the base, those beside the draft."""
        base = jax.device_put(0).sharding if self.base is None else replicated(self.base)
        return base, base if self.draft is None else replicated(self.draft)

    def place_base(self, array: np.ndarray, axes: tuple[str | None, ...] | None) -> jax.Array:
        """Put an array of the base with these logical axes onto its devices."""
        return placer(self.base)(array, axes)

    def place_draft_model(self, array: np.ndarray, axes: tuple[str | None, ...] | None) -> jax.Array:
        """The same of a draft model."""
        if self.split:
            return placer(self.draft)(array, axes)
        return placer(self.base)(array, axes if self.shard_draft else None)

    def place_heads(self, array: np.ndarray) -> jax.Array:
        """Put an array of draft heads beside the base, a copy on every device."""
        return placer(self.base)(array, None)


def last_devices(count: int, mesh: Mesh | None = None) -> Mesh:
    """Return a mesh of the last ``count`` devices, for a draft model with devices of its own (`Placement.draft`).

    mesh: the base's; None for one on the first device. Raises `HydrajaxError` where that leaves too few.
    """
    devices = jax.devices()
    if jax.process_count() > 1:
        raise HydrajaxError(f"draft_devices: are for one process, found {jax.process_count()}")
    taken = set(devices[:1]) if mesh is None else set(mesh.devices.flat)
    free = len(devices) - 1 - max(i for i, device in enumerate(devices) if device in taken)
    if not 1 <= count <= free:
        of_base = f"of {len(devices)} devices the base takes " + (f"the first {len(devices) - free}" if free else "all")
        raise HydrajaxError(f"draft_devices: must be at most {free}, found {count}: {of_base}")
    keep_collectives_out(devices[-count:])
    return jax.make_mesh((1, count), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices[-count:])


def sharding(mesh: Mesh, shape: tuple[int, ...], logical_axes: tuple[str | None, ...] | None) -> NamedSharding:
    """The sharding of one array from the logical names of its axes (None: replicated).

    A matrix none of whose axes the rules can split (52 heads over 8 devices) is split over its width instead: the
    partial products cost an all-reduce, a copy on every device would cost its memory.
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
    """Shardings of a tree of parameters boxed with their logical axes (`models.llama.abstract_base`)."""
    return jax.tree.map(
        lambda box: sharding(mesh, box.value.shape, box.names),
        boxed,
        is_leaf=lambda box: isinstance(box, nn.LogicallyPartitioned),
    )


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def placer(mesh: Mesh | None) -> Callable[[np.ndarray, tuple | None], jax.Array]:
    """``place(host_array, logical_axes)``: onto the mesh, each device receiving its slice, or the default device."""
    if mesh is None:
        return lambda array, _: jax.device_put(array)
    keep_collectives_out(list(mesh.devices.flat))  # the caller may have made the mesh
    return lambda array, axes: distribute(array, sharding(mesh, array.shape, axes))


def distribute(array: np.ndarray, home: NamedSharding) -> jax.Array:
    """A host array as one on the mesh. Each process hands its own devices their slices."""
    return jax.make_array_from_callback(array.shape, home, lambda index: array[index])
