"""Compare the kernels of a GPU or a TPU with NumPy on this device, once before the first program that uses them.

A kernel has its own compiler, and devices and versions vary. A wrong kernel would silently change generated text,
which is worth two seconds at the start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax import plugins
from hydrajax.ops.gpu import experts as experts_gpu
from hydrajax.ops.gpu import tree_attention
from hydrajax.ops.gpu.add_norm import add_norm
from hydrajax.ops.gpu.append_rows import append_rows
from hydrajax.ops.tpu import text_attention as text_attention_tpu
from hydrajax.ops.tpu import tree_attention as tree_attention_tpu

# For sums of numbers near 1: bfloat16 has 8 bits, and both sides round several times.
TOLERANCE = 0.05


def disagreement(device: str, interpret: bool = False) -> str | None:
    """Return a short description of the disagreement on this device, "GPU" or "TPU", or None.

    May be called while a program is traced: the checks run in a thread of their own, which traces nothing.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_disagreement, device, interpret).result()


def _disagreement(device: str, interpret: bool) -> str | None:
    kernels = tree_attention_tpu if device == "TPU" else tree_attention
    checks = {"attention": functools.partial(_attention, kernels.attend)}
    if device == "GPU":
        checks |= {"appending to caches": _appending, "a row's norm": _norm, "experts": _experts}
    else:
        checks |= {"a prompt's attention": _text}
    for name in plugins.Group("device_checks"):
        checks |= plugins.find("device_checks", name)[device]
    for name, check in checks.items():
        try:
            difference = float(check(interpret))
        except Exception as error:  # anything that a compiler or driver may raise
            return f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if not difference < TOLERANCE:
            return f"{name}: differs by {difference:.3g}"
    return None


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(jnp.bfloat16)


def _attention(attend: Callable, interpret: bool):
    """Check a tree of grouped heads with a window and sinks, and one token; sequences of different lengths in several
    programs.
    """
    worst = 0.0
    for n_tokens, head_dim, window in ((5, 64, 70), (1, 128, None)):
        queries, block = _normal(2, 4, n_tokens, head_dim), _normal(2, 2, n_tokens, head_dim)
        cache, lengths = _normal(2, 2, 384, head_dim), np.array([3, 300], np.int32)
        mask = np.tri(n_tokens, dtype=bool) & (np.arange(n_tokens) != 1) | np.eye(n_tokens, dtype=bool)
        oldest = lengths[:, None] + np.arange(n_tokens, dtype=np.int32) - (window or 384)
        # With negated keys as values, no segment can be mistaken for another unnoticed.
        args = queries, (block, -block), mask, (cache, -cache), lengths, oldest if window else None
        sinks = np.arange(4, dtype=np.float32) if window else None
        got = jax.jit(functools.partial(attend, interpret=interpret))(*args, sinks=sinks)

        keys = np.concatenate([block, cache], axis=2).astype(np.float32).repeat(2, axis=1)
        filled = np.arange(384) < lengths[:, None, None]
        seen = np.stack([mask, mask]), filled & (np.arange(384) >= oldest[..., None])
        scores = queries.astype(np.float32) @ keys.swapaxes(2, 3) / np.sqrt(head_dim)
        weights = np.where(np.concatenate(seen, axis=2)[:, None], np.exp(scores), 0.0)
        total = weights.sum(axis=-1, keepdims=True) + (0 if sinks is None else np.exp(sinks)[:, None, None])
        want = weights / total @ -keys
        worst = max(worst, np.max(np.abs(got - want.swapaxes(1, 2).reshape(got.shape))))
    return worst


def _text(interpret: bool):
    """Check a text of several blocks with grouped heads and a window."""
    queries, keys = _normal(1, 2, 600, 64), _normal(1, 1, 600, 64)
    call = functools.partial(text_attention_tpu.attend, window=200, interpret=interpret)
    got = jax.jit(call)(queries, keys, -keys)
    distance = np.arange(600)[:, None] - np.arange(600)
    wide = keys.astype(np.float32).repeat(2, axis=1)
    scores = queries.astype(np.float32) @ wide.swapaxes(2, 3) / np.sqrt(64)
    weights = np.where((distance >= 0) & (distance < 200), np.exp(scores), 0.0)
    want = weights / weights.sum(axis=-1, keepdims=True) @ -wide
    return np.max(np.abs(got - want.swapaxes(1, 2).reshape(got.shape)))


def _appending(interpret: bool):
    caches, blocks = [_normal(2, 2, 64, 64), -_normal(2, 2, 64, 64)], [_normal(2, 2, 5, 64), -_normal(2, 2, 5, 64)]
    index, starts = np.array([[0, 3, 4], [0, 1, 1]], np.int32), np.array([7, 61], np.int32)
    got = jax.jit(lambda *args: append_rows(*args, interpret=interpret))(caches, blocks, index, starts)
    for want, block in zip(caches, blocks, strict=True):
        for row, (places, start) in enumerate(zip(index, starts, strict=True)):
            want[row, :, start : start + 3] = block[row][:, places]
    return max(jnp.max(jnp.abs(one - other.astype(np.float32))) for one, other in zip(got, caches, strict=True))


def _experts(interpret: bool):
    """Check two blocks of two experts; the third is not in use."""
    random, x = np.random.default_rng(0), _normal(5, 128)
    rows, experts = random.integers(0, 5, (3, experts_gpu.LEAST), np.int32), np.array([2, 0, 3], np.int32)
    weight = (0.1 * random.normal(size=(3, 128, 64))).astype(jnp.bfloat16)
    call = functools.partial(experts_gpu.matmul, scale=None, dtype=jnp.float32, interpret=interpret)
    got = jax.jit(call)(x, rows, experts, weight)[:2]
    return np.max(np.abs(got - x.astype(np.float32)[rows[:2]] @ weight.astype(np.float32)[experts[:2]]))


def _norm(interpret: bool):
    x, scale = _normal(5120), np.ones(5120, jnp.bfloat16)
    added = (-3 * x.astype(np.float32)).astype(x.dtype)  # ml_dtypes 0.5.0 multiplies bfloat16 by numbers to float32
    got = jax.jit(functools.partial(add_norm, eps=1e-5, interpret=interpret))(x, added, scale)
    total = -2 * x.astype(np.float32)
    want = total, total / np.sqrt(np.mean(total * total) + 1e-5)
    return max(jnp.max(jnp.abs(one - other)) for one, other in zip(got, want, strict=True))
