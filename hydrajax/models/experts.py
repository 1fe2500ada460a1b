"""A mixture of experts in place of a decoder layer's MLP (`hydrajax.models.expert_settings.Experts`).

A router scores all experts for each token, and a token's output is a weighted sum of the MLPs of the best ones, perhaps
with an MLP that every token passes through.
"""

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from hydrajax import ops
from hydrajax.models.arrays import Array, DType
from hydrajax.models.expert_settings import Experts
from hydrajax.models.weights import Quantized, declare, declare_kernel, project, project_parts, quantized_type
from hydrajax.ops.cpu.experts import matmul_experts
from hydrajax.ops.sharded import DATA, MODEL, axis_over, on_each_device
from hydrajax.ops.trace import mesh_in_use
from hydrajax.ops.xla import with_gradient_of


class ExpertMLP(nn.Module):
    """The experts of one layer, their router and the shared MLP.

    Router and shared gate stay in float: they decide, and are small. An adapter does not reach experts.

    Attributes:
        activation: Of the parts of each MLP's first matmul (`hydrajax.models.layers.ACTIVATIONS`).
        parts: Number of these parts.
        dtype: Of parameters and computation, except for the router's bias, which is float32.
        quantize: How the weights of matmuls are stored.
    """

    experts: Experts
    activation: Callable
    parts: int
    dtype: DType
    quantize: str | None = None

    adapter = None  # not a field: `declare_kernel` reads it

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], routed_by: Float[Array, "B T D"] | None = None
    ) -> Float[Array, "B T D"]:
        """Return the layer's MLP of x; ``routed_by`` is what the router reads in place of x."""
        e, width, normal = self.experts, x.shape[-1], nn.initializers.normal(0.02)
        router = declare(self, "router", (width, e.count), (None, None), normal)
        scores = ops.matmul_float32(x if routed_by is None else routed_by, router)
        if e.with_mlp:
            scores = scores * width**-0.5
        if e.biases:
            scores = scores + declare(self, "router_bias", (e.count,), (None,), nn.initializers.zeros)
        bias = None
        if e.choice_bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, (None,))
            bias = self.param("choice_bias", zeros, (e.count,), jnp.float32)
        gate_up = declare_experts(self, "gate_up", e.count, (width, self.parts, e.width))
        down = declare_experts(self, "down", e.count, (e.width, width))
        biases = ()
        if e.biases:
            sizes = {"gate_up_bias": (e.count, self.parts, e.width), "down_bias": (e.count, width)}
            biases = tuple(
                declare(self, name, size, ("experts", *[None] * (len(size) - 1)), nn.initializers.zeros)
                for name, size in sizes.items()
            )
        ids, weights = route(scores, e, bias)
        if e.with_mlp:
            weights = weights * declare(self, "scale", (e.count,), (None,), nn.initializers.ones)[ids]
        activation = self.activation if e.swiglu is None else partial(clamped_swiglu, *e.swiglu)
        out = expert_sum(x, ids, weights, gate_up, down, e.count, activation, biases)
        if not e.shared_width:
            return out
        parts = (self.parts, e.shared_width)
        shared_gate_up = declare_kernel(self, "shared_gate_up", (width, *parts), ("width", None, "mlp"))
        shared_down = declare_kernel(self, "shared_down", (e.shared_width, width), ("mlp", "width"))
        shared = project(self.activation(*project_parts(x, shared_gate_up)), shared_down)
        if e.shared_gate:
            gate = declare(self, "shared_gate", (width, 1), (None, None), normal)
            shared = shared * jax.nn.sigmoid(ops.matmul_float32(x, gate)).astype(shared.dtype)
        return out + shared


def clamped_swiglu(
    alpha: float, limit: float, gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]
) -> Float[Array, "*rows F"]:
    """Return `Experts.swiglu` of a gate and a value."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


def declare_experts(module: nn.Module, name: str, count: int, shape: tuple[int, ...]) -> Array | Quantized:
    """Declare the kernels of all experts, of this shape each. Every array has a leading axis for experts, and only this
    is sharded.
    """
    if isinstance(stored := module.get_variable("params", name), Quantized):
        return stored

    def each(key: Array) -> Array | Quantized:
        if kind := quantized_type(module.quantize, name):
            return nn.unbox(kind.boxed(shape, (None,) * len(shape)))
        return nn.initializers.normal(0.02)(key, shape, module.dtype)

    def of_all(rng: Array):
        def boxed(x: Array):
            return nn.LogicallyPartitioned(x, ("experts", *[None] * (x.ndim - 1)))

        return jax.tree.map(boxed, jax.vmap(each)(jax.random.split(rng, count)))

    return module.param(name, of_all)


def route(
    logits: Float[Array, "*rows E"], e: Experts, bias: Float[Array, " E"] | None
) -> tuple[Int[Array, "*rows k"], Float[Array, "*rows k"]]:
    """Return each token's experts in ascending order, int32, and their weights.

    All in float32. transformers computes the logits of a softmax in the model's dtype, the softmax in float32, and
    rounds the weights to the model's dtype (Mixtral's stay float32); those of a sigmoid are float32 throughout. In
    bfloat16 a token with two nearly equal experts can therefore take another one there.

    Of equal scores the first expert wins. Sums have an order that does not depend on the number of rows.
    """
    if e.scores == "softmax":
        scores = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
        scores = scores / _sum(scores)
    else:
        scores = jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if e.groups > 1:
        choice = _of_best_groups(choice, e)
    ids = jnp.sort(jax.lax.top_k(choice, e.per_token)[1], axis=-1).astype(jnp.int32)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if e.normalized:
        weights = weights / (_sum(weights) + e.tiny)
    return ids, weights * e.scale


def _of_best_groups(choice: Float[Array, "*rows E"], e: Experts) -> Float[Array, "*rows E"]:
    """Replace the scores of experts outside the best groups by minus infinity (DeepSeek-V3 2.1.2)."""
    groups = choice.reshape(*choice.shape[:-1], e.groups, -1)
    sums = _sum(jax.lax.top_k(groups, e.best_of_group)[0])[..., 0]
    best = jax.lax.top_k(sums, e.chosen_groups)[1]
    chosen = jnp.any(best[..., None] == jnp.arange(e.groups), axis=-2)
    return jnp.where(chosen[..., None], groups, -jnp.inf).reshape(choice.shape)


def _sum(x: Float[Array, "*rows n"]) -> Float[Array, "*rows 1"]:
    """Return the sum over the last axis, half by half. XLA sums one row in another order than several."""
    while (size := x.shape[-1]) > 1:
        half = size // 2
        rest = x[..., 2 * half :]
        x = jnp.concatenate([x[..., :half] + x[..., half : 2 * half], rest], axis=-1)
    return x


Biases = tuple[Array, Array] | tuple[()]
Kernels = Array | Quantized  # of all experts, each array with a leading axis
ROWS_OF_BLOCK = 128  # rows that are multiplied with one expert's matrices at once


def expert_sum(
    x: Float[Array, "B T D"],
    ids: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
    gate_up: Kernels,
    down: Kernels,
    count: int,
    activation: Callable,
    biases: Biases = (),
) -> Float[Array, "B T D"]:
    """Return the weighted sum of each token's experts.

    Experts are sharded over the model axis of a mesh if it divides them evenly; one sum then joins the devices.

    Args:
        ids: Their experts, ascending.
        weights: The weights of these, float32.
        gate_up: The experts' kernels ``[D, 2, F]``.
        down: Their kernels ``[F, D]``.
        activation: Of the parts of the first matmul.
        biases: The experts' biases of both matmuls, ``[2, F]`` and ``[D]``, or none.
    """
    rows, model = P(axis_over(DATA, len(x))), axis_over(MODEL, count)
    here = count if model is None else count // mesh_in_use().shape[MODEL]

    def of_part(x, ids, weights, *kernels):
        if model is not None:
            ids = ids - jax.lax.axis_index(MODEL) * here
            weights = jnp.where((ids >= 0) & (ids < here), weights, 0)
        flat = (a.reshape(-1, a.shape[-1]) for a in (x, ids, weights))
        total = _sum_of_rows(*flat, kernels, here, activation)
        total = total if model is None else jax.lax.psum(total, MODEL)
        return total.astype(x.dtype).reshape(x.shape)

    kernels = gate_up, down, *biases
    specs = rows, rows, rows, *[P(model)] * len(kernels)
    return on_each_device(of_part, specs, rows, x, ids, weights, *kernels)


def _sum_of_rows(x, ids, weights, kernels: tuple, count: int, activation: Callable) -> Float[Array, "R D"]:
    """Return the sum in float32. Experts outside 0 to ``count`` - 1 are on other devices."""
    parts = kernels[0].shape[-2]

    def mlp(x, gate_up, down, gate_up_bias=None, down_bias=None):
        inner = project_parts(x, gate_up)
        inner = inner if gate_up_bias is None else inner + gate_up_bias[:, None]
        out = project(activation(*inner), down, jnp.float32)
        return out if down_bias is None else out + down_bias

    def plain(x, ids, weights, *kernels):
        @jax.checkpoint
        def add(total, expert):
            index, *kernels = expert
            weight = jnp.sum(jnp.where(ids == index, weights, 0), axis=1, keepdims=True)
            return total + weight * mlp(x, *kernels), None

        zeros = jnp.zeros(x.shape, jnp.float32)
        return jax.lax.scan(add, zeros, (jnp.arange(count), *kernels))[0]

    @with_gradient_of(plain)
    def chosen(x, ids, weights, *kernels):
        gate_up, down, *biases = kernels
        of_first, of_second = (partial(_with_bias, bias, count) for bias in biases or (None, None))
        experts = ids.reshape(-1)

        def inner(pairs, experts):
            return activation(*jnp.split(of_first(pairs, experts), parts, axis=-1))

        pairs = of_pairs(x, ids, gate_up, x.dtype)
        if pairs is not None:
            outs = of_second(of_pairs(inner(pairs, experts), ids, down, jnp.float32), experts)
        elif kernel := ops.here().expert_kernel(x.dtype, *map(_stored, (gate_up, down))):
            outs = of_second(_by_kernel(kernel, x, ids, gate_up, down, count, inner), experts)
        elif not isinstance(gate_up, Quantized) and ops.here().gathers_experts(len(x)):
            outs = of_second(_by_pair(x, ids, gate_up, down, inner), experts)
        else:
            outs = _in_blocks(x, ids, count, partial(_of_expert, mlp, kernels))
        outs = outs.reshape(*ids.shape, x.shape[-1])
        total = weights[:, :1] * outs[:, 0]
        for i in range(1, ids.shape[1]):
            total = total + weights[:, i : i + 1] * outs[:, i]
        return total

    return chosen(x, ids, weights, *kernels)


def _with_bias(bias: Array | None, count: int, outs: Float[Array, "pairs F"], experts: Int[Array, " pairs"]) -> Array:
    """Return the products of pairs with the bias of each one's expert, ``[E, *features]``."""
    if bias is None:
        return outs
    flat = bias.reshape(count, -1)
    return outs + flat[jnp.clip(experts, 0, count - 1)].astype(outs.dtype)


def of_pairs(
    x: Float[Array, "R_or_pairs D"], ids: Int[Array, "R k"], kernels: Kernels, dtype: DType
) -> Float[Array, "pairs F"] | None:
    """Return the product of every pair of a token and an expert by our CPU kernels; None without a kernel for it."""
    if isinstance(kernels, Quantized):
        return kernels.project_pairs(x, ids, dtype)
    if not ops.here().multiplies_pairs(x.dtype, kernels.dtype):
        return None
    return matmul_experts(x, ids, kernels.reshape(*kernels.shape[:2], -1), dtype)


def _stored(kernels: Kernels) -> jax.ShapeDtypeStruct | None:
    """Return shape and dtype of kernels as ``[E, D, F]``; None if they have more than a scale of each output."""
    if isinstance(kernels, Quantized) and not kernels.scaled_outputs:
        return None
    numbers = jax.tree.leaves(kernels)[0]
    return jax.ShapeDtypeStruct((*numbers.shape[:2], math.prod(numbers.shape[2:])), numbers.dtype)


def _of_expert(mlp: Callable, kernels: tuple, x: Float[Array, "R D"], expert: Array) -> Array:
    """Return ``mlp`` of rows that all belong to one expert."""
    return mlp(x, *jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, expert, keepdims=False), kernels))


class Blocks(NamedTuple):
    """Pairs of a token and an expert, sorted by the expert and cut into blocks of one expert each.

    Attributes:
        pairs: The pairs of each block; those that are not ``present`` fill it up.
        present: Which places of a block are in use.
        experts: The expert of each block; E for blocks that are not in use.
        used: Number of blocks in use, the first ones.
    """

    pairs: Int[Array, "blocks size"]
    present: Bool[Array, "blocks size"]
    experts: Int[Array, " blocks"]
    used: Int[Array, ""]


def blocks_of(ids: Int[Array, "R k"], count: int, size: int) -> Blocks:
    """Cut the pairs into blocks of this size. Pairs of experts outside 0 to ``count`` - 1 are left out."""
    n_pairs = ids.size
    experts = jnp.where((ids >= 0) & (ids < count), ids, count).reshape(-1)
    pairs = jnp.argsort(experts, stable=True).astype(jnp.int32)
    counts = jnp.sum(experts[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    starts, ends = jnp.cumsum(counts) - counts, jnp.cumsum(-(-counts // size))  # pairs and blocks of each expert
    block = jnp.arange(min(n_pairs, count + n_pairs // size), dtype=jnp.int32)  # as many as there can be
    expert = jnp.sum(ends <= block[:, None], axis=1, dtype=jnp.int32)
    of = jnp.minimum(expert, count - 1)
    before = jnp.where(of > 0, ends[of - 1], 0)
    places = (starts[of] + (block - before) * size)[:, None] + jnp.arange(size, dtype=jnp.int32)
    present = (places < (starts + counts)[of][:, None]) & (expert < count)[:, None]
    return Blocks(pairs[jnp.clip(places, 0, n_pairs - 1)], present, expert, ends[-1])


def _in_blocks(
    x: Float[Array, "R D"], ids: Int[Array, "R k"], count: int, product: Callable[[Array, Array], Array]
) -> Float[Array, "pairs D"]:
    """Return ``product(rows, expert)`` of every pair, in float32, a block at a time; zeros for absent experts.

    A step of up to `ROWS_OF_BLOCK` rows takes a block for each chosen expert.
    """
    n_pairs, per_token = ids.size, ids.shape[1]
    blocks = blocks_of(ids, count, min(len(ids), ROWS_OF_BLOCK))

    def block(i, out):
        chosen = blocks.pairs[i]
        found = product(x[chosen // per_token], blocks.experts[i])
        return out.at[jnp.where(blocks.present[i], chosen, n_pairs)].set(found, mode="drop")

    return jax.lax.fori_loop(0, blocks.used, block, jnp.zeros((n_pairs, x.shape[-1]), jnp.float32))


def _by_kernel(kernel: ModuleType, x, ids, gate_up: Kernels, down: Kernels, count: int, inner: Callable) -> Array:
    """Return the MLP of every pair by our GPU kernel, in float32; zeros for absent experts."""
    blocks = blocks_of(ids, count, kernel.rows_of_block(ids.size, count))
    n_blocks, size = blocks.pairs.shape

    def product(x, rows, kernels, dtype):
        numbers, *scale = jax.tree.leaves(kernels)
        flat = numbers.reshape(*numbers.shape[:2], -1)
        scale = scale[0].reshape(count, -1) if scale else None
        return kernel.matmul(x, rows, blocks.experts, flat, scale, dtype).reshape(n_blocks * size, -1)

    first = product(x, blocks.pairs // ids.shape[1], gate_up, x.dtype)
    own = jnp.arange(n_blocks * size, dtype=jnp.int32).reshape(n_blocks, size)
    outs = product(inner(first, jnp.repeat(blocks.experts, size)), own, down, jnp.float32)
    places = jnp.where(blocks.present, blocks.pairs, ids.size).reshape(-1)
    return jnp.zeros((ids.size, x.shape[-1]), jnp.float32).at[places].set(outs, mode="drop", unique_indices=True)


def _by_pair(x, ids, gate_up: Array, down: Array, inner: Callable) -> Float[Array, "pairs D"]:
    """Return the MLP of every pair; XLA's kernels gather the experts' matrices while they multiply."""
    experts = jnp.clip(ids.reshape(-1), 0, len(down) - 1)
    rows = jnp.repeat(x, ids.shape[1], axis=0)
    parts = jnp.einsum("nd,ndpf->npf", rows, gate_up[experts], preferred_element_type=x.dtype)
    found = inner(parts.reshape(len(rows), -1), experts)
    return jnp.einsum("nf,nfd->nd", found, down[experts], preferred_element_type=jnp.float32)
