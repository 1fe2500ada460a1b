"""The stepped executor: equality with the fused one, decoding under a grammar, and programs that executors share.

The grammars run on the host in pure Python (`helpers.host_grammars`). References come from full passes without a cache.
"""

import functools
import itertools
from collections import Counter

import jax
import numpy as np
import pytest
from scipy import stats

from helpers.host_grammars import END, Brackets, Changed, Place, Reasoned, Table
from helpers.how import sampling
from helpers.lab import CONTEXT, DRAFTERS, NEW, VOCAB, shared_lab
from hydrajax.bench.uncached_forward import all_logits, last_logits
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.decode_loop import next_burst
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.decoding.inputs import settled_inputs
from hydrajax.decoding.processors import Penalties
from hydrajax.decoding.program import Program
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.request import Request
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.state import Params
from hydrajax.decoding.stepped import SteppedExecutor
from hydrajax.decoding.traversal import TraversalVerification
from hydrajax.decoding.typical import Typical
from hydrajax.errors import HydrajaxError
from hydrajax.grammar.after_reasoning import AfterMark, AfterToken
from hydrajax.trees import presets
from hydrajax.trees.dynamic import guesses_of
from hydrajax.trees.static_tree import TreeTopology

PROMPTS = [[3, 4, 5, 6], [9], [1, 2, 1, 2, 1, 2, 1]]
TABLE = Table(3, VOCAB)
SMALL = TreeTopology.from_choices([[0], [1], [0, 0], [0, 1], [1, 0]])


def executor_of(kind, lab, name: str, tree: str, rule=None, params=None, **fields):
    """Return an executor for a drafter and a tree of the lab. fields: of the request or the program."""
    own = {field: fields.pop(field) for field in ("processors", "grammar") if field in fields}
    request = Request(rule or Greedy(), max_new_tokens=NEW, **own)
    program = Program(lab.drafters[name], lab.trees.get(tree, SMALL)).serving(request)
    program = program.replace(**{"forced_nodes": 0} | fields)
    return kind(lab.model, Params(lab.base(0), lab.draft(name, 0) if params is None else params), program, request)


@pytest.fixture(scope="module")
def stepped(lab):
    """Return ``make(name, tree, rule=None, **fields)``: stepped executors that share programs where they can."""
    made: dict = {}

    def make(name, tree, rule=None, **fields):
        key = (name, tree, fields.get("eos_ids", ()), fields.get("forced_nodes", 0))
        if key not in made:
            made[key] = executor_of(SteppedExecutor, lab, name, tree, rule, **fields)
        own = {name: value for name, value in fields.items() if name in ("processors", "grammar")}
        return made[key].with_request(rule=rule or Greedy(), **own)

    return make


padded = functools.partial(right_padded, width=8)


def decoded(executor, prompts, grammars, limits=None, seed: int = 2):
    """Decode prompts under a grammar each, None for none."""
    given = settled_inputs(executor.program, executor.model.config, *padded(prompts), jax.random.key(seed), limits)
    requests = [executor.request.replace(grammar=grammar) for grammar in grammars]
    sampled = given.sampling._replace(constraints=executor.constraints(requests))
    *_, last = executor.run(given._replace(sampling=sampled), np.zeros(len(prompts), bool), NEW)
    return [tokens[:length].tolist() for tokens, length in zip(last.tokens, last.lengths, strict=True)]


# --- stepped ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tree", "rule", "choices"),
    [
        pytest.param("none", "root", Greedy(), {}, marks=pytest.mark.slow),
        ("medusa", "small", Greedy(), {"processors": [Penalties(presence_penalty=0.2)], "logprobs": 2}),
        pytest.param("hydra++", "skips ranks", Greedy(), {"logprobs": 2}, marks=pytest.mark.slow),
        pytest.param("eagle", "grown", ExactSampling(0.8), {"eos_ids": (5,)}, marks=pytest.mark.slow),
        pytest.param("model", "chain", RejectionSampling(0.8), {}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_stepped_decoding_equals_fused_decoding(lab, name, tree, rule, choices):
    """Compare tokens, accept lengths and log-probabilities of sequences that end at different steps."""
    arguments = (*padded(PROMPTS), jax.random.key(1), np.array([NEW, 3, NEW - 1], np.int32))
    fused, stepped = (
        executor_of(kind, lab, name, tree, rule, **choices).decode(*arguments)
        for kind in (FusedExecutor, SteppedExecutor)
    )
    for wanted, found in zip(jax.tree.leaves(fused), jax.tree.leaves(stepped), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("kind", [FusedExecutor, SteppedExecutor])
def test_a_burst_can_end_with_a_sequence(lab, kind):
    grammar = TABLE if kind is SteppedExecutor else None
    executor = executor_of(kind, lab, "none", "root", grammar=grammar)
    given = settled_inputs(executor.program, executor.model.config, *padded(PROMPTS), None, np.array([NEW, 3, 5]))
    if grammar:
        given = given._replace(
            sampling=given.sampling._replace(constraints=executor.constraints([executor.request] * 3))
        )
    state, lengths = executor.prefill(*given), []
    for _ in range(3):
        state, now = executor.advance(state, np.zeros(3, bool), NEW, until_one_ends=True)
        lengths.append(now.lengths.tolist())
    assert lengths == [[3, 3, 3], [5, 3, 5], [NEW, 3, 5]]


def conversation(executor) -> list[list[int]]:
    """Return the output after ten tokens, a rewind by one, a message and six more tokens."""
    numbers = sampling(executor.request.replace(grammar=None), 2, VOCAB, limits=[6, 6])
    running = np.zeros(2, bool)
    state = executor.prefill(*padded(PROMPTS[:2]), numbers, slots=CONTEXT)
    state, _ = executor.advance(state, running, NEW)
    state = executor.rewind(state, np.array([7, 3], np.int32))
    state = executor.extend(state, *padded([[4, 4], [8, 1, 2]]), numbers)
    state, now = executor.advance(state, running, NEW)
    assert now.done.all()
    return executor.output(state).tokens[:, :6].tolist()


def test_stepped_rewind_and_extend(lab):
    """Without a grammar as from full passes. A message also starts the grammar anew."""
    stepped = executor_of(SteppedExecutor, lab, "medusa", "small")
    texts, _ = lab.references(0, PROMPTS[:2])
    whole = [[*text[:n].tolist(), *new] for text, n, new in zip(texts, (7, 3), ([4, 4], [8, 1, 2]), strict=True)]
    answers, _ = lab.references(0, whole)
    expected = [lab.expected(text, len(prompt), 6) for text, prompt in zip(answers, whole, strict=True)]
    assert conversation(stepped) == expected
    texts = [[*p, *constrained(lab, p, TABLE, 6)][:n] for p, n in zip(PROMPTS[:2], (7, 3), strict=True)]
    expected = [constrained(lab, [*text, *new], TABLE, 6) for text, new in zip(texts, ([4, 4], [8, 1, 2]), strict=True)]
    assert conversation(stepped.with_request(grammar=TABLE)) == expected


# --- steps per burst of streamed text: chunks arrive at a readable rate, whatever the duration of a step --------------


def rates(step: float, burst: float, slow_first: float) -> list[float]:
    """Return chunks per second for given durations of a step and a burst; the first burst takes longer."""
    steps, found = 1, []
    for _ in range(40):
        seconds = burst + step * steps + (0 if found else slow_first)
        found.append(1 / seconds)
        steps = next_burst(steps, seconds)
    return found


def test_ten_to_twenty_chunks_per_second():
    for step, burst, slow_first in itertools.product((1e-5, 3e-4, 0.002, 0.01, 0.04), (0.0, 0.002), (0.0, 3.0)):
        found = rates(step, burst, slow_first)
        settled = next(number for number, rate in enumerate(found) if number and rate < 21)
        assert settled <= 9
        assert all(10 <= rate < 21 for rate in found[settled:])
        assert min(found[1:settled], default=21) >= 10  # and no gap before that


def test_slow_steps_are_streamed_one_by_one():
    assert rates(0.5, 0.0, 0.0) == [2.0] * 40


def test_irregular_clocks():
    assert next_burst(3, 0.0) == 12
    assert next_burst(100, 60.0) == 1
    assert next_burst(1, 1e-9) == 4


# --- grammars ---------------------------------------------------------------------------------------------------------


def constrained(lab, prompt: list[int], grammar=None, limit: int = NEW) -> list[int]:
    """Return the best tokens under a grammar without cache, tree or engine: one full pass per token."""
    grammar, text, emitted = grammar or Brackets(), list(prompt), []
    while len(emitted) < limit and END not in emitted:
        allowed = np.isin(np.arange(VOCAB), list(grammar.after(tuple(emitted))))
        best = int(
            np.where(allowed, last_logits(lab.model, lab.base(0), [np.array(text, np.int32)])[0], -np.inf).argmax()
        )
        text, emitted = [*text, best], [*emitted, best]
    return emitted


def accepted(out) -> int:
    return int(np.maximum(out.accept_lengths, 0).sum())


@pytest.mark.parametrize(
    ("name", "tree"), [pytest.param("hydra++", "cartesian", marks=pytest.mark.slow), ("eagle", "grown")]
)
def test_a_grammar_allows_tokens_at_every_node(lab, stepped, monkeypatch, name, tree):
    calls, allow = [], Place.allow

    def watched(self, tokens, parents, allowed):
        allow(self, tokens, parents, allowed)
        nodes = np.flatnonzero((tokens >= 0) & (parents >= 0))
        words = allowed[parents[nodes], tokens[nodes] // 32]
        calls.append(((words >> (tokens[nodes] % 32).astype(np.uint32)) & 1).astype(bool))

    monkeypatch.setattr(Place, "allow", watched)
    executor = stepped(name, tree, eos_ids=(END,), grammar=Brackets())
    out = executor.decode(*padded(PROMPTS))
    assert out.ids() == [constrained(lab, prompt) for prompt in PROMPTS]
    # Per step of a sequence that runs: every level, from the program (three programs: the root), and the tree.
    levels = len(guesses_of(executor.program.tree)) if executor.host_calls else 1
    assert len(calls) == (levels + 1) * out.steps.sum() + len(PROMPTS)
    assert accepted(out) > 0  # drafts were accepted under the grammar
    if executor.host_calls:
        assert all(found.all() for found in calls)  # no node is wasted
        assert sum(map(len, calls)) > 10 * out.steps.sum()


@pytest.mark.parametrize(
    "name", [name if name == "medusa" else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS]
)
def test_forced_tokens_leave_greedy_output_unchanged(lab, stepped, name):
    """Every drafter, with and without nodes for forced tokens, on sequences that end at different steps."""
    tree = {"model": "small", "medusa": "small", "eagle3": "grown", "none": "root"}.get(name, "cartesian")
    expected = [constrained(lab, prompt) for prompt in PROMPTS]
    if name == "oracle":  # proposes the constrained text, so every accept length occurs
        texts = np.zeros((len(PROMPTS), CONTEXT), np.int32)
        for row, prompt, output in zip(texts, PROMPTS, expected, strict=True):
            row[: len(prompt) + len(output)] = [*prompt, *output]
        lab_params = {"params": lab.oracle_params(texts)}
        make = functools.partial(executor_of, SteppedExecutor, lab, **lab_params)
    else:
        make = stepped
    steps = {}
    for forced_nodes in (3,) if tree == "small" else (0, 3):  # the others also without
        executor = make(name, tree, eos_ids=(END,), grammar=Brackets(), forced_nodes=forced_nodes)
        out = executor.decode(*padded(PROMPTS))
        assert out.ids() == expected
        steps[forced_nodes] = int(out.steps.sum())
    assert steps[3] < 0.7 * sum(map(len, expected))
    assert 0 not in steps or steps[3] < steps[0] or name == "oracle"


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("none", "root"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("model", "small"), ("eagle", "grown"))),
    ],
)
def test_three_programs_per_step_give_the_same_tokens(lab, name, tree):
    """As on accelerators, and on a CPU without a compiler."""
    executor = executor_of(SteppedExecutor, lab, name, tree, eos_ids=(END,), grammar=Brackets(), forced_nodes=3)
    executor.host_calls = None
    assert executor.decode(*padded(PROMPTS)).ids() == [constrained(lab, prompt) for prompt in PROMPTS]


def test_wrongly_forced_tokens_are_drafts_that_the_base_rejects(lab, stepped):
    liar = Changed(Brackets(), forces=(7, 1, 0, 0))
    executor = stepped("medusa", "small", eos_ids=(END,), grammar=liar, forced_nodes=3)
    assert executor.decode(*padded(PROMPTS)).ids() == [constrained(lab, prompt) for prompt in PROMPTS]


def test_forced_tokens_are_accepted_together(lab, stepped):
    """Without a draft, a step emits the root and all forced tokens after it, up to the number of nodes."""
    once = Table(8, VOCAB, most=1)  # one text
    executor = stepped("none", "root", grammar=once, forced_nodes=3)
    out = executor.decode(*padded(PROMPTS))
    assert out.ids() == [once.forced((), NEW)] * len(PROMPTS)
    assert out.steps.tolist() == [NEW // 4] * len(PROMPTS)


@pytest.mark.slow
def test_the_baseline_follows_the_grammar_one_token_at_a_time(lab, stepped):
    """Exact sampling draws the same tokens with drafts and forced tokens, because its keys belong to positions."""
    executor = stepped("medusa", "small", eos_ids=(END,), grammar=Brackets(), forced_nodes=3)
    baseline = executor.autoregressive()
    rule, seen = ExactSampling(1.3), set()
    for seed in range(4):
        plain = baseline.with_request(rule=rule).decode(*padded(PROMPTS), jax.random.key(seed))
        assert plain.steps.tolist() == plain.lengths.tolist()
        tree = executor.with_request(rule=rule).decode(*padded(PROMPTS), jax.random.key(seed))
        assert tree.ids() == plain.ids()
        seen |= set(map(tuple, plain.ids()))
    assert len(seen) > 8


def test_masks_of_the_wrong_nodes_change_greedy_output(lab, stepped):
    """The equality above depends on which node gets which mask."""
    wrong = Changed(Brackets(), misplaced=True)
    executor = stepped("medusa", "small", eos_ids=(END,), grammar=wrong, forced_nodes=3)
    assert executor.decode(*padded(PROMPTS)).ids() != [constrained(lab, prompt) for prompt in PROMPTS]


def test_an_error_of_a_grammar_ends_its_sequence_alone(lab, stepped):
    executor = stepped("medusa", "small", eos_ids=(END,), forced_nodes=3)
    expected = [constrained(lab, prompt) for prompt in PROMPTS]
    fails = 4
    found = decoded(executor, PROMPTS, [Brackets(), Changed(Brackets(), fails_after=fails), Brackets()])
    assert [found[0], found[2]] == [expected[0], expected[2]]
    # The text before the root that was in error; a step may accept several tokens beyond the limit.
    assert found[1] == expected[1][: len(found[1])]
    assert fails - 1 <= len(found[1]) < len(expected[1])
    at_once = decoded(executor, PROMPTS, [Brackets(), Changed(Brackets(), fails_after=1), Brackets()])
    assert at_once == [expected[0], [], expected[2]]


def test_sequences_without_a_grammar_are_those_of_a_batch_without(lab, stepped):
    executor = stepped("medusa", "small", eos_ids=(END,), forced_nodes=3)
    texts, margin = lab.references(0, PROMPTS)
    free = [lab.expected(text, len(p), NEW, (END,)) for text, p in zip(texts, PROMPTS, strict=True)]
    assert margin > 1e-4
    assert decoded(executor, PROMPTS, [None, Brackets(), None]) == [free[0], constrained(lab, PROMPTS[1]), free[2]]
    assert decoded(executor, PROMPTS, [TABLE, None, Brackets()]) == [
        constrained(lab, PROMPTS[0], TABLE),
        free[1],
        constrained(lab, PROMPTS[2]),
    ]


class Unseen(AfterToken):
    """Wrong: as vllm#36138, a mark among the drafts is ignored."""

    def allow(self, tokens, parents, allowed):
        super().allow(np.where(tokens == self._end, -1, tokens), parents, allowed)


@pytest.mark.parametrize("cases", [30, pytest.param(1_002, marks=pytest.mark.slow)])
def test_a_grammar_begins_after_the_reasoning(lab, stepped, monkeypatch, cases):
    """Drafts continue over the mark, and the text before it is the free one; greedy and sampled, token for token."""
    executor = stepped("medusa", "small", ExactSampling(1.3), eos_ids=(END,), forced_nodes=3)
    baseline, rng, ended, wrong = executor.autoregressive(), np.random.default_rng(cases), 0, 0
    for seed in range(cases // len(PROMPTS)):
        rule = {"rule": ExactSampling(float(rng.choice([0, 1.3])))}
        prompts = [rng.integers(0, VOCAB, rng.integers(1, 9)).tolist() for _ in PROMPTS]
        marks = rng.integers(END + 1, VOCAB, len(PROMPTS)).tolist()
        inner = Brackets(least=int(rng.integers(4))) if rng.random() < 0.5 else Table(int(rng.integers(99)), VOCAB)
        after, oracle = (
            [kind(mark) for mark in marks]
            for kind in (functools.partial(AfterMark, inner), functools.partial(Reasoned, inner, VOCAB))
        )
        found = decoded(executor.with_request(**rule), prompts, after, seed=seed)
        plain = baseline.with_request(**rule)
        assert found == decoded(plain, prompts, oracle, seed=seed)
        for text, free, mark in zip(found, decoded(plain, prompts, [None] * 3, seed=seed), marks, strict=True):
            place = text.index(mark) + 1 if mark in text else len(text)
            assert text[:place] == free[:place]
            assert all(text[at] in inner.after(tuple(text[place:at])) for at in range(place, len(text)))
            ended += place < len(text)
        with monkeypatch.context() as patch:
            patch.setattr("hydrajax.grammar.after_reasoning.AfterToken", Unseen)
            wrong += found != decoded(executor.with_request(**rule), prompts, after, seed=seed)
    assert ended > cases / 5
    assert wrong > cases / 50  # batches in which a token after a mark within a draft is not allowed


# --- distributions ----------------------------------------------------------------------------------------------------

ROWS, LENGTH = 1500, 4


@functools.cache
def probabilities(grammar, rule) -> dict[tuple[int, ...], float]:
    """Return the probability of each text of `LENGTH` tokens: the base's distribution, renormalised at each token."""
    lab = shared_lab()
    texts: list[tuple[int, ...]] = [()]
    for _ in range(LENGTH):
        texts = [(*text, token) for text in texts for token in sorted(grammar.after(text))]
    start = len(PROMPTS[0])
    logits = [all_logits(lab.model, lab.base(0), np.array([*PROMPTS[0], *text], np.int32)) for text in texts]
    found = {}
    for row, text in zip(logits, texts, strict=True):
        p = 1.0
        for place, token in enumerate(text):
            allowed = sorted(grammar.after(text[:place]))
            weights = np.exp(row[start - 1 + place][allowed].astype(np.float64) / rule.temperature)
            if rule.top_k is not None:
                weights[np.argsort(-weights)[rule.top_k :]] = 0
            p *= weights[allowed.index(token)] / weights.sum()
        found[text] = p
    return found


def p_value(executor, grammar) -> float:
    """Return the p-value of the chi-square test of `ROWS` texts. Rare texts are pooled; others must not occur."""
    expected = probabilities(grammar, executor.request.rule)
    prompts = padded([PROMPTS[0]] * ROWS)
    out = executor.decode(*prompts, jax.random.key(5), np.full(ROWS, LENGTH, np.int32))
    found = [tuple(text) for text in np.asarray(out.tokens)[:, :LENGTH].tolist()]
    assert accepted(out) > ROWS / 10
    if any(expected.get(text, 0.0) == 0 for text in found):
        return 0.0
    wanted = np.array(list(expected.values())) * ROWS
    drawn = Counter(found)
    counts = np.array([drawn[text] for text in expected])
    rare = wanted < 8
    groups = [np.append(values[~rare], values[rare].sum()) for values in (counts, wanted)]
    keep = groups[1] > 0
    return float(stats.chisquare(groups[0][keep], groups[1][keep] * ROWS / groups[1][keep].sum()).pvalue)


EXACT, REJECTION = ExactSampling(1.3, top_k=2), RejectionSampling(0.8)
NAMES = {ExactSampling: "exact", RejectionSampling: "rejection", TraversalVerification: "traversal"}


# Exact sampling is compared token for token with the baseline above, which is stronger and faster.
@pytest.mark.quick("rejection-medusa-small-0")
@pytest.mark.parametrize(
    ("rule", "name", "tree", "forced_nodes"),
    [
        pytest.param(*case, id="-".join([NAMES[type(case[0])], *map(str, case[1:])]))
        for case in (
            (REJECTION, "medusa", "small", 0),
            (REJECTION, "medusa", "chain", 3),
            (REJECTION, "model", "small", 3),
            (REJECTION, "model", "grown", 0),
            (REJECTION, "hydra++", "cartesian", 3),
            (REJECTION, "eagle", "grown", 3),
            (RejectionSampling(1.3, top_k=2), "medusa", "small", 3),
            (TraversalVerification(1.3, top_k=2), "medusa", "small", 3),
            (TraversalVerification(0.8), "model", "grown", 3),
            (EXACT, "none", "root", 3),
            (EXACT, "model", "grown", 3),
            (EXACT, "hydra++", "cartesian", 0),
        )
    ],
)
def test_sampling_under_a_grammar_preserves_the_distribution_of_allowed_tokens(
    lab, stepped, rule, name, tree, forced_nodes
):
    """Drafts are drawn from what the grammar allows; forced tokens are a branch next to them, or in the tree."""
    executor = stepped(name, tree, rule, grammar=TABLE, forced_nodes=forced_nodes, eos_ids=(END,))
    assert p_value(executor, TABLE) > 1e-3


@pytest.mark.parametrize("rule", [pytest.param(EXACT, marks=pytest.mark.slow), REJECTION], ids=["exact", "rejection"])
def test_the_test_of_distributions_fails_for_masks_of_the_wrong_nodes(lab, stepped, rule):
    executor = stepped("medusa", "small", rule, grammar=Changed(TABLE, misplaced=True), eos_ids=(END,))
    assert p_value(executor, TABLE) < 1e-9


# --- shared programs --------------------------------------------------------------------------------------------------


def test_requests_with_other_parameters_share_programs(lab):
    executor = executor_of(FusedExecutor, lab, "medusa", "chain", ExactSampling(0.7))
    cooler = executor.with_request(rule=ExactSampling(0.2))
    assert (cooler.request.rule.temperature, executor.request.rule.temperature) == (0.2, 0.7)
    assert cooler._advance is executor._advance
    other = executor.with_program(tree=presets.chain(2))
    assert other._advance is not executor._advance
    assert other.request == executor.request
    with pytest.raises(HydrajaxError, match="got a depth of 5, expected at most"):
        executor.with_program(tree=presets.chain(5))


def test_a_stepped_executor_keeps_its_grammar_under_another_program(lab):
    executor = executor_of(SteppedExecutor, lab, "medusa", "chain", eos_ids=(END,), grammar=Brackets())
    other = executor.with_program(tree=presets.chain(2))
    assert other.decode(*padded(PROMPTS[:1])).ids() == [constrained(lab, PROMPTS[0])]
    assert other.with_request(grammar=TABLE)._steps is other._steps  # grammars are not part of a program


def test_the_autoregressive_executor_gives_the_same_tokens(lab):
    for rule, plain, same in (
        (Greedy(), Greedy(), True),
        (ExactSampling(0.7, top_k=3), ExactSampling(0.7, top_k=3), True),
        (RejectionSampling(0.7, top_k=5, min_p=0.1), ExactSampling(0.7, top_k=5, min_p=0.1), False),
        (Typical(), Greedy(), False),
    ):
        processors = [Penalties(presence_penalty=0.5)]
        executor = executor_of(FusedExecutor, lab, "hydra++", "chain", rule, processors=processors).autoregressive()
        assert executor.params.draft == {}
        assert executor.program == Program(rule=type(plain), max_new_tokens=NEW)
        assert executor.request == Request(plain, processors, max_new_tokens=NEW)
        assert rule.same_output is same
