"""Steps per burst of streamed text: chunks arrive at a readable rate, whatever the duration of a step."""

from __future__ import annotations

import itertools

from hydrajax.decoding.decode_loop import next_burst


def rates(step: float, burst: float, slow_first: float) -> list[float]:
    """Return chunks per second for given durations of a step and a burst; the first burst takes longer."""
    steps, found = 1, []
    for _ in range(40):
        seconds = burst + step * steps + (0 if found else slow_first)
        found.append(1 / seconds)
        steps = next_burst(steps, seconds)
    return found


def test_ten_to_twenty_chunks_per_second():
    for step, burst, slow_first in itertools.product((1e-5, 3e-4, 0.002, 0.01, 0.04), (0.0, 0.002), (0.0, 3.0)):
        found = rates(step, burst, slow_first)
        settled = next(number for number, rate in enumerate(found) if number and rate < 21)
        assert settled <= 9
        assert all(10 <= rate < 21 for rate in found[settled:])
        assert min(found[1:settled], default=21) >= 10  # and no gap before that


def test_slow_steps_are_streamed_one_by_one():
    assert rates(0.5, 0.0, 0.0) == [2.0] * 40


def test_irregular_clocks():
    assert next_burst(3, 0.0) == 12
    assert next_burst(100, 60.0) == 1
    assert next_burst(1, 1e-9) == 4
