"""`logit_effect` against NumPy and SciPy on the two models' logits."""

from functools import partial

import jax
import numpy as np
import pytest
from scipy.special import rel_entr, softmax

from helpers.noise import noise
from hydrajax.bench.quantization import logit_effect
from hydrajax.models.attention import causal_mask
from hydrajax.models.llama import Llama

TEXTS = [np.random.default_rng(n).integers(0, 61, n).astype(np.int32) for n in (5, 19)]


def logits(model: Llama, params) -> list[np.ndarray]:
    """Logits of every text, float64 ``[T, V]``, in one pass over rows padded with token 0."""
    width = max(map(len, TEXTS))
    ids = np.stack([np.pad(text, (0, width - len(text))) for text in TEXTS])

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(params):
        hidden = model.apply({"params": params}, ids, np.arange(width) + 0 * ids, causal_mask(width)).hidden
        return model.apply({"params": params}, hidden, method="logits")

    return [np.asarray(row[: len(text)], np.float64) for row, text in zip(run(params), TEXTS, strict=True)]


def test_figures_match_the_logits_of_both_models(tiny_model):
    """With so much noise in the weights that likeliest tokens differ."""
    model, params = tiny_model
    other = model, jax.tree.map(lambda leaf, noise: leaf + 0.1 * noise, params, noise(params, 0))
    before, after = np.concatenate(logits(model, params)), np.concatenate(logits(*other))
    assert before.shape == (24, 61)

    effect = logit_effect((model, params), other, TEXTS)
    assert effect.positions == 24
    assert effect.largest == pytest.approx(np.abs(before - after).max(), rel=1e-4)
    assert effect.mean == pytest.approx(np.abs(before - after).mean(), rel=1e-4)
    divergence = rel_entr(softmax(before, axis=-1), softmax(after, axis=-1)).sum(axis=-1)
    assert effect.kl == pytest.approx(divergence.mean(), rel=1e-3, abs=1e-6)
    assert effect.agreement == np.mean(before.argmax(axis=-1) == after.argmax(axis=-1))
    following = np.concatenate([np.append(text[1:], 0) for text in TEXTS])
    inside = np.concatenate([np.arange(len(text)) < len(text) - 1 for text in TEXTS])
    for perplexity, each in ((effect.perplexity_before, before), (effect.perplexity_after, after)):
        surprise = -np.log(softmax(each, axis=-1)[np.arange(len(each)), following])
        assert perplexity == pytest.approx(np.exp(surprise[inside].mean()), rel=1e-5)
    assert effect.kl > 1e-4
    assert 0 < effect.agreement < 1


def test_a_model_does_not_differ_from_itself(tiny_model):
    effect = logit_effect(tiny_model, tiny_model, TEXTS[:1])
    assert (effect.positions, effect.largest, effect.mean, effect.kl, effect.agreement) == (5, 0, 0, 0, 1)
    assert effect.perplexity_before == effect.perplexity_after
    one = logit_effect(tiny_model, tiny_model, [np.array([3], np.int32)])
    assert np.isnan(one.perplexity_before)  # one token has no perplexity
