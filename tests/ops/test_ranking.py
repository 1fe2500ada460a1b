"""Compare argmax, top-k and sampling over large vocabularies with NumPy, ties included."""

import jax
import numpy as np
import pytest

from hydrajax.ops import best_token, likeliest_tokens, log_probability, sampled_tokens, top_tokens, trace
from hydrajax.ops.xla import ARGMAX_CHUNK


def test_best_token_is_the_first_of_equal_maxima():
    for size in (5, 1000, 1024, 4096, 4096 + ARGMAX_CHUNK, 5000):
        random = np.random.default_rng(size)
        logits = random.integers(0, 40, (3, 7, size)).astype(np.float32)  # many ties, within and between chunks
        logits[0, 0] = 1.0
        logits[0, 1] = -np.inf
        logits[0, 2, -1] = 99.0
        found = jax.jit(best_token)(logits)
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, logits.argmax(axis=-1), err_msg=str(size))
        np.testing.assert_array_equal(top_tokens(logits, 1)[..., 0], found)


@pytest.mark.parametrize("device", [trace.Platform("gpu", 1, 9.0), trace.Platform("tpu", 1)])
def test_top_tokens_of_an_accelerator_are_the_first_of_equal_ones(device):
    """Chunk by chunk, as for GPUs and TPUs, with many ties within and between chunks."""
    for size, k in ((4096, 1), (4096, 16), (5000, 10), (32_000, 10), (32_000, 100)):
        logits = np.random.default_rng(size).integers(0, 40, (3, 2, size)).astype(np.float32)
        logits[0, 0] = 1.0
        logits[0, 1, :-k] = -np.inf
        logits[1, 0, ::ARGMAX_CHUNK] = 50.0  # one in every chunk
        logits[1, 1, 3 * ARGMAX_CHUNK : 3 * ARGMAX_CHUNK + k] = 50.0  # all in one chunk
        with trace.tracing(platform=device):
            found = np.asarray(jax.jit(lambda logits, k=k: top_tokens(logits, k))(logits))
        assert found.dtype == np.int32
        expected = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
        np.testing.assert_array_equal(found, expected, err_msg=f"{size}, {k}")


def test_likeliest_tokens_are_the_first_of_equal_ones_with_their_log_probabilities():
    """By the kernel where there is one: vectors and a rest, whole and broken blocks, ties, and rows with few tokens."""
    for size, k in ((5, 5), (40, 3), (256, 256), (257, 200), (5000, 10), (8192, 4), (12_300, 256), (5000, 300)):
        logits = np.random.default_rng(size).integers(0, 40, (2, 3, size)).astype(np.float32) / 4
        logits[0, 0] = 1.0
        logits[0, 1, 1:-1] = -np.inf
        logits[1, 0] += 1000
        logits[1, 1, size // 2] = 90.0
        tokens, log_p = jax.jit(lambda logits, k=k: likeliest_tokens(logits, k))(logits)
        expected = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
        np.testing.assert_array_equal(tokens, expected, err_msg=f"{size}, {k}")
        wide = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
        wanted = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
        np.testing.assert_allclose(log_p, np.take_along_axis(wanted, expected, -1), rtol=2e-6, atol=2e-6)


def test_a_slice_of_the_best_tokens_does_not_sort_the_vocabulary():
    """If XLA fuses the slice with top-k, a CPU sorts the whole vocabulary, which is a hundred times slower."""

    @jax.jit
    def first_and_others(logits):
        best = top_tokens(logits, 5)
        return best[..., 0], best[..., 1:]

    logits = np.random.default_rng(0).random((1, 16, 4096), np.float32)
    expected = np.argsort(-logits, axis=-1)[..., :5]
    np.testing.assert_array_equal(first_and_others(logits)[1], expected[..., 1:])
    assert " sort(" not in first_and_others.lower(logits).compile().as_text()


def test_log_probabilities_of_likely_tokens_of_large_logits_keep_their_digits():
    logits = np.array([[1000, 992, 980], [-5, -5, -5], [1e-3, 40, 0]], np.float32)
    tokens = np.array([0, 2, 0], np.int32)
    p = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    expected = np.log(p[np.arange(3), tokens] / p.sum(axis=-1))
    found = jax.jit(log_probability)(logits, tokens)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_draws_without_replacement_are_distinct_and_follow_the_distribution():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    keys = jax.random.split(jax.random.key(0), 20_000)
    drawn = np.asarray(sampled_tokens(keys, np.broadcast_to(np.log(p).astype(np.float32), (20_000, 4)), 2))
    assert (drawn[:, 0] != drawn[:, 1]).all()
    np.testing.assert_allclose(np.bincount(drawn[:, 0], minlength=4) / 20_000, p, atol=0.015)
    after_first = drawn[drawn[:, 0] == 0, 1]
    np.testing.assert_allclose(np.bincount(after_first, minlength=4) / len(after_first), [0, 0.6, 0.3, 0.1], atol=0.02)
