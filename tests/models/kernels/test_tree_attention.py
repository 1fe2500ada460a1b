"""Compare the GPU attention kernel, interpreted on the CPU, with NumPy in float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.models.kernels import tree_attention


def normal(rng, *shape):
    return rng.normal(size=shape).astype(jnp.bfloat16)


def exact(queries, block, mask, cache, lengths, first_seen=None):
    """Compute softmax attention over the block and the filled slots, one sequence and head at a time."""
    (batch, n_heads, n_tokens, head_dim), n_kv = queries.shape, block[0].shape[1]
    mask = np.broadcast_to(np.asarray(mask).reshape(-1, n_tokens, n_tokens), (batch, n_tokens, n_tokens))
    out = np.zeros((batch, n_tokens, n_heads, head_dim))
    for b in range(batch):
        seen = np.tile(np.arange(lengths[b]), (n_tokens, 1)) >= (0 if first_seen is None else first_seen[b][:, None])
        visible = np.concatenate([mask[b], seen], axis=1)
        for head in range(n_heads):
            kv = head // (n_heads // n_kv)
            keys, values = (
                np.concatenate([new[b, kv], old[b, kv, : lengths[b]]]).astype(np.float64)
                for new, old in zip(block, cache, strict=True)
            )
            scores = queries[b, head].astype(np.float64) @ keys.T / np.sqrt(head_dim)
            weights = np.where(visible, np.exp(scores - scores.max(axis=1, keepdims=True)), 0)
            out[b, :, head] = weights / weights.sum(axis=1, keepdims=True) @ values
    return out.reshape(batch, n_tokens, -1)


CASES = {  # batch, key-value heads, queries to each, tokens, head_dim, slots, filled slots
    "one token": (2, 2, 1, 1, 64, 128, [128, 37]),
    "one token of grouped heads": (1, 2, 8, 1, 128, 192, [150]),
    "chain": (2, 2, 2, 5, 64, 320, [300, 1]),
    "tree of 64": (1, 1, 1, 64, 128, 320, [299]),
    "several tiles of lines": (1, 1, 4, 48, 64, 256, [200]),
    "empty cache": (2, 1, 2, 20, 64, 128, [0, 64]),
    "one program to each row": (65, 2, 1, 3, 16, 128, [i % 80 for i in range(65)]),
}


@pytest.mark.parametrize("windowed", [False, True], ids=["whole", "window"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.quick(
    "several tiles of lines-window",
    "empty cache-whole",
    "tree of 64-window",
    "chain-window",
    "one token of grouped heads-whole",
    "one token-whole",
    "one program to each row-whole",
)
def test_equals_numpy(case, windowed):
    batch, n_kv, groups, n_tokens, head_dim, slots, lengths = case
    rng = np.random.default_rng(sum(case[:6]))
    queries = 2 * normal(rng, batch, n_kv * groups, n_tokens, head_dim)
    block = tuple(normal(rng, batch, n_kv, n_tokens, head_dim) for _ in range(2))
    cache = tuple(normal(rng, batch, n_kv, slots, head_dim) for _ in range(2))
    for filled, row in zip(lengths, range(batch), strict=True):
        for array in cache:
            array[row, :, filled:] = np.nan  # must not enter the result even as 0 * NaN
    mask = np.tri(n_tokens, dtype=bool) & (rng.random((n_tokens, n_tokens)) < 0.6) | np.eye(n_tokens, dtype=bool)
    lengths, first_seen = np.array(lengths, np.int32), None
    if windowed:  # each query attends to about 50 slots; one window starts before position 0
        first_seen = (lengths[:, None] + np.arange(n_tokens) - 50).astype(np.int32)
        mask = np.broadcast_to(mask, (batch, 1, 1, *mask.shape))
    inputs = queries, block, mask, cache, lengths, first_seen
    found = jax.jit(partial(tree_attention.attend, interpret=True))(*inputs)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), exact(*inputs), atol=0.02)


def test_a_node_is_rounded_like_a_single_token():
    """Otherwise a tree could choose another of two nearly equal tokens than decoding without a tree."""
    rng = np.random.default_rng(0)
    queries, cache = normal(rng, 1, 4, 33, 64), tuple(normal(rng, 1, 2, 512, 64) for _ in range(2))
    block, lengths = tuple(normal(rng, 1, 2, 33, 64) for _ in range(2)), np.array([400], np.int32)
    attend = jax.jit(partial(tree_attention.attend, interpret=True))
    tree = attend(queries, block, np.eye(33, dtype=bool), cache, lengths)
    for node in (0, 17, 32):
        one = tuple(x[:, :, node : node + 1] for x in block)
        alone = attend(queries[:, :, node : node + 1], one, np.ones((1, 1), bool), cache, lengths)
        np.testing.assert_array_equal(alone[:, 0], tree[:, node])


@pytest.mark.parametrize(("pairs", "splits"), [(1, 8), (8, 8), (32, 4), (64, 2), (128, 1), (1000, 1)])
def test_small_batches_are_split_among_more_programs(pairs, splits):
    assert tree_attention.splits_of(pairs) == splits


def test_supported_shapes():
    assert tree_attention.fits(64, 128, jnp.bfloat16)
    assert not tree_attention.fits(64, 128, jnp.float32)
    assert not tree_attention.fits(64, 96, jnp.bfloat16)
    assert not tree_attention.fits(2048, 128, jnp.bfloat16)
