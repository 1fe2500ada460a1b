"""TPU kernel: attention of a tree's nodes, or of one token, to a cache and to the tree itself.

The same sums as the GPU's kernel (`hydrajax.ops.gpu.tree_attention`): the filled slots are read once, by all
heads and nodes that share a key-value head, and no score leaves the chip. A program holds some key-value heads of one
sequence and passes over its slots block by block; Pallas fetches the next block meanwhile. Blocks that are not filled,
or lie before a sliding window, are neither fetched nor computed.

Alternatives: none of `jax.experimental.pallas.ops.tpu` takes a tree's mask. Paged and ragged paged attention have
causal masks, and splash attention compiles a mask that is known in advance into the program, while a cache grows.

Compiled for described TPUs and compared with NumPy in Pallas's simulation of a TPU; it has not run on a TPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Bool, Float, Int

from hydrajax.models.arrays import Array

NAME = "hydrajax_tree_attention_tpu"
MASKED, TINY = -1e30, 1e-30
MOST_TOKENS = 256  # of a tree: its keys and scores stay on the chip
MOST_LINES = 1024  # queries that share a key-value head
SLOTS = 512  # of a block of the cache
VECTOR_MEMORY = 8 * 2**20  # bytes for blocks and scores, of 16 MB that a program may take by default


def fits(lines: int, n_tokens: int, head_dim: int, dtype) -> bool:
    """Return whether the kernel applies to these queries of one key-value head."""
    known = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32)
    return known and n_tokens <= MOST_TOKENS and lines <= MOST_LINES and head_dim in (64, 128, 256)


def attend(
    queries: Float[Array, "B n_heads T H"],
    block: tuple[Float[Array, "B kv T H"], Float[Array, "B kv T H"]],
    block_mask: Bool[Array, "..."],
    cache: tuple[Float[Array, "B kv S H"], Float[Array, "B kv S H"]],
    lengths: Int[Array, " B"],
    first_seen: Int[Array, "B T"] | None = None,
    *,
    sinks: Float[Array, " n_heads"] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B T width"]:
    """Attend to a block of T tokens and to the first ``lengths[b]`` slots of a cache.

    Softmax and sums are float32. The order of the sums depends neither on T nor on the number of slots, so a tree and a
    single token are rounded alike.

    Args:
        block_mask: bool ``[T, T]`` or ``[B, 1, 1, T, T]``.
        first_seen: The first visible slot of each query; None for all.
        sinks: A further logit of each head's softmax, float32; None for none.
    """
    batch, n_heads, n_tokens, head_dim = queries.shape
    n_kv, n_slots = cache[0].shape[1:3]
    groups = n_heads // n_kv
    lines = groups * n_tokens
    sublanes = 8 * 4 // queries.dtype.itemsize
    padded = -(-lines // sublanes) * sublanes
    heads = heads_per_program(n_kv, padded, head_dim, queries.dtype.itemsize)

    def of_lines(x: Array, axis: int) -> Array:
        """Repeat what each query has for each head of a group, and the last line up to the padded number."""
        repeated = jnp.concatenate([x] * groups, axis=axis)
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, padded - lines)
        return jnp.pad(repeated, widths, mode="edge")

    visible = jnp.asarray(block_mask).reshape(-1, n_tokens, n_tokens).astype(jnp.float32)
    # Key-value heads first, as matmuls write them: XLA would copy heads and keys of several sequences.
    q, *block = (x.reshape(batch, n_kv, -1, head_dim).swapaxes(0, 1) for x in (queries, *block))
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padded - lines), (0, 0)))
    oldest = jnp.zeros_like(lengths) if first_seen is None else jnp.maximum(jnp.min(first_seen, axis=1), 0)
    inputs = [q, *block, of_lines(visible, 1)]
    per_sequence = n_kv // heads  # programs

    def of_program(rows):
        return pl.BlockSpec(
            (heads, None, rows, head_dim),
            lambda program, turn, *_: (jax.lax.rem(program, per_sequence), jax.lax.div(program, per_sequence), 0, 0),
        )

    def of_sequence(array: Array):
        shared = len(array) == 1 and batch > 1
        return pl.BlockSpec(
            (1, *array.shape[1:]), lambda program, turn, *_: (0 if shared else jax.lax.div(program, per_sequence), 0, 0)
        )

    def of_slots(program, turn, lengths, oldest):
        row = jax.lax.div(program, per_sequence)
        blocks = jax.lax.div(lengths[row] + SLOTS - 1, SLOTS)  # filled; staying at the last one fetches nothing
        return program, jnp.minimum(jax.lax.div(oldest[row], SLOTS) + turn, jnp.maximum(blocks - 1, 0)), 0

    specs = [of_program(padded), *[of_program(n_tokens)] * 2, of_sequence(inputs[3])]
    if first_seen is not None:
        inputs.append(of_lines(first_seen, 1)[..., None])
        specs.append(of_sequence(inputs[-1]))
    if sinks is not None:
        of_each = jnp.repeat(sinks.reshape(n_kv, groups), n_tokens, axis=1)
        inputs.append(jnp.pad(of_each, ((0, 0), (0, padded - lines)), mode="edge")[..., None])
        specs.append(pl.BlockSpec((heads, padded, 1), lambda program, *_: (jax.lax.rem(program, per_sequence), 0, 0)))
    slots = min(SLOTS, n_slots)
    specs += [pl.BlockSpec((heads, slots, head_dim), of_slots)] * 2
    kernel = functools.partial(
        _passes, per_sequence=per_sequence, windowed=first_seen is not None, with_sinks=sinks is not None
    )
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch * n_kv // heads, pl.cdiv(n_slots, SLOTS)),
            in_specs=specs,
            out_specs=pl.BlockSpec((heads, padded, head_dim), lambda program, turn, *_: (program, 0, 0)),
            scratch_shapes=[pltpu.VMEM((heads, padded, size), jnp.float32) for size in (head_dim, 1, 1)],
        ),
        out_shape=jax.ShapeDtypeStruct((batch * n_kv, padded, head_dim), queries.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name=NAME,
    )(lengths, oldest, *inputs, *(x.reshape(batch * n_kv, n_slots, head_dim) for x in cache))
    out = out[:, :lines].reshape(batch, n_heads, n_tokens, head_dim)
    return out.swapaxes(1, 2).reshape(batch, n_tokens, -1)


def heads_per_program(n_kv: int, lines: int, head_dim: int, itemsize: int) -> int:
    """Return how many key-value heads a program holds: a divisor of all, as many as the vector memory has room for."""
    lanes = max(head_dim, 128)
    blocks = 2 * 2 * SLOTS * lanes * itemsize  # keys and values, this block and the next
    scores = 3 * lines * SLOTS * 4
    room = max(1, VECTOR_MEMORY // (blocks + scores))
    return max(heads for heads in range(1, min(room, n_kv) + 1) if n_kv % heads == 0)


def _passes(lengths, oldest, queries, block_keys, block_values, mask, *rest, per_sequence, windowed, with_sinks):
    """Process one block of slots of one sequence's key-value heads; before the first, the tree's own keys."""
    first_seen = rest[0] if windowed else None
    sinks = rest[windowed] if with_sinks else None
    keys, values, out, weighted, total, peak = rest[windowed + with_sinks :]
    program, turn = pl.program_id(0), pl.program_id(1)
    row = jax.lax.div(program, per_sequence)
    filled = lengths[row]
    slots = keys.shape[1]
    begin = (jax.lax.div(oldest[row], SLOTS) + turn) * SLOTS
    q = queries[...]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def add(k, v, visible) -> None:
        """Add these keys and values to the sums, as far as they are visible (None: all)."""
        scores = product(q, k, (((2,), (2,)), ((0,), (0,)))) * (q.shape[-1] ** -0.5)
        if visible is not None:
            scores = jnp.where(visible, scores, MASKED)
        before = peak[...]
        higher = jnp.maximum(before, jnp.max(scores, axis=2, keepdims=True))
        weights = jnp.exp(scores - higher)
        if visible is not None:
            weights = jnp.where(visible, weights, 0.0)
        shrink = jnp.exp(before - higher)
        weighted[...] = weighted[...] * shrink + product(weights.astype(v.dtype), v, (((2,), (1,)), ((0,), (0,))))
        total[...] = total[...] * shrink + jnp.sum(weights, axis=2, keepdims=True)
        peak[...] = higher

    @pl.when(turn == 0)
    def _():
        weighted[...] = jnp.zeros_like(weighted)
        total[...] = jnp.full_like(total, with_sinks)
        peak[...] = sinks[...] if with_sinks else jnp.full_like(peak, MASKED)
        add(block_keys[...], block_values[...], mask[...] != 0)

    full = begin + slots <= filled

    @pl.when(full & (not windowed))
    def _():
        add(keys[...], values[...], None)

    @pl.when((begin < filled) & (jnp.logical_not(full) | windowed))
    def _():
        slot = begin + jax.lax.broadcasted_iota(jnp.int32, (1, 1, slots), 2)
        visible = slot < filled
        if windowed:
            visible &= slot >= first_seen[...]
        here = begin + jax.lax.broadcasted_iota(jnp.int32, (1, slots, 1), 1) < filled
        v = values[...]
        add(keys[...], jnp.where(here, v, jnp.zeros_like(v)), visible)  # garbage may be NaN, and so 0 times it

    @pl.when(turn == pl.num_programs(1) - 1)
    def _():
        out[...] = (weighted[...] / jnp.maximum(total[...], TINY)).astype(out.dtype)


_passes.__name__ = NAME  # jax 0.11 names a kernel by its function
