"""The batcher against `generate`: the same tokens, whichever sequences share the batch and however prefill is split."""

import itertools
import time
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
import pytest

from helpers.compilations import no_compilation
from helpers.lab import NEW, hybrid_lab, shared_lab
from helpers.letters import END, TREE, answers, model, pool
from helpers.serving import SECONDS, request, watched
from hydrajax.decoding import rows
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.several import with_lookup
from hydrajax.errors import HydrajaxError
from hydrajax.serve import batcher as batcher_module
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.executor_pool import PoolSizes
from hydrajax.serve.requests import Closed, QueueFull
from hydrajax.serve.slot_group import SlotGroup
from hydrajax.serve.speculation_policy import SpeculationPolicy
from hydrajax.trees import presets


def prompts_and_limits(count: int, seed: int) -> tuple[list[np.ndarray], list[int]]:
    """Prompts of random lengths; a third of them share a prefix with another one."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 16, random.integers(1, 75), dtype=np.int32) for _ in range(count)]
    for at in range(2, count, 3):
        shared = prompts[at - 2][: random.integers(1, len(prompts[at - 2]) + 1)]
        prompts[at] = np.concatenate([shared, prompts[at][:12]])
    return prompts, random.integers(1, 60, count).tolist()


@contextmanager
def every_iteration_makes_progress(pool):
    """Every iteration of a batcher prefills, decodes or drops something.

    Prompts and answers are finite, so a request waits a finite number of iterations.
    """
    done, idle = [], []

    def noted(function):
        return lambda *args, **more: (done.append(1), function(*args, **more))[1]

    def iterate(batcher, original=Batcher._iterate):
        before = len(done), batcher.stats().cancelled
        original(batcher)
        if before == (len(done), batcher.stats().cancelled):
            idle.append(batcher.stats())

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((pool, "feed"), (pool, "finish"), (FusedExecutor, "advance")):
            patch.setattr(owner, name, noted(getattr(owner, name)))
        patch.setattr(Batcher, "_iterate", iterate)
        yield
    assert done
    assert not idle


def check_random_arrivals(served, batcher, count: int, pause: float) -> None:
    """Send requests at random times to a batcher whose programs are compiled."""
    random = np.random.default_rng(7)
    prompts, limits = prompts_and_limits(count, 3)
    rules = [Greedy() if at % 2 else ExactSampling(1.2, top_p=0.9) for at in range(count)]
    seeds = random.integers(0, 1000, count).tolist()
    handles = []
    with no_compilation():
        for prompt, limit, rule, seed in zip(prompts, limits, rules, seeds, strict=True):
            handles += batcher.submit([request(batcher, prompt, limit, rule, seed)])
            time.sleep(random.exponential(pause))
        results = [handle.wait(SECONDS) for handle in handles]
    for result, wanted in zip(results, answers(served, prompts, rules, limits, seeds), strict=True):
        assert (result.output_ids, result.finish_reason) == (wanted.output_ids, wanted.finish_reason)
        assert sum(result.emitted_per_step) == result.new_tokens
        np.testing.assert_allclose(result.logprobs, wanted.logprobs, atol=1e-4)
    assert {handle.result.finish_reason for handle in handles} >= {"length", "eos"}
    stats = batcher.stats()
    assert (stats.ended, stats.running, stats.waiting) == (count, 0, 0)
    assert stats.tokens == sum(handle.result.new_tokens for handle in handles) > stats.steps


def test_random_arrivals_get_the_answers_of_generate(served, small, start):
    batcher = start(small)
    check_random_arrivals(served, batcher, 16, 0.01)
    # It is chance whether a prompt arrives while the slot of another with its beginning is free, and whether the last
    # one's slot is left as it is. Of two in a row, the second finds the first.
    last = prompts_and_limits(16, 3)[0][-1]
    for _ in range(2):
        batcher.submit([request(batcher, last, 2)])[0].wait(SECONDS)
    stats = batcher.stats()
    assert 0 < stats.cached < stats.prompt_tokens


def test_greedy_answers_are_those_of_uncached_passes(small, start):
    """The reference uses no cache, tree, batch or loop of the package."""
    lab, batcher, prompts = shared_lab(), start(small), [[3, 1, 4, 1, 5], [2], [9, 2, 6, 5, 3, 5, 8]]
    handles = batcher.submit([request(batcher, prompt, NEW) for prompt in prompts])
    texts, _ = lab.references(0, prompts)
    for text, prompt, handle in zip(texts, prompts, handles, strict=True):
        assert list(handle.wait(SECONDS).output_ids) == lab.expected(text, len(prompt), NEW, (END,))


@pytest.mark.slow
def test_random_arrivals_with_several_shapes_trees_and_a_cache_of_the_draft(start):
    served = model("hydra++")
    trees = {1: TREE, 2: TREE, 5: presets.chain(2)}
    executors = pool(served, PoolSizes(slots=5, chunk=32, cache_len=32), trees.get, drops_draft=True)
    assert (executors.batches, len(executors.cache_lens)) == ((1, 2, 5), 3)
    executors.warm_up()
    batcher = start(executors)
    check_random_arrivals(served, batcher, 60, 0.03)
    stats = batcher.stats()
    assert 0 < stats.speculative_steps < stats.steps
    # Also with memory for little more than one long sequence, or for two short ones in addition; never more is used.
    for memory, groups in ((executors.nbytes(1, 90), 1), (executors.nbytes(1, 90) + executors.nbytes(2, 20), 2)):
        memory += executors.prefill_nbytes(90)
        batcher = start(executors, cache_memory=memory)
        with watched(batcher.stats) as seen, every_iteration_makes_progress(executors):
            check_random_arrivals(served, batcher, 40, 0.0)
        assert max(stats.nbytes + stats.prefix_cache_nbytes for stats in seen) <= memory
        assert max(stats.running for stats in seen) > 1
        assert max(stats.groups for stats in seen) >= groups


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["lookup", "lookup with heads"])
def test_random_arrivals_with_lookup(start, draft):
    """Its tables are rebuilt when a sequence moves to another cache length or starts from a cached prefix."""
    inner = model()
    drafter = PromptLookup(depth=4) if draft == "lookup" else with_lookup(inner.drafter, 3)
    params = inner.params._replace(draft={}) if draft == "lookup" else inner.params
    served = replace(inner, drafter=drafter, params=params)
    executors = pool(served, PoolSizes(slots=2, chunk=32, cache_len=32), drops_draft=True)
    executors.warm_up()
    batcher = start(executors)
    check_random_arrivals(served, batcher, 40, 0.0)
    stats = batcher.stats()
    assert stats.cached > 0
    assert 0 < stats.speculative_steps < stats.steps


@pytest.mark.slow
def test_each_request_has_its_own_processors(served, start):
    """Penalties, which count each sequence's own tokens, biases, both and none in one batch."""
    batcher = start(pool(served, PoolSizes(slots=3, chunk=16, cache_len=128, penalties=True)))
    prompts, limits = prompts_and_limits(9, 8)
    penalties, bias = {"repetition_penalty": 1.3, "presence_penalty": 0.4}, {"logit_bias": {"3": 4.0, "5": -9.0}}
    numbers = [(penalties, bias, penalties | bias, {})[at % 4] for at in range(9)]
    handles = batcher.submit(
        [batcher.request(p, max_new_tokens=n, **own) for p, n, own in zip(prompts, limits, numbers, strict=True)]
    )
    names = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "logit_bias": {}}
    each = {name: [own.get(name, neutral) for own in numbers] for name, neutral in names.items()}
    expected = served.generate([*prompts], tree=TREE, max_new_tokens=limits, batch_size=9, **each)
    for handle, wanted in zip(handles, expected, strict=True):
        assert handle.wait(SECONDS).output_ids == wanted.output_ids
    assert batcher.stats().cached > 0


def test_min_tokens_forbids_eos_and_ignore_eos_continues_after_it(served, small, start):
    """Next to a request with neither, which ends as `generate` does."""
    prompts = [np.array([at], np.int32) for at in range(16)]
    ends = [one for one in answers(served, prompts, [Greedy()] * 16, [40] * 16, 0) if one.new_tokens < 20]
    prompt, wanted = ends[0].prompt_ids, ends[0].output_ids
    assert wanted[-1] == END
    batcher, least = start(small), len(wanted) + 3
    settings = [{}, {"min_tokens": least}, {"ignore_eos": True}, {"min_tokens": least, "ignore_eos": True}]
    handles = batcher.submit([batcher.request(np.array(prompt), max_new_tokens=40, **own) for own in settings])
    plain, late, ignored, both = (handle.wait(SECONDS) for handle in handles)
    assert plain.output_ids == wanted
    assert late.output_ids[: len(wanted) - 1] == wanted[:-1]
    assert END not in late.output_ids[:least]
    assert late.new_tokens > least
    # The numbers of `generate` with another processor, whose bias forbids EOS everywhere.
    forbidden = served.generate([prompt], tree=TREE, max_new_tokens=least, logit_bias={END: -1e9})[0]
    assert late.output_ids[:least] == both.output_ids[:least] == forbidden.output_ids
    assert ignored.output_ids[: len(wanted)] == wanted
    assert [(one.new_tokens, one.finish_reason) for one in (ignored, both)] == [(40, "length")] * 2


def test_a_long_prompt_delays_others_by_one_chunk(small, start, monkeypatch):
    """Once a sequence runs, there is a step between any two chunks."""
    log, feed, advance = [], small.feed, FusedExecutor.advance
    monkeypatch.setattr(small, "feed", lambda *args: (log.append("chunk"), feed(*args))[1])
    monkeypatch.setattr(
        FusedExecutor, "advance", lambda *args, **more: (log.append("steps"), advance(*args, **more))[1]
    )
    batcher = start(small, prefix_cache=False)
    first, *_ = batcher.submit([request(batcher, [1, 2, 3], 90), request(batcher, np.arange(90) % 13, 4)])
    first.wait(SECONDS)
    chunks = [at for at, what in enumerate(log) if what == "chunk"]
    assert len(chunks) == 5  # without the last one, which is another program
    assert all("steps" in log[a:b] for a, b in itertools.pairwise(chunks))


def test_a_cancelled_request_frees_its_slot_and_the_others_continue(small, start):
    batcher = start(small, queue=1)
    long = [request(batcher, [at], 90) for at in range(2)]
    seen = []
    handles = batcher.submit(long, lambda: seen.append(time.perf_counter()))
    (waits,) = batcher.submit([request(batcher, [5, 6], 3)])
    while handles[0].result is None:
        time.sleep(0.001)
    batcher.cancel(handles[0])
    assert waits.wait(SECONDS).new_tokens == 3
    assert handles[0].wait(SECONDS).finish_reason is None
    assert handles[1].wait(SECONDS).finish_reason in ("length", "eos")
    assert batcher.stats().cancelled == 1
    assert len(seen) > 2


@pytest.fixture
def asked(monkeypatch):
    """The number of steps that each burst is asked for."""
    found, advance = [], SlotGroup.advance
    monkeypatch.setattr(SlotGroup, "advance", lambda *args: (found.append(args[1]), advance(*args))[1])
    return found


def test_bursts_that_end_early_do_not_lengthen_the_next_ones(small, start, asked):
    """Longer bursts would delay others: a sequence of three tokens has a single step and at most two more."""
    batcher = start(small)
    handles = batcher.submit([request(batcher, [1, 2], 3) for _ in range(20)])  # so that the group is never empty
    assert all(handle.wait(SECONDS).new_tokens == 3 for handle in handles)
    assert max(asked) <= 4


@pytest.mark.parametrize("seconds", [0.0, SECONDS])
def test_after_an_answer_steps_are_single_while_its_client_may_ask_again(small, start, asked, monkeypatch, seconds):
    monkeypatch.setattr(batcher_module, "ASKS_AGAIN", seconds)
    batcher = start(small)
    short, long = batcher.submit([request(batcher, [1, 2], limit) for limit in (3, 20)])
    assert (short.wait(SECONDS).new_tokens, long.wait(SECONDS).new_tokens) == (3, 20)
    assert (max(asked[-5:]) == 1) == (seconds > 0)


@pytest.mark.slow
def test_random_arrivals_on_recurrent_layers(start, monkeypatch):
    """Also with plain steps, after which the draft reads what it has missed, and with memory for few snapshots."""
    kinds = itertools.cycle([True] * 20 + [False] * 10)
    monkeypatch.setattr(SpeculationPolicy, "prefers", lambda policy, batch: next(kinds))
    monkeypatch.setattr(SpeculationPolicy, "next_burst", lambda policy, batch, speculative, seconds: (speculative, 2))
    served = model("hydra++", hybrid_lab())
    executors = pool(served, PoolSizes(slots=2, chunk=32, cache_len=64), drops_draft=True)
    executors.warm_up()
    for sequences in (20, 3):
        batcher = start(executors, cache_memory=sequences * executors.prefill_nbytes(90))
        with watched(batcher.stats) as seen:
            check_random_arrivals(served, batcher, 40, 0.0)
        stats = batcher.stats()
        assert 0 < stats.speculative_steps < stats.steps
        assert stats.cached > 0 or sequences == 3
        assert max(each.nbytes + each.prefix_cache_nbytes for each in seen) <= stats.limit_nbytes


def test_memory_bounds_the_batch_and_the_prefix_cache(served, small, start):
    """With memory for one sequence and a prefill, the second sequence waits although a slot is free."""
    memory = small.nbytes(1, 90) + small.prefill_nbytes(90)
    assert memory < small.nbytes(2, 90) + small.prefill_nbytes(1)
    batcher = start(small, cache_memory=memory)
    with watched(batcher.stats) as seen, every_iteration_makes_progress(small):
        handles = batcher.submit([request(batcher, [*range(at, at + 10)] * 2, 30) for at in range(4)])
        for handle in handles:
            handle.wait(SECONDS)
    assert max(stats.running for stats in seen) == 1
    assert max(stats.nbytes + stats.prefix_cache_nbytes for stats in seen) <= memory
    assert {handle.result.finish_reason for handle in handles} <= {"length", "eos"}
    with pytest.raises(HydrajaxError, match=r"cache_memory: got 9 bytes, expected at least \d+ for one sequence"):
        Batcher(small, cache_memory=9)


def test_a_full_queue_refuses_all_requests_of_a_call(small, start):
    batcher = start(small, queue=1)
    for many in (4, 128):  # room for two in slots and one in the queue
        with pytest.raises(HydrajaxError, match=f"^n: got {many} sequences .*, expected at most 3, ") as caught:
            batcher.submit([request(batcher, [1], 90)] * many)
        assert not isinstance(caught.value, QueueFull)  # they never fit
    assert batcher.stats().requests == 0
    handles = batcher.submit([request(batcher, [1], 90)] * 3)
    with pytest.raises(QueueFull, match="the queue of 1 requests is full"):
        batcher.submit([request(batcher, [1])] * 2)
    assert batcher.stats().refused == 2
    assert batcher.close(grace=SECONDS)
    assert all(handle.result.finish_reason for handle in handles)
    with pytest.raises(Closed, match="shutting down"):
        batcher.submit([request(batcher, [1])])


def test_closing_without_grace_returns_partial_answers(small, start):
    batcher = start(small)
    running, *_ = handles = batcher.submit([request(batcher, [1], 90)] * 5)
    while running.result is None:
        time.sleep(0.001)
    assert not batcher.close()
    assert all(handle.done for handle in handles)
    assert running.wait(0).new_tokens >= 1
    assert handles[-1].wait(0) is None


def test_a_failure_reaches_all_requests(small, start, monkeypatch, capfd):
    batcher = start(small)
    monkeypatch.setattr(small, "finish", lambda *args: 1 / 0)
    handles = batcher.submit([request(batcher, [1])] * 2)
    for handle in handles:
        with pytest.raises(Closed, match="the server has failed: division by zero"):
            handle.wait(SECONDS)
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert batcher.stats().failed
    with pytest.raises(Closed, match="the server has failed; see its log"):
        batcher.submit([request(batcher, [1])])


def test_a_limit_beyond_32_bits_means_the_rest_of_the_context(small, start):
    batcher = start(small)
    (handle,) = batcher.submit([request(batcher, [1, 2], 10**12)])
    assert handle.wait(SECONDS).finish_reason in ("context", "eos")
    assert not batcher.stats().failed


def test_bad_requests_are_refused(served, small, start):
    """tests/serve/test_app.py has more of them."""
    batcher = start(small)
    for match, ids, settings in (
        ("max_new_tokens: got 0, expected at least 1", [1], {"max_new_tokens": 0}),
        ("prompt: got 96 tokens, expected fewer than the model's context of 96", [1] * 96, {}),
        ("logit_bias: got", [1], {"logit_bias": {"the": 1.0}}),
        ("stop: .*empty string", [1], {"stop": [""]}),
    ):
        with pytest.raises(HydrajaxError, match=match):
            batcher.request(ids, **settings)
    without = Batcher(pool(served, PoolSizes(slots=2, chunk=16, cache_len=128)))
    for name, value in {"presence_penalty": 1.0, "min_tokens": 3}.items():
        with pytest.raises(HydrajaxError, match=f"{name}: this server has no penalties; start it without"):
            without.request([1], **{name: value})
    with pytest.raises(HydrajaxError, match="slots: got 0, expected at least 1"):
        pool(served, PoolSizes(slots=0))


@pytest.mark.parametrize("together", [1, 1000, rows.MOVED_TOGETHER])
def test_a_reshaped_state_holds_the_gathered_slots_and_the_old_one_is_deleted(small, together, monkeypatch):
    monkeypatch.setattr(rows, "MOVED_TOGETHER", together)
    sizes = [x.nbytes for x in jax.tree.leaves(small.empty(small.cache_lens[0]))]
    monkeypatch.setattr(small.shapes, "_parts", rows._parts(sizes))
    (cache_len,) = small.cache_lens
    first, second = (small.finish(small.empty(cache_len), ids, small.neutral) for ids in (np.arange(9), np.arange(5)))
    state = small.shapes.put(small.shapes.tile(first, 2, cache_len), 1, second, cache_len)
    wanted = small.shapes.gather(state, [1, 0], cache_len)
    found = small.shapes.reshape(state, [1, 0], cache_len)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    for x, expected in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, expected = jax.random.key_data(x), jax.random.key_data(expected)
        np.testing.assert_array_equal(x, expected)


def test_arrays_are_moved_in_runs_of_limited_size(monkeypatch):
    for sizes, runs in [([3, 3, 3], [2, 1]), ([9, 1, 9], [1, 1, 1]), ([6], [1]), ([0, 6, 6], [2, 1])]:
        monkeypatch.setattr(rows, "MOVED_TOGETHER", 7)
        assert [len(sizes[part]) for part in rows._parts(sizes)] == runs
