"""Prompts that begin as earlier or running sequences do: the same tokens, from a copied cache."""

import threading

import jax
import numpy as np
import pytest

from helpers.lab import hybrid_lab
from helpers.letters import END, answers, model, pool
from helpers.serving import SECONDS, request
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.state_snapshots import TAIL
from hydrajax.serve.executor_pool import PoolSizes
from hydrajax.serve.slot_group import SlotGroup


def test_shared_prefixes_are_prefilled_once(small, start):
    batcher = start(small, cache_memory=20 * small.nbytes(1, 90))
    system = np.arange(40, dtype=np.int32) % 16
    for ids, cached in (
        ([*system, 3, 4], 0),
        ([*system, 9, 9, 9], 40),
        ([*system, 3, 4], 41),  # all tokens except the last one, which must be run
        ([*system[:10], 1], 0),  # too short
    ):
        (handle,) = batcher.submit([request(batcher, ids, 5)])
        handle.wait(SECONDS)
        assert handle.cached == cached
    # The next turn of a conversation.
    (turn,) = batcher.submit([request(batcher, [*ids, *handle.result.output_ids, 2, 3], 5)])
    turn.wait(SECONDS)
    assert turn.cached == len(ids) + handle.result.new_tokens
    batcher.close(SECONDS)
    assert batcher.stats().prefix_cache_entries == 3


@pytest.fixture
def held(monkeypatch):
    """Two events: ``stepped`` after the first step of a group, which ends when ``go`` is set."""
    stepped, go, advance = threading.Event(), threading.Event(), SlotGroup.advance

    def advance_and_wait(*args):
        snapshot = advance(*args)
        stepped.set()
        go.wait(SECONDS)
        return snapshot

    monkeypatch.setattr(SlotGroup, "advance", advance_and_wait)
    yield stepped, go
    go.set()


def test_a_prompt_shares_the_prefix_of_a_running_sequence(served, small, start, held):
    """A sequence that starts alone is not copied, so no entry of the prefix cache has its prompt while it runs."""
    stepped, go = held
    batcher = start(small)
    prompts = [np.arange(32, dtype=np.int32) % 16, np.array([*np.arange(32) % 16, 3, 4], np.int32)]
    (running,) = batcher.submit([request(batcher, prompts[0], 60)])
    stepped.wait(SECONDS)
    assert batcher.stats().prefix_cache_entries == 0
    (later,) = batcher.submit([request(batcher, prompts[1], 5)])
    go.set()
    expected = answers(served, prompts, [Greedy()] * 2, [60, 5], 0)
    for handle, wanted in zip((running, later), expected, strict=True):
        assert handle.wait(SECONDS).output_ids == wanted.output_ids
    assert later.cached == 32


def test_a_cancelled_prompt_is_not_prefilled_again(small, start, held):
    stepped, go = held
    batcher = start(small)
    ids = np.arange(32, dtype=np.int32) % 16
    (cancelled,) = batcher.submit([request(batcher, ids, 60)])
    stepped.wait(SECONDS)
    batcher.cancel(cancelled)
    go.set()
    (again,) = batcher.submit([request(batcher, ids, 5)])
    again.wait(SECONDS)
    assert again.cached == 31  # the last token must be run


@pytest.mark.slow
def test_prompts_continue_from_snapshots_of_recurrent_layers(start):
    """Snapshots are near the end of each prompt and where it leaves an earlier text."""
    served = model(lab=hybrid_lab())
    executors = pool(served, PoolSizes(slots=2, chunk=16, cache_len=128))
    batcher = start(executors, cache_memory=20 * executors.nbytes(1, 90))

    def ask(ids, count: int = 1) -> tuple[list[int], list[int]]:
        """Return the cached tokens of each request for this prompt, and prompt and answer."""
        handles = batcher.submit([request(batcher, ids, 12) for _ in range(count)])
        wanted = answers(served, [np.array(ids, np.int32)] * count, [Greedy()] * count, [12] * count, 0)
        for handle, one in zip(handles, wanted, strict=True):
            assert handle.wait(SECONDS).output_ids == one.output_ids
        return [handle.cached for handle in handles], [*ids, *one.output_ids]

    system = [token % 13 for token in range(30)]
    first = [*system, *[3, 4] * 9]
    cached, text = ask(first, 4)
    assert cached == [0] + [len(first) - TAIL] * 3
    assert ask([*system, *[7, 1, 1] * 6])[0] == [0]  # nobody has stopped at the end of `system` yet
    assert ask([*system, *[9, 5] * 4])[0] == [len(system)]
    assert ask([*text, 5, 5])[0] == [len(text)]  # the next turn
    assert ask([*text[:-2], 5, 5])[0] == [len(first) - TAIL]  # an answer that was rewritten
    assert ask([*text[:-2], 6])[0] == [len(text) - TAIL]
    assert ask([*text[:-2], 5, 5, 0])[0] == [len(text) - TAIL]  # the snapshot at the end of `text` is of another one
    # Answers that EOS and a stop string end, perhaps within a draft, and the turns after them.
    prompts = list(np.random.default_rng(0).integers(0, 16, (9, 40), dtype=np.int32))
    ended = [one for one in answers(served, prompts, [Greedy()] * 9, [12] * 9, 0) if 1 < one.new_tokens < 12]
    text = ask(ended[0].prompt_ids)[1]
    assert (text[-1], ask([*text, 5])[0]) == (END, [len(text)])
    ids = next(prompt for prompt in prompts if prompt.tolist() not in [list(one.prompt_ids) for one in ended])
    stop = served.tokenizer.decode(answers(served, [ids], [Greedy()], [12], 0)[0].output_ids[4:6])
    (handle,) = batcher.submit([batcher.request(ids, max_new_tokens=12, stop=[stop])])
    cut = handle.wait(SECONDS).output_ids
    assert len(cut) < 12
    assert ask([*ids, *cut, 5])[0][0] >= len(ids) - TAIL
    stats = batcher.stats()
    assert stats.prefix_cache_nbytes == stats.prefix_cache_entries * executors.nbytes(1, 90)
    kept = [entry.snapshots.states for entry in batcher.memory.prefix_cache._entries]
    held = sum(x.nbytes for states in kept for x in jax.tree.leaves(states))
    assert 0 < held <= stats.prefix_cache_entries * executors.shapes._kept
