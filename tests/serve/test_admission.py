"""Admission: never more than fits, and the queue always advances."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import letters
from helpers.letters import CONTEXT
from hydrajax.decoding.request import Request
from hydrajax.errors import HydrajaxError
from hydrajax.serve.admission import CacheBudget, GroupUsage
from hydrajax.serve.executor_pool import PoolSizes
from hydrajax.serve.requests import Submission


@pytest.fixture(scope="module")
def pool(served):
    """A pool with several shapes; none is compiled here."""
    return letters.pool(served, PoolSizes(slots=5, chunk=32, cache_len=32))


def request(length: int, limit: int) -> Submission:
    return Submission(np.zeros(length, np.int32), Request(max_new_tokens=limit))


def test_a_request_that_is_not_refused_is_admitted_when_nothing_runs(pool):
    """So the first request in the queue is admitted at the latest when all running sequences have ended."""
    admitted = refused = 0
    least = pool.nbytes(1, 1) + pool.prefill_nbytes(1)
    for limit in np.linspace(least, pool.nbytes(2, CONTEXT), 7, dtype=int).tolist():
        budget = CacheBudget(pool, limit, prefix_cache=True)
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


@pytest.mark.parametrize("seed", range(3))
def test_admitted_sequences_fit_at_every_length(pool, seed):
    """Random arrivals, shapes and departures: never more than the limit, and several groups where needed."""
    random, together, groups_seen = np.random.default_rng(seed), set(), set()
    budget = CacheBudget(pool, pool.nbytes(2, CONTEXT) + pool.prefill_nbytes(CONTEXT), prefix_cache=True)
    groups: list[GroupUsage] = []
    for _ in range(400):
        asked = request(*(2 ** random.uniform(0, 6, 2)).astype(int).tolist())
        number = budget.find_group(groups, asked)
        if number is not None:
            groups += [GroupUsage((), 0)] * (number == len(groups))
            groups[number] = GroupUsage((*groups[number].max_lengths, budget.max_length(asked)), groups[number].nbytes)
            budget.shrink_prefix_cache(groups, asked)
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
        assert sum(use.nbytes for use in groups) + reads <= budget.limit
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
    assert CacheBudget(pool, together + reads, prefix_cache=False).find_group(three, long) == 0
    assert CacheBudget(pool, together + reads - 1, prefix_cache=False).find_group(three, long) == 1
    assert CacheBudget(pool, apart + reads, prefix_cache=False).find_group(three, long) == 1
    assert CacheBudget(pool, apart + reads - 1, prefix_cache=False).find_group(three, long) is None
    both = [*three, GroupUsage((90,), pool.nbytes(1, 90))]
    assert CacheBudget(pool, apart + reads, prefix_cache=False).find_group(both, short) == 0
