"""Attention to keys and values in fewer bits, and caches of them, compared with NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.numpy_attention import exact_attention
from hydrajax.models.attention import Causal, Filled, KVSegment, attend, attend_plain
from hydrajax.models.cache import KVCache, append, cut_caches, init_cache
from hydrajax.models.kv_vectors import KV_CACHES, Int8Vectors, rounded
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.ops import trace

BATCH, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 16
LENGTHS = np.array([40, 7, 0])


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("dtype", "kv_cache", "tokens", "window"),
    [
        ("float32", "int8", 5, None),
        ("float32", "int8", 150, 9),
        ("bfloat16", "int8", 150, None),
        ("bfloat16", "bfloat16", 5, 9),
        pytest.param("float32", "bfloat16", 150, None, marks=pytest.mark.slow),
        pytest.param("bfloat16", "int8", 5, 9, marks=pytest.mark.slow),
    ],
)
def test_attention_equals_numpy(dtype, kv_cache, tokens, window):
    """Two segments, sequences of different lengths, two query heads per key-value head."""
    queries = jnp.asarray(3 * numbers(0, BATCH, HEADS, tokens, HEAD_DIM), dtype)
    sizes = (tokens, tokens, 48, 48)
    stored = [
        rounded(jnp.asarray(numbers(i, BATCH, KV_HEADS, size, HEAD_DIM), dtype), kv_cache)
        for i, size in enumerate(sizes)
    ]
    first_seen = None if window is None else LENGTHS[:, None] + np.arange(tokens) - window + 1
    parts = [KVSegment(*stored[:2], Causal(tokens, window)), KVSegment(*stored[2:], Filled(LENGTHS, first_seen))]
    want = exact_attention(queries, parts)
    tolerance = {"atol": 1e-5} if dtype == "float32" else {"atol": 0.02, "rtol": 0.01}
    for how in (attend, attend_plain):
        found = jax.jit(lambda queries, parts, how=how: how(queries, parts))(queries, parts)
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), want, **tolerance)


def test_a_vector_of_8_bits_is_within_half_a_step():
    vectors = numbers(0, 2, 2, 50, 64) * np.logspace(-6, 6, 50, dtype=np.float32)[:, None]
    vectors[0, 0, 0] = 0
    found = Int8Vectors.of(vectors)
    steps = np.abs(vectors).max(axis=-1, keepdims=True) / 127
    np.testing.assert_allclose(found.scales, steps, rtol=1e-6)
    assert (np.abs(found.widened(jnp.float32) - vectors) <= steps * 0.50001).all()
    assert np.abs(np.asarray(found.codes)).max() == 127
    assert not np.asarray(found.widened(jnp.float32)[0, 0, 0]).any()


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_chosen_tokens_are_written_after_each_sequence(kv_cache):
    config = LlamaConfig(97, 64, 64, n_layers=2, n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    blocks = [
        tuple(rounded(jnp.asarray(numbers(2 * layer + i, BATCH, KV_HEADS, 6, HEAD_DIM)), kv_cache) for i in (0, 1))
        for layer in range(2)
    ]
    starts, index = np.array([0, 3, 9], np.int32), np.array([[0, 2, 5], [1, 3, 4], [5, 0, 0]], np.int32)
    cache = KVCache(init_cache(config, BATCH, 12, jnp.float32, kv_cache).layers, jnp.asarray(starts))
    cache = jax.jit(lambda cache: append(cache, tuple(blocks), jnp.array([3, 2, 1]), index=index))(cache)
    assert cache.lengths.tolist() == [3, 5, 10]
    assert cut_caches(cache, jnp.full(BATCH, 4)).lengths.tolist() == [3, 4, 4]
    for block, layer in zip(blocks, cache.layers, strict=True):
        for fed, found in zip(jax.tree.leaves(block), jax.tree.leaves(layer), strict=True):
            want = np.zeros(found.shape, found.dtype)
            for row, start in enumerate(starts):
                want[row, :, start : start + 3] = np.asarray(fed)[row][:, index[row]]
            np.testing.assert_array_equal(found, want)


def test_the_cpu_kernel_reads_every_type():
    if not trace.has_cpu_kernels():
        pytest.skip("the CPU kernels were not built, or several devices")
    keys = jnp.ones((1, 1, 4, HEAD_DIM))
    for kv_cache in KV_CACHES:
        part = KVSegment(rounded(keys, kv_cache), rounded(keys, kv_cache), Causal(4))
        assert "hydrajax_attend" in jax.jit(lambda x, part=part: attend(x, [part])).lower(keys).as_text()
