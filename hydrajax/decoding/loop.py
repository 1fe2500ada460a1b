"""The loop over decode steps: to the end in one call, or in bursts between which text is shown and stopped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.state import DecodeState, Params
from hydrajax.decoding.step import Engine
from hydrajax.models import backend
from hydrajax.models.arrays import Array


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
        n_steps: int,
        stopped: Bool[np.ndarray, " B"],
    ) -> Iterator[Snapshot]:
        """One snapshot after every ``n_steps`` decode steps, the last when every row is done.

        The arguments are those of `Engine.prefill`; ``prompt`` has the width of a bucket. A row ends early where the
        caller sets its element of ``stopped`` between two snapshots.
        """
        state = self.start(params, prompt, lengths, keys, rule, limits)
        while True:
            state, now = self.advance(params, state, stopped, n_steps)
            yield now
            if (now.done | stopped).all():
                return
