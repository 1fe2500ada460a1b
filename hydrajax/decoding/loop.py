"""The loop over decode steps: to the end in one call, or in bursts between which text is shown and stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.logprobs import Logprobs
from hydrajax.decoding.state import DecodeState, Params
from hydrajax.decoding.step import Engine
from hydrajax.models import backend
from hydrajax.models.arrays import Array

PIECES_PER_SECOND = 20  # of shown text, at most: more are no smoother to read, and each is a trip to the host


def next_burst(steps: int, seconds: float) -> int:
    """How many steps the next burst of shown text shall take, if the last took so many seconds for ``steps``.

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


@dataclass(frozen=True)
class Bursts:
    """An engine's loop cut into bursts, compiled; the tokens are those of the whole loop.

    Every shape of prompt compiles once; rules of one kind, limits and random keys are arguments and compile nothing.
    """

    engine: Engine

    @cached_property
    def start(self):
        """`Engine.prefill`, compiled."""
        return jax.jit(self.engine.prefill)

    @cached_property
    def extend(self):
        """`Engine.extend`, compiled; the state is donated."""
        return jax.jit(self.engine.extend, donate_argnums=1)

    @cached_property
    def _advance(self):
        def burst(params: Params, state: DecodeState, stopped, n_steps):
            output = state.output._replace(done=state.output.done | stopped)
            return run_steps(self.engine, params, state._replace(output=output), n_steps)

        return jax.jit(burst, donate_argnums=1, compiler_options=backend.compiler_options())

    def advance(self, params: Params, state: DecodeState, stopped, n_steps: int) -> tuple[DecodeState, Snapshot]:
        """At most ``n_steps`` decode steps further; ``state`` is donated. Rows in ``stopped`` take none."""
        state = self._advance(params, state, np.array(stopped), np.int32(n_steps))
        return state, Snapshot(*jax.device_get(tuple(getattr(state.output, name) for name in Snapshot._fields)))

    def compile(self, params: Params, prompt, lengths, keys, rule: AcceptanceRule, limits) -> None:
        """Compile for inputs of these shapes; `run` then only runs."""
        start = self.start.lower(params, prompt, lengths, keys, rule, limits)
        start.compile()
        stopped = np.zeros(len(prompt), bool)
        self._advance.lower(params, start.out_info, stopped, np.int32(0)).compile()

    def run(
        self,
        params: Params,
        prompt,
        lengths,
        keys,
        rule: AcceptanceRule,
        limits,
        *,
        n_steps: int | None,
        stopped: Bool[np.ndarray, " B"],
    ) -> Iterator[Snapshot]:
        """One snapshot after every ``n_steps`` decode steps, the last when every row is done.

        n_steps: None is for somebody who reads: one step first, then as many as `next_burst` says.
        The arguments are those of `Engine.prefill`; ``prompt`` has the width of a bucket. A row ends early where the
        caller sets its element of ``stopped`` between two snapshots.
        """
        state = self.start(params, prompt, lengths, keys, rule, limits)
        steps = n_steps or 1
        while True:
            began = time.perf_counter()
            state, now = self.advance(params, state, stopped, steps)
            steps = n_steps or next_burst(steps, time.perf_counter() - began)  # what the reader does is not in the time
            yield now
            if (now.done | stopped).all():
                return
