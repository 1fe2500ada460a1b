"""Recurrences over texts and trees against one token after the other in float64; families compare with transformers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import lab
from hydrajax.bench.random_models import random_base
from hydrajax.models.attention import Documents, causal_mask
from hydrajax.models.llama_config import LayerKind
from hydrajax.models.packed_forward import run_base
from hydrajax.models.recurrence import CHUNK, Text, Tokens, convolve, order_of, run, stored
from hydrajax.models.recurrent_cache import RecurrentCache
from hydrajax.models.recurrent_settings import GatedDelta, Mamba2, ShortConv

BATCH, HEADS, PER_KEY, KEY, VALUE, CHANNELS, KERNEL = 2, 2, 2, 5, 3, 4, 4
DELTA, SSD = True, False
NODES = 24
TOLERANCE = 2e-6


class Given(NamedTuple):
    """Random tokens of two sequences in float64: what a recurrence and a convolution read, and the cache before."""

    tokens: Tokens
    inputs: np.ndarray
    weights: np.ndarray
    state: np.ndarray
    earlier: np.ndarray

    @classmethod
    def random(cls, n_tokens: int, delta: bool, key: int = KEY) -> "Given":
        random = np.random.default_rng(n_tokens)
        queries, keys = random.standard_normal((2, BATCH, HEADS, n_tokens, key))
        keys = keys + 2 * random.standard_normal((BATCH, HEADS, 1, key))  # alike, so that writes depend on each other
        keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
        values = random.standard_normal((BATCH, HEADS, PER_KEY, n_tokens, VALUE))
        log_decay = -(random.uniform(0, 2, (BATCH, HEADS, PER_KEY, n_tokens)) ** 3)
        beta = random.uniform(0, 2, log_decay.shape) if delta else None
        inputs = random.standard_normal((BATCH, HEADS, n_tokens, CHANNELS))
        weights = random.standard_normal((HEADS, CHANNELS, KERNEL))
        state = random.standard_normal((BATCH, HEADS * PER_KEY, VALUE, key))
        earlier = random.standard_normal((BATCH, HEADS, KERNEL - 1, CHANNELS))
        return cls(Tokens(queries, keys, values, log_decay, beta), inputs, weights, state, earlier)

    def along(self, row: int, path: list[int], fresh: bool):
        """Return outputs ``[heads, r, v]`` and convolution of a path's last token, and state and inputs after it."""
        queries, keys, values, log_decay, beta = self.tokens
        state = self.state[row].reshape(HEADS, PER_KEY, VALUE, -1) * (not fresh)
        window = self.earlier[row] * (not fresh)
        for t in path:
            key = keys[row, :, None, t]
            state = state * np.exp(log_decay[row, :, :, t])[..., None, None]
            write = values[row, :, :, t]
            if beta is not None:
                write = beta[row, :, :, t, None] * (write - np.einsum("grvk,gxk->grv", state, key))
            state = state + write[..., None] * key[..., None, :]
            window = np.concatenate([window, self.inputs[row, :, t : t + 1]], axis=1)[:, -KERNEL:]
        output = np.einsum("grvk,gk->grv", state, queries[row, :, path[-1]]) if path else None
        mixed = np.einsum("gtc,gct->gc", window, self.weights) if path else None
        return output, mixed, state.reshape(HEADS * PER_KEY, VALUE, -1), window[:, -(KERNEL - 1) :]


def ours(given: Given, mask, positions):
    """Return outputs, convolution and the block of these tokens."""

    @jax.jit
    def passed(given, mask, positions):
        order = order_of(mask, positions)
        past = RecurrentCache(given.earlier, given.state)
        outputs, kept = run(given.tokens, order, past.state)
        block = stored(given.inputs, past, order, kept)
        return outputs, convolve(given.inputs, past.inputs, given.weights, order), block

    single = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), given)
    return passed(single, mask, positions), RecurrentCache(single.earlier, single.state)


def check(found, expected, what) -> None:
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * max(1, np.abs(expected).max()), err_msg=str(what))


@pytest.mark.parametrize("delta", [DELTA, SSD])
@pytest.mark.parametrize("n_tokens", [1, 7, CHUNK + 9])
def test_a_text_is_its_tokens_one_after_the_other(n_tokens: int, delta: bool):
    given = Given.random(n_tokens, delta)
    # The first text is padded and continues an earlier one, the second begins.
    lengths, starts = np.array([n_tokens - n_tokens // 3, n_tokens]), np.array([5, 0])
    positions = starts[:, None] + np.arange(n_tokens)
    (outputs, mixed, block), past = ours(given, causal_mask(n_tokens, jnp.asarray(lengths)), positions)
    after = past.after(block, jnp.asarray(lengths), None)
    for row in range(BATCH):
        for t in range(lengths[row]):
            output, window, state, inputs = given.along(row, [*range(t + 1)], fresh=starts[row] == 0)
            check(outputs[row, :, :, t], output, (row, t))
            check(mixed[row, :, t], window, (row, t))
        check(after.state[row], state, row)
        known = min(KERNEL - 1, starts[row] + lengths[row])
        check(after.inputs[row, :, -known:], inputs[:, -known:], row)


@pytest.mark.parametrize("delta", [DELTA, SSD])
def test_documents_of_a_row_begin_anew(delta: bool):
    sizes = [[CHUNK - 3, 20, 17], [2, 40, CHUNK - 8]]
    n_tokens = sum(sizes[0])
    given = Given.random(n_tokens, delta)
    positions = np.array([np.concatenate([np.arange(size) for size in row]) for row in sizes])
    (outputs, mixed, _), _ = ours(given, Documents(jnp.zeros((BATCH, 1, 1, n_tokens, n_tokens), bool)), positions)
    for row, documents in enumerate(sizes):
        for end in np.cumsum(documents):
            path = [*range(end - 1 - positions[row, end - 1], end)]
            output, window, _, _ = given.along(row, path, fresh=True)
            check(outputs[row, :, :, end - 1], output, (row, end))
            check(mixed[row, :, end - 1], window, (row, end))


@pytest.mark.parametrize("delta", [DELTA, SSD])
@pytest.mark.parametrize(("by_row", "key"), [(False, KEY), (True, KEY), (False, 16), (True, 32)])
def test_a_tree_is_its_paths_and_a_commit_is_the_accepted_one(delta: bool, by_row: bool, key: int):
    """By XLA's matmuls, and for keys of whole vectors by the CPU's kernels."""
    given = Given.random(NODES, delta, key)
    paths = [random_paths(seed) for seed in (1, 2 if by_row else 1)]
    masks = np.array([[[j in path for j in range(NODES)] for path in of_tree] for of_tree in paths])
    mask = masks[:, None, None] if by_row else masks[0]
    positions = 9 + masks.sum(-1) - 1
    (outputs, mixed, block), past = ours(given, mask, positions)
    for row in range(BATCH):
        for node in range(NODES):
            output, window, _, _ = given.along(row, paths[row][node], fresh=False)
            check(outputs[row, :, :, node], output, (row, node))
            check(mixed[row, :, node], window, (row, node))
    longest = max(len(path) for of_tree in paths for path in of_tree)
    deep = [max(of_tree, key=len) for of_tree in paths]
    index = np.array([path + [0] * (longest - len(path)) for path in deep])  # what follows a path is arbitrary
    for counts in ([len(deep[0]), 1], [0, len(deep[1]) - 1], [2, 0]):
        after = jax.jit(RecurrentCache.after)(past, block, jnp.asarray(counts), index)
        for row, count in enumerate(counts):
            _, _, state, inputs = given.along(row, deep[row][:count], fresh=False)
            check(after.state[row], state, (row, count))
            check(after.inputs[row], inputs, (row, count))


def random_paths(seed: int) -> list[list[int]]:
    """Return the path to each node of a random tree, deep and not in order of depth."""
    random, paths = np.random.default_rng(seed), [[0]]
    for node in range(1, NODES):
        paths.append([*paths[random.integers(max(0, node - 5), node)], node])
    return paths


@pytest.mark.slow
def test_packed_documents_train_as_alone():
    """Hidden states and gradients of a base with all kinds of layers."""
    kinds = (GatedDelta(4, 2, 4, 8, 8), Mamba2(3, 2, 4, 8, 6), ShortConv(3, lab.WIDTH), None)
    layers = tuple(LayerKind(None, None if kind else 1e4, recurrent=kind) for kind in kinds)
    model, params = random_base(lab.CONFIG.replace(n_layers=4, layer_kinds=layers))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, lab.VOCAB, (2, 12)))

    def loss(params, tokens, segments=None):
        hidden = run_base(model, params, tokens, segments=segments).hidden
        return jnp.sum(hidden**2 * jnp.cos(jnp.arange(hidden.shape[-1]))), hidden

    gradient = lab.quick_jit(jax.grad(loss, has_aux=True))
    packed, hidden = gradient(params, tokens.reshape(1, 24), jnp.repeat(jnp.array([1, 2]), 12)[None])
    alone, rows = gradient(params, tokens)
    np.testing.assert_allclose(hidden.reshape(rows.shape), rows, atol=1e-4)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(packed), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(leaf, other, atol=2e-4 * max(1, np.abs(other).max()), err_msg=str(path))
        assert np.abs(leaf).max() > 0 or path[0].key == "lm_head", path


def test_a_text_cut_to_nothing_leaves_no_trace():
    given = Given.random(2, DELTA)
    (_, _, block), past = ours(given, causal_mask(2, jnp.array([1, 2])), np.array([[0, 1], [0, 1]]))
    after = past.after(block, jnp.array([1, 2]), None)
    assert not np.asarray(after.inputs[0, :, :-1]).any()
    assert not np.asarray(after.inputs[1, :, :-2]).any()
    assert isinstance(order_of(causal_mask(2), np.zeros((1, 2), int)), Text)
