"""Speculative or plain steps: the policy, and a draft that plain steps leave out and that catches up."""

from functools import partial

import jax
import numpy as np
import pytest

from helpers.letters import TREE, model, pool
from helpers.serving import SECONDS
from hydrajax.serve import bursts
from hydrajax.serve.bursts import PATIENCE, BurstRunner
from hydrajax.serve.executor_pool import PoolSizes
from hydrajax.serve.programs import Kind
from hydrajax.serve.slot_group import SlotGroup
from hydrajax.serve.speculation_policy import (
    CONSTRAINED,
    ENOUGH,
    ENOUGH_STEPS,
    FEWEST_STEPS,
    PROBE_EVERY,
    PROBE_STEPS,
    IdleTimes,
    SpeculationPolicy,
)


def simulated(seconds, tokens, turns: int, policy: SpeculationPolicy | None = None):
    """The kinds of bursts for random batch sizes.

    seconds: of a step by (batch size, kind). tokens: per speculative step.
    """
    random, policy, chosen = np.random.default_rng(0), policy or SpeculationPolicy(), []
    for _ in range(turns):
        batch = int(random.choice([batch for batch, speculative in seconds if speculative]))
        speculative, _ = policy.next_burst(batch, policy.prefers(batch) is not False, 8.0)
        chosen.append((batch, speculative))
        took = seconds[batch, speculative] * random.uniform(0.9, 1.1)
        policy.record(batch, speculative, took, tokens * random.uniform(0.8, 1.2) if speculative else None, steps=8)
    return chosen, policy


def shares(chosen) -> dict[int, float]:
    """The share of speculative steps in the later half, by batch size."""
    late = chosen[len(chosen) // 2 :]
    return {
        batch: float(np.mean([speculative for found, speculative in late if found == batch]))
        for batch in sorted({batch for batch, _ in late})
    }


def measured(policy: SpeculationPolicy, batch: int, seconds, tokens: float) -> SpeculationPolicy:
    """Record enough bursts of both kinds. seconds: of a speculative and of a plain step."""
    for kind, took in zip((True, False), seconds, strict=True):
        for _ in range(ENOUGH + 1):
            policy.record(batch, kind, took, tokens if kind else None, steps=ENOUGH_STEPS)
    return policy


# A speculative step costs 1.5 times a plain one at batch size 1 and 3 times at batch size 8.
STEP_SECONDS = {(1, True): 1.5, (1, False): 1.0, (2, True): 2.6, (2, False): 1.3, (8, True): 6.0, (8, False): 2.0}


def test_the_kind_of_step_with_more_tokens_per_second_is_chosen():
    for tokens, worth in [(1.2, ()), (1.75, (1,)), (2.4, (1, 2)), (4.0, (1, 2, 8))]:
        chosen, _ = simulated(STEP_SECONDS, tokens, 4000)
        for batch, share in shares(chosen).items():
            assert share == pytest.approx(1.0 if batch in worth else 0.0, abs=2 / 40)
            assert 0 < share < 1  # the other kind is probed now and then


def test_the_policy_follows_changing_acceptance():
    chosen, policy = simulated(STEP_SECONDS, 4.0, 300)
    assert shares(chosen)[8] > 0.9
    chosen, policy = simulated(STEP_SECONDS, 1.2, 4000, policy)
    assert shares(chosen)[8] < 0.1
    chosen, _ = simulated(STEP_SECONDS, 4.0, 24 * PROBE_EVERY[True], policy)
    assert shares(chosen)[8] > 0.9


def test_both_kinds_are_measured_before_they_are_compared_and_the_time_of_a_compilation_is_left_out():
    policy, kinds = SpeculationPolicy(), []
    for seconds in (100.0, *[1.0] * ENOUGH, 100.0, *[2.0] * ENOUGH):
        assert policy.prefers(4) is None
        kinds.append(policy.next_burst(4, True, 1.0)[0])
        policy.record(4, kinds[-1], seconds, 1.0 if kinds[-1] else None, steps=8)
    assert kinds == [True] * (ENOUGH + 1) + [False] * (ENOUGH + 1)
    assert policy.prefers(4)


def test_a_text_whose_first_drafts_are_rejected_does_not_end_speculation():
    """A burst of a large model has two steps. The first eight emit a token each, later ones two."""
    policy, kinds = SpeculationPolicy(), []
    policy.idle = IdleTimes({(1, True): 1.2, (1, False): 1.0}, 0.0)
    for _ in range(100):
        kinds.append(policy.next_burst(1, policy.prefers(1) is not False, 2.0)[0])
        tokens = (1.0 if sum(kinds) <= 4 else 2.0) if kinds[-1] else None
        policy.record(1, kinds[-1], 1.2 if kinds[-1] else 1.0, tokens, steps=2)
    assert all(kinds[: ENOUGH_STEPS // 2])
    assert np.mean(kinds) > 0.8


def test_tokens_of_a_draft_that_is_behind_do_not_count():
    policy = measured(SpeculationPolicy(), 2, (2.0, 1.0), 3.0)
    assert policy.prefers(2)
    for _ in range(100):
        policy.record(2, True, 2.0)
    assert policy.prefers(2)


def test_each_batch_size_has_its_own_tokens():
    """Larger batches have smaller trees."""
    policy = SpeculationPolicy()
    for batch, tokens in ((1, 3.0), (8, 1.5)):
        measured(policy, batch, (2.0, 1.0), tokens)
    assert policy.prefers(1)
    assert policy.prefers(8) is False


def test_bursts_of_both_kinds_take_as_long_but_probes_let_the_draft_miss_few_tokens():
    policy = SpeculationPolicy()
    assert policy.next_burst(2, True, 1.0) == (True, FEWEST_STEPS)
    measured(policy, 2, (0.2, 0.1), 4.0)
    assert {policy.next_burst(2, True, 1.0) for _ in range(100)} == {(True, 5), (False, PROBE_STEPS)}
    measured(policy, 8, (0.2, 0.1), 1.0)
    assert {policy.next_burst(8, False, 1.0) for _ in range(200)} == {(True, 5), (False, 10)}


def test_a_probe_that_makes_the_draft_catch_up_is_rarer():
    policy = SpeculationPolicy()
    for batch, tokens in ((1, 4.0), (8, 1.0)):
        measured(policy, batch, (0.2, 0.1), tokens)
    probes = {
        (batch, usual): sum(policy.next_burst(batch, usual, 1.0)[0] is not usual for _ in range(1000))
        for batch, usual in ((1, True), (8, False))
    }
    assert 0 < probes[8, False] < probes[1, True] / 2


def test_steps_under_grammars_have_a_time_of_their_own():
    policy = SpeculationPolicy()
    for seconds in (100.0, 0.5):  # the first may include a compilation
        assert policy.steps(2, CONSTRAINED, 2.0) == FEWEST_STEPS
        policy.record(2, CONSTRAINED, seconds)
    assert policy.steps(2, CONSTRAINED, 2.0) == 4
    assert policy.next_burst(2, True, 2.0) == (True, FEWEST_STEPS)


# A speculative step costs twice a plain one at batch size 1 and 4 times at batch size 8.
IDLE = IdleTimes({(1, True): 0.2, (1, False): 0.1, (8, True): 0.8, (8, False): 0.2}, 0.0)


def test_times_of_an_idle_device_spare_the_measurement_of_slower_steps():
    policy = SpeculationPolicy()
    policy.idle = IDLE
    assert policy.prefers(8) is None  # no step has been speculative
    assert policy.next_burst(8, True, 1.0) == (True, 2)
    for _ in range(2):
        policy.record(1, True, 0.2, 3.0, steps=ENOUGH_STEPS)
    assert policy.prefers(1) is None  # they can be faster
    assert policy.prefers(8) is False  # not even with as many tokens as with a smaller batch
    kinds = [policy.next_burst(8, False, 1.0)[0] for _ in range(1000)]
    assert 0 < sum(kinds) < 10
    measured(policy, 8, (0.3, 0.2), 2.5)  # the idle times were wrong
    assert policy.prefers(8)


def test_the_time_to_read_prompts_counts():
    for prompt, worth in [(200, True), (10_000, False)]:
        policy = measured(SpeculationPolicy(), 1, (0.2, 0.1), 3.0)
        policy.idle = IDLE._replace(reading=0.01)
        assert policy.prefers(1)
        policy.answered(prompt, 100)
        # Reading takes 0.02 and 1 s for each token of the answer; the rest takes 0.067 s, and a plain step 0.1 s.
        assert policy.prefers(1) is worth


def test_bursts_that_end_early_count_by_their_steps():
    """Seven steps of 5 ms and one of 20 ms take 6.9 ms each, not 12.5."""
    policy = SpeculationPolicy()
    for _ in range(100):
        policy.record(1, False, 5e-3, steps=7)
        policy.record(1, False, 20e-3, steps=1)
    assert 13 <= policy.steps(1, False, 0.1) <= 16


PROMPT = np.arange(20, dtype=np.int32) % 13


@pytest.fixture(scope="module")
def drafted():
    """A model whose draft has a KV cache."""
    return model("hydra++")


@pytest.fixture(scope="module")
def executors(drafted):
    found = pool(drafted, PoolSizes(slots=1, chunk=64, cache_len=128), drops_draft=True)
    for program in found.all_programs():
        if program.cache_len == 128 and program.kind is not Kind.CONSTRAINED:
            found.programs.compile(program)
    return found


def steps_taken(executors, state, count: int, speculative: bool):
    return executors.advance(state, 128, np.zeros(1, bool), count, speculative)


def begun(executors, ids, read: bool):
    """Prefill a text into a batch of one."""
    rest = executors.neutral.replace(max_new_tokens=30)
    state = executors.finish(executors.empty(128), ids, rest, read=read)
    return executors.shapes.tile(state, 1, 128)


def test_after_catching_up_the_draft_has_read_the_text_and_the_base_is_as_before(executors):
    state, now = steps_taken(executors, begun(executors, PROMPT, read=False), 10, False)
    text = np.concatenate([PROMPT, now.tokens[0, : now.lengths[0]]])
    assert len(text) == len(PROMPT) + 10
    before = jax.tree.map(np.array, (state.target, state.output.tokens))
    missing = int(state.draft.cache.lengths[0])
    state = executors.catch_up(state, 0, text, 0, 128)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, (state.target, state.output.tokens)))
    wanted = begun(executors, text, read=True)
    assert missing == 0
    assert int(state.draft.cache.lengths[0]) == int(wanted.draft.cache.lengths[0])
    close = partial(np.testing.assert_allclose, atol=1e-4)
    jax.tree.map(close, jax.tree.map(np.array, state.draft), jax.tree.map(np.array, wanted.draft))
    accepted = [steps_taken(executors, each, 6, True)[1] for each in (state, wanted)]
    assert accepted[0].lengths[0] - 10 == accepted[1].lengths[0] > 6


def test_a_long_gap_is_read_from_its_end(executors):
    assert executors.read_from(0, 30) == 0
    assert executors.read_from(25, 30) == 25
    assert executors.read_from(5, 90) == 90 - 64


class Given(SpeculationPolicy):
    """Prefer what each turn is given; the last one for all later turns."""

    def __init__(self, preferences):
        super().__init__()
        self._preferences = list(preferences)

    def prefers(self, batch_size):
        return self._preferences[0]

    def next_burst(self, batch_size, speculative, seconds):
        if len(self._preferences) > 1:
            self._preferences.pop(0)
        return speculative, 2


@pytest.fixture
def served_with(executors, start, monkeypatch):
    """``served_with(preferences)``: the kinds of bursts, whether prompts were read, and the batcher."""

    def started(preferences):
        monkeypatch.setattr(bursts, "SpeculationPolicy", lambda: Given(preferences))
        kinds, caught_up, reads = [], [], []
        advance, catch_up, finish = BurstRunner._advance, SlotGroup.catch_up, executors.finish

        def advanced(self, group, steps, speculative):
            kinds.append(speculative)
            return advance(self, group, steps, speculative)

        def read(*args):
            reads.append(args[-1])
            return finish(*args)

        monkeypatch.setattr(BurstRunner, "_advance", advanced)
        monkeypatch.setattr(SlotGroup, "catch_up", lambda *args: (caught_up.append(1), catch_up(*args))[1])
        monkeypatch.setattr(executors, "finish", read)
        return start(executors), kinds, reads, caught_up

    return started


def check_answer(drafted, batcher, limit: int = 50) -> None:
    (handle,) = batcher.submit([batcher.request(PROMPT, max_new_tokens=limit)])
    (wanted,) = drafted.generate([PROMPT], tree=TREE, max_new_tokens=limit)
    assert handle.wait(SECONDS).output_ids == wanted.output_ids
    assert wanted.new_tokens == limit  # no EOS


def test_plain_steps_leave_the_draft_out(drafted, served_with):
    batcher, kinds, reads, caught_up = served_with([False])
    check_answer(drafted, batcher)
    assert (set(kinds), reads, caught_up) == ({False}, [False], [])
    assert batcher.stats().speculative_steps == batcher.draft_counts().steps == 0


def test_a_prompt_is_read_for_speculative_steps(drafted, served_with):
    batcher, kinds, reads, caught_up = served_with([True])
    check_answer(drafted, batcher)
    assert (set(kinds), reads, caught_up) == ({True}, [True], [])


def test_the_draft_catches_up_once_when_speculative_steps_have_been_faster_for_a_while(drafted, served_with):
    batcher, kinds, reads, caught_up = served_with([False, True])
    check_answer(drafted, batcher)
    assert reads[0] is False
    assert (kinds.index(True), kinds[-1]) == (1 + PATIENCE, True)  # after a single step
    assert len(caught_up) == 1


def test_plain_steps_begin_at_once_because_they_need_no_preparation(drafted, served_with):
    batcher, kinds, reads, caught_up = served_with([True, True, False])
    check_answer(drafted, batcher)
    assert (kinds.index(False), kinds[-1]) == (3, False)  # after a single step and two bursts
    assert batcher.draft_counts().steps == batcher.stats().speculative_steps == 5
    assert (reads, caught_up) == ([True], [])


def test_measurements_that_alternate_change_nothing(drafted, served_with):
    batcher, kinds, _, caught_up = served_with([False, *[True, False] * 50])
    check_answer(drafted, batcher)
    assert (set(kinds), caught_up) == ({False}, [])


def test_a_cached_prefix_that_the_draft_has_missed_is_read_by_the_next_prompt(drafted, served_with):
    batcher, _, reads, _ = served_with([False])
    check_answer(drafted, batcher, 20)
    batcher._bursts.policy._preferences = [True]
    (handle,) = batcher.submit([batcher.request(np.append(PROMPT, 3), max_new_tokens=4)])
    handle.wait(SECONDS)
    assert reads == [False, True]
    assert handle.cached == 0  # the base runs the prefix again for the draft
