"""A draft that misses steps and catches up proposes what it would have proposed without a pause."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from helpers.letters import model
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.decoding.spec import DecodeSpec, sampling_params
from hydrajax.drafters.with_lookup import WithLookup
from hydrajax.scheduling.deferred import Deferred
from hydrajax.trees import presets

KEPT, BATCH, WIDTH = 8, 2, 12


@pytest.fixture(scope="module")
def executors():
    """Steps with and without the draft, and the catching up, of a draft with a cache of its own."""
    served = model("hydra++")
    deferred = Deferred(served.drafter, served.model, kept=KEPT)
    spec = DecodeSpec(deferred, presets.root(), max_new_tokens=40)
    reads = FusedExecutor(served.model, served.params, spec)
    misses = reads.with_spec(drafter=deferred.missing())

    @jax.jit
    def catch_up(params, state):
        base = reads.engine.bind(params)
        return state._replace(draft=deferred.catch_up(params.draft, state.draft, state.target.root, base))

    return reads, misses, lambda state: catch_up(reads.params, state)


def prompts():
    return np.arange(BATCH * WIDTH, dtype=np.int32).reshape(BATCH, WIDTH) % 16


def begun(executor, length: int = 5):
    sampling = sampling_params([executor.spec] * BATCH, jax.random.key(0), 17)
    return executor.prefill(prompts(), np.full(BATCH, length, np.int32), sampling)


def after(executor, state, steps: int, stopped=(False, False)):
    return executor.advance(state, np.array(stopped), steps)[0]


def check_same(one, other) -> None:
    """The same text, and the same draft state where it is in use."""
    np.testing.assert_array_equal(one.output.tokens, other.output.tokens)
    first, second = one.draft, other.draft
    for name in ("missed", "read", "length"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    np.testing.assert_allclose(first.drafter.hidden, second.drafter.hidden, atol=1e-5)
    caches = first.drafter.cache, second.drafter.cache
    np.testing.assert_array_equal(caches[0].lengths, caches[1].lengths)
    most = int(caches[0].lengths.max())
    for a, b in zip(*(jax.tree.leaves(cache.layers) for cache in caches), strict=True):
        np.testing.assert_allclose(a[:, :, :most], b[:, :, :most], atol=1e-5)


def test_a_draft_that_caught_up_is_as_one_that_missed_nothing(executors):
    reads, misses, catch_up = executors
    missed = after(misses, begun(reads), 6)
    np.testing.assert_array_equal(missed.draft.missed, [6, 6])
    check_same(catch_up(missed), after(reads, begun(reads), 6))


def test_only_the_last_tokens_are_kept(executors):
    """More are missed than the ring holds: the draft has a gap, and rewinding it keeps no token that is cut."""
    reads, misses, catch_up = executors
    found = catch_up(after(misses, begun(reads), KEPT + 3)).draft
    np.testing.assert_array_equal(found.read, [5 + KEPT] * 2)
    np.testing.assert_array_equal(found.length, [5 + KEPT + 3] * 2)
    np.testing.assert_array_equal(found.drafter.cache.lengths, found.read)
    for length, read in ((16, 13), (15, 12), (6, 3), (2, 0)):
        cut = reads.spec.drafter.rewind(found, np.full(BATCH, length, np.int32))
        np.testing.assert_array_equal(cut.read, [read] * 2)
        np.testing.assert_array_equal(cut.drafter.cache.lengths, cut.read)


def test_a_sequence_that_missed_nothing_keeps_its_state(executors):
    reads, misses, catch_up = executors
    state = after(misses, after(reads, begun(reads), 2), 4, (True, False))
    np.testing.assert_array_equal(state.draft.missed, [0, 4])
    before, found = state.draft.drafter, catch_up(state).draft.drafter
    np.testing.assert_array_equal(before.hidden[0], found.hidden[0])
    assert (before.hidden[1] != found.hidden[1]).any()


def test_missed_tokens_before_other_text_are_lost(executors):
    """They would come after it in the draft's text."""
    reads, misses, _ = executors
    state = after(reads, after(misses, begun(reads), 3), 2)
    np.testing.assert_array_equal(state.draft.missed, [0, 0])
    np.testing.assert_array_equal(state.draft.read, [7, 7])
    np.testing.assert_array_equal(state.draft.length, [10, 10])


def test_an_unread_prompt_is_read_when_the_draft_catches_up(executors):
    reads, misses, catch_up = executors
    unread = reads.with_spec(drafter=reads.spec.drafter.without_reading())
    check_same(catch_up(after(misses, begun(unread), 3)), after(reads, begun(reads), 3))
    # More than the ring holds: the end of it, which is that of a draft that read from there on.
    found = catch_up(begun(unread, WIDTH)).draft
    np.testing.assert_array_equal(found.read, [KEPT] * 2)
    np.testing.assert_array_equal(found.length, [WIDTH] * 2)
    tokens = np.sort(np.asarray(found.tokens), axis=1)
    np.testing.assert_array_equal(tokens, np.sort(prompts()[:, WIDTH - KEPT :], axis=1))


def test_without_the_draft_only_the_root_is_fed():
    served = model()
    deferred = Deferred(WithLookup(served.drafter, 3), served.model)
    assert deferred.spec.verified_nodes(presets.root()) == 4
    assert deferred.missing().spec.verified_nodes(presets.root()) == 1
