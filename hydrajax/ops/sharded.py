"""Operations on sharded arrays: what each device of a mesh computes on its own part, and where activations are.

XLA cannot partition our kernels, gathers a sharded vocabulary to rank it, and replicates a sharded embedding to look
tokens up in it. `on_each_device` and the functions below it call a function with each device's part (`jax.shard_map`)
if the program is traced for a mesh (`hydrajax.sharding.on_mesh`); without a mesh they call it as it is.

Training steps also shard activations between matmuls by tokens (`Trace.sharded_tokens`; Korthikanti et al. 2022, arXiv
2205.05198, section 4.2.2): tensor parallelism alone repeats norms, residual additions, dropout and shifts on every
device. All tokens are gathered before a matmul whose outputs are sharded, and the sums of a matmul whose inputs are
sharded are scattered over the tokens; together they move the bytes of the all-reduce that they replace. After a matmul
whose outputs are sharded and that no norm follows, as in draft heads, the features stay sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int, Shaped

from hydrajax.models.arrays import Array
from hydrajax.ops import trace
from hydrajax.ops.trace import DATA, MODEL, mesh_in_use


def axis_over(name: str, size: int) -> str | None:
    """Return the name of a mesh axis if ``size`` is sharded evenly over its devices, else None: replicated."""
    mesh = mesh_in_use()
    return name if mesh is not None and mesh.shape[name] > 1 and size % mesh.shape[name] == 0 else None


def on_each_device(work: Callable, specs: Any, out_specs: Any, *args: Any) -> Any:
    """Call ``work`` with each device's part of the arrays.

    Args:
        work: The function.
        specs: For each argument the `PartitionSpec` of its arrays, or a pytree of them. Replicated NumPy
            arrays stay constants.
        out_specs: The same for the result.
        args: Pytrees.
    """
    if mesh_in_use() is None:
        return work(*args)
    leaves, treedef = jax.tree.flatten(args)
    leaf_specs = jax.tree.leaves(
        jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), tuple(specs), args, is_leaf=_is_spec),
        is_leaf=_is_spec,
    )
    given = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, np.ndarray) or leaf_specs[i] != PartitionSpec()]

    def with_constants(*parts):
        found = list(leaves)
        for i, part in zip(given, parts, strict=True):
            found[i] = part
        return work(*jax.tree.unflatten(treedef, found))

    on_devices = jax.shard_map(
        with_constants, in_specs=tuple(leaf_specs[i] for i in given), out_specs=out_specs, check_vma=False
    )
    return on_devices(*(leaves[i] for i in given))


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def gathered_in_each_step(params: Any, changing: Array) -> tuple[Any, Array]:
    """Return parameters and an array that every step of a loop changes, bound to each other on a mesh with ``data``.

    XLA would gather parameters that are sharded over that axis until they are used (FSDP) once before the loop, into
    memory of their own on every device.
    """
    mesh = mesh_in_use()
    if mesh is None or mesh.shape[DATA] == 1:
        return params, changing
    return jax.lax.optimization_barrier((params, changing))


def shard(array: Array, *axes: str | None) -> Array:
    """Return the array, sharded over these mesh axes where they divide it evenly."""
    if mesh_in_use() is None:
        return array
    names = [name and axis_over(name, size) for name, size in zip(axes, array.shape, strict=False)]
    return jax.lax.with_sharding_constraint(array, PartitionSpec(*names))


def replicate_features(x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """Replicate the last axis (one all-gather) before the next matmul.

    XLA by itself may split that matmul into as many steps as there are devices, each with a collective. The gradient, a
    sum over devices, is sharded as the array was.
    """
    return x if mesh_in_use() is None else placed(partial(_last_axis_over, None), _summed_by_feature)(x)


def _last_axis_over(name: str | None, x: Array) -> Array:
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1), name))


def _summed_by_feature(x: Array) -> Array:
    """Shard sums over all devices, in two steps that XLA joins; in one step it would split the matmul."""
    return _last_axis_over(axis_over(MODEL, x.shape[-1]), _last_axis_over(None, x))


def placed(forward: Callable, backward: Callable) -> Callable:
    """Return the identity with its result placed by ``forward``, and its gradient by ``backward``."""
    place = jax.custom_vjp(forward)
    place.defvjp(lambda x: (forward(x), None), lambda _, gradient: (backward(gradient),))
    return place


def shards_tokens(x: Array) -> bool:
    """Return whether ``x``, ``[B, T, D]``, is sharded by its tokens."""
    return trace.current().sharded_tokens and x.ndim == 3 and axis_over(MODEL, x.shape[1]) is not None


def by_token(x: Shaped[Array, "*rows D"]) -> Shaped[Array, "*rows D"]:
    """Return ``x`` with a stretch of tokens on each device."""
    return shard(x, DATA, MODEL) if shards_tokens(x) else x


def by_feature(x: Shaped[Array, "*rows D"]) -> Shaped[Array, "*rows D"]:
    """Return ``x`` with some features of all tokens on each device."""
    return shard(x, DATA, None, MODEL) if shards_tokens(x) else x


def all_tokens(x: Shaped[Array, "*rows D"], trained: int | None = None) -> Shaped[Array, "*rows D"]:
    """Gather the tokens before a matmul whose outputs are sharded. Its gradient is summed and scattered.

    ``trained``: the number of features, from the first on, that need a gradient; None: all.
    """

    def backward(gradient):
        scattered = _scattered(gradient[..., :trained])
        return jnp.pad(scattered, ((0, 0), (0, 0), (0, gradient.shape[-1] - scattered.shape[-1])))

    return placed(_everywhere, backward)(x) if shards_tokens(x) else x


def summed_by_token(x: Shaped[Array, "*rows D"]) -> Shaped[Array, "*rows D"]:
    """Scatter the sums of a matmul whose inputs are sharded over the tokens. Its gradient is gathered."""
    return placed(_scattered, _everywhere)(x) if shards_tokens(x) else x


def _everywhere(x: Array) -> Array:
    return shard(x, DATA)


def _scattered(x: Array) -> Array:
    """Shard sums over all devices by tokens, in two steps as `replicate_features` does."""
    return by_token(_everywhere(x))


def over_vocabulary(rank: Callable, logits: Float[Array, "*rows V"], k: int) -> Int[Array, "*rows k"]:
    """Return ``rank(logits, k)``, the ids of the k best tokens, of a vocabulary that may be sharded.

    Each device ranks its own part. Then k logits and ids of each travel, in one collective, in place of all logits.
    """
    size = logits.shape[-1]
    if axis_over(MODEL, size) is None or size // mesh_in_use().shape[MODEL] < k:
        return rank(logits, k)

    def of_part(part):
        ids = rank(part, k)
        bits = jax.lax.bitcast_convert_type(jnp.take_along_axis(part, ids, -1).astype(jnp.float32), jnp.int32)
        pairs = jnp.stack([bits, ids + jax.lax.axis_index(MODEL) * part.shape[-1]], axis=-1)
        # In the order of the devices, so that ties still go to the smallest id.
        pairs = jax.lax.all_gather(pairs, MODEL, axis=pairs.ndim - 2, tiled=True)
        best = rank(jax.lax.bitcast_convert_type(pairs[..., 0], jnp.float32), k)
        return jnp.take_along_axis(pairs[..., 1], best, -1)

    spec = PartitionSpec(*[None] * (logits.ndim - 1), MODEL)
    return _over_model(of_part, (spec,), PartitionSpec())(logits)


def take_sharded(
    take: Callable,
    table: Float[Array, "V D"],
    index: Int[Array, "*rows"],
    summed_dtype: Callable,
    scattered: bool = False,
) -> Float[Array, "*rows D"]:
    """Return ``take(table, index)``, rows of an embedding that may be sharded by its first axis.

    Each device looks up the rows that it has, and one sum joins them; if ``scattered``, each device gets the sum of a
    stretch of the second axis. ``summed_dtype`` returns the dtype of the sum of numbers of a dtype.
    """
    if axis_over(MODEL, len(table)) is None:
        return take(table, index)

    def of_part(part, index):
        index = jnp.clip(index, 0, len(table) - 1) - jax.lax.axis_index(MODEL) * len(part)
        here = (index >= 0) & (index < len(part))
        rows = jnp.where(here[..., None], take(part, index), 0)
        summed = summed_dtype(rows.dtype)
        join = partial(jax.lax.psum_scatter, scatter_dimension=1, tiled=True) if scattered else jax.lax.psum
        return join(rows.astype(summed), MODEL).astype(rows.dtype)

    home = PartitionSpec(None, MODEL) if scattered else PartitionSpec()
    return _over_model(of_part, (PartitionSpec(MODEL), PartitionSpec()), home)(table, index)


def _over_model(work: Callable, specs: Sequence[PartitionSpec], out_spec: PartitionSpec) -> Callable:
    """Call it for each device of the model axis only; XLA shards sequences over the data axis as it likes."""
    return jax.shard_map(work, in_specs=tuple(specs), out_specs=out_spec, axis_names={MODEL}, check_vma=False)
