"""Make a `LanguageModel` of parameters that another JAX program has on its devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from hydrajax.api import DTYPES
from hydrajax.compilation import use_compilation_cache
from hydrajax.decoding.state import Params
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError, not_allowed, one_line
from hydrajax.families.family_layout import base_layout
from hydrajax.integrations.axes import LORA, ForeignTensors, Table, arrays_of, candidates_of, places_of
from hydrajax.integrations.configs import config_of
from hydrajax.integrations.layouts import table_of
from hydrajax.language_model import LanguageModel
from hydrajax.models.init import abstract_base
from hydrajax.models.layout import Parameter, Stack, named_leaves, read, shapes, write
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.ops import stored_order
from hydrajax.ops.sharded import DATA, MODEL
from hydrajax.sharding import AXES, Placement, check_divides, in_order, tree_shardings

# Names of other programs' mesh axes that shard features; all others shard sequences, or parameters until they are used.
TENSOR_AXES = ("tp", "tensor", "model", "mdl", "tensor_transpose", "tensor_sequence", "expert")


def from_params(
    config: Any,
    params: Any,
    layout: str | Table = "tunix",
    *,
    draft: Any = None,
    tokenizer: Any = None,
    eos_ids: Sequence[int] = (),
    dtype: Any = None,
    mesh: Mesh | None = None,
    max_positions: int | None = None,
    lora_alpha: float | None = None,
    copy: bool = False,
    corpus: int | None = None,
) -> LanguageModel:
    """Make a model of parameters that another JAX program has.

    Arrays that our layout keeps as they are (the embedding, norms, and an MLP's second matrix) are shared, the others
    are copied: query, key and value projections are one array here, gate and up are one, and an attention's output
    projection has its heads and their features in one axis. Copies are sharded as the originals are. A trainer that
    donates its parameters deletes shared arrays too: call ``m.update_params`` after each update, or pass ``copy``.

    Args:
        config: a `LlamaConfig`, a directory with a ``config.json``, the fields of one, or a configuration of tunix,
            gemma or MaxText.
        params: an ``nnx.Module`` or ``nnx.State``, nested dicts, arrays by path (``"layers.0.attn.q_proj.w"``), or the
            directory of an Orbax checkpoint.
        layout: ``"tunix"``, ``"maxtext"``, ``"gemma"``, ``"hf"`` (transformers' names and axes), or a table of places
            (`hydrajax.integrations.axes`).
        draft: as in `hydrajax.load`.
        tokenizer: transformers' tokenizer, for prompts that are text.
        eos_ids: token ids that end generation.
        dtype: of computation; by default that of most parameters.
        mesh: to shard over, by default that of the parameters. Axes named ``tp``, ``tensor`` or ``model`` become
            ``model``, all others ``data``.
        max_positions: the context; by default the configuration's, or 32,768 where it has none (tunix).
        lora_alpha: alpha of the low-rank weights of qwix among the parameters, which are added to the weights.
        copy: copy every array.
        corpus: as in `hydrajax.load`.

    Returns:
        The model. Its ``update_params`` takes other parameters of the same form.

    Raises:
        HydrajaxError: for a configuration or layout that is not supported, and for an array that is missing, has
            another shape, or belongs to no weight.

    Example:
        ```python
        m = hydrajax.from_params(model.config, model, "tunix", draft="lookup", tokenizer=tokenizer, eos_ids=[2])
        m.generate(["1 + 1 ="], max_new_tokens=16)
        ```
    """
    use_compilation_cache()
    arrays, c = arrays_by_path(params), config_of(config, max_positions)
    reader = Reader(c, arrays, layout, dtype, mesh, lora_alpha, copy, config)
    m = LanguageModel(
        reader.model,
        NoDrafter(),
        Params(reader(arrays), {}),
        tokenizer,
        tuple(eos_ids),
        Placement(reader.mesh),
        read_params=reader,
    )
    return m if draft is None else m.with_draft(draft, corpus=corpus)


def to_params(m: LanguageModel, layout: str | Table = "tunix", like: Any = None) -> dict[str, np.ndarray]:
    """Return the base's parameters as another program keeps them, by path, on the host.

    Args:
        layout: as in `from_params`.
        like: parameters of that program, which decide between the forms that a layout has. By default the form is that
            from which ``m`` was read, or the layout's first.
    """
    layout_of_base = base_layout(m.config)
    reader = m.read_params if m.read_params is not None and m.read_params.layout == layout else None
    table = table_of(layout, m.config) if reader is None else reader.table
    if like is not None:
        places = places_of(table, shapes(layout_of_base), arrays_by_path(like), m.config)
    elif reader is not None:
        places = reader.places
    else:
        places = {name: candidates_of(table, name)[0] for name in shapes(layout_of_base)}
    tensors = write(layout_of_base, m.params.base)
    return arrays_of(tensors, places, m.config)


def arrays_by_path(params: Any) -> dict[str, Any]:
    """Return the arrays of another program's parameters by path, such as ``layers.0.attn.q_proj.w``.

    Args:
        params: as in `from_params`.
    """
    if isinstance(params, (str, Path)):
        import orbax.checkpoint as ocp
        from etils import epath

        folder = epath.Path(params if "://" in str(params) else Path(params).absolute())
        checkpointer = ocp.PyTreeCheckpointer()
        folder = folder / "items" if (folder / "items").is_dir() else folder  # a step of MaxText's
        try:
            stored = checkpointer.metadata(folder).item_metadata
            wanted = {} if stored is None else stored.tree
            wanted = {"params": wanted["params"]} if "params" in wanted else wanted  # not the optimizer's state
            params = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(item=wanted, partial_restore=True))
        except (OSError, ValueError, KeyError) as error:
            raise HydrajaxError(f"params: {params}: got no Orbax checkpoint: {one_line(error, 200)}") from None
    if isinstance(params, nnx.Module):
        params = nnx.state(params)
    if isinstance(params, nnx.State):
        params = nnx.to_pure_dict(params)
    found = named_leaves(nn.unbox(params))
    found = {name.removesuffix(".value"): x for name, x in found.items()}
    for start in ("params.", "params.", "base."):  # of variables, of a train state's parameters, of MaxText in tunix
        if all(name.startswith(start) for name in found):
            found = {name.removeprefix(start): x for name, x in found.items()}
    # Other state, such as that of random numbers, has integers.
    return {name: x for name, x in found.items() if jnp.issubdtype(getattr(x, "dtype", int), jnp.floating)}


class Reader:
    """Reads parameters of one form, with one compiled program.

    Attributes:
        layout: of the parameters, and its table.
        places: of each tensor of a checkpoint among them.
        mesh: that it is sharded over; None for one device.
        shared: the paths of our parameters that are arrays of the other program, with those arrays' paths.
    """

    def __init__(
        self,
        config: LlamaConfig,
        arrays: Mapping[str, Any],
        layout: str | Table,
        dtype: Any = None,
        mesh: Mesh | None = None,
        lora_alpha: float | None = None,
        copy: bool = False,
        given: Any = None,
    ):
        self.layout, self.table, self._layout = layout, table_of(layout, config, given), base_layout(config)
        self.places = places_of(self.table, shapes(self._layout), arrays, config)
        self._form = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
        rank = next((x.shape[-1] for name, x in arrays.items() if name.endswith(LORA[0])), None)
        if rank is not None and lora_alpha is None:
            raise HydrajaxError(f"lora_alpha: got none for weights of rank {rank}, expected the alpha of qwix' rule")
        self._lora_alpha = lora_alpha
        self.model = Llama(config, _dtype_of(dtype or _most_common_dtype(arrays)))
        boxed = abstract_base(self.model)
        self._expected = named_leaves(nn.unbox(boxed))
        first = next(iter(arrays.values()))
        device = next(iter(first.devices())) if isinstance(first, jax.Array) else jax.devices()[0]
        if mesh is None:
            mesh = next((x.sharding.mesh for x in arrays.values() if _is_sharded(x)), None)
        elif mesh.size == 1:
            mesh, device = None, mesh.devices.flat[0]
        self.mesh = mesh if mesh is None or mesh.axis_names == AXES["axis_names"] else _our_mesh(mesh)
        if self.mesh is None:
            self._homes: dict[str, Any] = dict.fromkeys(self._expected, SingleDeviceSharding(device))
        else:
            check_divides(self.mesh, config)
            self._homes = named_leaves(tree_shardings(self.mesh, boxed))
            if any(DATA in _spec(x) for x in arrays.values() if _is_sharded(x)):  # sharded until they are used (FSDP)
                self._homes = {path: _over_data(home, self._expected[path].shape) for path, home in self._homes.items()}
        self.shared = {} if copy else self._unchanged()
        copied = {
            path: in_order(home, self._order(path)) for path, home in self._homes.items() if path not in self.shared
        }
        self._copies = jax.jit(
            lambda old, arrays: {path: x for path, x in self._read(arrays).items() if path in copied},
            donate_argnums=0,
            keep_unused=True,
            out_shardings=copied,
        )
        empty = {path: self._expected[path] for path in copied}
        self._empty = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty), out_shardings=copied)

    def __call__(self, params: Any, old: Any = None) -> dict:
        """Return our parameters, nested.

        Args:
            params: as in `from_params`.
            old: our parameters of an earlier call, whose copies are overwritten; None for new ones.

        Raises:
            HydrajaxError: for parameters of another form.
        """
        arrays = arrays_by_path(params)
        if {name: x.shape for name, x in arrays.items()} != {name: x.shape for name, x in self._form.items()}:
            places_of(self.table, shapes(self._layout), arrays, self.model.config)
            raise HydrajaxError("params: got another form of arrays than before, expected the same")
        dtypes = {name: x.dtype for name, x in self._form.items()}
        arrays = {
            name: self._placed(x if x.dtype == dtypes[name] else x.astype(dtypes[name])) for name, x in arrays.items()
        }
        old = named_leaves(old) if old is not None else self._empty()
        found = self._copies({path: x for path, x in old.items() if path not in self.shared}, arrays)
        nested: dict = {}
        for path, x in (found | {path: arrays[name] for path, name in self.shared.items()}).items():
            *parents, name = path.split(".")
            at = nested
            for parent in parents:
                at = at.setdefault(parent, {})
            at[name] = x
        return nested

    def _read(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return our parameters by path."""
        tensors, found = ForeignTensors(arrays, self.places, self._lora_alpha), {}

        def keep(path: tuple[str, ...], parameter: Parameter | Stack) -> None:
            found[".".join(path)] = _traced(parameter).astype(self._expected[".".join(path)].dtype)

        read(self._layout, tensors, keep)
        return found

    def _unchanged(self) -> dict[str, str]:
        """Return which of our parameters are arrays of the other program as they are: transposed twice, or never."""
        program, out = jax.make_jaxpr(self._read, return_shape=True)(self._form)
        names = sorted(self._form)
        origins = {
            var: (name, tuple(range(len(self._form[name].shape))))
            for var, name in zip(program.jaxpr.invars, names, strict=True)
        }
        for eqn in program.eqns:
            if eqn.primitive.name == "transpose" and eqn.invars[0] in origins:
                name, order = origins[eqn.invars[0]]
                origins[eqn.outvars[0]] = name, tuple(order[axis] for axis in eqn.params["permutation"])
        found = {}
        for path, var in zip(sorted(out), program.jaxpr.outvars, strict=True):
            name, order = origins.get(var, ("", (1, 0)))
            if order == tuple(range(len(order))) and self._order(path) is None:
                found[path] = name
        return found

    def _order(self, path: str) -> tuple[int, ...] | None:
        x = self._expected[path]
        return stored_order(x.shape, x.dtype, ("experts",) if ".experts." in path else None)

    def _placed(self, x: Any) -> jax.Array:
        """Return an array on our mesh. It is not copied if it lies there already, under other names."""
        if self.mesh is None:
            home: Any = next(iter(self._homes.values()))
        else:
            home = NamedSharding(self.mesh, PartitionSpec(*_spec(x)) if _is_sharded(x) else PartitionSpec())
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(home, x.ndim):
            return jax.make_array_from_single_device_arrays(x.shape, home, [part.data for part in x.addressable_shards])
        return jax.device_put(x, home)


def _traced(parameter: Parameter | Stack) -> jax.Array:
    """Return a parameter whose tensors are JAX arrays."""
    if isinstance(parameter, Stack):
        return jnp.stack([_traced(part) for part in parameter.parts])
    parts = parameter.parts
    joined = jnp.concatenate(parts, parameter.axis) if len(parts) > 1 else parts[0]
    return joined if parameter.order is None else joined.transpose(parameter.order)


def _dtype_of(given: Any) -> np.dtype:
    try:
        found = jnp.dtype(given)
    except TypeError:
        found = np.dtype(int)
    if found.name not in DTYPES:
        raise not_allowed("dtype", str(given), DTYPES)
    return found


def _most_common_dtype(arrays: Mapping[str, Any]) -> Any:
    sizes: dict[Any, int] = {}
    for x in arrays.values():
        sizes[x.dtype] = sizes.get(x.dtype, 0) + math.prod(x.shape)
    return max(sizes, key=sizes.__getitem__)


def _is_sharded(x: Any) -> bool:
    return isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and x.sharding.mesh.size > 1


def _our_mesh(theirs: Mesh) -> Mesh:
    """Return a mesh of the same devices with our axes."""
    names = sorted(theirs.axis_names, key=lambda name: name in TENSOR_AXES)  # stable
    devices = theirs.devices.transpose([theirs.axis_names.index(name) for name in names])
    model = math.prod(theirs.shape[name] for name in names if name in TENSOR_AXES)
    return Mesh(devices.reshape(-1, model), **AXES)


def _spec(x: jax.Array) -> list[str | None]:
    """Return our names of the mesh axes over which an array is sharded."""
    sizes, found = x.sharding.mesh.shape, []
    for names in x.sharding.spec:
        names = (names,) if isinstance(names, str) else names or ()
        kinds = {MODEL if name in TENSOR_AXES else DATA for name in names if sizes[name] > 1}
        found.append(min(kinds, default=None))
    return found


def _over_data(home: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Return a sharding over the data axis too, for a matrix."""
    spec, count = [*home.spec, *[None] * (len(shape) - len(home.spec))], home.mesh.shape[DATA]
    free = [axis for axis, size in enumerate(shape) if spec[axis] is None and size % count == 0]
    if len(shape) < 2 or not free:
        return home
    spec[max(free, key=lambda axis: shape[axis])] = DATA
    return NamedSharding(home.mesh, PartitionSpec(*spec))
