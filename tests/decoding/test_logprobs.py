"""Compare log-probabilities with full passes of the base, for every rule, with and without a tree."""

import jax
import numpy as np
import pytest

from helpers.how import how, sampling
from helpers.lab import NEW, VOCAB
from helpers.log_probabilities import check_top, of_whole_text
from hydrajax.api import make_decode_fn
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.decode import make_decode_fn as of_program
from hydrajax.decoding.processors import Penalties
from hydrajax.decoding.program import Program
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.scoring import token_logprobs
from hydrajax.decoding.state import Params
from hydrajax.decoding.typical import Typical
from hydrajax.errors import HydrajaxError
from hydrajax.trees import presets

PROMPTS = [[3, 1, 4, 1, 5], [2], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9]]
TREE = presets.cartesian([3, 2, 2])
SPECS = [
    how(Greedy(), processors=[Penalties(repetition_penalty=1.5, frequency_penalty=0.5)]),
    how(Typical(0.05)),
    how(ExactSampling(1.4, top_k=9, min_p=0.01)),
    how(RejectionSampling(0.8)),
]
TOPS = (VOCAB, 1, 4, 4)


def check(lab, out, top: int = 0) -> None:
    assert out.logprobs.dtype == np.float32
    assert out.logprobs.shape == out.tokens.shape
    assert (out.top is None) == (top == 0)
    for row, prompt in enumerate(PROMPTS):
        length = out.lengths[row]
        ids = np.asarray(out.tokens[row, :length])
        log_p = of_whole_text(lab.model, lab.base(0), prompt, ids.tolist())
        np.testing.assert_allclose(out.logprobs[row, :length], log_p[np.arange(length), ids], atol=1e-4)
        assert (out.logprobs[row, length:] == 0).all()
        if top:
            top_ids, top_logprobs = (np.asarray(part[row]) for part in out.top)
            assert (top_ids.dtype, top_logprobs.dtype) == (np.int32, np.float32)
            assert top_ids.shape == top_logprobs.shape == (NEW, top)
            check_top(log_p, top_ids[:length], top_logprobs[:length])
            assert (top_ids[length:] == -1).all()
            assert (top_logprobs[length:] == 0).all()


@pytest.mark.parametrize(
    ("spec", "top"), [pytest.param(*each, id=type(each[0].rule).__name__) for each in zip(SPECS, TOPS, strict=True)]
)
@pytest.mark.quick("ExactSampling")
def test_every_rule_with_a_tree(lab, spec, top):
    """Some sequences end inside a path, by EOS or by the limit."""
    settings = {"max_new_tokens": NEW, "eos_ids": (0,), "logprobs": top}
    decode = make_decode_fn(lab.model, lab.drafters["hydra"], TREE, spec.rule, **settings)
    out = lab.decode(decode, 0, lab.draft("hydra", 0), PROMPTS, rule=spec, limits=[NEW, 17, 9], seed=1)
    assert out.accept_lengths.max() >= 1
    check(lab, out, top)


def test_no_logprobs_by_default(lab):
    decode = lab.decode_fn("none", "root", NEW)
    state = jax.eval_shape(
        decode.engine.prefill,
        Params(lab.base(0), {}), np.zeros((1, 16), np.int32), np.ones(1, np.int32), sampling(None, 1, VOCAB),
    )  # fmt: skip
    assert state.output.logprobs is None
    assert state.target.root_logprobs is None
    assert lab.plainly(PROMPTS).logprobs is None


def test_k_is_at_most_the_vocabulary(lab):
    for k in (-1, VOCAB + 1):
        with pytest.raises(HydrajaxError, match=f"logprobs: got {k}, expected 0 to the vocabulary's {VOCAB}"):
            make_decode_fn(lab.model, lab.drafters["none"], presets.root(), max_new_tokens=NEW, logprobs=k)


@pytest.mark.quick("exact")
@pytest.mark.parametrize(
    "rule", [ExactSampling(0.7, top_k=9), RejectionSampling(0.7), Greedy()], ids=["exact", "rejection", "greedy"]
)
def test_log_probabilities_at_the_sampling_temperature_are_those_of_the_text(lab, rule):
    """Of the tempered distribution without truncation, as a policy's trainer computes them from whole texts."""
    program = Program(lab.drafters["hydra"], TREE, type(rule), NEW, logprobs=0, tempered_logprobs=True)
    decode = of_program(lab.model, program)
    out = lab.decode(decode, 0, lab.draft("hydra", 0), PROMPTS, rule=how(rule), seed=1)
    texts = [[*prompt, *ids] for prompt, ids in zip(PROMPTS, out.ids(), strict=True)]
    packed, _ = right_padded(texts, 64)
    temperature = getattr(rule, "temperature", 1.0)
    found = token_logprobs(lab.model, lab.base(0), packed, temperature)
    for row, prompt in enumerate(PROMPTS):
        ids = np.array(out.ids()[row])
        tempered = jax.nn.log_softmax(of_whole_text(lab.model, lab.base(0), prompt, ids.tolist()) / temperature)
        expected = tempered[np.arange(len(ids)), ids]
        np.testing.assert_allclose(out.logprobs[row, : len(ids)], expected, atol=1e-5)
        np.testing.assert_allclose(found[row, len(prompt) : len(texts[row])], expected, atol=1e-5)
        assert found[row, 0] == 0
