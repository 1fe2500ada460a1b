"""Admission and the prefix cache: never more than fits, and the queue always advances."""

import numpy as np
import pytest

from helpers import letters
from helpers.letters import CONTEXT
from helpers.serving import SECONDS, watched
from hydrajax.decoding.prompt_batch import common_length
from hydrajax.decoding.request import Request
from hydrajax.errors import HydrajaxError
from hydrajax.serve.admission import CacheBudget, CacheMemory, GroupUsage
from hydrajax.serve.executor_pool import PoolSizes
from hydrajax.serve.prefix_cache import SHORTEST, CachedPrefix, PrefixCache
from hydrajax.serve.requests import Submission


@pytest.fixture(scope="module")
def pool(served):
    """A pool with several shapes; none is compiled here."""
    return letters.pool(served, PoolSizes(slots=5, chunk=32, cache_len=32))


def request(length: int, limit: int) -> Submission:
    return Submission(np.zeros(length, np.int32), Request(max_new_tokens=limit))


def budget_of(pool, limit: int, prefix_cache: bool = True) -> CacheBudget:
    return CacheBudget(pool, CacheMemory([pool], limit, prefix_cache=prefix_cache))


def test_a_request_that_is_not_refused_is_admitted_when_nothing_runs(pool):
    """So the first request in the queue is admitted at the latest when all running sequences have ended."""
    admitted = refused = 0
    least = pool.nbytes(1, 1) + pool.prefill_nbytes(1)
    for limit in np.linspace(least, pool.nbytes(2, CONTEXT), 7, dtype=int).tolist():
        budget = budget_of(pool, limit)
        for length in range(1, CONTEXT, 5):
            for new in (1, 7, 40, 200):
                asked = request(length, new)
                try:
                    budget.check(asked)
                except HydrajaxError:
                    refused += 1
                    continue
                admitted += 1
                assert budget.find_group([], asked) == 0
    assert min(admitted, refused) > 20


def test_admitted_sequences_fit_at_every_length(pool):
    """Random arrivals, shapes and departures: never more than the limit, and several groups where needed."""
    random, together, groups_seen = np.random.default_rng(0), set(), set()
    budget = budget_of(pool, pool.nbytes(2, CONTEXT) + pool.prefill_nbytes(CONTEXT))
    groups: list[GroupUsage] = []
    for _ in range(1200):
        asked = request(*(2 ** random.uniform(0, 6, 2)).astype(int).tolist())
        number = budget.find_group(groups, asked)
        if number is not None:
            groups += [GroupUsage((), 0)] * (number == len(groups))
            groups[number] = GroupUsage((*groups[number].max_lengths, budget.max_length(asked)), groups[number].nbytes)
            assert budget.reserve(groups, asked)
        else:
            leaves = int(random.integers(len(groups)))
            lengths = groups[leaves].max_lengths
            at = int(random.integers(len(lengths)))
            groups[leaves] = GroupUsage((*lengths[:at], *lengths[at + 1 :]), groups[leaves].nbytes)
        # A group may be in its final shape or still in an earlier one.
        groups = [
            GroupUsage(
                use.max_lengths,
                int(random.choice([use.nbytes, pool.nbytes(len(use.max_lengths), max(use.max_lengths))])),
            )
            for use in groups
            if use.max_lengths
        ]
        reads = 0 if number is None else pool.prefill_nbytes(len(asked.ids))
        assert sum(use.nbytes for use in groups) + reads <= budget.memory.limit
        together.add(sum(len(use.max_lengths) for use in groups))
        groups_seen.add(len(groups))
    assert together >= {1, 2, 3, 5}
    assert max(together) == 5
    assert groups_seen >= {1, 2}


def test_a_long_sequence_gets_a_new_group_only_if_it_fits_in_no_other(pool):
    short, long = request(4, 8), request(20, 70)
    three = [GroupUsage((12,) * 3, pool.nbytes(3, 12))]
    reads = pool.prefill_nbytes(20)
    together, apart = pool.nbytes(4, 90), pool.nbytes(3, 12) + pool.nbytes(1, 90)
    assert apart < together
    assert budget_of(pool, together + reads, False).find_group(three, long) == 0
    assert budget_of(pool, together + reads - 1, False).find_group(three, long) == 1
    assert budget_of(pool, apart + reads, False).find_group(three, long) == 1
    assert budget_of(pool, apart + reads - 1, False).find_group(three, long) is None
    both = [*three, GroupUsage((90,), pool.nbytes(1, 90))]
    assert budget_of(pool, apart + reads, False).find_group(both, short) == 0


def test_models_share_one_limit_in_the_order_of_arrival(pool):
    """A request that waits for another model's memory is the next one to get it."""
    whole = pool.nbytes(1, CONTEXT) + pool.prefill_nbytes(60)
    memory = CacheMemory([pool, pool], whole)
    one, two = CacheBudget(pool, memory), CacheBudget(pool, memory)
    asked, running = request(60, 200), [GroupUsage((CONTEXT,), 0)]
    two.check(asked)  # each model can have all
    assert one.find_group([], asked) == 0
    assert one.reserve(running, asked)
    assert two.find_group([], asked, arrived=1.0) is None
    assert not two.reserve(running, asked)
    one.release()
    assert one.find_group([], request(1, 1), arrived=2.0) is None
    assert two.find_group([], asked, arrived=1.0) == 0
    assert two.reserve([GroupUsage((CONTEXT,), 0)], asked)
    two.release()
    assert one.find_group([], request(1, 1), arrived=2.0) == 0


def test_two_models_never_use_more_than_their_common_limit(small, start):
    """One has the memory that the other leaves, also that of cached prefixes."""
    sizes = small.nbytes(1, 90), small.prefill_nbytes(90)
    memory = CacheMemory([small, small], sum(sizes) + small.nbytes(1, 40))
    batchers = [start(small, cache_memory=memory) for _ in range(2)]
    with watched(lambda: [batcher.stats() for batcher in batchers]) as seen:
        handles = []
        for at in range(8):
            prompt, batcher = np.arange(at, at + 20, dtype=np.int32) % 16, batchers[at % 2]
            handles += batcher.submit([batcher.request(prompt, max_new_tokens=20 + 10 * (at % 5))])
        assert all(handle.wait(SECONDS).finish_reason in ("length", "eos") for handle in handles)
    used = [sum(each.nbytes + each.prefix_cache_nbytes for each in both) for both in seen]
    assert 0 < max(used) <= memory.limit
    assert all(any(both[at].prefix_cache_entries for both in seen) for at in range(2))
    for batcher in batchers:
        batcher.close()
    assert [batcher.stats().nbytes for batcher in batchers] == [0, 0]


SYSTEM = np.arange(40)


def text(*ends: int) -> np.ndarray:
    return np.concatenate([SYSTEM, ends]).astype(np.int32)


def names(cache: PrefixCache) -> set[str]:
    return {one.state for one in cache._entries}


def test_common_length():
    for a, b, n in (([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([1, 5, 3], [1, 2, 3], 1)):
        a, b = np.array(a, int), np.array(b, int)
        assert common_length(a, b) == common_length(b, a) == n


def test_lookup_finds_the_longest_prefix_but_never_the_whole_prompt():
    cache = PrefixCache(1000)
    cache.add(CachedPrefix(text(1, 2, 3), "first", 10, 0))
    cache.add(CachedPrefix(text(1, 7), "second", 10, 0))
    for new, name, shared in (
        (text(1, 2, 9), "first", 42),
        (text(1, 7, 8, 9), "second", 42),
        (text(1, 2, 3), "first", 42),  # its last token must be run
    ):
        found, n = cache.lookup(new)
        assert (found.state, n) == (name, shared)
    assert cache.lookup(text(5))[1] == len(SYSTEM)
    assert cache.lookup(SYSTEM[:SHORTEST]) is None
    assert cache.lookup(SYSTEM[: SHORTEST + 1])[1] == SHORTEST
    assert cache.lookup(text(1)[1:]) is None


def test_the_least_recently_used_entry_is_evicted_first():
    cache = PrefixCache(30)
    texts = {name: np.full(20, number, np.int32) for number, name in enumerate("abcd")}
    for name in "abc":
        assert cache.accepts(texts[name], 10)
        cache.add(CachedPrefix(texts[name], name, 10, 0))
    cache.lookup(np.concatenate([texts["a"], [9]]))
    cache.add(CachedPrefix(texts["d"], "d", 10, 0))
    assert (names(cache), cache.sizes()) == ({"a", "c", "d"}, [10] * 3)
    cache.shrink(19)
    assert names(cache) == {"d"}
    assert not cache.accepts(texts["a"], 20)
    cache.shrink(0)
    assert cache.sizes() == []


def test_an_entry_replaces_its_prefixes():
    cache = PrefixCache(100)
    cache.add(CachedPrefix(text(1), "begun", 10, 0))
    cache.add(CachedPrefix(text(2), "other", 10, 0))
    assert not cache.accepts(text(1), 10)
    assert not cache.accepts(text()[:30], 10)
    assert not cache.accepts(np.arange(SHORTEST - 1) + 7, 10)
    assert cache.accepts(text(1, 5), 10)
    cache.add(CachedPrefix(text(1, 5), "ended", 10, 0))
    assert names(cache) == {"ended", "other"}


def test_models_share_the_memory_and_not_the_entries():
    cache = PrefixCache(20)
    for owner, name in (("a", "first"), ("b", "second")):
        assert cache.accepts(text(1), 10, owner)
        cache.add(CachedPrefix(text(1), name, 10, 0, owner))
    assert [cache.lookup(text(1, 2), owner)[0].state for owner in ("a", "b")] == ["first", "second"]
    assert cache.lookup(text(1, 2), "c") is None
    cache.add(CachedPrefix(text(3), "third", 10, 0, "b"))
    assert (cache.sizes("a"), cache.sizes("b")) == ([], [10, 10])
