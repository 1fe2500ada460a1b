"""Who is let in: never more than fits, and always somebody."""

from __future__ import annotations

import numpy as np
import pytest
from letters import CONTEXT, TREE

from hydrajax.decoding.either import GreedyOrExact
from hydrajax.errors import HydrajaxError
from hydrajax.serve.memory import Memory
from hydrajax.serve.programs import Programs, Sizes
from hydrajax.serve.requests import Request


@pytest.fixture(scope="module")
def programs(served):
    """Of several shapes; none of them is compiled here."""
    return Programs(served, Sizes(rows=5, chunk=32, places=32), lambda rows: TREE)


def test_a_draft_on_devices_of_its_own_is_refused(served, monkeypatch):
    monkeypatch.setattr("hydrajax.serve.programs.are_apart", lambda params: params is served.params)
    with pytest.raises(HydrajaxError, match="draft_devices: requests that share a batch"):
        Programs(served, Sizes())


def request(length: int, limit: int) -> Request:
    return Request(np.zeros(length, np.int32), limit, GreedyOrExact())


def test_what_is_not_refused_is_let_in_once_nothing_runs(programs):
    """So that whoever is first in the queue gets in, as all that run come to their ends."""
    taken = refused = 0
    least = programs.nbytes(1, 1) + programs.nbytes_to_read(1)
    for limit in np.linspace(least, programs.nbytes(2, CONTEXT), 7, dtype=int).tolist():
        memory = Memory(programs, limit, keep=True)
        for length in range(1, CONTEXT, 5):
            for new in (1, 7, 40, 200):
                asked = request(length, new)
                try:
                    memory.check(asked)
                except HydrajaxError:
                    refused += 1
                    continue
                taken += 1
                assert memory.fits([], 0, asked)
    assert min(taken, refused) > 20


def test_those_who_run_have_room_to_their_ends_whatever_shape_that_takes(programs):
    """Random arrivals and departures: the shape that all need at their ends, and a prompt beside it, always fits."""
    random, together = np.random.default_rng(0), set()
    memory = Memory(programs, programs.nbytes(5, 20) + programs.nbytes_to_read(CONTEXT), keep=True)
    ends: list[int] = []
    for _ in range(400):
        asked = request(*(2 ** random.uniform(0, 6, 2)).astype(int).tolist())
        held = programs.nbytes(len(ends), max(ends)) if ends else 0
        if memory.fits(ends, held, asked):
            ends.append(memory.end_of(asked))
            needed = programs.nbytes(len(ends), max(ends)) + programs.nbytes_to_read(len(asked.ids))
            assert max(needed, held + programs.nbytes_to_read(len(asked.ids))) <= memory.limit
            memory.leave_room(ends[:-1], held, asked)
        elif ends:
            ends.pop(int(random.integers(len(ends))))
        together.add(len(ends))
        assert len(ends) <= 5
    assert together >= {1, 2, 3, 5}
