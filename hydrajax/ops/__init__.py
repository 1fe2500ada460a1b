"""Every operation that depends on the backend.

The rest of the package calls these functions and does not depend on the backend. GPU and TPU kernels are imported where
they are used: Pallas takes a tenth of the package's import.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int, Num

from hydrajax.models.arrays import Array
from hydrajax.ops import trace
from hydrajax.ops.cpu import few_rows as kernels
from hydrajax.ops.sharded import (
    DATA,
    MODEL,
    axis_over,
    by_token,
    on_each_device,
    over_vocabulary,
    shard,
    shards_tokens,
    take_sharded,
)
from hydrajax.ops.trace import mesh_in_use


def contract(spec: str, a: Array, b: Array, dtype) -> Array:
    """Return ``einsum(spec, a, b)``, accumulated and returned in ``dtype``.

    Under `jax.default_matmul_precision` ("bfloat16"), float32 inputs (and float32 gradients in the backward pass) are
    rounded to bfloat16 and accumulated in float32. XLA does this itself on accelerators; on a CPU it ignores the
    setting, so the inputs are rounded here, which AMX needs.

    On a CPU, bfloat16 inputs with a bfloat16 result are also accumulated in float32: XLA uses AMX for a float32 result
    only.
    """
    if trace.on_cpu() and trace.rounds_float32() and a.dtype == jnp.float32:
        return _rounded_contract(spec, a, b).astype(dtype)
    if trace.on_cpu() and a.dtype == b.dtype == dtype == jnp.bfloat16:
        return _contract_bfloat16(spec, a, b).astype(dtype)
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)


def _contract_bfloat16(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded_contract(spec: str, a: Array, b: Array) -> Array:
    return _contract_bfloat16(spec, a, b)


def _rounded_contract_forward(spec: str, a: Array, b: Array):
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)  # stays rounded: half the memory between the two passes
    return _contract_bfloat16(spec, a, b), (a, b)


def _rounded_contract_backward(spec: str, inputs, gradient: Array):
    a, b = inputs
    left, right, out = re.split(",|->", spec)
    gradient = gradient.astype(jnp.bfloat16)
    to_a = _contract_bfloat16(f"{out},{right}->{left}", gradient, b)
    return to_a, _contract_rows_of_both(f"{left},{out}->{right}", a, gradient)


def _contract_rows_of_both(spec: str, a: Array, b: Array) -> Array:
    """Return ``einsum(spec, a, b)`` of bfloat16 inputs in float32, where ``spec`` is a gradient's sum over rows.

    Without batch axes it is written as a product of two matrices: XLA compiles ``rd,rpf->dpf`` to an instruction that
    fails when it runs ("Unsupported element type for DotThunk::Execute", jax 0.10.2 on a CPU without AMX).
    """
    left, right, out = re.split(",|->", spec)
    if set(left) & set(right) & set(out):
        return _contract_bfloat16(spec, a, b)
    rows = "".join(axis for axis in left if axis not in out)
    of_a, of_b = ("".join(axis for axis in axes if axis in out) for axes in (left, right))
    a, b = jnp.einsum(f"{left}->{rows + of_a}", a), jnp.einsum(f"{right}->{rows + of_b}", b)
    shape = (*a.shape[len(rows) :], *b.shape[len(rows) :])
    n_rows = math.prod(a.shape[: len(rows)])
    flat = _contract_bfloat16("rd,rf->df", a.reshape(n_rows, -1), b.reshape(n_rows, -1))
    return jnp.einsum(f"{of_a + of_b}->{out}", flat.reshape(shape))


_rounded_contract.defvjp(_rounded_contract_forward, _rounded_contract_backward)


def few_rows(rows: int, *dtypes) -> bool:
    """Return whether `hydrajax.ops.cpu.few_rows` computes products with this many rows and these dtypes.

    XLA would widen each bfloat16 weight in memory.
    """
    small = 0 < rows <= kernels.MOST_ROWS and all(dtype in kernels.DTYPES for dtype in dtypes)
    return small and trace.has_cpu_kernels()


def matmul(x: Num[Array, "*rows D"], kernel: Num[Array, "D F"], dtype, *, stored: bool = True) -> Num[Array, "*rows F"]:
    """Return ``x @ kernel``, accumulated and returned in ``dtype``.

    On a CPU without our kernels a single row is multiplied as two half contractions whose results are added. XLA runs
    the two on two cores, while it leaves one core idle for some shapes. More rows would be slower in halves.

    Args:
        x: Rows.
        kernel: The weight.
        dtype: Of the result and the accumulation.
        stored: The kernel lies in memory as it is (it is not dequantised on the way).
    """
    if dtype == x.dtype and shards_tokens(x):  # the axis of tokens stays one, to be divided
        return contract("btd,df->btf", x, kernel, dtype)
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    flat = x.reshape(rows, width)
    if trace.on_tpu() and dtype != x.dtype:  # an lm head
        # XLA would relayout its weight, and with several rows compute a draft head's block again for each part of the
        # vocabulary.
        flat = jax.lax.optimization_barrier(flat)
    if few_rows(rows, x.dtype, kernel.dtype, dtype):
        out = kernels.matmul(flat, kernel, dtype)
    elif trace.on_cpu() and rows == 1 and width % 2 == 0 and mesh_in_use() is None:
        halves = x.reshape(2, width // 2), kernel.reshape(2, width // 2, -1)
        out = jnp.einsum("gd,gdf->gf", *halves, preferred_element_type=dtype).sum(axis=0)
    else:
        out = _contract_rows("rd,df->rf", flat, kernel, dtype, stored)
    return out.reshape(*x.shape[:-1], -1)


def matmul_transposed(x: Float[Array, "*rows D"], weight: Float[Array, "F D"], dtype) -> Float[Array, "*rows F"]:
    """Return ``x @ weight.T``, accumulated and returned in ``dtype``: an embedding that is also the lm head.

    XLA's CPU products of a few rows would first transpose the weight, in every step.
    """
    flat = x.reshape(-1, x.shape[-1])
    if few_rows(len(flat), x.dtype, weight.dtype):
        out = kernels.matmul_transposed(flat, weight).astype(dtype)
    else:
        out = _contract_rows("rd,fd->rf", flat, weight, dtype)
    return out.reshape(*x.shape[:-1], -1)


def matmul_float32(x: Float[Array, "*rows D"], kernel: Float[Array, "D F"]) -> Float[Array, "*rows F"]:
    """Return ``x @ kernel`` in float32 without rounding the inputs: the scores of a router, which decide.

    An accelerator would round float32 inputs to TF32 or bfloat16.
    """
    wide = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    if few_rows(len(wide), kernel.dtype):
        out = kernels.matmul(wide, kernel, jnp.float32)
    else:
        out = jnp.matmul(wide, kernel.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return out.reshape(*x.shape[:-1], -1)


def _contract_rows(spec: str, x: Num[Array, "rows D"], weight: Array, dtype, stored: bool = True) -> Array:
    """Apply `contract` to rows of ``x``; ``r`` in the specification.

    cuBLAS cannot multiply a single 16-bit row into a float32 result, so XLA converts the whole weight in every step. A
    TPU multiplies a single row on the slower vector unit. Repeating the row avoids both.
    """
    widened = stored and trace.platform().name == "gpu" and dtype == jnp.float32 and x.dtype != jnp.float32
    if len(x) == 1 and (widened or trace.on_tpu()):
        twice = contract(spec, jnp.concatenate([x, x]), weight, dtype)
        return jax.lax.slice_in_dim(twice, 0, 1, axis=spec.partition("->")[2].index("r"))
    return contract(spec, x, weight, dtype)


def stored_order(shape: tuple[int, ...], dtype, axes: Iterable[str | None] | None = None) -> tuple[int, ...] | None:
    """Return the order of a weight's axes in memory, outermost first, for `jax.experimental.layout`; None: JAX's own.

    A TPU stores the last two axes in tiles of 8 by 128, and a fused kernel ``[D, 2, F]`` as it is declared would be
    laid out anew in every step: 180 MB per layer of a 7B, three times the cycles of its product. With D next to F, it
    is read in place. cuBLAS multiplies int8 where both factors have D as their last axis.

    Kernels of experts, by the logical names ``axes``, have a leading axis, which stays the outermost: each expert's is
    one stretch of memory.
    """
    if next(iter(axes or ()), None) == "experts":
        order = stored_order(shape[1:], dtype)
        return None if order is None else (0, *(axis + 1 for axis in order))
    if trace.on_turing() and dtype == jnp.int8 and len(shape) > 1:
        return (*range(1, len(shape)), 0)
    if not trace.on_tpu() or len(shape) < 3:
        return None
    last = len(shape) - 1
    return (*reversed(range(last)), last)


def trained_order(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return `stored_order` of a fused kernel that is trained: with D last, as the gradient's product writes it.

    XLA would relayout kernel and moments before and after each step.
    """
    if not trace.on_tpu() or len(shape) < 3:
        return None
    last = len(shape) - 1
    return (*reversed(range(1, last)), last, 0)


FUSED_ROWS = 128  # of a fused product on a TPU; with more, XLA copies the parts of the result


def matmul_parts(
    x: Num[Array, "*rows D"],
    kernel: Num[Array, " D *parts F"],
    dtype,
    *,
    stored: bool = True,
    trained: int | None = None,
) -> Num[Array, "*parts *rows F"]:
    """Return `matmul` of a fused kernel, part by part. On a TPU the kernel is read as `stored_order` stores it.

    On a mesh, a kernel ``[D, 2, F]`` that is divided over F would be gathered to be reshaped, in every step.

    ``trained``: the number of features of ``x``, from the first on, that need a gradient; None: all.
    """
    if shards_tokens(x) and jnp.issubdtype(x.dtype, jnp.floating):
        return _with_joint_gradient(functools.partial(_matmul_parts, dtype=dtype, stored=stored), x, kernel, trained)
    return _matmul_parts(x, kernel, dtype, stored)


def _with_joint_gradient(multiply: Callable, x, kernel, trained: int | None):
    """Return ``multiply(x, kernel)``. The gradient of x, or of its first features, is one product with all parts.

    A product for each part would write all features again to add them.
    """

    @jax.custom_vjp
    def product(x, kernel):
        return multiply(x, kernel)

    def backward(kept, gradient):
        x, kernel = kept
        parts = "kp"[4 - kernel.ndim :]
        to_x = contract(f"{parts}btf,d{parts}f->btd", gradient, kernel[:trained], x.dtype)
        to_x = jnp.pad(to_x, ((0, 0), (0, 0), (0, x.shape[-1] - to_x.shape[-1])))
        return to_x, *jax.vjp(functools.partial(multiply, x), kernel)[1](gradient)

    product.defvjp(lambda x, kernel: (product(x, kernel), (x, kernel)), backward)
    return product(x, kernel)


def _matmul_parts(x, kernel, dtype, stored: bool):
    rows, features = x.shape[:-1], kernel.shape[1:]
    if not trace.on_tpu() and mesh_in_use() is None:
        return parts_first(matmul(x, kernel.reshape(len(kernel), -1), dtype, stored=stored), features)
    flat, parts = x.reshape(-1, x.shape[-1]), "kp"[3 - len(features) :]
    if trace.on_tpu() and len(flat) > FUSED_ROWS and parts:
        return _by_section(x, kernel, dtype)
    out = _contract_rows(f"rd,d{parts}f->{parts}rf", flat, kernel, dtype, stored)
    return out.reshape(*features[:-1], *rows, features[-1])


def _by_section(x, kernel, dtype):
    """Return the products with queries, keys and values, or gate and up, joined for callers that take them apart.

    XLA copies gate and heads out of a fused product, but removes this concatenation. With x as one axis of rows it
    would relayout queries' kernels, and without the barrier multiply up within down's kernel, which is slower.
    """
    parts, heads = kernel.shape[-2], "k" * (kernel.ndim - 3)
    rows, shape = "bt"[3 - x.ndim :], x.shape[:-1]
    if heads and len(shape) == 2 and shape[0] == 1 and shape[1] % FUSED_ROWS == 0:  # to XLA this is one axis
        x = x.reshape(-1, FUSED_ROWS, x.shape[-1])
    spec = f"{rows}d,d{heads}pf->{rows[:-1]}{heads}p{rows[-1]}f"
    products = [
        contract(spec, x, section, dtype) for section in jnp.split(kernel, [max(0, parts - 2), parts - 1], axis=-2)
    ]
    if not heads:
        products = jax.lax.optimization_barrier(products)
    if len(rows) == 2:
        products = [jnp.moveaxis(product, 0, -3) for product in products]
    products = [product.reshape(*product.shape[: len(heads) + 1], *shape, product.shape[-1]) for product in products]
    return jnp.concatenate(products, axis=len(heads))


def split_heads(qkv: Num[Array, "kv parts B T H"], sizes: Sequence[int]) -> list[Num[Array, "B kv part T H"]]:
    """Return the heads of a fused product in parts of these sizes. A TPU's products are already apart."""
    places = np.cumsum(sizes)[:-1]
    if trace.on_tpu():
        return [part.transpose(2, 0, 1, 3, 4) for part in jnp.split(qkv, places, axis=1)]
    return jnp.split(qkv.transpose(2, 0, 1, 3, 4), places, axis=2)


def parts_first(product: Num[Array, "*rows F"], features: tuple[int, ...]) -> Num[Array, "*parts *rows f"]:
    """Return a fused kernel's product with the parts, all features but the last, as leading axes."""
    rows, parts = product.ndim - 1, len(features) - 1
    split = product.reshape(*product.shape[:-1], *features)
    return jnp.moveaxis(split, range(rows, rows + parts), range(parts))


def attends_few_rows(queries: Float[Array, "B n_heads T H"]) -> bool:
    """Return whether our own CPU kernel attends from these queries."""
    n_tokens, head_dim = queries.shape[2:]
    fits = head_dim % kernels.LANES == 0 and head_dim <= kernels.LONGEST_HEAD
    return fits and few_rows(n_tokens, queries.dtype)


def tree_kernel(queries: Float[Array, "B n_heads T H"], n_kv: int) -> ModuleType | None:
    """Return the module whose ``attend`` attends from these queries to a cache and a tree; None: XLA's operations do.

    XLA's own programs move far more bytes (`experiments/results/gpu_program`, `experiments/results/tpu_program`).
    """
    _, n_heads, n_tokens, head_dim = queries.shape
    if trace.has_triton():
        from hydrajax.ops.gpu import tree_attention

        return tree_attention if tree_attention.fits(n_tokens, head_dim, queries.dtype) else None
    if trace.has_mosaic():
        from hydrajax.ops.tpu import tree_attention as tree_attention_tpu

        lines = n_heads // n_kv * n_tokens
        return tree_attention_tpu if tree_attention_tpu.fits(lines, n_tokens, head_dim, queries.dtype) else None
    return None


def attends_text(queries: Float[Array, "B n_heads T H"]) -> bool:
    """Return whether a library attends within a text: it stores no square of scores and compiles at once."""
    if trace.on_tpu():
        from hydrajax.ops.tpu import text_attention as text_attention_tpu

        return text_attention_tpu.fits(queries) and trace.has_mosaic()
    head_dim = queries.shape[3]
    sixteen_bit = queries.dtype in (jnp.bfloat16, jnp.float16)
    return trace.on_ampere() and sixteen_bit and head_dim % 8 == 0 and head_dim <= 128


def attend_text(queries, keys, values, window: int | None) -> Float[Array, "B T width"]:
    """Compute `hydrajax.models.attention.attend` within a text by cuDNN, or on a TPU by splash attention; ``window`` as
    in `Causal`.
    """
    if trace.on_tpu():
        from hydrajax.ops.tpu import text_attention as text_attention_tpu

        return text_attention_tpu.attend(queries, keys, values, window)
    by_token = (x.swapaxes(1, 2) for x in (queries, keys, values))
    sizes = None if window is None else (window - 1, 0)
    out = jax.nn.dot_product_attention(*by_token, is_causal=True, local_window_size=sizes, implementation="cudnn")
    return out.reshape(*out.shape[:2], -1)


def rotate_halves(
    x: Float[Array, "*rows H"], cos: Float[Array, "*#rows 1 half"], sin: Float[Array, "*#rows 2 half"]
) -> Float[Array, "*rows H"]:
    """Return ``x * cos + y * sin`` in float32, where y is x with the two halves of its last axis exchanged.

    On CPUs and GPUs the halves are an axis, whose reversal joins the kernel of its neighbours. A TPU would store them
    in tiles that are a quarter full, so it multiplies by a permutation: exact, as each sum has one term, and faster
    than shifts of lanes.
    """
    wide = x.astype(jnp.float32)
    if trace.on_tpu():
        cos, sin = (jnp.broadcast_to(t, (*t.shape[:-2], 2, t.shape[-1])) for t in (cos, sin))
        cos, sin = (t.reshape(*t.shape[:-2], -1) for t in (cos, sin))
        exchange = np.roll(np.eye(x.shape[-1], dtype=x.dtype), x.shape[-1] // 2, axis=1)
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        exchanged = jnp.matmul(x, exchange, precision=precision, preferred_element_type=jnp.float32)
        return wide * cos + exchanged * sin
    halves = wide.reshape(*x.shape[:-1], 2, -1)
    return (halves * cos + jnp.flip(halves, axis=-2) * sin).reshape(x.shape)


def add_norm(
    x: Float[Array, "*rows D"], added: Float[Array, "*rows D"] | None, scale: Float[Array, " D"], eps: float
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """Return ``(sum, sum / rms(sum) * scale)`` of ``x + added``, or of ``x`` alone; statistics in float32."""
    few = x.size <= kernels.MOST_ROWS * x.shape[-1]  # kernels have no other norms
    if x.ndim == 3 and few:  # the residual stream, which every device of a mesh has; heads are divided
        rows = P(axis_over(DATA, len(x)))
        return on_each_device(partial(_add_norm, eps=eps), (rows, rows, P()), rows, x, added, scale)
    x, added = by_token(x), None if added is None else by_token(added)
    total, normed = _add_norm(x, added, scale, eps)
    return by_token(total), by_token(normed)


def _add_norm(x, added, scale, eps: float):
    if trace.has_triton() and x.size == x.shape[-1]:
        from hydrajax.ops.gpu import add_norm as norm_kernel

        rows = x.reshape(-1), None if added is None else added.reshape(-1)
        total, normed = norm_kernel.add_norm(*rows, scale, eps)
        return total.reshape(x.shape), normed.reshape(x.shape)

    def plain(x, scale, *added):
        total = sum(added, x)
        wide = total.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        if scale.dtype != x.dtype:  # Gemma's: multiplied in float32
            return total, (normed * scale).astype(x.dtype)
        return total, normed.astype(x.dtype) * scale

    summands = (x,) if added is None else (x, added)
    if few_rows(x.size // x.shape[-1], x.dtype) and scale.dtype == x.dtype:
        first, *second = (y.reshape(-1, x.shape[-1]) for y in summands)
        total, normed = kernels.add_norm(plain, eps, first, scale, *second)
        return total.reshape(x.shape), normed.reshape(x.shape)
    return plain(x, scale, *summands[1:])


def step_rows() -> int:
    """Return the rows (sequences times nodes) that a speculative step of several sequences should have.

    On a CPU each row costs. Other devices wait for the weights with up to some hundred rows (`hydrajax roofline`).
    """
    return 10 if trace.on_cpu() else 256


def padded_slots(slots: int) -> int:
    """Return the number of slots to allocate for ``slots``: GPU kernels read blocks, and a TPU stores whole tiles.

    A TPU would keep a cache of another number in another order of axes, and lay it out anew before and after each loop.
    """
    block = 1
    if trace.has_triton() or (trace.on_ampere() and mesh_in_use() is not None):
        from hydrajax.ops.gpu.tree_attention import SLOTS as block
    elif trace.on_tpu():
        block = TPU_TILE_ROWS
    return -(-slots // block) * block


TPU_TILE_ROWS = 16  # of bfloat16; a multiple of those of float32


def rows_of_token(tokens: int) -> int:
    """Return how often to feed a pass's only token: on a TPU as often as a tile has rows.

    A single row would be copied into another layout before and after most kernels, and XLA multiplies it slowly
    (`matmul`). Several devices would exchange all rows.
    """
    return TPU_TILE_ROWS if tokens == 1 and trace.on_tpu() and trace.on_one_device() else 1


def take_rows(table: Float[Array, "V D"], index: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
    """Return rows of an embedding; indices outside it are clipped.

    XLA's CPU gather from bfloat16 first widens the whole table.
    """

    def plain(table, index):
        return jnp.take(table, index, axis=0, mode="clip")

    @kernels.with_gradient_of(plain)
    def copied(table, index):
        rows = jnp.clip(index.reshape(1, -1), 0, len(table) - 1)
        room = jnp.zeros((1, 1, rows.size, table.shape[1]), table.dtype)
        (out,) = kernels.append_rows([room], [table[None, None]], rows, jnp.zeros(1, jnp.int32))
        return out.reshape(*index.shape, table.shape[1])

    widens = table.dtype == jnp.bfloat16 and index.size
    look_up = copied if widens and trace.has_cpu_kernels() else plain
    return take_sharded(look_up, table, index, scattered=shards_tokens(index[..., None]))


# XLA's CPU argmax is a scalar loop, its maximum is not, so the argmax is taken over the maxima of chunks and then
# within one chunk.
ARGMAX_CHUNK, ARGMAX_SMALLEST = 128, 1024


def argmax(logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Return the index of the largest number of each row, int32; ties go to the smallest index.

    A TPU's own argmax is faster than that of chunks. The barrier keeps it out of the lm head's product, whose tiles it
    would make smaller.
    """
    size = logits.shape[-1]
    if trace.on_tpu():
        return jnp.argmax(jax.lax.optimization_barrier(logits), axis=-1).astype(jnp.int32)
    if size < ARGMAX_SMALLEST or size % ARGMAX_CHUNK:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    chunks = logits.reshape(*logits.shape[:-1], size // ARGMAX_CHUNK, ARGMAX_CHUNK)
    chunk = jnp.argmax(jnp.max(chunks, axis=-1), axis=-1)
    inside = jnp.take_along_axis(chunks, chunk[..., None, None], axis=-2)[..., 0, :]
    return (chunk * ARGMAX_CHUNK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def top_k(logits: Float[Array, "*rows V"], k: int) -> Int[Array, "*rows k"]:
    """Return the indices of the k largest numbers in descending order, int32; ties go to the smallest index.

    XLA's selection for GPUs reads a row with one block of threads, and for TPUs it sorts whole rows. Here it gets
    chunks' maxima, and then the k chunks with the largest ones. All k best are in these: a number in any other chunk
    comes after the k maxima.
    """
    size = logits.shape[-1]
    if trace.on_cpu() or size % ARGMAX_CHUNK or size < 2 * k * ARGMAX_CHUNK:
        return jax.lax.top_k(logits, k)[1].astype(jnp.int32)
    chunks = logits.reshape(*logits.shape[:-1], size // ARGMAX_CHUNK, ARGMAX_CHUNK)
    best = jnp.sort(jax.lax.top_k(jnp.max(chunks, axis=-1), k)[1], axis=-1)  # in order, for ties
    within = jnp.take_along_axis(chunks, best[..., None], axis=-2)
    places = jax.lax.top_k(within.reshape(*best.shape[:-1], -1), k)[1]
    chunk = jnp.take_along_axis(best, places // ARGMAX_CHUNK, axis=-1)
    return (chunk * ARGMAX_CHUNK + places % ARGMAX_CHUNK).astype(jnp.int32)


FEW_TOKENS = 16  # at most as many as a step accepts


def append_rows(
    caches: Sequence[Num[Array, "B kv S _"]],
    blocks: Sequence[Num[Array, "B kv T _"]],
    index: Int[Array, "B R"] | None,
    starts: Int[Array, " B"],
) -> Sequence[Num[Array, "B kv S _"]]:
    """Write the tokens ``index[b]`` of the blocks, or all of them, into ``caches`` from slot ``starts[b]`` on, in
    place.

    A prompt is written block by block on every backend: a few large writes. Each device of a mesh writes its part.
    """
    rows, heads = axis_over(DATA, len(starts)), axis_over(MODEL, caches[0].shape[1])
    parts, of_rows = P(rows, heads), P(rows)
    return on_each_device(
        _append_rows, (parts, parts, of_rows, of_rows), parts, list(caches), list(blocks), index, starts
    )


def _append_rows(caches, blocks, index, starts):
    batch, _, n_tokens, head_dim = blocks[0].shape
    few = index is not None or n_tokens <= FEW_TOKENS
    chosen = np.broadcast_to(np.arange(n_tokens, dtype=np.int32), (batch, n_tokens)) if index is None else index
    if few and trace.has_triton():
        from hydrajax.ops.gpu import append_rows as append_kernel

        if append_kernel.fits(head_dim):
            return append_kernel.append_rows(caches, blocks, chosen, starts)
    if trace.has_cpu_kernels():
        return kernels.append_rows(caches, blocks, chosen, starts)
    if index is not None:  # by a gather: see openxla/xla#49176
        blocks = [_rows_of(block, index) for block in blocks]
    return [_write_slots(cache, block, starts) for cache, block in zip(caches, blocks, strict=True)]


def _rows_of(block: Num[Array, "B kv T _"], index: Int[Array, "B R"]) -> Num[Array, "B kv R _"]:
    """Return some tokens of a block.

    For a TPU's gather XLA would copy the block of several sequences, 4 MB each for 8 x 64 nodes of a 7B. A product with
    ones and zeros reads it in place; it is exact, as each sum has one term.
    """
    if not (trace.on_tpu() and jnp.issubdtype(block.dtype, jnp.floating)):
        return jnp.take_along_axis(block, index[:, None, :, None], axis=2)
    chosen = jax.nn.one_hot(index, block.shape[2], dtype=block.dtype)
    precision = jax.lax.Precision.HIGHEST if block.dtype == jnp.float32 else None
    return jnp.einsum("brt,bktd->bkrd", chosen, block, precision=precision)


def _write_slots(
    slots: Num[Array, "B kv S H"], rows: Num[Array, "B kv R H"], starts: Int[Array, " B"]
) -> Num[Array, "B kv S H"]:
    """Write ``rows`` into ``slots`` from slot ``starts[b]`` of each sequence on.

    A batch of one is a plain slice update. The batched form becomes a scatter, which is slower on every backend.
    """
    if slots.shape[0] == 1:
        return jax.lax.dynamic_update_slice(slots, rows, (0, 0, starts[0], 0))
    update = jax.vmap(lambda s, r, at: jax.lax.dynamic_update_slice(s, r, (0, at, 0)))
    return update(slots, rows, starts)


# XLA's default and the last two.
IN_GRAPHS = ("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "CONDITIONAL", "WHILE")


def host_calls() -> ModuleType | None:
    """Return the module whose ``call_host`` calls Python within a program; None: programs return to Python instead.

    The start of a program takes time for each of its arrays.
    """
    if not (trace.has_cpu_kernels() and trace.platform().devices == 1):
        return None
    from hydrajax.ops.cpu import call_host

    return call_host


def compiler_options() -> dict[str, str | bool] | None:
    """Return the compiler options of a decode loop for `jax.jit`.

    On a GPU the whole loop becomes one CUDA graph: most of the several hundred kernels of a step move less than a
    megabyte, and launching them one by one would take longer than running them. HYDRAJAX_CUDA_GRAPHS=0 disables it.

    On a TPU a product's kernel gets 32 MB of vector memory in place of 16, for larger tiles of the weight. With more,
    less is left to fetch the next weights into, which is most of what several devices gain: their programs keep 16. A
    limit in LIBTPU_INIT_ARGS has precedence.
    """
    if trace.on_tpu():
        sets = trace.platform().sets_vector_memory and trace.platform().devices == 1
        return {trace.TPU_VECTOR_MEMORY: "32768"} if sets else None
    if not trace.platform().capability or not trace.platform().cuda_graphs:
        return None
    options = {"xla_gpu_enable_command_buffer": ",".join(IN_GRAPHS), "xla_gpu_graph_min_graph_size": "1"}
    # XLA would join the keys of cache and tree for a single product: 36 MB per layer of a 7B, with 64 nodes and 2048
    # tokens. Our kernels, which newer GPUs have, read both.
    return options | {"xla_gpu_dot_merger_threshold_mb": "0"} if trace.on_turing() else options


def best_token(logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Return the argmax over the vocabulary, int32; ties go to the smallest id."""
    return top_tokens(logits, 1)[..., 0]


def top_tokens(logits: Float[Array, "*rows V"], k: int) -> Int[Array, "*rows k"]:
    """Return the k best tokens in descending order, int32; ties go to the smallest id."""
    return over_vocabulary(_top, logits, k)


def _top(logits: Float[Array, "*rows V"], k: int) -> Int[Array, "*rows k"]:
    if k == 1:
        return argmax(logits)[..., None]
    # The barrier keeps XLA from moving a caller's slice into the selection: its CPU compiler would then sort the whole
    # vocabulary, a hundred times slower.
    return jax.lax.optimization_barrier(top_k(logits, k))


def log_probability(logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return the natural log-probability of a token, float32."""
    return log_probabilities(logits, tokens[..., None])[..., 0]


def log_probabilities(logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows k"]) -> Float[Array, "*rows k"]:
    """Return the natural log-probabilities of some tokens, float32, at most 0."""
    # From differences to the largest logit, so that small log-probabilities keep their digits.
    logits = logits.astype(jnp.float32)
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens, axis=-1)
    return chosen - jnp.log(jnp.sum(jnp.exp(logits), axis=-1, keepdims=True))


def sampled_tokens(keys: Array, logits: Float[Array, "B *n V"], k: int) -> Int[Array, "B *n k"]:
    """Draw k tokens without replacement, in order, int32; each sequence from its own key ``[B]``.

    The k largest logits with Gumbel noise are such a draw (Kool et al. 2019).
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return top_tokens(logits + noise, k)


def over_rows(number: float | Array, like: Float[Array, "B ..."]) -> Array:
    """Return a number, or one per sequence ``[B]``, in a shape that broadcasts against ``like``, float32."""
    number = jnp.asarray(number, jnp.float32)
    return number.reshape(-1, *(1,) * (like.ndim - 1)) if number.ndim else number


def drop(
    x: Float[Array, "*rows D"], rate: float, rng: Array | None, division: Callable[[Array], Array] | None = None
) -> Float[Array, "*rows D"]:
    """Apply inverted dropout, which keeps every element's expectation; without a key, return ``x`` as it is.

    Args:
        x: The activations.
        rate: The share of elements to drop.
        rng: The key, on which alone the mask depends.
        division: How devices divide ``x`` (`hydrajax.ops.sharded`); None: each has all of it.
    """
    x = x if division is None else division(x)
    if rng is None or rate == 0:
        return x
    keep = jax.random.bernoulli(rng, 1 - rate, x.shape)
    if trace.on_tpu() and x.ndim == 3:
        # A byte for each element is little where the devices divide them, and read at once.
        keep = jax.lax.optimization_barrier(division(keep)) if division and shards_tokens(x) else _stored(keep)
    dropped = jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
    return dropped if division is None else division(dropped)


def _stored(keep: Bool[Array, "B T D"]) -> Bool[Array, "B T D"]:
    """Return the mask as read from memory, a bit for each element, of which every device of a mesh draws a part.

    Otherwise each device draws all of it, in every kernel that reads a product's input.
    """
    drawn = jnp.packbits(shard(keep, DATA, None, MODEL), axis=1)
    bits = jax.lax.optimization_barrier(shard(drawn, DATA))
    return jnp.unpackbits(bits, axis=1, count=keep.shape[1]).astype(bool)
