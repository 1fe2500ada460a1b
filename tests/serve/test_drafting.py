"""With a draft or without: whichever emits more tokens in a second, for every number of rows."""

from __future__ import annotations

import numpy as np
import pytest

from hydrajax.serve.drafting import TRIAL_EVERY, Drafting


def simulated(seconds, tokens, turns: int, drafting: Drafting | None = None) -> tuple[list[tuple[int, bool]], Drafting]:
    """What is chosen for rows of random numbers. seconds: of a step by (rows, drafted). tokens: of a drafted one."""
    random, drafting, chosen = np.random.default_rng(0), drafting or Drafting(), []
    for _ in range(turns):
        rows = int(random.choice([rows for rows, drafted in seconds if drafted]))
        drafted = drafting.is_worth_it(rows)
        chosen.append((rows, drafted))
        steps = int(random.integers(1, 9))
        took = steps * seconds[rows, drafted] * random.uniform(0.9, 1.1)
        emitted = round(rows * steps * (tokens * random.uniform(0.8, 1.2) if drafted else 1))
        drafting.saw(rows, drafted, steps, took, rows * steps, emitted)
    return chosen, drafting


def shares(chosen) -> dict[int, float]:
    """Of the later half, how much was drafted."""
    late = chosen[len(chosen) // 2 :]
    return {
        rows: float(np.mean([drafted for found, drafted in late if found == rows]))
        for rows in sorted({rows for rows, _ in late})
    }


# A step of one row costs 1.5 times as much with a draft; of eight rows three times.
SECONDS = {(1, True): 1.5, (1, False): 1.0, (2, True): 2.6, (2, False): 1.3, (8, True): 6.0, (8, False): 2.0}


@pytest.mark.parametrize(("tokens", "worth"), [(1.2, ()), (1.75, (1,)), (2.4, (1, 2)), (3.5, (1, 2, 8))])
def test_a_draft_is_dropped_where_it_costs_more_than_it_brings(tokens, worth):
    chosen, _ = simulated(SECONDS, tokens, 1000)
    for rows, share in shares(chosen).items():
        tried = 2 / TRIAL_EVERY
        assert share == pytest.approx(1.0 if rows in worth else 0.0, abs=tried)
        assert 0 < share < 1  # the other way is tried now and then


def test_texts_that_change_are_noticed():
    chosen, drafting = simulated(SECONDS, 3.5, 300)
    assert shares(chosen)[8] > 0.9
    chosen, drafting = simulated(SECONDS, 1.2, 4000, drafting)
    assert shares(chosen)[8] < 0.1
    chosen, _ = simulated(SECONDS, 3.5, 8000, drafting)
    assert shares(chosen)[8] > 0.9


def test_the_time_of_a_compilation_is_not_held_against_anybody():
    drafting = Drafting()
    for seconds in (100.0, 1.0):
        assert drafting.is_worth_it(4)
        drafting.saw(4, True, 1, seconds, 4, 12)
    for seconds in (100.0, 2.0):
        assert not drafting.is_worth_it(4)
        drafting.saw(4, False, 1, seconds, 4, 4)
    assert drafting.is_worth_it(4)
