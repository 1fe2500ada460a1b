"""Compare chunked attention over long sequences with the plain form and its mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.numpy_attention import exact_attention
from hydrajax.models import attention
from hydrajax.models.attention import Causal, Filled, KVSegment, SamePosition, attend, attend_plain
from hydrajax.ops import trace
from hydrajax.ops.gpu import backend as gpu


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def text_of(n_tokens, window, *, slots=None):
    """Return queries and KV segments with and without masks, for a sequence and optionally a partly filled cache."""
    rng = np.random.default_rng(n_tokens)
    queries = normal(rng, 2, 4, n_tokens, 16)
    parts = [KVSegment(normal(rng, 2, 2, n_tokens, 16), normal(rng, 2, 2, n_tokens, 16), Causal(n_tokens, window))]
    if slots:
        lengths = jnp.array([slots, slots // 3], jnp.int32)
        first_seen = None if window is None else lengths[:, None] + jnp.arange(n_tokens) - window + 1
        parts.append(KVSegment(normal(rng, 2, 2, slots, 16), normal(rng, 2, 2, slots, 16), Filled(lengths, first_seen)))
    return queries, parts, [part.with_mask() for part in parts]


plain_attention = jax.jit(lambda *args: attend_plain(*args))


def test_causal_mask_equals_numpy():
    np.testing.assert_array_equal(np.asarray(Causal(5)), np.tri(5, dtype=bool))
    np.testing.assert_array_equal(np.asarray(Causal(5, 2)), np.tri(5, dtype=bool) & ~np.tri(5, k=-2, dtype=bool))


@pytest.mark.parametrize(("n_tokens", "window", "slots"), [(300, 70, 200), (700, 70, 200), (700, None, None)])
def test_chunks_equal_plain_attention(n_tokens, window, slots, monkeypatch):
    """300 tokens give three sections of one chunk each; 700 tokens give two sections that loop over three chunks."""
    monkeypatch.setattr(attention, "UNROLLED_SECTIONS", 3 if n_tokens == 300 else 2)
    queries, parts, with_masks = text_of(n_tokens, window, slots=slots)
    found = jax.jit(lambda *args: attend(*args))(queries, parts)
    np.testing.assert_allclose(found, plain_attention(queries, with_masks), atol=2e-5)


@pytest.mark.parametrize(("cap", "sinks"), [(1.5, None), (None, np.float32([-3, 0, 2, 9])), (1.5, np.ones(4))])
def test_a_cap_of_scores_and_sinks_in_chunks_and_of_a_few_rows(cap, sinks):
    """``cap * tanh(score / cap)``, the mask, then the softmax with the sink as one more score, in NumPy."""
    for n_tokens in (5, 300):
        queries, parts, _ = text_of(n_tokens, None, slots=40)
        found = jax.jit(lambda *args: attend(*args, cap, sinks))(queries, parts)
        np.testing.assert_allclose(found, exact_attention(queries, parts, cap, sinks), atol=2e-5)
        assert np.abs(found - jax.jit(lambda *args: attend(*args))(queries, parts)).max() > 1e-2


def test_gradients_of_chunks_equal_those_of_plain_attention(monkeypatch):
    monkeypatch.setattr(attention, "UNROLLED_SECTIONS", 2)
    queries, (part,), (with_mask,) = text_of(700, None)

    def total(how, mask):
        return jax.jit(jax.grad(lambda q, k, v: jnp.sum(how(q, [KVSegment(k, v, mask)]) ** 2), argnums=(0, 1, 2)))

    found = total(attend, part.visible)(queries, part.keys, part.values)
    want = total(attend_plain, with_mask.visible)(queries, part.keys, part.values)
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)


def test_segments_visible_at_their_own_position_only():
    """Such segments can precede and follow the causal one, as in EAGLE's training."""
    rng = np.random.default_rng(0)
    for n_tokens in (9, 300):
        queries, (text,), (masked_text,) = text_of(n_tokens, None)
        own = [KVSegment(*(normal(rng, 2, 2, n_tokens, 16) for _ in range(2)), SamePosition()) for _ in range(2)]
        found = jax.jit(lambda *args: attend(*args))(queries, [own[0], text, own[1]])
        by_mask = [part._replace(visible=np.eye(n_tokens, dtype=bool)) for part in own]
        np.testing.assert_allclose(found, plain_attention(queries, [masked_text, *by_mask]), atol=2e-5)


def test_a_long_prompt_does_not_materialise_all_scores():
    """For 8,192 tokens all scores of a head would take 268 MB and a full mask 67 MB."""
    shape = jax.ShapeDtypeStruct((1, 1, 8192, 16), jnp.float32)
    lowered = jax.jit(lambda q, k, v: attend(q, [KVSegment(k, v, Causal(8192))])).lower(shape, shape, shape)
    assert len(lowered.as_text()) < 500_000
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 25_000_000


def test_long_prompts_use_cudnn_on_a_gpu(monkeypatch):
    called = []
    monkeypatch.setattr(
        gpu, "attend_text", lambda q, k, v, window: called.append(window) or jnp.zeros((1, 300, 256), q.dtype)
    )
    shape = jax.ShapeDtypeStruct((1, 4, 300, 64), jnp.bfloat16)
    with trace.tracing(platform=trace.Platform("gpu", 1, 9.0)):
        jax.eval_shape(lambda q, k, v: attend(q, [KVSegment(k, v, Causal(300, 50))]), shape, shape, shape)
        jax.eval_shape(lambda q, k, v: attend(q, [KVSegment(k, v, np.ones((300, 300), bool))]), shape, shape, shape)
        sinks = np.zeros(4)  # which cuDNN does not have
        jax.eval_shape(lambda q, k, v: attend(q, [KVSegment(k, v, Causal(300))], sinks=sinks), shape, shape, shape)
    assert called == [50]


def test_a_long_text_after_a_cache_has_no_square_of_a_mask(monkeypatch):
    """Its queries are masked in chunks; the whole mask of 32,768 tokens would take a gigabyte."""
    whole = []
    monkeypatch.setattr(Causal, "__array__", lambda self, *args, **settings: whole.append(self.n_tokens))
    text, cache = jnp.ones((1, 1, 200, 8)), jnp.ones((1, 1, 64, 8))
    segments = [KVSegment(text, text, Causal(200)), KVSegment(cache, cache, Filled(jnp.array([64], jnp.int32)))]
    jax.eval_shape(lambda queries: attend(queries, segments), text)
    assert whole == []
