"""Compare the attention kernels of GPUs and TPUs, interpreted on the CPU, with NumPy in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # holds the found races, and is not public
from jax.experimental.pallas import tpu as pltpu

from hydrajax.ops.gpu import tree_attention
from hydrajax.ops.tpu import tree_attention as tree_attention_tpu

TPU = pltpu.InterpretParams(detect_races=True)  # also simulates the copies between memories


def normal(rng, *shape, dtype=jnp.bfloat16):
    return rng.normal(size=shape).astype(dtype)


def exact(queries, block, mask, cache, lengths, first_seen=None, sinks=None):
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
            highest = scores.max(axis=1, keepdims=True)
            weights = np.where(visible, np.exp(scores - highest), 0)
            total = weights.sum(axis=1, keepdims=True) + (0 if sinks is None else np.exp(sinks[head] - highest))
            out[b, :, head] = weights / total @ values
    return out.reshape(batch, n_tokens, -1)


# Cases with a further logit of each head, some of them larger than all scores.
WITH_SINKS = ("one token of grouped heads", "several tiles of lines", "chain", "tree over several blocks")


def sinks_of(queries):
    return (8 * np.random.default_rng(1).normal(size=queries.shape[1])).astype(np.float32)


CASES = {  # batch, key-value heads, queries to each, tokens, head_dim, slots, filled slots
    "one token": (2, 2, 1, 1, 64, 128, [128, 37]),
    "one token of grouped heads": (1, 2, 8, 1, 128, 192, [150]),
    "chain": (2, 2, 2, 5, 64, 320, [300, 1]),
    "tree of 64": (1, 1, 1, 64, 128, 320, [299]),
    "several tiles of lines": (1, 1, 4, 48, 64, 256, [200]),
    "empty cache": (2, 1, 2, 20, 64, 128, [0, 64]),
    "one program to each row": (65, 2, 1, 3, 16, 128, [i % 80 for i in range(65)]),
}


@pytest.mark.quick("several tiles of lines", "empty cache", "one token of grouped heads", "one program to each row")
@pytest.mark.parametrize("case", CASES)
def test_equals_numpy(case):
    inputs = inputs_of(CASES[case], windowed=case in ("several tiles of lines", "chain", "one token"))
    sinks = sinks_of(inputs[0]) if case in WITH_SINKS else None
    found = jax.jit(partial(tree_attention.attend, interpret=True))(*inputs, sinks=sinks)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), exact(*inputs, sinks), atol=0.02)


TPU_CASES = {  # also whether there is a window, and the dtype
    "one token": (2, 2, 1, 1, 64, 128, [128, 37], True, "float32"),
    "one token of grouped heads, several blocks": (1, 2, 8, 1, 128, 1100, [1030], False, "bfloat16"),
    "tree over several blocks": (2, 4, 2, 5, 128, 1200, [1100, 3], True, "float32"),
    "tree of 64": (1, 2, 1, 64, 256, 600, [512], True, "bfloat16"),
    "empty cache": (2, 1, 2, 20, 64, 128, [0, 64], False, "float32"),
}


@pytest.mark.quick("one token of grouped heads, several blocks", "tree over several blocks")
@pytest.mark.parametrize("case", TPU_CASES)
def test_a_tpu_equals_numpy(case):
    *shape, windowed, dtype = TPU_CASES[case]
    inputs = inputs_of(shape, windowed, dtype)
    sinks = sinks_of(inputs[0]) if case in WITH_SINKS else None
    found = jax.jit(partial(tree_attention_tpu.attend, interpret=TPU))(*inputs, sinks=sinks)
    assert found.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float64), exact(*inputs, sinks), atol=0.02 if dtype == "bfloat16" else 5e-6
    )
    assert not interpret_pallas_call.races.races_found


def inputs_of(case, windowed, dtype=jnp.bfloat16):
    """Draw the arguments of a case's attention; slots that are not filled hold NaN."""
    batch, n_kv, groups, n_tokens, head_dim, slots, lengths = case
    rng = np.random.default_rng(sum(case[:6]))
    queries = (2 * normal(rng, batch, n_kv * groups, n_tokens, head_dim)).astype(dtype)
    block = tuple(normal(rng, batch, n_kv, n_tokens, head_dim, dtype=dtype) for _ in range(2))
    cache = tuple(normal(rng, batch, n_kv, slots, head_dim, dtype=dtype) for _ in range(2))
    for filled, row in zip(lengths, range(batch), strict=True):
        for array in cache:
            array[row, :, filled:] = np.nan  # must not enter the result even as 0 * NaN
    mask = np.tri(n_tokens, dtype=bool) & (rng.random((n_tokens, n_tokens)) < 0.6) | np.eye(n_tokens, dtype=bool)
    lengths, first_seen = np.array(lengths, np.int32), None
    if windowed:  # each query attends to about 50 slots; one window starts before position 0
        first_seen = (lengths[:, None] + np.arange(n_tokens) - 50).astype(np.int32)
        mask = np.broadcast_to(mask, (batch, 1, 1, *mask.shape))
    return queries, block, mask, cache, lengths, first_seen


@pytest.mark.parametrize(
    ("kernel", "interpret"), [(tree_attention, True), (tree_attention_tpu, TPU)], ids=["GPU", "TPU"]
)
def test_a_node_is_rounded_like_a_single_token(kernel, interpret):
    """Otherwise a tree could choose another of two nearly equal tokens than decoding without a tree."""
    rng = np.random.default_rng(0)
    queries, cache = normal(rng, 1, 4, 33, 64), tuple(normal(rng, 1, 2, 512, 64) for _ in range(2))
    block, lengths = tuple(normal(rng, 1, 2, 33, 64) for _ in range(2)), np.array([400], np.int32)
    attend = jax.jit(partial(kernel.attend, interpret=interpret))
    tree = attend(queries, block, np.eye(33, dtype=bool), cache, lengths)
    for node in (0, 17, 32):
        one = tuple(x[:, :, node : node + 1] for x in block)
        alone = attend(queries[:, :, node : node + 1], one, np.ones((1, 1), bool), cache, lengths)
        np.testing.assert_array_equal(alone[:, 0], tree[:, node])


def test_supported_shapes():
    assert tree_attention.fits(64, 128, jnp.bfloat16)
    assert not tree_attention.fits(64, 128, jnp.float32)
    assert not tree_attention.fits(64, 96, jnp.bfloat16)
    assert not tree_attention.fits(2048, 128, jnp.bfloat16)
    assert tree_attention_tpu.fits(256, 64, 128, jnp.float32)
    assert not tree_attention_tpu.fits(256, 64, 128, jnp.float16)
    assert not tree_attention_tpu.fits(256, 64, 80, jnp.bfloat16)
    assert not tree_attention_tpu.fits(64 * 71, 64, 64, jnp.bfloat16)
