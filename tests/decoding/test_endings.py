"""Sequences end at EOS anywhere in an accepted path or at the token limit; the others are unaffected.

With the oracle on a chain of 4 every step emits five tokens. Output token e is the root of its step if e % 5 is 0, is
inside the accepted path for 1..3 and ends it for 4.
"""

import jax
import numpy as np
import pytest

from helpers.how import sampling
from helpers.lab import arrays
from hydrajax.decoding.decode import result_of
from hydrajax.decoding.state import Params

MAX_NEW = 24
EOS = (3,)
HEALTHY = 2e-5  # see test_equality.py
PROMPT = 6


@pytest.fixture(scope="session")
def examples(lab):
    """Return ``find(wanted) -> (prompt, text)``: a prompt of 6 tokens with the wanted greedy continuation."""
    random = np.random.default_rng(0)
    found, prompts = [], random.integers(0, lab.vocab, size=(200, PROMPT)).tolist()
    lab.references(0, prompts)  # in one batch, which is faster
    for prompt in prompts:
        texts, margin = lab.references(0, [prompt])
        if margin > HEALTHY:
            found.append((prompt, texts[0]))

    def find(wanted):
        return next((prompt, text) for prompt, text in found if wanted(text[PROMPT : PROMPT + MAX_NEW].tolist()))

    return find


def first_eos_at(place: int):
    return lambda out: [token in EOS for token in out].index(True) == place if set(out) & set(EOS) else False


def never():
    return lambda out: not set(out) & set(EOS)


def run_oracle(lab, tree, max_new, eos_ids, rows):
    prompts, texts = zip(*rows, strict=True)
    decode_fn = lab.decode_fn("oracle", tree, max_new, eos_ids)
    return lab.decode(decode_fn, 0, lab.oracle_params(np.stack(texts)), list(prompts))


def test_eos_at_every_position_of_a_path(lab, examples):
    for place in range(10):
        prompt, text = examples(first_eos_at(place))
        out = run_oracle(lab, "chain", MAX_NEW, EOS, [(prompt, text)])
        assert out.lengths[0] == place + 1
        assert out.tokens[0, : place + 1].tolist() == text[PROMPT : PROMPT + place + 1].tolist()
        assert out.tokens[0, place] in EOS
        assert (out.tokens[0, place + 1 :] == -1).all()
        assert out.steps[0] == place // 5 + 1
        # Accepted tokens after EOS are not counted.
        assert out.accept_lengths[0, : out.steps[0]].tolist() == [4] * (place // 5) + [place % 5]


def test_a_finished_sequence_is_frozen(lab, examples):
    """After EOS nothing in the result of the sequence changes in any later step."""
    rows = [examples(first_eos_at(2)), examples(first_eos_at(11)), examples(never())]
    prompts, texts = zip(*rows, strict=True)
    engine = lab.decode_fn("oracle", "chain", MAX_NEW, EOS).engine
    params = Params(lab.base(0), lab.oracle_params(np.stack(texts)))
    lengths = np.full(3, PROMPT, np.int32)
    state = lab.quick_jit(engine.prefill)(params, np.array(prompts, np.int32), lengths, sampling(None, 3, lab.vocab))
    step = lab.quick_jit(engine.decode_step)
    assert state.output.done.tolist() == [False] * 3
    done, records = [], []
    for _ in range(6):  # one more than any sequence needs
        state = step(params, state)
        done.append(state.output.done.tolist())
        result = jax.device_get(result_of(state.output))
        cached = np.asarray(state.target.cache.lengths), np.asarray(state.draft)
        keys = np.asarray(state.target.cache.layers[0][0])[0, :, : PROMPT + 3]
        records.append(
            [*(field[0].tolist() for field in arrays(result).values()), *(int(x[0]) for x in cached), keys.tolist()]
        )
    assert done == [[True, False, False]] * 2 + [[True, True, False]] * 2 + [[True, True, True]] * 2
    assert all(record == records[0] for record in records)
    assert state.output.lengths.tolist() == [3, 12, MAX_NEW]
    assert (state.target.cache.lengths - state.output.lengths).tolist() == [PROMPT] * 3


def test_the_limit_cuts_a_path(lab, examples):
    """The limit of 7 is inside the second path, with EOS before, at and after it."""
    for place in (5, 6, 7):
        prompt, text = examples(first_eos_at(place))
        out = run_oracle(lab, "chain", 7, EOS, [(prompt, text)])
        emitted = min(7, place + 1)
        assert out.tokens.shape == out.accept_lengths.shape == (1, 7)
        assert out.tokens[0].tolist() == text[PROMPT : PROMPT + emitted].tolist() + [-1] * (7 - emitted)
        assert out.lengths[0] == emitted
        assert out.accept_lengths[0].tolist() == [4, emitted - 6] + [-1] * 5
        assert out.steps[0] == 2


def test_one_new_token(lab, examples):
    rows = [examples(first_eos_at(0)), examples(first_eos_at(1)), examples(never())]
    out = run_oracle(lab, "chain", 1, EOS, rows)
    assert out.tokens.tolist() == [[int(text[PROMPT])] for _, text in rows]
    assert out.lengths.tolist() == out.steps.tolist() == [1, 1, 1]
    assert out.accept_lengths.tolist() == [[0], [0], [0]]
