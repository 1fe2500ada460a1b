"""The loop over decode steps, and the number of steps per burst of streamed text."""

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
from hydrajax.ops.sharded import gathered_in_each_step
from hydrajax.processes import fetch

BURSTS_PER_SECOND = 20  # more do not read more smoothly, and each returns to the host


def next_burst(steps: int, seconds: float) -> int:
    """Return the number of steps of the next burst, if the last ``steps`` took ``seconds``.

    The fewest steps that stay within `BURSTS_PER_SECOND`, and at most four times the last number: one step predicts the
    time of many poorly.
    """
    if seconds <= 0:
        return 4 * steps
    return min(math.ceil(steps / (seconds * BURSTS_PER_SECOND)), 4 * steps)


def run_steps(
    engine: Engine,
    params: Params,
    state: DecodeState,
    most: Int[Array, ""] | int | None = None,
    until_one_ends: Bool[Array, ""] | bool = False,
) -> DecodeState:
    """Step until every sequence is done, or at most ``most`` steps: one `jax.lax.while_loop` without a return to the
    host. With ``most`` steps it can also end when one more sequence is done.
    """
    done_before = state.output.done

    def unfinished(carry):
        state, taken = carry
        done = state.output.done
        busy = ~jnp.all(done)
        if most is None:
            return busy
        return busy & (taken < most) & ~(until_one_ends & jnp.any(done & ~done_before))

    def step(carry):
        state, taken = carry
        own, lengths = gathered_in_each_step(params, state.output.lengths)
        state = state._replace(output=state.output._replace(lengths=lengths))
        return engine.decode_step(own, state), taken + 1

    return jax.lax.while_loop(unfinished, step, (state, jnp.zeros((), jnp.int32)))[0]


class Snapshot(NamedTuple):
    """The emitted tokens on the host; the fields are those of `OutputState`."""

    tokens: Int[np.ndarray, "B room"]
    lengths: Int[np.ndarray, " B"]
    accept_lengths: Int[np.ndarray, "B max_steps"]
    steps: Int[np.ndarray, " B"]
    done: Bool[np.ndarray, " B"]
    logprobs: Logprobs | None

    @classmethod
    def of(cls, output: OutputState) -> Snapshot:
        """Fetch an output from the device, waiting for it."""
        return cls(*fetch(tuple(getattr(output, name) for name in cls._fields)))
