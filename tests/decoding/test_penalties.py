"""Penalties against transformers' processor and the published formula; through the loop against plain passes.

That random trees give the penalised text of plain decoding, greedy and sampled, is in test_dynamic_trees.py; what is
sampled is in test_distribution.py; that counts move with their rows in test_state.py.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

import hydrajax
from helpers.lab import NEW
from hydrajax.decoding.acceptance import ExactSampling, Greedy, Typical
from hydrajax.decoding.decode import make_decode_fn, result_of
from hydrajax.decoding.penalties import Seen
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.sampling import per_row
from hydrajax.decoding.state import Params
from hydrajax.errors import HydrajaxError
from hydrajax.measure.plain_pass import last_logits
from hydrajax.trees import presets

V = 12
# Tokens said once, twice and thrice, in the prompt, in the output or in both.
PROMPTS = [[1, 2, 2, 5], [7], [0, 11, 0, 4, 4]]
OUTPUTS = [[2, 8, 8, 8], [7, 7], []]
LOGITS = np.random.default_rng(0).normal(size=(3, V)).astype(np.float32) * 2
RULES = [
    Greedy(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.25),
    Greedy(repetition_penalty=0.7, presence_penalty=-0.6, frequency_penalty=0.9),
    Greedy(repetition_penalty=2.0, presence_penalty=1.5, frequency_penalty=-0.3),
]


def padded(rows, width: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """``(tokens, lengths)``; behind the rows stands what no penalty may count, the token 3 among it."""
    table = np.stack([np.resize(np.array([-1, 10**6, 3], np.int32), width)] * len(rows))
    for line, tokens in zip(table, rows, strict=True):
        line[: len(tokens)] = tokens
    return table, np.array([len(tokens) for tokens in rows], np.int32)


@jax.jit
def penalise(rule, logits, prompts, first, rest):
    return rule.penalise(logits, Seen.of_prompt(*prompts, V).with_output(*first).with_output(*rest))


def penalised(rules) -> np.ndarray:
    """`LOGITS` after the three texts, each under a rule of its own; the output is counted in two goes."""
    first, rest = [row[:2] for row in OUTPUTS], [row[2:] for row in OUTPUTS]
    return np.asarray(penalise(per_row(rules, 3), LOGITS, padded(PROMPTS), padded(first), padded(rest)))


def by_formula(logits, rule, prompt, output) -> np.ndarray:
    """transformers' processor, then the formula of OpenAI's API, in float64."""
    text = torch.tensor([[*prompt, *output]])
    processor = RepetitionPenaltyLogitsProcessor(rule.repetition_penalty)
    found = processor(text, torch.tensor(logits[None], dtype=torch.float64))[0].numpy()
    counts = np.bincount(np.array(output, int), minlength=len(logits))
    return found - counts * rule.frequency_penalty - (counts > 0) * rule.presence_penalty


def test_repetition_penalty_equals_transformers():
    rules = [Greedy(repetition_penalty=number) for number in (1.5, 0.6, 3.0)]
    found = penalised(rules)
    for row, rule in enumerate(rules):
        text = torch.tensor([PROMPTS[row] + OUTPUTS[row]])
        expected = RepetitionPenaltyLogitsProcessor(rule.repetition_penalty)(text, torch.tensor(LOGITS[row : row + 1]))
        np.testing.assert_allclose(found[row], expected[0].numpy(), rtol=1e-6)
    # Positive and negative logits were changed in every row, and token 3, which is padding alone, in none.
    assert all((found != LOGITS)[row][LOGITS[row] > 0].any() for row in range(3))
    assert (found != LOGITS)[LOGITS < 0].any()
    assert (found[:, 3] == LOGITS[:, 3]).all()


def test_presence_and_frequency_penalties_equal_the_formula():
    """logit - presence * (count > 0) - frequency * count, of what was generated; the prompt does not count."""
    rules = [Greedy(presence_penalty=p, frequency_penalty=f) for p, f in [(0.5, 0.25), (-1.0, 2.0), (9.0, 9.0)]]
    wanted = LOGITS.copy()
    wanted[0, 2] -= 0.5 + 0.25
    wanted[0, 8] -= 0.5 + 3 * 0.25
    wanted[1, 7] -= -1.0 + 2 * 2.0
    np.testing.assert_allclose(penalised(rules), wanted, rtol=1e-6)


def test_all_penalties_in_the_order_of_vllm():
    expected = [by_formula(*each) for each in zip(LOGITS, RULES, PROMPTS, OUTPUTS, strict=True)]
    np.testing.assert_allclose(penalised(RULES), expected, rtol=1e-5)


@pytest.fixture(scope="module")
def engine(lab):
    """Greedy decoding with all penalties and no draft."""
    return make_decode_fn(lab.model, lab.drafters["none"], presets.root(), RULES[0], max_new_tokens=NEW).engine


def test_greedy_decoding_takes_the_best_of_the_penalised_logits(lab):
    """Against whole texts through the base and the penalties by formula: ragged prompts, other numbers in each row."""
    prompts = [[3, 1, 4, 1, 5], [2], [9, 2, 6, 5, 3, 5, 8, 9]]
    out, plain = lab.plainly(prompts, RULES), lab.plainly(prompts)
    for row, (prompt, rule) in enumerate(zip(prompts, RULES, strict=True)):
        said: list[int] = []
        for _ in range(NEW):
            logits = last_logits(lab.model, lab.base(0), [np.array(prompt + said, np.int32)])[0]
            said.append(int(by_formula(logits, rule, prompt, said).argmax()))
        assert out.tokens[row].tolist() == said
        assert out.tokens[row].tolist() != plain.tokens[row].tolist()


def test_greedy_generation_equals_transformers(tiny_checkpoint):
    """From text lookup and a chain; reward of what was said makes the text repeat itself, so that drafts are taken."""
    loaded = hydrajax.load(tiny_checkpoint, "lookup")
    prompts = [np.random.default_rng(n).integers(0, 96, n).tolist() * 2 for n in (3, 9)]
    settings = {"max_new_tokens": NEW, "batch_size": 2, "tree": presets.chain(3)}
    model = LlamaForCausalLM.from_pretrained(tiny_checkpoint)
    for penalty in (1.25, 0.5):
        found = list(hydrajax.generate(loaded, prompts, rule=Greedy(repetition_penalty=penalty), **settings))
        for prompt, mine in zip(prompts, found, strict=True):
            ids = torch.tensor([prompt])
            arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
            theirs = model.generate(ids, repetition_penalty=penalty, pad_token_id=0, **arguments)[0, len(prompt) :]
            assert mine.output_ids == theirs.tolist()
    assert max(found[0].step_lengths) > 2


def test_only_what_was_emitted_is_counted(lab):
    """Cut by EOS and by a limit within the accepted path, and in rows that go on being fed after their end."""
    prompts = [[3, 1, 4], [5], [7, 7]]
    rule = Greedy(frequency_penalty=1e-6)  # changes no choice, so that the oracle knows the text
    texts, _ = lab.references(0, prompts)
    eos = int(texts[0, 3 + 6])  # the seventh token of the first row, or one that came before
    tree = lab.trees["chain"]
    decode = make_decode_fn(lab.model, lab.drafters["oracle"], tree, rule, max_new_tokens=NEW, eos_ids=(eos,))
    engine, params = decode.engine, Params(lab.base(0), lab.oracle_params(texts))
    tokens, lengths = padded(prompts, 16)
    limits = np.array([NEW, 7, 12], np.int32)
    state = lab.quick_jit(engine.prefill)(params, tokens, lengths, jax.random.key(0), rule, limits)
    step = lab.quick_jit(engine.decode_step)
    for _ in range(8):
        state = step(params, state)
    assert state.output.done.all()
    out = jax.device_get(result_of(state.output))
    assert out.accept_lengths.max() == 4
    for row in range(3):
        said = out.tokens[row, : out.lengths[row]]
        assert said.tolist() == lab.expected(texts[row], len(prompts[row]), int(limits[row]), (eos,))
        np.testing.assert_array_equal(state.output.seen.output[row], np.bincount(said, minlength=lab.vocab))
        assert np.flatnonzero(state.output.seen.prompt[row]).tolist() == sorted({*prompts[row]})


def test_a_second_turn_takes_all_before_it_for_prompt(lab, engine):
    """`Engine.extend` after an answer, against a prefill of everything: output is counted from the new answer on."""
    params = Params(lab.base(0), {})
    prompts, more = [[3, 1, 4], [2, 6], [9, 2, 6, 5]], [[5, 5], [1], [8, 0, 2]]
    limits, key, rule = np.array([4, 6, 5], np.int32), jax.random.key(0), per_row(RULES, 3)
    prefill, extend = lab.quick_jit(engine.prefill, static_argnames="slots"), lab.quick_jit(engine.extend)
    step = lab.quick_jit(engine.decode_step)

    def finish(state):
        while not state.output.done.all():
            state = step(params, state)
        return state, jax.device_get(result_of(state.output))

    first, said = finish(prefill(params, *padded(prompts, 16), key, rule, limits))
    _, second = finish(extend(params, first, *padded(more, 16), key, rule, limits))
    whole = [
        [*prompt, *tokens[:length].tolist(), *text]
        for prompt, tokens, length, text in zip(prompts, said.tokens, said.lengths, more, strict=True)
    ]
    _, at_once = finish(prefill(params, *padded(whole, 16), key, rule, limits))
    np.testing.assert_array_equal(second.tokens, at_once.tokens)
    assert second.lengths.tolist() == limits.tolist()


def test_a_text_decoded_without_penalties_cannot_go_on_with_them(lab, engine):
    arguments = Params(lab.base(0), {}), *padded([[3]], 16), jax.random.key(0)
    state = jax.eval_shape(engine.prefill, *arguments, Greedy())
    params, more, counts, key = arguments
    with pytest.raises(HydrajaxError, match="rule: has penalties, but the tokens before were not counted"):
        jax.eval_shape(engine.extend, params, state, more, counts, key, RULES[0])


@pytest.mark.parametrize("kind", [Greedy, ExactSampling])
def test_neutral_penalties_are_no_part_of_the_program(lab, engine, kind):
    neutral = kind(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0)
    assert jax.tree.structure(neutral) == jax.tree.structure(kind())
    assert str(neutral) == str(kind())
    assert not neutral.penalises
    arguments = Params(lab.base(0), {}), *padded([[3]], 16), jax.random.key(0)
    one, other = (jax.make_jaxpr(engine.prefill)(*arguments, rule) for rule in (kind(), neutral))
    assert str(one) == str(other)
    state = jax.eval_shape(engine.prefill, *arguments, neutral)
    assert state.output.seen is None
    one, other = (
        jax.make_jaxpr(rule.first_root)(LOGITS, jax.random.split(jax.random.key(0), 3)) for rule in (kind(), neutral)
    )
    assert str(one) == str(other)
    for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        rule = kind(**{penalty: 0.5})
        assert rule.penalises
        assert f"{penalty}=0.5" in str(rule)
        assert jax.eval_shape(engine.prefill, *arguments, rule).output.seen.output.shape == (1, lab.vocab)


@pytest.mark.parametrize("kind", [Greedy, ExactSampling])
@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty: must be positive, found 0.0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty: must be positive, found inf"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty: must be positive, found nan"),
        ({"presence_penalty": float("inf")}, "presence_penalty: must be a finite number, found inf"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty: must be a finite number, found nan"),
    ],
)
def test_numbers_out_of_range_are_refused(kind, numbers, message):
    with pytest.raises(HydrajaxError, match=message):
        kind(**numbers)


@pytest.mark.parametrize("kind", [Typical, RejectionSampling])
def test_other_rules_have_no_penalties(kind):
    assert not kind().penalises
    with pytest.raises(TypeError, match="unexpected keyword argument 'presence_penalty'"):
        kind(presence_penalty=0.5)
