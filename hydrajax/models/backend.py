"""Every choice that depends on the backend, each with the figure that justifies it.

The rest of the package calls these functions and does not depend on the backend. A new kernel for a backend belongs
here, behind the function that it replaces, with its measurement. GPU kernels are imported where they are used: Pallas
takes a tenth of the package's import.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterable, Sequence
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Num

from hydrajax.models import platforms
from hydrajax.models.arrays import Array
from hydrajax.models.kernels import few_rows as kernels
from hydrajax.models.per_device import DATA, MODEL, axis_over, mesh_in_use, on_each_device, take_divided


def contract(spec: str, a: Array, b: Array, dtype) -> Array:
    """Return ``einsum(spec, a, b)``, accumulated and returned in ``dtype``.

    Under `jax.default_matmul_precision` ("bfloat16"), float32 inputs (and float32 gradients in the backward pass) are
    rounded to bfloat16 and accumulated in float32. XLA does this itself on accelerators; on a CPU it ignores the
    setting, so the inputs are rounded here. On a CPU with AMX a [4096, 512] by [512, 1536] product then takes 4.5 ms,
    before 25 (jax 0.10, 2 cores).

    On a CPU, bfloat16 inputs with a bfloat16 result are also accumulated in float32: XLA uses AMX for a float32 result
    only. A [128, 2048] by [2048, 11264] product takes 68 ms, before 311 (float32: 182; jax 0.10, one thread).
    """
    if platforms.on_cpu() and jax.config.jax_default_matmul_precision == "bfloat16" and a.dtype == jnp.float32:
        return _rounded_contract(spec, a, b).astype(dtype)
    if platforms.on_cpu() and a.dtype == b.dtype == dtype == jnp.bfloat16:
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
    return to_a, _contract_bfloat16(f"{left},{out}->{right}", a, gradient)


_rounded_contract.defvjp(_rounded_contract_forward, _rounded_contract_backward)


def few_rows(rows: int, *dtypes) -> bool:
    """Return whether `hydrajax.models.kernels.few_rows` computes products with this many rows and these dtypes.

    1.1B parameters in bfloat16, one thread of an Intel Xeon with AMX: XLA, which widens each weight in memory, takes
    603 ms for a token and 1,100 for a verify of 8 nodes, the kernels 139 and 162 (float32: 278 and 328).
    """
    small = 0 < rows <= kernels.MOST_ROWS and all(dtype in kernels.DTYPES for dtype in dtypes)
    return small and platforms.has_cpu_kernels()


def attends_few_rows(queries: Float[Array, "B n_heads T H"]) -> bool:
    """Return whether our own CPU kernel attends from these queries."""
    n_tokens, head_dim = queries.shape[2:]
    fits = head_dim % kernels.LANES == 0 and head_dim <= kernels.LONGEST_HEAD
    return fits and few_rows(n_tokens, queries.dtype)


def tree_kernel(queries: Float[Array, "B n_heads T H"], n_kv: int) -> ModuleType | None:
    """Return the module whose ``attend`` attends from these queries to a cache and a tree; None: XLA's operations do.

    7B, 64 nodes, 2048 tokens, batch 1. GPU: XLA's own program moves 19.2 GB per step in 619 kernels, of which weights
    and filled slots are 14.3 (`experiments/results/gpu_program`). TPU v5e: XLA's attention from one token takes 4.7
    times the cycles of its bytes, by the compiler's estimate (`experiments/results/tpu_program`).
    """
    _, n_heads, n_tokens, head_dim = queries.shape
    if platforms.has_triton():
        from hydrajax.models.kernels import tree_attention

        return tree_attention if tree_attention.fits(n_tokens, head_dim, queries.dtype) else None
    if platforms.has_mosaic():
        from hydrajax.models.kernels import tree_attention_tpu

        lines = n_heads // n_kv * n_tokens
        return tree_attention_tpu if tree_attention_tpu.fits(lines, n_tokens, head_dim, queries.dtype) else None
    return None


def attends_text(queries: Float[Array, "B n_heads T H"]) -> bool:
    """Return whether a library attends within a text: it stores no square of scores and compiles at once.

    7B, a prompt of 8192 tokens on a GPU: XLA's own operations take 356 kernels and 70 seconds of compilation per layer.
    """
    if platforms.on_tpu():
        from hydrajax.models.kernels import text_attention_tpu

        return text_attention_tpu.fits(queries) and platforms.has_mosaic()
    head_dim = queries.shape[3]
    sixteen_bit = queries.dtype in (jnp.bfloat16, jnp.float16)
    return platforms.on_ampere() and sixteen_bit and head_dim % 8 == 0 and head_dim <= 128


def attend_text(queries, keys, values, window: int | None) -> Float[Array, "B T width"]:
    """Compute `hydrajax.models.attention.attend` within a text by cuDNN, or on a TPU by splash attention; ``window`` as
    in `Causal`.
    """
    if platforms.on_tpu():
        from hydrajax.models.kernels import text_attention_tpu

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
    in tiles that are a quarter full. Shifts of lanes took 11% of the cycles of a verify of 8 x 64 nodes of a 7B, a
    product with a permutation takes 2% (v5e, by the compiler's estimate); it is exact, as each sum has one term.
    """
    wide = x.astype(jnp.float32)
    if platforms.on_tpu():
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
    if x.ndim == 3:  # the residual stream, which every device of a mesh has; heads are divided
        rows = P(axis_over(DATA, len(x)))
        return on_each_device(partial(_add_norm, eps=eps), (rows, rows, P()), rows, x, added, scale)
    return _add_norm(x, added, scale, eps)


def _add_norm(x, added, scale, eps: float):
    if platforms.has_triton() and x.size == x.shape[-1]:
        from hydrajax.models.kernels import add_norm as norm_kernel

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

    On a CPU each row costs. Decoding with the shipped model and its draft model (2 cores, float32), relative to plain
    steps: 2 sequences 1.66x with 3 nodes each, 1.69x with 4, 1.51x with 6; 4 sequences 1.39x with 2 nodes, 1.23x with
    4; 8 sequences 1.13x with 2 nodes, 1.03x with 3. Other devices wait for the weights with up to some hundred rows
    (`hydrajax roofline`).
    """
    return 10 if platforms.on_cpu() else 256


def whole_slots(slots: int) -> int:
    """Return the number of slots to allocate for ``slots``: GPU kernels read blocks, and a TPU stores whole tiles.

    A TPU would keep a cache of another number in another order of axes, and lay it out anew before and after each loop.
    """
    block = 1
    if platforms.has_triton() or (platforms.on_ampere() and mesh_in_use() is not None):
        from hydrajax.models.kernels.tree_attention import SLOTS as block
    elif platforms.on_tpu():
        block = TPU_TILE_ROWS
    return -(-slots // block) * block


TPU_TILE_ROWS = 16  # of bfloat16; a multiple of those of float32


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
    if platforms.on_turing() and dtype == jnp.int8 and len(shape) > 1:
        return (*range(1, len(shape)), 0)
    if not platforms.on_tpu() or len(shape) < 3:
        return None
    last = len(shape) - 1
    return (*reversed(range(last)), last)


FUSED_ROWS = 128  # of a fused product on a TPU; with more, XLA copies the parts of the result


def matmul_parts(
    x: Num[Array, "*rows D"], kernel: Num[Array, " D *parts F"], dtype, *, stored: bool = True
) -> Num[Array, "*parts *rows F"]:
    """Return `matmul` of a fused kernel, part by part. On a TPU the kernel is read as `stored_order` stores it.

    On a mesh, a kernel ``[D, 2, F]`` that is divided over F would be gathered to be reshaped, in every step.
    """
    rows, features = x.shape[:-1], kernel.shape[1:]
    if not platforms.on_tpu() and mesh_in_use() is None:
        return parts_first(matmul(x, kernel.reshape(len(kernel), -1), dtype, stored=stored), features)
    heads, flat = "k" * (len(features) - 2), x.reshape(-1, x.shape[-1])
    if platforms.on_tpu() and len(flat) > FUSED_ROWS:
        return _by_section(x, kernel, dtype, stored)
    out = _contract_rows(f"rd,d{heads}pf->{heads}prf", flat, kernel, dtype, stored)
    return out.reshape(*features[:-1], *rows, features[-1])


def _by_section(x, kernel, dtype, stored: bool):
    """Return the products with queries, keys and values, or gate and up, joined for callers that take them apart.

    In a verify of 8 x 64 nodes of a 7B, XLA needs 147,000 cycles a layer to copy gate out of a fused product, and
    118,000 for the heads (v5e, by its estimate). It removes this concatenation, if no reshape follows.
    """
    parts, heads, rows = kernel.shape[-2], "k" * (kernel.ndim - 3), tuple(range(x.ndim - 1))
    products = []
    for section in jnp.split(kernel, [max(0, parts - 2), parts - 1], axis=-2):
        section = jnp.moveaxis(section, -2, 1)
        product = _contract_rows(f"rd,dp{heads}f->rp{heads}f", x.reshape(-1, x.shape[-1]), section, dtype, stored)
        product = product.reshape(*x.shape[:-1], *product.shape[1:])
        last = range(len(rows), product.ndim)  # part, perhaps head, feature
        products.append(product.transpose(*reversed(last[:-1]), *rows, last[-1]))
    return jnp.concatenate(products, axis=len(heads))


def split_heads(qkv: Num[Array, "kv parts B T H"], sizes: Sequence[int]) -> list[Num[Array, "B kv part T H"]]:
    """Return the heads of a fused product in parts of these sizes. A TPU's products are already apart."""
    places = np.cumsum(sizes)[:-1]
    if platforms.on_tpu():
        return [part.transpose(2, 0, 1, 3, 4) for part in jnp.split(qkv, places, axis=1)]
    return jnp.split(qkv.transpose(2, 0, 1, 3, 4), places, axis=2)


def parts_first(product: Num[Array, "*rows F"], features: tuple[int, ...]) -> Num[Array, "*parts *rows f"]:
    """Return a fused kernel's product with the parts, all features but the last, as leading axes."""
    rows, parts = product.ndim - 1, len(features) - 1
    split = product.reshape(*product.shape[:-1], *features)
    return jnp.moveaxis(split, range(rows, rows + parts), range(parts))


def matmul(x: Num[Array, "*rows D"], kernel: Num[Array, "D F"], dtype, *, stored: bool = True) -> Num[Array, "*rows F"]:
    """Return ``x @ kernel``, accumulated and returned in ``dtype``.

    On a CPU without our kernels a single row is multiplied as two half contractions whose results are added. XLA runs
    the two on two cores, while it leaves one core idle for some shapes: [512] by [512, 3072] takes 117 us instead of
    196, and no shape was more than 10% slower (jax 0.10, 2 cores). With more rows this loses up to threefold.

    Args:
        x: Rows.
        kernel: The weight.
        dtype: Of the result and the accumulation.
        stored: The kernel lies in memory as it is (it is not dequantised on the way).
    """
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    flat = x.reshape(rows, width)
    if platforms.on_tpu() and dtype != x.dtype:  # an lm head
        # XLA would lay its weight out anew (262 MB of a 7B), and with several rows compute a draft head's block again
        # for each part of the vocabulary: 1.10M cycles in place of 0.62M and 0.09M (v5e, by the compiler's estimate).
        flat = jax.lax.optimization_barrier(flat)
    if few_rows(rows, x.dtype, kernel.dtype, dtype):
        out = kernels.matmul(flat, kernel, dtype)
    elif platforms.on_cpu() and rows == 1 and width % 2 == 0 and mesh_in_use() is None:
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
    return take_divided(copied if widens and platforms.has_cpu_kernels() else plain, table, index)


def _contract_rows(spec: str, x: Num[Array, "rows D"], weight: Array, dtype, stored: bool = True) -> Array:
    """Apply `contract` to rows of ``x``; ``r`` in the specification.

    cuBLAS cannot multiply a single 16-bit row into a float32 result, so XLA converts the whole weight in every step:
    1.05 GB for the lm head of a 7B model instead of 0.26. A TPU multiplies a single row on the vector unit, in 3.8
    times the cycles that two take on the matrix unit (v5e, by the compiler's estimate). Repeating the row avoids both.
    """
    widened = stored and platforms.platform().name == "gpu" and dtype == jnp.float32 and x.dtype != jnp.float32
    if len(x) == 1 and (widened or platforms.on_tpu()):
        twice = contract(spec, jnp.concatenate([x, x]), weight, dtype)
        return jax.lax.slice_in_dim(twice, 0, 1, axis=spec.partition("->")[2].index("r"))
    return contract(spec, x, weight, dtype)


# XLA's CPU argmax is a scalar loop, its maximum is not, so the argmax is taken over the maxima of chunks and then
# within one chunk. For 64 x 32,000 logits that takes 0.4 ms in place of 5 (jax 0.10).
ARGMAX_CHUNK, ARGMAX_SMALLEST = 128, 1024


def argmax(logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Return the index of the largest number of each row, int32; ties go to the smallest index."""
    size = logits.shape[-1]
    if size < ARGMAX_SMALLEST or size % ARGMAX_CHUNK:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    chunks = logits.reshape(*logits.shape[:-1], size // ARGMAX_CHUNK, ARGMAX_CHUNK)
    chunk = jnp.argmax(jnp.max(chunks, axis=-1), axis=-1)
    inside = jnp.take_along_axis(chunks, chunk[..., None, None], axis=-2)[..., 0, :]
    return (chunk * ARGMAX_CHUNK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def top_k(logits: Float[Array, "*rows V"], k: int) -> Int[Array, "*rows k"]:
    """Return the indices of the k largest numbers in descending order, int32; ties go to the smallest index.

    XLA's selection for GPUs reads a row with one block of threads: 145 us for the 10 best of 32,000 logits (H200, jax
    0.11), 7% of a Hydra++ step of a 7B in its three levels. Here it gets chunks' maxima, and then the k chunks with the
    largest ones. All k best are in these: a number in any other chunk comes after the k maxima.
    """
    size = logits.shape[-1]
    if platforms.platform().name != "gpu" or size % ARGMAX_CHUNK or size < 2 * k * ARGMAX_CHUNK:
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
    if few and platforms.has_triton():
        from hydrajax.models.kernels import append_rows as append_kernel

        if append_kernel.fits(head_dim):
            return append_kernel.append_rows(caches, blocks, chosen, starts)
    if platforms.has_cpu_kernels():
        return kernels.append_rows(caches, blocks, chosen, starts)
    if index is not None:  # by a gather: see openxla/xla#49176
        at = index[:, None, :, None]
        blocks = [jnp.take_along_axis(block, at, axis=2) for block in blocks]
    return [_write_slots(cache, block, starts) for cache, block in zip(caches, blocks, strict=True)]


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

    After 100 MB of weights have passed through the caches, a program's start takes 130 microseconds, and 3 per array.
    SmolLM2 with its cache has 330 arrays (two cores of an AMD EPYC).
    """
    if not (platforms.has_cpu_kernels() and platforms.platform().devices == 1):
        return None
    from hydrajax.models.kernels import call_host

    return call_host


def compiler_options() -> dict[str, str | bool] | None:
    """Return the compiler options of a decode loop for `jax.jit`.

    On a GPU the whole loop becomes one CUDA graph: most of the several hundred kernels of a step move less than a
    megabyte, and launching them one by one would take longer than running them. HYDRAJAX_CUDA_GRAPHS=0 disables it.
    """
    if not platforms.platform().capability or os.environ.get("HYDRAJAX_CUDA_GRAPHS") == "0":
        return None
    options = {"xla_gpu_enable_command_buffer": ",".join(IN_GRAPHS), "xla_gpu_graph_min_graph_size": "1"}
    # XLA would join the keys of cache and tree for a single product: 36 MB per layer of a 7B, with 64 nodes and 2048
    # tokens. Our kernels, which newer GPUs have, read both.
    return options | {"xla_gpu_dot_merger_threshold_mb": "0"} if platforms.on_turing() else options
