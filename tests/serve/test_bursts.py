"""Plain steps leave the draft out, and it catches up before speculative steps."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from helpers.letters import TREE, model, pool
from hydrajax.serve import bursts
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.bursts import PATIENCE, BurstRunner
from hydrajax.serve.executor_pool import PoolSizes
from hydrajax.serve.programs import Kind
from hydrajax.serve.slot_group import SlotGroup
from hydrajax.serve.speculation_policy import SpeculationPolicy

SECONDS = 300
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
    return executors.tile(state, 1, 128)


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
def served_with(executors, monkeypatch):
    """``served_with(preferences)``: the kinds of bursts, whether prompts were read, and the batcher."""
    made = []

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
        made.append(Batcher(executors).start())
        return made[-1], kinds, reads, caught_up

    yield started
    for batcher in made:
        batcher.close()


def check_answer(drafted, batcher, limit: int = 50) -> None:
    (handle,) = batcher.submit([batcher.request(PROMPT, max_new_tokens=limit)])
    (wanted,) = drafted.generate([PROMPT], tree=TREE, max_new_tokens=limit)
    assert handle.wait(SECONDS).output_ids == wanted.output_ids
    assert wanted.new_tokens == limit  # no EOS


def test_plain_steps_leave_the_draft_out(drafted, served_with):
    batcher, kinds, reads, caught_up = served_with([False])
    check_answer(drafted, batcher)
    assert (set(kinds), reads, caught_up) == ({False}, [False], [])
    assert batcher.stats().speculative_steps == 0


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
