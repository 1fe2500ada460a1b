"""How many steps a burst of streamed text takes: pieces come at a rate that reads well, whatever a step costs."""

from __future__ import annotations

import pytest

from hydrajax.decoding.decode_loop import next_burst


def rates(step: float, burst: float, slow_first: float) -> list[float]:
    """Pieces per second on a device where a step and a burst cost so many seconds, the first some more."""
    steps, found = 1, []
    for _ in range(40):
        seconds = burst + step * steps + (0 if found else slow_first)
        found.append(1 / seconds)
        steps = next_burst(steps, seconds)
    return found


@pytest.mark.parametrize("slow_first", [0.0, 3.0], ids=["at once", "after a long prompt"])
@pytest.mark.parametrize("burst", [0.0, 0.002])
@pytest.mark.parametrize("step", [1e-5, 3e-4, 0.002, 0.01, 0.04])
def test_ten_to_twenty_pieces_a_second(step, burst, slow_first):
    found = rates(step, burst, slow_first)
    settled = next(number for number, rate in enumerate(found) if number and rate < 21)
    assert settled <= 9
    assert all(10 <= rate < 21 for rate in found[settled:])
    assert min(found[1:settled], default=21) >= 10  # and no gap on the way there


def test_a_model_of_slow_steps_shows_every_one_of_them():
    assert rates(0.5, 0.0, 0.0) == [2.0] * 40


def test_a_clock_that_stands_still_and_one_that_jumps():
    assert next_burst(3, 0.0) == 12
    assert next_burst(100, 60.0) == 1
    assert next_burst(1, 1e-9) == 4
