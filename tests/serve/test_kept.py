"""Which texts are kept, and for which new ones they are of use. The states are names here."""

from __future__ import annotations

import numpy as np
import pytest

from hydrajax.serve.prefix_cache import SHORTEST, CachedPrefix, PrefixCache, common

SYSTEM = np.arange(40)


def text(*ends: int) -> np.ndarray:
    return np.concatenate([SYSTEM, ends]).astype(np.int32)


def names(kept: PrefixCache) -> set[str]:
    return {one.state for one in kept._texts}


@pytest.mark.parametrize(
    ("a", "b", "n"), [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([1, 5, 3], [1, 2, 3], 1)]
)
def test_common(a, b, n):
    assert common(np.array(a, int), np.array(b, int)) == common(np.array(b, int), np.array(a, int)) == n


def test_the_longest_beginning_is_found_but_never_the_whole_text():
    kept = PrefixCache(1000)
    kept.add(CachedPrefix(text(1, 2, 3), "first", 10))
    kept.add(CachedPrefix(text(1, 7), "second", 10))
    for new, name, shared in (
        (text(1, 2, 9), "first", 42),
        (text(1, 7, 8, 9), "second", 42),
        (text(1, 2, 3), "first", 42),  # its last token must be read
    ):
        found, n = kept.best(new)
        assert (found.state, n) == (name, shared)
    assert kept.best(text(5))[1] == len(SYSTEM)
    assert kept.best(SYSTEM[:SHORTEST]) is None
    assert kept.best(SYSTEM[: SHORTEST + 1])[1] == SHORTEST
    assert kept.best(text(1)[1:]) is None


def test_what_was_of_no_use_for_longest_goes_first():
    kept = PrefixCache(30)
    texts = {name: np.full(20, number, np.int32) for number, name in enumerate("abcd")}
    for name in "abc":
        assert kept.worth(texts[name], 10)
        kept.add(CachedPrefix(texts[name], name, 10))
    kept.best(np.concatenate([texts["a"], [9]]))
    kept.add(CachedPrefix(texts["d"], "d", 10))
    assert (names(kept), kept.nbytes) == ({"a", "c", "d"}, 30)
    kept.shrink(19)
    assert names(kept) == {"d"}
    assert not kept.worth(texts["a"], 20)
    kept.shrink(0)
    assert len(kept) == 0


def test_a_text_takes_the_place_of_its_beginnings():
    kept = PrefixCache(100)
    kept.add(CachedPrefix(text(1), "begun", 10))
    kept.add(CachedPrefix(text(2), "other", 10))
    assert not kept.worth(text(1), 10)
    assert not kept.worth(text()[:30], 10)
    assert not kept.worth(np.arange(SHORTEST - 1) + 7, 10)
    assert kept.worth(text(1, 5), 10)
    kept.add(CachedPrefix(text(1, 5), "ended", 10))
    assert names(kept) == {"ended", "other"}
