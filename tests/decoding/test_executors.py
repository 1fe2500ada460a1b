"""The stepped executor: equality with the fused one, decoding under a grammar, and programs that executors share."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from scipy import stats

from helpers.how import sampling
from helpers.lab import CONTEXT, NEW, VOCAB
from hydrajax.decoding.acceptance import ExactSampling, Greedy, Typical
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.decoding.processors import AllowedTokens, Penalties
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.spec import DecodeSpec
from hydrajax.decoding.state import Params
from hydrajax.decoding.stepped import Candidates, SteppedExecutor
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.models.attention import causal_mask
from hydrajax.trees import presets

PROMPTS = [[3, 4, 5, 6], [9], [1, 2, 1, 2, 1, 2, 1]]
OPEN, CLOSE, END = 0, 1, 2
DEEPEST = 2


def executor_of(kind, lab, name: str, tree: str, rule=None, **choices):
    """Return an executor for a drafter and a tree of the lab. choices: fields of the spec, and ``between``."""
    own = {"between": choices.pop("between")} if "between" in choices else {}
    spec = DecodeSpec(lab.drafters[name], lab.trees[tree], rule or Greedy(), max_new_tokens=NEW, **choices)
    return kind(lab.model, Params(lab.base(0), lab.draft(name, 0)), spec, **own)


def padded(prompts) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    ids = np.zeros((len(prompts), 8), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return ids, lengths


# --- stepped ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tree", "rule", "choices"),
    [
        ("none", "root", Greedy(), {}),
        ("hydra++", "skips ranks", Greedy(), {"processors": [Penalties(presence_penalty=0.2)], "logprobs": 2}),
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


def test_stepped_rewind_and_extend(lab):
    """A conversation: ten tokens, a rewind by one, a message and more tokens."""
    found = []
    for kind in (FusedExecutor, SteppedExecutor):
        executor = executor_of(kind, lab, "hydra++", "skips ranks")
        numbers = sampling(executor.spec, 2, VOCAB, limits=[6, 6])
        running = np.zeros(2, bool)
        state = executor.prefill(*padded(PROMPTS[:2]), numbers, slots=CONTEXT)
        state, _ = executor.advance(state, running, NEW)
        state = executor.rewind(state, np.array([7, 3], np.int32))
        state = executor.extend(state, *padded([[4, 4], [8, 1, 2]]), numbers)
        state, now = executor.advance(state, running, NEW)
        found.append(executor.output(state).tokens[:, :6].tolist())
        assert now.done.all()
    assert found[0] == found[1]


class Brackets:
    """A grammar on the host: brackets nest at most `DEEPEST` deep, and EOS needs all of them closed.

    The tokens allowed after a node depend on all emitted tokens and on the path to the node.
    """

    def __init__(self, batch: int):
        self.batch, self.calls = batch, 0

    def __call__(self, candidates: Candidates | None):
        self.calls += 1
        if candidates is None:
            allowed = [[self.after(())]] * self.batch
        else:
            emitted = zip(candidates.emitted, candidates.lengths, strict=True)
            before = [tuple(tokens[:length].tolist()) for tokens, length in emitted]
            allowed = [
                [self.after(text + self.path(tokens, parents, node)) for node in range(len(tokens))]
                for text, tokens, parents in zip(before, candidates.tokens, candidates.parents, strict=True)
            ]
        return [AllowedTokens(np.array(allowed))]

    @staticmethod
    def path(tokens, parents, node: int) -> tuple[int, ...]:
        found = []
        while node >= 0:
            found.append(int(tokens[node]))
            node = parents[node]
        return tuple(reversed(found))

    @staticmethod
    def after(text: tuple[int, ...]) -> np.ndarray:
        depth = text.count(OPEN) - text.count(CLOSE)
        allowed = np.zeros(VOCAB, bool)
        allowed[[OPEN, CLOSE, END]] = depth < DEEPEST, depth > 0, depth == 0 and len(text) > 5
        return allowed


def constrained(lab, prompt: list[int]) -> list[int]:
    """Return the best tokens under the grammar without cache, tree or engine: one full pass per token."""
    text, emitted = list(prompt), []
    apply = lab.quick_jit(
        lambda params, ids, places: lab.model.apply({"params": params}, ids, places, causal_mask(CONTEXT))
    )
    while len(emitted) < NEW and END not in emitted:
        ids = np.zeros((1, CONTEXT), np.int32)
        ids[0, : len(text)] = text
        hidden = apply(lab.base(0), ids, np.arange(CONTEXT)[None]).hidden[:, len(text) - 1]
        logits = np.asarray(lab.model.apply({"params": lab.base(0)}, hidden, method="logits"))[0]
        best = int(np.where(Brackets.after(tuple(emitted)), logits, -np.inf).argmax())
        text, emitted = [*text, best], [*emitted, best]
    return emitted


@pytest.mark.parametrize(("name", "tree"), [("hydra++", "cartesian"), ("eagle", "grown")])
def test_a_grammar_allows_tokens_at_every_node(lab, name, tree):
    grammar = Brackets(len(PROMPTS))
    executor = executor_of(SteppedExecutor, lab, name, tree, eos_ids=(END,), between=grammar)
    out = executor.decode(*padded(PROMPTS))
    assert out.ids() == [constrained(lab, prompt) for prompt in PROMPTS]
    assert grammar.calls == out.steps.max() + 1
    assert (out.accept_lengths > 0).any()  # drafts were accepted under the grammar


def test_sampling_under_a_grammar_preserves_the_distribution_of_allowed_tokens(lab):
    """Rejection sampling with a draft that ignores the grammar. Chi-square of the first token of 1,500 sequences."""
    rows, allowed = 1500, np.isin(np.arange(VOCAB), [3, 4, 7, 8, 11])

    def between(candidates):
        nodes = 1 if candidates is None else candidates.tokens.shape[1]
        return [AllowedTokens(np.broadcast_to(allowed, (rows, nodes, VOCAB)))]

    executor = executor_of(SteppedExecutor, lab, "model", "chain", RejectionSampling(1.0), between=between)
    prompts = padded([PROMPTS[0]] * rows)
    tokens = np.asarray(executor.decode(*prompts, jax.random.key(0), np.full(rows, 2, np.int32)).tokens)
    assert np.isin(tokens[:, :2], np.flatnonzero(allowed)).all()
    for root in np.unique(tokens[:, 0]):
        drawn = tokens[tokens[:, 0] == root, 1]
        ids = np.array([[*PROMPTS[0], root]])
        hidden = lab.model.apply({"params": lab.base(0)}, ids, np.arange(5)[None], causal_mask(5)).hidden[:, -1]
        logits = np.asarray(lab.model.apply({"params": lab.base(0)}, hidden, method="logits"), np.float64)[0]
        weights = np.where(allowed, np.exp(logits), 0)
        expected = len(drawn) * (weights / weights.sum())[allowed]
        observed = np.bincount(drawn, minlength=VOCAB)[allowed]
        assert stats.chisquare(observed, expected).pvalue > 1e-4


# --- shared programs --------------------------------------------------------------------------------------------------


def test_specs_with_other_numbers_share_programs(lab):
    executor = executor_of(FusedExecutor, lab, "medusa", "chain", ExactSampling(0.7))
    cooler = executor.with_spec(rule=ExactSampling(0.2))
    assert (cooler.spec.rule.temperature, executor.spec.rule.temperature) == (0.2, 0.7)
    assert cooler._advance is executor._advance
    other = executor.with_spec(tree=presets.chain(2))
    assert other._advance is not executor._advance
    assert other.room == executor.room
    with pytest.raises(HydrajaxError, match="got a depth of 5, expected at most"):
        executor.with_spec(tree=presets.chain(5))


def test_a_stepped_executor_keeps_its_grammar_under_another_spec(lab):
    grammar = Brackets(1)
    executor = executor_of(SteppedExecutor, lab, "medusa", "chain", eos_ids=(END,), between=grammar)
    other = executor.with_spec(tree=presets.chain(2))
    assert other.decode(*padded(PROMPTS[:1])).ids() == [constrained(lab, PROMPTS[0])]


@pytest.mark.parametrize(
    ("rule", "plain", "same"),
    [
        (Greedy(), Greedy(), True),
        (ExactSampling(0.7, top_k=3), ExactSampling(0.7, top_k=3), True),
        (RejectionSampling(0.7, top_k=5, min_p=0.1), ExactSampling(0.7, top_k=5, min_p=0.1), False),
        (Typical(), Greedy(), False),
    ],
)
def test_the_autoregressive_executor_gives_the_same_tokens(lab, rule, plain, same):
    processors = [Penalties(presence_penalty=0.5)]
    executor = executor_of(FusedExecutor, lab, "hydra++", "chain", rule, processors=processors).autoregressive()
    assert executor.params.draft == {}
    assert executor.spec == DecodeSpec(NoDrafter(), presets.root(), plain, processors, max_new_tokens=NEW)
    assert rule.same_output is same
