"""Attention of long texts, which is computed in pieces, against the plain form with its mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.models import attention, backend
from hydrajax.models.attention import Causal, Filled, KVSegment, SamePosition, attend, attend_plain


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def text_of(n_tokens, window, *, slots=None):
    """Queries, and parts with and without masks: of a text, perhaps behind caches of which each row fills a part."""
    rng = np.random.default_rng(n_tokens)
    queries = normal(rng, 2, 4, n_tokens, 16)
    parts = [KVSegment(normal(rng, 2, 2, n_tokens, 16), normal(rng, 2, 2, n_tokens, 16), Causal(n_tokens, window))]
    if slots:
        lengths = jnp.array([slots, slots // 3], jnp.int32)
        first_seen = None if window is None else lengths[:, None] + jnp.arange(n_tokens) - window + 1
        parts.append(KVSegment(normal(rng, 2, 2, slots, 16), normal(rng, 2, 2, slots, 16), Filled(lengths, first_seen)))
    return queries, parts, [part.with_mask() for part in parts]


def test_a_causal_mask_is_numpys():
    np.testing.assert_array_equal(np.asarray(Causal(5)), np.tri(5, dtype=bool))
    np.testing.assert_array_equal(np.asarray(Causal(5, 2)), np.tri(5, dtype=bool) & ~np.tri(5, k=-2, dtype=bool))


@pytest.mark.parametrize("slots", [None, 200], ids=["text alone", "behind a cache"])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("n_tokens", [300, 700])
def test_pieces_are_the_whole(n_tokens, window, slots, monkeypatch):
    """300 tokens are three stretches of one chunk each; 700 are two stretches, in loops over three chunks each."""
    monkeypatch.setattr(attention, "UNROLLED", 3 if n_tokens == 300 else 2)
    queries, parts, with_masks = text_of(n_tokens, window, slots=slots)
    found = jax.jit(lambda *args: attend(*args))(queries, parts)
    np.testing.assert_allclose(found, attend_plain(queries, with_masks), atol=2e-5)


def test_gradients_of_pieces_are_those_of_the_whole(monkeypatch):
    monkeypatch.setattr(attention, "UNROLLED", 2)
    queries, (part,), (with_mask,) = text_of(700, None)

    def total(how, mask):
        return jax.grad(lambda q, k, v: jnp.sum(how(q, [KVSegment(k, v, mask)]) ** 2), argnums=(0, 1, 2))

    found = total(attend, part.visible)(queries, part.keys, part.values)
    want = total(attend_plain, with_mask.visible)(queries, part.keys, part.values)
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("n_tokens", [9, 300])
def test_guesses_at_every_place_of_a_text_see_their_own_place(n_tokens):
    """Their parts stand before and behind the text's, as EAGLE's training has them."""
    queries, (text,), (masked_text,) = text_of(n_tokens, None)
    rng = np.random.default_rng(0)
    own = [KVSegment(*(normal(rng, 2, 2, n_tokens, 16) for _ in range(2)), SamePosition()) for _ in range(2)]
    found = jax.jit(lambda *args: attend(*args))(queries, [own[0], text, own[1]])
    by_mask = [part._replace(visible=np.eye(n_tokens, dtype=bool)) for part in own]
    np.testing.assert_allclose(found, attend_plain(queries, [masked_text, *by_mask]), atol=2e-5)


def test_a_long_prompt_needs_no_square_of_scores():
    """32,768 tokens: the scores of all would be 4.3 GB a head, and a mask of all 1.1 GB."""
    shape = jax.ShapeDtypeStruct((1, 1, 32768, 16), jnp.float32)
    lowered = jax.jit(lambda q, k, v: attend(q, [KVSegment(k, v, Causal(32768))])).lower(shape, shape, shape)
    assert len(lowered.as_text()) < 1_000_000
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 100_000_000


def test_a_gpu_leaves_long_prompts_to_cudnn(monkeypatch):
    called = []
    monkeypatch.setattr(
        backend, "attend_text", lambda q, k, v, window: called.append(window) or jnp.zeros((1, 300, 256), q.dtype)
    )
    shape = jax.ShapeDtypeStruct((1, 4, 300, 64), jnp.bfloat16)
    with backend.traced_for(backend.Platform("gpu", 1, 9.0)):
        jax.eval_shape(lambda q, k, v: attend(q, [KVSegment(k, v, Causal(300, 50))]), shape, shape, shape)
        jax.eval_shape(lambda q, k, v: attend(q, [KVSegment(k, v, np.ones((300, 300), bool))]), shape, shape, shape)
    assert called == [50]
