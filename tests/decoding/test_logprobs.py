"""Log-probabilities of emitted tokens against whole texts through the base, for every rule, with a tree and without."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from lab import NEW

from hydrajax.decoding.acceptance import ExactSampling, Greedy, Typical
from hydrajax.decoding.decode import make_decode_fn
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.state import Params
from hydrajax.measure.plain_pass import all_logits
from hydrajax.trees import presets

PROMPTS = [[3, 1, 4, 1, 5], [2], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9]]
TREE = presets.cartesian([3, 2, 2])
RULES = [
    Greedy(repetition_penalty=1.5, frequency_penalty=0.5),
    Typical(0.05),
    ExactSampling(1.4, top_k=9, min_p=0.01),
    RejectionSampling(0.8),
]


def from_whole_text(lab, prompt: list[int], output: list[int]) -> np.ndarray:
    """Of each token of the output: log softmax in float64 of what a plain pass says there."""
    text = np.array([*prompt, *output], np.int32)
    logits = all_logits(lab.model, lab.base(0), text).astype(np.float64)[len(prompt) - 1 : -1]
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.log(p[np.arange(len(output)), output] / p.sum(axis=-1))


def check(lab, out) -> None:
    assert out.logprobs.dtype == np.float32
    assert out.logprobs.shape == out.tokens.shape
    for row, prompt in enumerate(PROMPTS):
        length = out.lengths[row]
        expected = from_whole_text(lab, prompt, out.tokens[row, :length].tolist())
        np.testing.assert_allclose(out.logprobs[row, :length], expected, atol=1e-4)
        assert (out.logprobs[row, length:] == 0).all()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.quick("ExactSampling", "Typical")
def test_every_rule_with_a_tree(lab, rule):
    """Rows end by an EOS and by a limit within a path, too."""
    settings = {"max_new_tokens": NEW, "eos_ids": (0,), "logprobs": True}
    decode = make_decode_fn(lab.model, lab.drafters["hydra"], TREE, rule, **settings)
    out = lab.decode(decode, 0, lab.draft("hydra", 0), PROMPTS, rule=rule, limits=[NEW, 17, 9], seed=1)
    assert out.accept_lengths.max() >= 1
    check(lab, out)


@pytest.mark.slow
def test_without_a_draft(lab):
    rule = ExactSampling(1.4, top_k=9)
    decode = make_decode_fn(lab.model, lab.drafters["none"], presets.root(), rule, max_new_tokens=NEW, logprobs=True)
    out = lab.decode(decode, 0, {}, PROMPTS, rule=rule, seed=1)
    check(lab, out)
    # Asking for them changes nothing of the text.
    np.testing.assert_array_equal(out.tokens, lab.plainly(PROMPTS, rule, seed=1).tokens)


def test_long_paths_and_all_the_roots_between_them(lab):
    """An oracle's paths of four tokens, some of them wrong in the middle."""
    texts, _ = lab.references(0, PROMPTS)
    right = np.random.default_rng(0).random((3, lab.context + 5)) < 0.8
    settings = {"max_new_tokens": NEW, "logprobs": True}
    decode = make_decode_fn(lab.model, lab.drafters["oracle"], lab.trees["random"], **settings)
    out = lab.decode(decode, 0, lab.oracle_params(texts, right), PROMPTS)
    assert set(out.accept_lengths[out.accept_lengths >= 0].tolist()) >= {0, 1, 2, 3}
    check(lab, out)


def test_nothing_is_kept_unless_asked_for(lab):
    decode = lab.decode_fn("none", "root", NEW)
    state = jax.eval_shape(
        decode.engine.prefill,
        Params(lab.base(0), {}), np.zeros((1, 16), np.int32), np.ones(1, np.int32), jax.random.key(0), Greedy(),
    )  # fmt: skip
    assert state.output.logprobs is None
    assert state.target.root_logprob is None
    assert lab.plainly(PROMPTS).logprobs is None
