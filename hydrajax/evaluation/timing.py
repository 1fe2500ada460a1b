"""Timing the phases of a decode step where they run: inside a compiled loop on the device.

Each phase is iterated by a `fori_loop` in one call, so that the host's dispatch is not measured, and each iteration
depends on the one before it, so that XLA can neither hoist nor drop the work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.decoding.step import DecodeState, Engine, Params


class PhaseTimes(NamedTuple):
    """Median milliseconds per step. ``step`` is the whole step timed on its own, not the sum of the others."""

    step: float
    propose: float
    verify: float
    accept_commit: float
    observe: float
    prefill: float
    compile_seconds: float


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Median wall time in milliseconds of ``call``, which must return arrays; they are waited for."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def phase_times(engine: Engine, params: Params, prompt: np.ndarray, n_steps: int, repeats: int) -> PhaseTimes:
    """Time the engine's step and its phases after prefilling ``prompt`` int32 ``[B, P]``.

    ``engine.max_new_tokens`` must hold ``n_steps * (K + 1)`` tokens, so that no row finishes while being timed.
    """
    lengths = np.full(prompt.shape[0], prompt.shape[1], np.int32)
    prefill = jax.jit(lambda params: engine.prefill(params, prompt, lengths, jax.random.key(0)))
    began = time.perf_counter()
    state = jax.block_until_ready(prefill(params))
    compile_seconds = time.perf_counter() - began
    vocab = engine.model.config.vocab_size

    def loop(body):
        """Compile ``n_steps`` of ``body(params, carry)`` and return a function that times one call per step."""
        compiled = jax.jit(
            lambda params, carry: jax.lax.fori_loop(0, n_steps, lambda _, carry: body(params, carry), carry)
        )

        def time_it(carry) -> float:
            jax.block_until_ready(compiled(params, carry))
            return median_ms(lambda: compiled(params, carry), repeats) / n_steps

        return time_it

    def propose(params, state: DecodeState):
        # Every candidate feeds the next root, so none can be dropped.
        return state._replace(root=jnp.sum(engine.propose(params, state), axis=1) % vocab)

    candidates = jax.jit(engine.propose)(params, state)

    def verify(params, carry):
        state, candidates = carry
        _, logits = engine.verify(params, state.cache, candidates)
        # A maximum over the vocabulary, one pass over the logits, is the cheapest thing that needs all of them.
        shift = (jnp.max(logits, axis=-1) > 0).astype(jnp.int32)
        return state, (candidates + shift) % vocab

    forward, logits = jax.jit(engine.verify)(params, state.cache, candidates)

    def accept_commit(params, carry):
        state, forward, logits, candidates = carry
        # Adding something that changes keeps the argmax inside the loop; the addition fuses into it.
        nudged = logits + (state.root[:, None, None] % 2) * jnp.float32(1e-6)
        accepted = engine.accept(state, nudged, candidates)
        state, _, _ = engine.commit(state, forward, candidates, accepted)
        return state, forward, logits, candidates

    accepted = jax.jit(engine.accept)(state, logits, candidates)
    tokens = jnp.take_along_axis(candidates, accepted.path, axis=1)

    def observe(params, carry):
        state, forward = carry
        new = engine.observe(params, state, forward, accepted, tokens, accepted.accept_length + 1)
        leaves = [jnp.max(leaf) for leaf in jax.tree.leaves(new.draft) if leaf.ndim == 2]
        shift = sum(leaves, jnp.float32(0)).astype(forward.features.dtype) * 1e-6
        return new, forward._replace(features=forward.features + shift)

    began = time.perf_counter()
    run_steps = jax.jit(
        lambda params, state: jax.lax.fori_loop(0, n_steps, lambda _, s: engine.decode_step(params, s), state),
        donate_argnums=1,
    )
    run_steps = run_steps.lower(params, state).compile()
    compile_seconds += time.perf_counter() - began

    def timed_steps() -> float:
        times = []
        for _ in range(repeats + 1):
            fresh = jax.block_until_ready(prefill(params))  # the loop donates its state
            times.append(median_ms(lambda fresh=fresh: run_steps(params, fresh), 1))
        return statistics.median(times[1:]) / n_steps

    return PhaseTimes(
        step=timed_steps(),
        propose=loop(propose)(state),
        verify=loop(verify)((state, candidates)),
        accept_commit=loop(accept_commit)((state, forward, logits, candidates)),
        observe=loop(observe)((state, forward)),
        prefill=median_ms(lambda: prefill(params), repeats),
        compile_seconds=compile_seconds,
    )
