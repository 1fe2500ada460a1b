"""Timing the phases of a decode step where they run: inside a compiled loop on the device.

Each phase is iterated by a `fori_loop` in one call, so that the host's dispatch is not measured, and each iteration
depends on the one before it, so that XLA can neither hoist nor drop the work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from hydrajax.decoding.engine import Engine
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.spec import sampling_params
from hydrajax.decoding.state import DecodeState, Params
from hydrajax.drafters.drafter import Proposal
from hydrajax.models import backend
from hydrajax.models.arrays import Array
from hydrajax.models.cache import KVCache, after_reads
from hydrajax.trees.dynamic import DynamicTree
from hydrajax.trees.topology import Topology, from_parents


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Median wall time in milliseconds of ``call``, which must return arrays; they are waited for."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def _is_feature(x) -> bool:
    """Whether a leaf of a drafter's state is a hidden state ``[B, D]``."""
    return x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.floating)


def random_like(shapes: Any, rng: Array) -> Any:
    """Random numbers and keys of these shapes, and zeros for integers."""
    leaves, treedef = jax.tree.flatten(shapes)
    filled = []
    for i, leaf in enumerate(leaves):
        key = jax.random.fold_in(rng, i)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            filled.append(jax.random.split(key, leaf.shape))
        elif jnp.issubdtype(leaf.dtype, jnp.floating):
            filled.append(jax.random.normal(key, leaf.shape, leaf.dtype))
        else:
            filled.append(jnp.zeros(leaf.shape, leaf.dtype))
    return jax.tree.unflatten(treedef, filled)


class Timed:
    """A compiled loop of ``n_steps`` iterations that can be run again and again from where it began."""

    def __init__(self, loop: Callable, rewind: Callable, params: Params, carry: Any, n_steps: int):
        self._loop, self._rewind, self._params, self._n_steps = loop, rewind, params, n_steps
        self._carry = loop(params, jax.tree.map(jnp.copy, carry))  # once unmeasured

    def once(self) -> float:
        """Milliseconds per iteration of one run."""
        self._carry = jax.block_until_ready(self._rewind(self._carry))
        began = time.perf_counter()
        self._carry = jax.block_until_ready(self._loop(self._params, self._carry))
        return (time.perf_counter() - began) * 1e3 / self._n_steps


def in_rounds(timed: Mapping[str, Timed], rounds: int) -> list[dict[str, float]]:
    """Milliseconds per iteration of each, from rounds that run every one once.

    What else the machine does then meets all alike, and their ratios can be trusted where single figures cannot.
    """
    return [{name: one.once() for name, one in timed.items()} for _ in range(rounds)]


def interleaved_ms(timed: Mapping[str, Timed], rounds: int) -> dict[str, float]:
    """The median of each over `in_rounds`."""
    times = in_rounds(timed, rounds)
    return {name: statistics.median(row[name] for row in times) for name in timed}


def some_topology(engine: Engine, batch: int) -> Topology:
    """The engine's tree as arrays, with what a drafter puts beside it; of one whose shape or whose neighbours see
    something else at every step a shape that it may have, as no time depends on which.
    """
    tree = engine.tree
    added, beside = engine.drafter.spec.branch_nodes, engine.drafter.spec.window_nodes
    if isinstance(tree, DynamicTree):
        parents = np.arange(-1, tree.size - 1, dtype=np.int32)  # a chain as long as may be, the rest below the root
        parents[tree.depth + 1 :] = 0
        most_children = min(tree.top_k, tree.size - 1)
    elif added or beside:
        parents, most_children = tree.parents, max(tree.max_rank + 1, 1)
    else:
        return tree.topology
    parents = np.concatenate([parents, [0] * min(added, 1), np.arange(tree.size, tree.size + added - 1)])
    parents = np.pad(parents, (0, beside), constant_values=-1).astype(np.int32)
    return from_parents(np.tile(parents, (batch, 1)), engine.depth, most_children + (added > 0))


def verify_again(engine: Engine, params: Params, cache: KVCache, tokens: Int[Array, "B N"]):
    """Verify these tokens in the engine's tree; a cache and tokens for the next pass, which depend on this one."""
    _, logits = engine.verify(params, cache, Proposal(tokens, some_topology(engine, len(tokens))))
    # A maximum over the vocabulary, one pass over the logits, is the cheapest thing that needs all of them.
    shift = (jnp.max(logits, axis=-1) > 0).astype(jnp.int32)
    # Lengths that depend on the logits: otherwise masks and rotary angles are hoisted out of the loop.
    cache = cache._replace(lengths=after_reads(cache.lengths, shift[:, 0]))
    return cache, (tokens + shift) % engine.model.config.vocab_size


class StepTimer:
    """Times an executor's step and each of its phases: every method compiles one and returns it as `Timed`.

    The rows hold ``context`` random tokens and may emit ``max_new_tokens`` of the executor's spec, which must hold
    ``n_steps`` steps of K+1 tokens, so that no row finishes in a timed loop. ``compile_seconds`` adds up the
    compilations so far.
    """

    def __init__(self, executor: Executor, batch: int, context: int, n_steps: int, seed: int = 0):
        self.engine, self.params, spec = executor.engine, executor.params, executor.spec
        self.batch, self.context = batch, context
        self.n_steps, self.seed = n_steps, seed
        self.compile_seconds = 0.0
        vocab_size = executor.model.config.vocab_size
        random = np.random.default_rng(seed)
        self._arguments = (
            self.params,
            random.integers(0, vocab_size, (batch, context), dtype=np.int32),
            np.full(batch, context, np.int32),
            sampling_params([spec] * batch, jax.random.key(seed), vocab_size),
        )

    @cached_property
    def _prefill(self) -> Callable[[], DecodeState]:
        """Prefill random tokens, compiled."""
        run = jax.jit(self.engine.prefill)
        began = time.perf_counter()
        jax.block_until_ready(run(*self._arguments))
        self.compile_seconds += time.perf_counter() - began
        return lambda: run(*self._arguments)

    @cached_property
    def state(self) -> DecodeState:
        """The state after ``context`` random tokens."""
        return self._prefill()

    def _rewound(self, state: DecodeState) -> DecodeState:
        """Back to ``context`` tokens per row, nothing emitted."""
        back = jnp.full(self.batch, self.context, jnp.int32)
        state, zero = self.engine.rewind(state, back), jnp.zeros_like(back)
        limits = zero + self.engine.max_new_tokens
        return state._replace(output=state.output._replace(lengths=zero, steps=zero, limits=limits, done=zero > 0))

    def _time(self, body: Callable[[Params, Any], Any], carry: Any) -> Timed:
        """The loop of ``carry = body(params, carry)``; the carry is donated and used again."""
        n = self.n_steps
        loop = jax.jit(
            lambda params, carry: jax.lax.fori_loop(0, n, lambda _, c: body(params, c), carry),
            donate_argnums=1,
            compiler_options=backend.compiler_options(),  # as the decode loop itself
        )
        rewind = jax.jit(
            lambda carry: jax.tree.map(
                lambda x: self._rewound(x) if isinstance(x, DecodeState) else x,
                carry,
                is_leaf=lambda x: isinstance(x, DecodeState),
            ),
            donate_argnums=0,
        )
        began = time.perf_counter()
        loop = loop.lower(self.params, carry).compile()
        self.compile_seconds += time.perf_counter() - began
        return Timed(loop, rewind, self.params, carry, n)

    # --- inputs that the phases share ---------------------------------------------------------------------------

    @cached_property
    def _start(self):
        """A state, a proposal, and what the base makes of it: random numbers of the right shapes, as no time depends on
        them and compiling what makes them would take longer than all that is timed.
        """
        engine, state = self.engine, self.state
        key, more = jax.random.split(jax.random.key(self.seed + 1))
        proposal = random_like(jax.eval_shape(engine.propose, self.params, state), key)
        tokens = jax.random.randint(more, proposal.tokens.shape, 0, engine.model.config.vocab_size)
        proposal = proposal._replace(tokens=tokens, tree=some_topology(engine, self.batch))
        shapes = jax.eval_shape(engine.verify, self.params, state.target.cache, proposal)
        return state, proposal, *random_like(shapes, more)

    # --- what is timed ------------------------------------------------------------------------------------------

    def step(self) -> Timed:
        """The whole step; the phases need not add up to it exactly."""
        return self._time(self.engine.decode_step, self.state)

    def propose(self) -> Timed:
        vocab = self.engine.model.config.vocab_size

        def body(params, state):
            # Every candidate feeds the next root, so none can be dropped. The hidden state depends on it too: heads
            # that read nothing else (Medusa's) would be hoisted out of the loop.
            root = jnp.sum(self.engine.propose(params, state).tokens, axis=1) % vocab
            draft = jax.tree.map(
                lambda x: x + (root[:, None] % 2).astype(x.dtype) * 1e-6 if _is_feature(x) else x, state.draft
            )
            return state._replace(target=state.target._replace(root=root), draft=draft)

        return self._time(body, self._start[0])

    def verify(self) -> Timed:
        def body(params, carry):
            state, proposal = carry
            cache, tokens = verify_again(self.engine, params, state.target.cache, proposal.tokens)
            return state._replace(target=state.target._replace(cache=cache)), proposal._replace(tokens=tokens)

        state, proposal, *_ = self._start
        return self._time(body, (state, proposal))

    def accept_commit(self) -> Timed:
        def body(params, carry):
            state, proposal, forward, logits = carry
            # Adding something that changes keeps the argmax inside the loop; the addition fuses into it.
            nudged = logits + (state.target.root[:, None, None] % 2) * jnp.float32(1e-6)
            accepted = self.engine.accept(state, nudged, proposal)
            state, _ = self.engine.commit(state, forward, nudged, proposal, accepted)
            return state, proposal, forward, logits

        return self._time(body, self._start)

    def observe(self) -> Timed:
        state, proposal, forward, logits = self._start

        def outcome(*args):
            return self.engine.commit(*args, proposal, self.engine.accept(args[0], args[2], proposal))[1]

        outcome = random_like(jax.eval_shape(outcome, state, forward, logits), jax.random.key(self.seed))

        def body(params, carry):
            state, outcome = carry
            state = self.engine.observe(params, state, proposal, outcome)
            # Feed something of the new draft state back, so that iterations follow each other.
            changed = [jnp.max(x).astype(jnp.float32) for x in jax.tree.leaves(state.draft) if x.ndim == 2]
            nudge = sum(changed, jnp.float32(0)).astype(outcome.aux_hidden_states.dtype) * 1e-6
            return state, outcome._replace(aux_hidden_states=outcome.aux_hidden_states + nudge)

        return self._time(body, (state, outcome))

    def prefill(self, repeats: int) -> float:
        """Return the median milliseconds of prefilling ``context`` random tokens per row."""
        return median_ms(self._prefill, repeats)
