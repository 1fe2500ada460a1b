"""Contests of stub executors on a fake clock: rates, intervals and equality in closed form. Contests of drafts."""

import functools
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from helpers import letters
from helpers.refusals import assert_refused
from hydrajax import assets
from hydrajax.bench import rounds
from hydrajax.bench.contests.contest import contest
from hydrajax.bench.draft_contest import candidate_drafts, measure_drafts
from hydrajax.decoding.acceptance import AcceptanceRule, Greedy
from hydrajax.decoding.decode import DecodeResult
from hydrajax.decoding.typical import Typical
from hydrajax.formats.hub import resolve

PROMPTS = [np.arange(3, 3 + n, dtype=np.int32) for n in (4, 6, 5)]


@pytest.fixture
def clock(monkeypatch):
    """Replaces the module `time`; executors advance its ``now``."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(rounds, "time", clock)
    return clock


@dataclass
class Stub:
    """Replaces an `Executor`: emits 8 tokens per sequence in ``steps`` steps.

    seconds: a number, or one for every call, the first of which is not timed. change: added to the tokens. rule, nodes:
    of the program.
    """

    clock: SimpleNamespace
    seconds: float | list[float]
    steps: int
    change: int = 0
    nodes: int = 1
    rule: AcceptanceRule = field(default_factory=Greedy)
    name: str = ""
    seen: list = field(default_factory=list)

    @property
    def program(self):
        return SimpleNamespace(verified_nodes=self.nodes, rule=type(self.rule))

    def decode(self, prompt, lengths, key):
        rows = len(prompt)
        self.clock.now += self.seconds if isinstance(self.seconds, float) else self.seconds.pop(0)
        self.seen.append((self.name, rows, prompt.shape[1], tuple(lengths.tolist())))
        tokens = np.arange(rows * 10).reshape(rows, 10) + self.change
        tokens[:, 8:] = np.random.default_rng().integers(0, 99, (rows, 2))  # beyond the lengths: garbage
        accept_lengths = np.full((rows, self.steps), 8 // self.steps - 1)
        return DecodeResult(tokens, np.full(rows, 8), accept_lengths, np.full(rows, self.steps))


def test_rates_are_tokens_over_median_seconds(clock):
    stubs = {"tree": Stub(clock, 1.0, 2, nodes=5), "chain": Stub(clock, 2.0, 4, nodes=3)}
    rows = contest({"plain": Stub(clock, 4.0, 8)} | stubs, PROMPTS, batch_size=1, repeats=3)
    found = [(row.tokens_per_second, row.speedup, row.tokens_per_step, row.nodes) for row in rows]
    assert found == [(2.0, 1.0, 1.0, 1), (8.0, 4.0, 4.0, 5), (4.0, 2.0, 2.0, 3)]
    _, tree, chain = rows
    assert (tree.low, tree.high, tree.step_seconds) == (8.0, 8.0, 0.5)
    assert (tree.chance_best, chain.chance_best) == (1.0, 0.0)
    assert all(row.equal for row in rows)
    (alone,) = contest({"plain": Stub(clock, 1.0, 8)}, PROMPTS, batch_size=1, repeats=1)  # a round has no intervals
    assert (alone.low, alone.high, alone.speedup_low, alone.speedup_high, alone.chance_best) == (None,) * 5


def test_every_round_runs_every_executor_once_on_the_same_batches(clock):
    seen: list = []
    stubs = {name: Stub(clock, 1.0, 4, name=name, seen=seen) for name in "abc"}
    contest(stubs, PROMPTS, batch_size=2, repeats=5)
    shapes = {(rows, width, lengths) for _, rows, width, lengths in seen}
    assert shapes == {(2, 6, (4, 6)), (2, 6, (5, 5))}  # one shape; the last batch is filled up
    per_round = [[name for name, *_ in seen[start : start + 6]] for start in range(6, len(seen), 6)]
    assert len(per_round) == 5
    assert all(sorted(names) == ["a", "a", "b", "b", "c", "c"] for names in per_round)
    assert len({tuple(names) for names in per_round}) > 1  # not always in the same order


def test_the_interval_comes_from_whole_rounds(clock):
    """A machine that is twice as slow in two of five rounds."""
    speeds = [1.0, 1.0, 2.0, 1.0, 2.0]
    factors = {"plain": 1, "tree": 2, "other": 1.5}
    stubs = {name: Stub(clock, [0.0, *(s / by for s in speeds)], 8) for name, by in factors.items()}
    plain, tree, other = contest(stubs, PROMPTS[:1], batch_size=1, repeats=5)
    assert (plain.tokens_per_second, tree.speedup) == (8.0, 2.0)
    assert (plain.low, plain.high) == pytest.approx((4.0, 8.0))
    assert (tree.speedup_low, tree.speedup_high) == pytest.approx((2.0, 2.0))  # the baseline has the same load
    assert (tree.chance_best, other.chance_best) == (1.0, 0.0)  # in any choice of rounds


def test_different_output_is_reported_for_rules_with_equal_output(clock):
    stubs = {"plain": Stub(clock, 1.0, 8), "wrong": Stub(clock, 1.0, 8, change=1)}
    stubs["typical"] = Stub(clock, 1.0, 8, change=1, rule=Typical())
    assert [row.equal for row in contest(stubs, PROMPTS, batch_size=3, repeats=1)] == [True, False, None]


def test_divided_rounds_decode_each_batch_once(clock):
    """Round r has the batches r, r + 2 ...; a rate is tokens per step * the rounds' median of steps per second."""
    plain, tree = Stub(clock, 2.0, 8, name="plain"), Stub(clock, [1.0] * 4 + [3.0, 3.0, 1.0, 1.0], 4, name="tree")
    rows = contest({"plain": plain, "tree": tree}, [*PROMPTS, PROMPTS[0]], batch_size=1, repeats=2, divided=True)
    assert len(tree.seen) == 4 + 4  # untimed, timed
    assert [lengths for _, _, _, lengths in tree.seen[4:]] == [(4,), (5,), (6,), (4,)]
    assert rows[0].tokens_per_second == 4.0
    assert rows[1].tokens_per_second == pytest.approx(8 / 4 * np.median([8 / (3 + 3), 8 / (1 + 1)]))
    assert rows[1].tokens_per_step == 2.0


@pytest.fixture(scope="module")
def m():
    return letters.model()


def test_the_base_comes_first_and_outputs_are_equal(m):
    seen = []
    rows = measure_drafts(
        m, ["lookup"], ["abcabc", [1, 2, 3]], tree="chain-2", max_new_tokens=8, repeats=3, on_status=seen.append
    )
    assert [(row.name, row.nodes) for row in rows] == [("autoregressive", 1), ("lookup", 3)]
    plain, lookup = rows
    assert plain.tokens_per_step == plain.speedup == plain.speedup_low == plain.speedup_high == 1
    assert lookup.equal
    assert lookup.tokens_per_step >= 1
    assert lookup.speedup_low <= lookup.speedup <= lookup.speedup_high
    compiling = ["compiling autoregressive, 1 of 2", "compiling lookup, 2 of 2"]
    assert seen == [*compiling, *(f"round {number} of 3" for number in (1, 2, 3))]


def test_a_draft_has_its_own_tree_by_default(m, monkeypatch):
    monkeypatch.setattr("hydrajax.bench.draft_contest.contest", lambda executors, *args, **keywords: executors)
    found = measure_drafts(m, ["lookup", "lookahead-4-3-4"], ["abc"], max_new_tokens=5)
    assert list(found) == ["autoregressive", "lookup", "lookahead-4-3-4"]
    assert found["lookup"].program.tree == m.with_draft("lookup").default_tree()
    assert {executor.request.max_new_tokens for executor in found.values()} == {5}


def test_bad_input_is_refused_before_anything_is_compiled(m):
    assert_refused(
        functools.partial(measure_drafts, on_status=pytest.fail),
        (m, ["lookup"], [], "prompts: got none, expected at least one"),
        (m, ["lookup"], "abc", "prompts: got one text, expected a list"),
        (m, ["no-such-draft"], ["abc"], "draft: no such directory"),
    )


def test_candidates_of_a_base():
    drafts = ["lookup", "medusa", "hydra++", "dspark", "lookup+medusa", "lookup+hydra++", "lookup+dspark"]
    assert candidate_drafts("smollm2") == drafts
    assert candidate_drafts("some/directory") == ["lookup"]
    bundled = list(assets.SHIPPED_DRAFTS)
    assert candidate_drafts("shipped") == ["lookup", *bundled, *(f"lookup+{name}" for name in bundled)]
    assert [resolve(name, "draft") for name in bundled] == [assets.path(name) for name in assets.DRAFTS]
