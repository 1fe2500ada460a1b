"""The batcher against `generate`: the same tokens, whatever runs beside a request and however its prompt is read."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from helpers.compilations import no_compilation
from helpers.lab import NEW, shared_lab
from helpers.letters import END, TREE, answers, model, pool
from hydrajax.decoding.acceptance import ExactSampling, Greedy
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.with_lookup import WithLookup
from hydrajax.errors import HydrajaxError
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.group import Group
from hydrajax.serve.pool import Sizes
from hydrajax.serve.requests import Closed, QueueFull
from hydrajax.trees import presets

SECONDS = 300  # that a busy machine may take


@pytest.fixture
def start():
    """Batchers that are closed at the end."""
    made = []

    def started(executors, **settings) -> Batcher:
        made.append(Batcher(executors, **settings).start())
        return made[-1]

    yield started
    for batcher in made:
        batcher.close()


def prompts_and_limits(count: int, seed: int) -> tuple[list[np.ndarray], list[int]]:
    """Of any length; a third of them begin like another one."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 16, random.integers(1, 75), dtype=np.int32) for _ in range(count)]
    for at in range(2, count, 3):
        shared = prompts[at - 2][: random.integers(1, len(prompts[at - 2]) + 1)]
        prompts[at] = np.concatenate([shared, prompts[at][:12]])
    return prompts, random.integers(1, 60, count).tolist()


@contextmanager
def watched(batcher):
    """What the batcher says of itself all the while."""
    stop, seen = threading.Event(), []

    def watch():
        while not stop.is_set():
            seen.append(batcher.stats())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        stop.set()
        watcher.join()


@contextmanager
def every_turn_gets_on(executors):
    """In no turn of a batcher nothing is read, decoded or dropped. As texts and answers are finite, so is the number of
    turns that a request can wait.
    """
    done, idle = [], []

    def noted(function):
        return lambda *args: (done.append(1), function(*args))[1]

    def turn(batcher, original=Batcher._turn):
        before = len(done), batcher.stats().cancelled
        original(batcher)
        if before == (len(done), batcher.stats().cancelled):
            idle.append(batcher.stats())

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((executors, "feed"), (executors, "end"), (FusedExecutor, "advance")):
            patch.setattr(owner, name, noted(getattr(owner, name)))
        patch.setattr(Batcher, "_turn", turn)
        yield
    assert done
    assert not idle


def request(batcher, prompt, limit=20, rule=None, seed=None):
    numbers = {"temperature": rule.temperature, "top_p": rule.top_p} if isinstance(rule, ExactSampling) else {}
    return batcher.request(np.asarray(prompt, np.int32), max_new_tokens=limit, seed=seed, **numbers)


def check_random_arrivals(served, batcher, count: int, pause: float) -> None:
    """Whose programs are compiled before."""
    random = np.random.default_rng(7)
    prompts, limits = prompts_and_limits(count, 3)
    rules = [Greedy() if at % 2 else ExactSampling(1.2, top_p=0.9) for at in range(count)]
    seeds = random.integers(0, 1000, count).tolist()
    tickets = []
    with no_compilation():
        for prompt, limit, rule, seed in zip(prompts, limits, rules, seeds, strict=True):
            tickets += batcher.submit([request(batcher, prompt, limit, rule, seed)])
            time.sleep(random.exponential(pause))
        results = [ticket.wait(SECONDS) for ticket in tickets]
    for result, wanted in zip(results, answers(served, prompts, rules, limits, seeds), strict=True):
        assert (result.output_ids, result.finish_reason) == (wanted.output_ids, wanted.finish_reason)
        assert sum(result.step_lengths) == result.new_tokens
        np.testing.assert_allclose(result.logprobs, wanted.logprobs, atol=1e-4)
    assert {ticket.result.finish_reason for ticket in tickets} >= {"length", "eos"}
    stats = batcher.stats()
    assert (stats.ended, stats.running, stats.waiting) == (count, 0, 0)
    assert stats.tokens == sum(ticket.result.new_tokens for ticket in tickets) > stats.steps


def test_under_random_arrivals_every_request_gets_what_it_gets_alone(served, small, start):
    batcher = start(small)
    check_random_arrivals(served, batcher, 16, 0.01)
    stats = batcher.stats()
    assert 0 < stats.cached < stats.prompt_tokens


def test_greedy_answers_are_what_the_base_alone_goes_on_with(small, start):
    """Without a cache, a tree, a batch or a loop of the package."""
    lab, batcher, prompts = shared_lab(), start(small), [[3, 1, 4, 1, 5], [2], [9, 2, 6, 5, 3, 5, 8]]
    tickets = batcher.submit([request(batcher, prompt, NEW) for prompt in prompts])
    texts, _ = lab.references(0, prompts)
    for text, prompt, ticket in zip(texts, prompts, tickets, strict=True):
        assert list(ticket.wait(SECONDS).output_ids) == lab.expected(text, len(prompt), NEW, (END,))


@pytest.mark.slow
def test_so_it_is_with_several_shapes_a_tree_for_each_batch_and_a_cache_of_the_draft(start):
    served = model("hydra++")
    trees = {1: TREE, 2: TREE, 5: presets.chain(2)}
    executors = pool(served, Sizes(rows=5, chunk=32, places=32), trees.get, drops_draft=True)
    assert (executors.batches, len(executors.places)) == ((1, 2, 5), 3)
    executors.warm()
    batcher = start(executors)
    check_random_arrivals(served, batcher, 60, 0.03)
    stats = batcher.stats()
    assert 0 < stats.drafted < stats.steps
    # And in hardly more memory than one long row takes, or in what short rows need beside it, which is never exceeded.
    for memory, groups in ((executors.nbytes(1, 90), 1), (executors.nbytes(1, 90) + executors.nbytes(2, 20), 2)):
        memory += executors.nbytes_to_read(90)
        batcher = start(executors, cache_memory=memory)
        with watched(batcher) as seen, every_turn_gets_on(executors):
            check_random_arrivals(served, batcher, 40, 0.0)
        assert max(stats.nbytes + stats.kept_nbytes for stats in seen) <= memory
        assert max(stats.running for stats in seen) > 1
        assert max(stats.groups for stats in seen) >= groups


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["lookup", "lookup beside heads"])
def test_so_it_is_with_tables_of_the_text(start, draft):
    """Which are made anew where a row comes to have other places, and where a text is taken over."""
    inner = model()
    drafter = PromptLookup(depth=4) if draft == "lookup" else WithLookup(inner.drafter, 3)
    params = inner.params._replace(draft={}) if draft == "lookup" else inner.params
    served = replace(inner, drafter=drafter, params=params)
    executors = pool(served, Sizes(rows=2, chunk=32, places=32), drops_draft=True)
    executors.warm()
    batcher = start(executors)
    check_random_arrivals(served, batcher, 40, 0.0)
    stats = batcher.stats()
    assert stats.cached > 0
    assert 0 < stats.drafted < stats.steps


@pytest.mark.slow
def test_processors_of_each_request(served, start):
    """Penalties, which count each row's own text, biases, both and none, side by side."""
    batcher = start(pool(served, Sizes(rows=3, chunk=16, places=128, penalties=True)))
    prompts, limits = prompts_and_limits(9, 5)
    penalties, bias = {"repetition_penalty": 1.3, "presence_penalty": 0.4}, {"logit_bias": {"3": 4.0, "5": -9.0}}
    numbers = [(penalties, bias, penalties | bias, {})[at % 4] for at in range(9)]
    tickets = batcher.submit(
        [batcher.request(p, max_new_tokens=n, **own) for p, n, own in zip(prompts, limits, numbers, strict=True)]
    )
    names = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "logit_bias": {}}
    each = {name: [own.get(name, neutral) for own in numbers] for name, neutral in names.items()}
    expected = served.generate([*prompts], tree=TREE, max_new_tokens=limits, batch_size=9, **each)
    for ticket, wanted in zip(tickets, expected, strict=True):
        assert ticket.wait(SECONDS).output_ids == wanted.output_ids
    assert batcher.stats().cached > 0


def test_a_long_prompt_delays_the_others_by_one_piece(small, start, monkeypatch):
    """Once a row runs there is a step between any two pieces."""
    log, feed, advance = [], small.feed, FusedExecutor.advance
    monkeypatch.setattr(small, "feed", lambda *args: (log.append("piece"), feed(*args))[1])
    monkeypatch.setattr(FusedExecutor, "advance", lambda *args: (log.append("steps"), advance(*args))[1])
    batcher = start(small, keep=False)
    first, *_ = batcher.submit([request(batcher, [1, 2, 3], 90), request(batcher, np.arange(90) % 13, 4)])
    first.wait(SECONDS)
    pieces = [at for at, what in enumerate(log) if what == "piece"]
    assert len(pieces) == 5  # and the last, which is another program
    assert all("steps" in log[a:b] for a, b in itertools.pairwise(pieces))


def test_a_cancelled_row_is_free_and_the_others_go_on(small, start):
    batcher = start(small, queue=1)
    long = [request(batcher, [at], 90) for at in range(2)]
    seen = []
    tickets = batcher.submit(long, lambda: seen.append(time.perf_counter()))
    (waits,) = batcher.submit([request(batcher, [5, 6], 3)])
    while tickets[0].result is None:
        time.sleep(0.001)
    batcher.cancel(tickets[0])
    assert waits.wait(SECONDS).new_tokens == 3
    assert tickets[0].wait(SECONDS).finish_reason is None
    assert tickets[1].wait(SECONDS).finish_reason in ("length", "eos")
    assert batcher.stats().cancelled == 1
    assert len(seen) > 2


def test_bursts_that_are_over_early_do_not_make_the_next_ones_longer(small, start, monkeypatch):
    """And so delay others: rows of three tokens have a step of their own, and at most two more."""
    asked, advance = [], Group.advance
    monkeypatch.setattr(Group, "advance", lambda *args: (asked.append(args[1]), advance(*args))[1])
    batcher = start(small)
    tickets = batcher.submit([request(batcher, [1, 2], 3) for _ in range(20)])  # so that the group is never empty
    assert all(ticket.wait(SECONDS).new_tokens == 3 for ticket in tickets)
    assert max(asked) <= 4


def test_what_comes_again_is_read_once(small, start):
    batcher = start(small, cache_memory=20 * small.nbytes(1, 90))
    system = np.arange(40, dtype=np.int32) % 16
    for ids, cached in (
        ([*system, 3, 4], 0),
        ([*system, 9, 9, 9], 40),
        ([*system, 3, 4], 41),  # all but the last token, which is read for what follows it
        ([*system[:10], 1], 0),  # too short to be worth it
    ):
        (ticket,) = batcher.submit([request(batcher, ids, 5)])
        ticket.wait(SECONDS)
        assert ticket.cached == cached
    (turn,) = batcher.submit([request(batcher, [*ids, *ticket.result.output_ids, 2, 3], 5)])  # a conversation goes on
    turn.wait(SECONDS)
    assert turn.cached == len(ids) + ticket.result.new_tokens
    batcher.close(SECONDS)
    assert batcher.stats().kept_texts == 3


def test_memory_bounds_what_runs_and_what_is_kept(served, small, start):
    """Room for one row and a prompt beside it: the second row waits although there is a place for it."""
    memory = small.nbytes(1, 90) + small.nbytes_to_read(90)
    assert memory < small.nbytes(2, 90) + small.nbytes_to_read(1)
    batcher = start(small, cache_memory=memory)
    with watched(batcher) as seen, every_turn_gets_on(small):
        tickets = batcher.submit([request(batcher, [*range(at, at + 10)] * 2, 30) for at in range(4)])
        for ticket in tickets:
            ticket.wait(SECONDS)
    assert max(stats.running for stats in seen) == 1
    assert max(stats.nbytes + stats.kept_nbytes for stats in seen) <= memory
    assert {ticket.result.finish_reason for ticket in tickets} <= {"length", "eos"}
    with pytest.raises(HydrajaxError, match=r"cache_memory: must be at least \d+ bytes, for one row, found 9"):
        Batcher(small, cache_memory=9)


def test_beyond_the_queue_requests_are_refused_all_or_none(small, start):
    batcher = start(small, queue=1)
    with pytest.raises(QueueFull, match="the queue of 1 requests is full"):
        batcher.submit([request(batcher, [1], 90)] * 4)  # two rows, and one that waits
    assert batcher.stats().requests == 0
    tickets = batcher.submit([request(batcher, [1], 90)] * 3)
    with pytest.raises(QueueFull):
        batcher.submit([request(batcher, [1])])
    assert batcher.stats().refused == 5
    assert batcher.close(grace=SECONDS)
    assert all(ticket.result.finish_reason for ticket in tickets)
    with pytest.raises(Closed, match="shutting down"):
        batcher.submit([request(batcher, [1])])


def test_closing_without_grace_hands_back_what_is_there(small, start):
    batcher = start(small)
    running, *_ = tickets = batcher.submit([request(batcher, [1], 90)] * 5)
    while running.result is None:
        time.sleep(0.001)
    assert not batcher.close()
    assert all(ticket.done for ticket in tickets)
    assert running.wait(0).new_tokens >= 1
    assert tickets[-1].wait(0) is None


def test_a_failure_reaches_all_who_wait(small, start, monkeypatch, capfd):
    batcher = start(small)
    monkeypatch.setattr(small, "end", lambda *args: 1 / 0)
    tickets = batcher.submit([request(batcher, [1])] * 2)
    for ticket in tickets:
        with pytest.raises(Closed, match="the server has failed: division by zero"):
            ticket.wait(SECONDS)
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert batcher.stats().failed
    with pytest.raises(Closed, match="failed"):
        batcher.submit([request(batcher, [1])])


def test_whoever_asks_for_more_than_numbers_hold_gets_what_there_is(small, start):
    batcher = start(small)
    (ticket,) = batcher.submit([request(batcher, [1, 2], 10**12)])
    assert ticket.wait(SECONDS).finish_reason in ("context", "eos")
    assert not batcher.stats().failed


def test_bad_requests_are_refused(served, small, start):
    batcher = start(small)
    for match, ids, settings in (
        ("max_new_tokens: got 0, expected at least 1", [1], {"max_new_tokens": 0}),
        ("prompt: has 96 tokens, which leaves no room in the model's context of 96", [1] * 96, {}),
        ("temperature: got -1, expected a finite number from 0 up", [1], {"temperature": -1}),
        ("top_p: got 0.0, expected above 0", [1], {"top_p": 0.0}),
        ("presence_penalty: penalties are not counted here", [1], {"presence_penalty": 1.0}),
        ("logit_bias: got token id 17, expected 0 to 16", [1], {"logit_bias": {17: 1.0}}),
        ("logit_bias: got", [1], {"logit_bias": {"the": 1.0}}),
        ("stop: found an empty string", [1], {"stop": [""]}),
    ):
        with pytest.raises(HydrajaxError, match=match):
            batcher.request(ids, **settings)
    with pytest.raises(HydrajaxError, match="rows: must be at least 1, found 0"):
        pool(served, Sizes(rows=0))
