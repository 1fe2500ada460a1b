"""Take, insert and move sequences of a decode state; numbers, processors and limits per sequence."""

import dataclasses

import jax
import numpy as np
import pytest

from helpers.how import how, sampling
from helpers.lab import arrays
from hydrajax.api import make_decode_fn
from hydrajax.decoding.decode import result_of
from hydrajax.decoding.processors import Penalties
from hydrajax.decoding.request import Request
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.state import DecodeState, Params
from hydrajax.decoding.typical import Typical
from hydrajax.errors import HydrajaxError
from hydrajax.language_model import LanguageModel
from hydrajax.trees import presets

MAX_NEW, BATCH, WIDTH = 20, 4, 8
SPECS = [
    how(
        ExactSampling(temperature, top_k, top_p),
        processors=[Penalties(frequency_penalty=frequency, repetition_penalty=repetition)],
    )
    for temperature, top_k, top_p, frequency, repetition in [
        (0.3, 9, 0.99, 0.8, 1.2),
        (1.0, 3, 0.9, -0.5, 1.5),
        (2.0, 17, 0.8, 0.3, 0.8),
        (5.0, 6, 0.7, 1.5, 2.0),
    ]
]


@jax.jit
def take_rows(state: DecodeState, rows) -> DecodeState:
    return jax.tree.map(lambda x: x[rows], state)


@jax.jit
def put_rows(state: DecodeState, places, rows: DecodeState) -> DecodeState:
    return jax.tree.map(lambda x, new: x.at[places].set(new), state, rows)


@pytest.fixture(scope="module")
def hydra_pp(lab):
    """Return ``(start, step, slots)`` for Hydra++ heads, which have their own KV cache."""
    decode_fn = make_decode_fn(
        lab.model, lab.drafters["hydra++"], presets.cartesian([3, 2]), SPECS[0].rule, max_new_tokens=MAX_NEW
    )
    params, engine = Params(lab.base(0), lab.draft("hydra++", 0)), decode_fn.engine
    prefill, step = lab.quick_jit(engine.prefill, static_argnames="slots"), lab.quick_jit(engine.decode_step)

    def start(seed: int, specs, limits, width: int = WIDTH, slots: int | None = None) -> DecodeState:
        random, batch = np.random.default_rng(seed), len(specs)
        prompt = random.integers(0, lab.vocab, (batch, width), dtype=np.int32)
        lengths = random.integers(1, width + 1, batch, dtype=np.int32)
        return prefill(params, prompt, lengths, sampling(specs, batch, lab.vocab, seed, limits), slots=slots)

    return start, lambda state: step(params, state), engine.cache_slots(WIDTH)


def finished(step, state: DecodeState):
    while not state.output.done.all():
        state = step(state)
    return jax.device_get(result_of(state.output))


def assert_rows(found, rows, wanted, wanted_rows):
    for name, values in arrays(found).items():
        np.testing.assert_array_equal(values[rows], getattr(wanted, name)[wanted_rows], err_msg=name)


def test_sequences_can_move_between_batches(hydra_pp):
    """Two batches with different rules and limits are mixed after a few steps and then reordered."""
    start, step, _ = hydra_pp
    first = start(1, SPECS, [20, 11, 17, 20])
    second = start(2, SPECS[::-1], [9, 20, 20, 14])
    wanted = finished(step, first), finished(step, second)
    assert max(result.accept_lengths.max() for result in wanted) >= 1
    for _ in range(3):
        first = step(first)
    second = step(second)
    mixed = put_rows(first, np.array([1, 3]), take_rows(second, np.array([2, 0])))
    mixed = take_rows(step(mixed), np.array([3, 2, 1, 0]))  # sequences 0 and 2 now come from the second batch
    found = finished(step, mixed)
    assert_rows(found, [3, 1], wanted[0], [0, 2])
    assert_rows(found, [0, 2], wanted[1], [0, 2])
    # The other sequences move to a batch of their own size.
    pair = finished(step, take_rows(first, np.array([3, 1])))
    assert_rows(pair, [0, 1], wanted[0], [3, 1])


def test_limits_per_sequence(lab):
    decode_fn = lab.decode_fn("oracle", "chain", 24)
    prompts = [[3, 1, 4], [5], [7, 7]]
    texts, _ = lab.references(0, prompts)
    for limits in ([24, 3, 0], [1, 24, 7]):
        out = lab.decode(decode_fn, 0, lab.oracle_params(texts), prompts, limits=limits)
        assert out.lengths.tolist() == limits
        for row, limit in enumerate(limits):
            assert out.tokens[row, :limit].tolist() == lab.expected(texts[row], len(prompts[row]), limit)


def test_a_rule_of_another_kind_is_rejected(lab):
    decode_fn = make_decode_fn(lab.model, lab.drafters["none"], presets.root(), ExactSampling(0.7, top_p=0.9))
    params, prompt = Params(lab.base(0), {}), np.array([[1, 2], [3, 4]])
    with pytest.raises(HydrajaxError, match=r"rule: got .*, expected ExactSampling"):
        decode_fn(params, prompt, rule=Typical())
    with pytest.raises(HydrajaxError, match="rule: got 3 rules for 2 prompts, expected one or one per prompt"):
        decode_fn(params, prompt, rule=[ExactSampling(0.7, top_p=0.9)] * 3)
    with pytest.raises(HydrajaxError, match="rule: got several kinds in one batch, expected"):
        decode_fn(params, prompt, rule=[ExactSampling(0.7, top_k=3, top_p=0.9), Typical()])


def test_executors_share_programs_across_numbers(lab):
    params = Params(lab.base(0), lab.draft("hydra", 0))
    model = LanguageModel(lab.model, lab.drafters["hydra"], params)

    def executor(rule, tree="chain-2", **fields):
        request = Request(rule, max_new_tokens=fields.pop("max_new_tokens", 30))
        return model.executor(model.program(request, tree=tree, **fields), request)

    first, second = executor(Typical(0.2)), executor(Typical(), max_new_tokens=17)
    assert first._advance is second._advance
    assert (first.request.rule, second.request.rule) == (Typical(0.2), Typical())
    assert (first.program.max_new_tokens, second.request.max_new_tokens) == (32, 17)
    for other in (executor(Typical(), "chain-1"), executor(Typical(), logprobs=0), executor(Typical(), eos_ids=(1,))):
        assert other._advance is not first._advance


def test_a_model_of_other_parameters_has_its_own_executors(lab):
    """An executor of the first model would decode with the first parameters."""
    model = LanguageModel(lab.model, lab.drafters["hydra"], Params(lab.base(0), lab.draft("hydra", 0)))
    program = model.program(tree="chain-1")
    first = model.executor(program)
    other = dataclasses.replace(model, params=Params(lab.base(1), lab.draft("hydra", 0)))
    assert other.executor(program).params is other.params
    assert model.executor(program).params is first.params is model.params
