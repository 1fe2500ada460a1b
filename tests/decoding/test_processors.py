"""Compare logits processors with transformers and the published formulas, and decoding with full passes.

Other files test processors with random trees (test_dynamic_trees.py), sampled distributions (test_distribution.py),
typical acceptance (test_acceptance.py) and token counts that move with their sequences (test_state.py).
"""

import jax
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

import hydrajax
from helpers.how import how, sampling
from helpers.lab import NEW
from helpers.refusals import refusal
from hydrajax.api import make_decode_fn
from hydrajax.bench.uncached_forward import last_logits
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.decode import result_of
from hydrajax.decoding.keywords import make_request
from hydrajax.decoding.processing import NodeContext, TokenCounts, batched_processors, process
from hydrajax.decoding.processors import LogitBias, Penalties
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.state import Params
from hydrajax.decoding.traversal import TraversalVerification
from hydrajax.decoding.typical import Typical
from hydrajax.errors import HydrajaxError
from hydrajax.trees import presets

V = 12
# Tokens that occur once, twice and thrice, in the prompt, in the output or in both.
PROMPTS = [[1, 2, 2, 5], [7], [0, 11, 0, 4, 4]]
OUTPUTS = [[2, 8, 8, 8], [7, 7], []]
LOGITS = np.random.default_rng(0).normal(size=(3, V)).astype(np.float32) * 2
PENALTIES = [
    Penalties(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.25),
    Penalties(repetition_penalty=0.7, presence_penalty=-0.6, frequency_penalty=0.9),
    Penalties(repetition_penalty=2.0, presence_penalty=1.5, frequency_penalty=-0.3),
]
BIASES = [LogitBias({4: 1.5, 11: -3.0}), LogitBias({}), LogitBias({0: 0.25})]
# The order in which processors are given does not matter.
SPECS = [
    how(processors=(PENALTIES[0], BIASES[0])),
    how(processors=(PENALTIES[1],)),
    how(processors=(BIASES[2], PENALTIES[2])),
]


def padded(rows, width: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(tokens, lengths)``; the padding contains tokens that no penalty may count, such as 3."""
    table = np.stack([np.resize(np.array([-1, 10**6, 3], np.int32), width)] * len(rows))
    for line, tokens in zip(table, rows, strict=True):
        line[: len(tokens)] = tokens
    return table, np.array([len(tokens) for tokens in rows], np.int32)


@jax.jit
def processed_by(processors, logits, prompts, first, rest):
    counts = TokenCounts.of_prompt(*prompts, V).with_output(*first).with_output(*rest)
    return process(processors, logits, NodeContext(np.zeros(3, np.int32), counts))


def processed(rows) -> np.ndarray:
    """Process `LOGITS` of three sequences, each with its own processors; output tokens are counted in two parts."""
    first, rest = [row[:2] for row in OUTPUTS], [row[2:] for row in OUTPUTS]
    return np.asarray(processed_by(batched_processors(rows, V), LOGITS, padded(PROMPTS), padded(first), padded(rest)))


def by_formula(logits, spec, prompt, output) -> np.ndarray:
    """Apply biases, the processor of transformers and the formula of OpenAI's API in float64."""
    text, found = torch.tensor([[*prompt, *output]]), np.array(logits, np.float64)
    for processor in spec.processors:
        for token, bias in getattr(processor, "logit_bias", ()):
            found[token] += bias
    for processor in spec.processors:
        if isinstance(processor, Penalties):
            theirs = RepetitionPenaltyLogitsProcessor(processor.repetition_penalty)
            found = theirs(text, torch.tensor(found[None]))[0].numpy()
            counts = np.bincount(np.array(output, int), minlength=len(logits))
            found = found - counts * processor.frequency_penalty - (counts > 0) * processor.presence_penalty
    return found


def test_all_processors_in_the_order_of_vllm():
    """Each kind alone, then together, in three sequences with numbers of their own."""
    together = [spec.processors for spec in SPECS]
    for rows in ([(each,) for each in PENALTIES], [(each,) for each in BIASES], together):
        found = processed(rows)
        specs = [how(processors=row) for row in rows]
        expected = [by_formula(*each) for each in zip(LOGITS, specs, PROMPTS, OUTPUTS, strict=True)]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert (found[:, 3] == LOGITS[:, 3]).all()  # token 3 occurs in padding only
    # Penalties change positive and negative logits.
    found = processed([(each,) for each in PENALTIES])
    assert all((found != LOGITS)[sign * LOGITS > 0].any() for sign in (-1, 1))


def test_the_references_that_certificates_use():
    for logits, spec, prompt, output in zip(LOGITS, SPECS, PROMPTS, OUTPUTS, strict=True):
        found = logits.astype(np.float64)
        for processor in sorted(spec.processors, key=lambda one: isinstance(one, Penalties)):
            found = processor.reference(found, prompt, output)
        np.testing.assert_allclose(found, by_formula(logits, spec, prompt, output), rtol=1e-12)


@pytest.fixture(scope="module")
def engine(lab):
    """Greedy decoding without a draft."""
    return make_decode_fn(lab.model, lab.drafters["none"], presets.root(), max_new_tokens=NEW).engine


def test_greedy_decoding_takes_the_best_of_the_processed_logits(lab):
    """Compare with full passes and the formulas for ragged prompts, each with its own processors."""
    prompts = [[3, 1, 4, 1, 5], [2], [9, 2, 6, 5, 3, 5, 8, 9]]
    out, plain = lab.plainly(prompts, SPECS), lab.plainly(prompts)
    for row, (prompt, spec) in enumerate(zip(prompts, SPECS, strict=True)):
        emitted: list[int] = []
        for _ in range(NEW):
            logits = last_logits(lab.model, lab.base(0), [np.array(prompt + emitted, np.int32)])[0]
            emitted.append(int(by_formula(logits, spec, prompt, emitted).argmax()))
        assert out.tokens[row].tolist() == emitted
        assert out.tokens[row].tolist() != plain.tokens[row].tolist()


def test_greedy_generation_equals_transformers(tiny_checkpoint):
    """Uses prompt lookup and a chain. Negative penalties make the text repeat, so drafts are accepted."""
    loaded = hydrajax.load(tiny_checkpoint, "lookup")
    prompts = [np.random.default_rng(n).integers(0, 96, n).tolist() * 2 for n in (3, 9)]
    model = LlamaForCausalLM.from_pretrained(tiny_checkpoint)
    for penalty in (1.25, 0.5):
        found = loaded.generate(prompts, tree="chain-3", repetition_penalty=penalty, batch_size=2, max_new_tokens=NEW)
        for prompt, mine in zip(prompts, found, strict=True):
            ids = torch.tensor([prompt])
            arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
            theirs = model.generate(ids, repetition_penalty=penalty, pad_token_id=0, **arguments)[0, len(prompt) :]
            assert mine.output_ids == theirs.tolist()
    assert max(found[0].emitted_per_step) > 2


def test_only_what_was_emitted_is_counted(lab):
    """EOS or a limit cuts the accepted path, and finished sequences stay in the batch."""
    prompts = [[3, 1, 4], [5], [7, 7]]
    spec = how(processors=[Penalties(frequency_penalty=1e-6)])  # changes no choice, so the oracle stays right
    texts, _ = lab.references(0, prompts)
    eos = int(texts[0, 3 + 6])  # the seventh token of the first sequence, or an earlier one
    tree = lab.trees["chain"]
    decode = make_decode_fn(lab.model, lab.drafters["oracle"], tree, max_new_tokens=NEW, eos_ids=(eos,))
    engine, params = decode.engine, Params(lab.base(0), lab.oracle_params(texts))
    tokens, lengths = padded(prompts, 16)
    limits = np.array([NEW, 7, 12], np.int32)
    state = lab.quick_jit(engine.prefill)(params, tokens, lengths, sampling(spec, 3, lab.vocab, 0, limits))
    step = lab.quick_jit(engine.decode_step)
    for _ in range(8):
        state = step(params, state)
    assert state.output.done.all()
    out = jax.device_get(result_of(state.output))
    assert out.accept_lengths.max() == 4
    for row in range(3):
        emitted = out.tokens[row, : out.lengths[row]]
        assert emitted.tolist() == lab.expected(texts[row], len(prompts[row]), int(limits[row]), (eos,))
        np.testing.assert_array_equal(state.output.counts.output[row], np.bincount(emitted, minlength=lab.vocab))
        assert np.flatnonzero(state.output.counts.prompt[row]).tolist() == sorted({*prompts[row]})


def test_a_second_turn_counts_everything_before_it_as_prompt(lab, engine):
    """Compare `Engine.extend` after an answer with a prefill of everything: only the new answer counts as output."""
    params = Params(lab.base(0), {})
    prompts, more = [[3, 1, 4], [2, 6], [9, 2, 6, 5]], [[5, 5], [1], [8, 0, 2]]
    limits = [4, 6, 5]
    drawn = sampling(SPECS, 3, lab.vocab, 0, limits)
    prefill, extend = lab.quick_jit(engine.prefill, static_argnames="slots"), lab.quick_jit(engine.extend)
    step = lab.quick_jit(engine.decode_step)

    def finish(state):
        while not state.output.done.all():
            state = step(params, state)
        return state, jax.device_get(result_of(state.output))

    first, emitted = finish(prefill(params, *padded(prompts, 16), drawn))
    _, second = finish(extend(params, first, *padded(more, 16), drawn))
    whole = [[*a, *b, *c] for a, b, c in zip(prompts, emitted.ids(), more, strict=True)]
    _, at_once = finish(prefill(params, *padded(whole, 16), drawn))
    np.testing.assert_array_equal(second.tokens, at_once.tokens)
    assert second.lengths.tolist() == limits


def test_counting_cannot_start_in_a_second_turn(lab, engine):
    params, text = Params(lab.base(0), {}), padded([[3]], 16)
    state = jax.eval_shape(engine.prefill, params, *text, sampling(None, 1, lab.vocab))
    with pytest.raises(HydrajaxError, match="processors: got one that counts tokens, expected none: the text"):
        jax.eval_shape(engine.extend, params, state, *text, sampling(SPECS[1], 1, lab.vocab))


@pytest.mark.parametrize("rule", [Greedy(), ExactSampling(), Typical()], ids=lambda rule: type(rule).__name__)
def test_processors_without_effect_are_not_in_the_program(lab, engine, rule):
    """Processors without effect give the same program, byte for byte, as no processors."""
    neutral = [Penalties(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0), LogitBias({})]
    assert not any(processor.has_effect for processor in neutral)
    arguments = Params(lab.base(0), {}), *padded([[3]], 16)
    prefill = jax.make_jaxpr(engine.prefill)(*arguments, sampling(rule, 1, lab.vocab))
    without = make_request(rule, repetition_penalty=1.0, presence_penalty=0.0, logit_bias={})
    assert without.processors == ()
    assert str(jax.make_jaxpr(engine.prefill)(*arguments, sampling(without, 1, lab.vocab))) == str(prefill)
    assert jax.eval_shape(engine.prefill, *arguments, sampling(without, 1, lab.vocab)).output.counts is None
    for numbers, counted in (({"presence_penalty": 0.5}, True), ({"logit_bias": {3: 1.0}}, False)):
        spec = make_request(rule, **numbers)
        state = jax.eval_shape(engine.prefill, *arguments, sampling(spec, 1, lab.vocab))
        assert (state.output.counts is not None) == counted
        assert len(state.output.processors) == 1


def test_numbers_that_float32_cannot_hold_are_limits():
    most = {"presence_penalty": 1e9, "frequency_penalty": -1e9, "repetition_penalty": 1e-9}
    assert Penalties(presence_penalty=1e39, frequency_penalty=-1e39, repetition_penalty=1e-44) == Penalties(**most)
    assert Penalties(presence_penalty=10**400, repetition_penalty=1e39).repetition_penalty == 1e9
    assert LogitBias({3: 1e39, 4: -1e39}) == LogitBias({3: 1e9, 4: -1e9})
    logits = np.random.default_rng(0).normal(0, 30, 8).astype(np.float32)
    counts = TokenCounts(np.arange(8)[None] < 2, np.array([[0, 1, 2, 1, 0, 0, 0, 0]], np.int32))
    context = NodeContext(np.zeros(1, np.int32), counts)
    for processor in (Penalties(**most), Penalties(presence_penalty=-1e39), LogitBias({3: 1e39})):
        found = process(batched_processors([[processor]], 8), logits[None], context)
        assert np.isfinite(found / np.float32(1e-5)).all()


def test_invalid_processors_are_rejected():
    for make, message in (
        *((lambda n=n: LogitBias({3: n}), "logit_bias: got") for n in (10**400, float("inf"))),
        *(
            (lambda n=n: Penalties(repetition_penalty=n), f"repetition_penalty: got {n}, expected a positive number")
            for n in (0.0, float("inf"), float("nan"))
        ),
        (lambda: Penalties(presence_penalty=float("inf")), "presence_penalty: got inf, expected a finite number"),
        (lambda: Penalties(frequency_penalty=float("nan")), "frequency_penalty: got nan, expected a finite number"),
        (lambda: LogitBias({-1: 1.0}), "logit_bias: got -1: 1.0, expected ids from 0 up with finite numbers"),
        *((lambda t=t: LogitBias({t: 1.0}), 'logit_bias: got {"') for t in ("the", "1_0", " 1", "+1", "１")),
        (lambda: LogitBias(3), "logit_bias: got 3, expected token ids with numbers"),
        (lambda: LogitBias({1.5: 3}), "logit_bias: got"),
        (
            lambda: sampling(how(processors=[LogitBias({17: 1.0})]), 1, 17),
            "logit_bias: got token id 17, expected 0 to 16",
        ),
        (
            lambda: how(processors=[Penalties(), LogitBias(), Penalties()]),
            "processors: got Penalties twice, expected one of a kind",
        ),
    ):
        assert refusal(make).startswith(message)


MIXED = [
    how(ExactSampling(0.0)),
    how(ExactSampling(1.3), processors=[LogitBias({2: 2.0})]),
    how(ExactSampling(0.0, top_k=3), processors=[Penalties(repetition_penalty=1.4)]),  # unaffected by top-k
    how(ExactSampling(0.8, 9, 0.9, min_p=0.05), processors=[Penalties(frequency_penalty=0.7), LogitBias({5: -9.0})]),
]


@pytest.mark.slow
def test_mixed_batches_give_the_tokens_of_each_request(lab):
    """Greedy and sampled sequences in one batch, each with its own numbers and processors, equal separate batches."""
    prompts = [[3, 1, 4], [5, 9], [2, 6, 5, 3], [8]]
    for specs in ([how(spec.rule) for spec in MIXED], MIXED):
        tree, rule = presets.cartesian([3, 2]), specs[0].rule
        decode_fn = make_decode_fn(lab.model, lab.drafters["hydra"], tree, rule, max_new_tokens=20)
        mixed = lab.decode(decode_fn, 0, lab.draft("hydra", 0), prompts, rule=specs, seed=4)
        assert mixed.accept_lengths.max() >= 1
        for row, spec in enumerate(specs):
            rule = spec.rule if spec.rule.temperature else Greedy()
            alone = lab.plainly(prompts, spec.replace(rule=rule), seed=4)  # keys depend on the index of the sequence
            np.testing.assert_array_equal(mixed.tokens[row], alone.tokens[row][:20])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RejectionSampling, TraversalVerification])
def test_rules_that_judge_draws_are_greedy_at_temperature_0(lab, kind):
    """Also in a batch with a sampled sequence, which the others do not change."""
    prompts, processors = [[3, 1, 4], [5, 9], [7]], [Penalties(repetition_penalty=1.4), LogitBias({2: 0.5})]
    specs = [how(kind(t, draft_temperature=1.0), processors=processors) for t in (0.0, 1.0, 0.0)]
    tree = presets.cartesian([3, 2])
    decode_fn = make_decode_fn(lab.model, lab.drafters["hydra"], tree, specs[0].rule, max_new_tokens=NEW)
    found = lab.decode(decode_fn, 0, lab.draft("hydra", 0), prompts, rule=specs, seed=4)
    greedy = lab.plainly(prompts, how(processors=processors))
    np.testing.assert_array_equal(found.tokens[[0, 2]], greedy.tokens[[0, 2]])
    assert (found.tokens[1] != greedy.tokens[1]).any()
    sampled = lab.decode(decode_fn, 0, lab.draft("hydra", 0), prompts, rule=[specs[1]] * 3, seed=4)
    np.testing.assert_array_equal(found.tokens[1], sampled.tokens[1])
