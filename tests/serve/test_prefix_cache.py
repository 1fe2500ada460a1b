"""The prefix cache: lookup, eviction and replacement. The states are names here."""

from __future__ import annotations

import numpy as np

from hydrajax.decoding.prompt_batch import common_length
from hydrajax.serve.prefix_cache import SHORTEST, CachedPrefix, PrefixCache

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
