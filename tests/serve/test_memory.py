"""Who is let in: never more than fits, and always somebody."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import letters
from helpers.letters import CONTEXT
from hydrajax.decoding.spec import DecodeSpec
from hydrajax.errors import HydrajaxError
from hydrajax.serve.admission import Memory, Use
from hydrajax.serve.pool import Sizes
from hydrajax.serve.requests import Request


@pytest.fixture(scope="module")
def pool(served):
    """Of several shapes; none of them is compiled here."""
    return letters.pool(served, Sizes(rows=5, chunk=32, places=32))


def request(length: int, limit: int) -> Request:
    return Request(np.zeros(length, np.int32), DecodeSpec(max_new_tokens=limit))


def test_what_is_not_refused_is_let_in_once_nothing_runs(pool):
    """So that whoever is first in the queue gets in, as all that run come to their ends."""
    taken = refused = 0
    least = pool.nbytes(1, 1) + pool.nbytes_to_read(1)
    for limit in np.linspace(least, pool.nbytes(2, CONTEXT), 7, dtype=int).tolist():
        memory = Memory(pool, limit, keep=True)
        for length in range(1, CONTEXT, 5):
            for new in (1, 7, 40, 200):
                asked = request(length, new)
                try:
                    memory.check(asked)
                except HydrajaxError:
                    refused += 1
                    continue
                taken += 1
                assert memory.group_for([], asked) == 0
    assert min(taken, refused) > 20


@pytest.mark.parametrize("seed", range(3))
def test_those_who_run_have_room_to_their_ends_whatever_shapes_that_takes(pool, seed):
    """Random arrivals, shapes on the way and departures: never more than the limit, and several groups where needed."""
    random, together, groups_seen = np.random.default_rng(seed), set(), set()
    memory = Memory(pool, pool.nbytes(2, CONTEXT) + pool.nbytes_to_read(CONTEXT), keep=True)
    groups: list[Use] = []
    for _ in range(400):
        asked = request(*(2 ** random.uniform(0, 6, 2)).astype(int).tolist())
        number = memory.group_for(groups, asked)
        if number is not None:
            groups += [Use((), 0)] * (number == len(groups))
            groups[number] = Use((*groups[number].ends, memory.end_of(asked)), groups[number].nbytes)
            memory.leave_room(groups, asked)
        else:
            leaves = int(random.integers(len(groups)))
            at = int(random.integers(len(groups[leaves].ends)))
            groups[leaves] = Use((*groups[leaves].ends[:at], *groups[leaves].ends[at + 1 :]), groups[leaves].nbytes)
        # Each may be in the shape that it needs at its end, in one that it still has from before, or on the way.
        groups = [
            Use(use.ends, int(random.choice([use.nbytes, pool.nbytes(len(use.ends), max(use.ends))])))
            for use in groups
            if use.ends
        ]
        reads = 0 if number is None else pool.nbytes_to_read(len(asked.ids))
        assert sum(use.nbytes for use in groups) + reads <= memory.limit
        together.add(sum(len(use.ends) for use in groups))
        groups_seen.add(len(groups))
    assert together >= {1, 2, 3, 5}
    assert max(together) == 5
    assert groups_seen >= {1, 2}


def test_a_long_text_has_a_group_of_its_own_only_where_the_others_would_not_fit_beside_it(pool):
    short, long = request(4, 8), request(20, 70)
    three = [Use((12,) * 3, pool.nbytes(3, 12))]
    reads = pool.nbytes_to_read(20)
    together, apart = pool.nbytes(4, 90), pool.nbytes(3, 12) + pool.nbytes(1, 90)
    assert apart < together
    assert Memory(pool, together + reads, keep=False).group_for(three, long) == 0
    assert Memory(pool, together + reads - 1, keep=False).group_for(three, long) == 1
    assert Memory(pool, apart + reads, keep=False).group_for(three, long) == 1
    assert Memory(pool, apart + reads - 1, keep=False).group_for(three, long) is None
    both = [*three, Use((90,), pool.nbytes(1, 90))]
    assert Memory(pool, apart + reads, keep=False).group_for(both, short) == 0  # the cheapest that it can join
