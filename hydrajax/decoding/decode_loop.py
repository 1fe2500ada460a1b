"""The loop over decode steps, and how many of them make one burst of text that is shown while it grows."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from hydrajax.decoding.engine import Engine
from hydrajax.decoding.logprobs import Logprobs
from hydrajax.decoding.state import DecodeState, OutputState, Params
from hydrajax.models.arrays import Array

PIECES_PER_SECOND = 20  # of shown text, at most: more are no smoother to read, and each is a trip to the host


def next_burst(steps: int, seconds: float) -> int:
    """Return how many steps the next burst of shown text takes, if the last took so many seconds for ``steps``.

    The fewest that make no more than `PIECES_PER_SECOND`; rounded up they never make less than half of that, unless one
    step alone does. At most four times as many as the last: a single step says little of how long many take.
    """
    if seconds <= 0:
        return 4 * steps
    return min(math.ceil(steps / (seconds * PIECES_PER_SECOND)), 4 * steps)


def run_steps(
    engine: Engine, params: Params, state: DecodeState, most: Int[Array, ""] | int | None = None
) -> DecodeState:
    """Step until every row is done, or at most so many steps: one `jax.lax.while_loop`, no trip to the host."""

    def goes_on(carry):
        state, taken = carry
        busy = ~jnp.all(state.output.done)
        return busy if most is None else busy & (taken < most)

    def step(carry):
        state, taken = carry
        return engine.decode_step(params, state), taken + 1

    return jax.lax.while_loop(goes_on, step, (state, jnp.zeros((), jnp.int32)))[0]


class Snapshot(NamedTuple):
    """What has been emitted so far, on the host; the fields are those of `OutputState`."""

    tokens: Int[np.ndarray, "B room"]
    lengths: Int[np.ndarray, " B"]
    accept_lengths: Int[np.ndarray, "B max_steps"]
    steps: Int[np.ndarray, " B"]
    done: Bool[np.ndarray, " B"]
    logprobs: Logprobs | None

    @classmethod
    def of(cls, output: OutputState) -> Snapshot:
        """Fetch an output from the device; waits for it."""
        return cls(*jax.device_get(tuple(getattr(output, name) for name in cls._fields)))
