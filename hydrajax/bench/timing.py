"""Time the phases of a decode step inside a compiled loop on the device.

A `fori_loop` iterates each phase in one call, which leaves out the host's dispatch. Each iteration depends on the one
before it, so that XLA can neither hoist nor drop the work.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax import ops
from hydrajax.bench.rounds import median_ms, seconds
from hydrajax.decoding.engine import Engine
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.request import sampling_params
from hydrajax.decoding.state import DecodeState, Params
from hydrajax.drafters.drafter import Proposal
from hydrajax.models.arrays import Array
from hydrajax.models.cache import after_reads
from hydrajax.sharding import jit_on
from hydrajax.trees.built_trees import from_parents
from hydrajax.trees.dynamic import DynamicTree
from hydrajax.trees.topology import Topology

Timed = Callable[..., float]


def random_like(shapes: Any, rng: Array) -> Any:
    """Return random numbers and keys of these shapes, and zeros for integers."""
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


def example_topology(engine: Engine, batch: int) -> Topology:
    """Return the engine's tree as arrays, with the drafter's lookup branch and lookahead window.

    If the tree changes at every step, return one possible shape: the time does not depend on it.
    """
    tree, can = engine.program.tree, engine.program.drafter.spec
    branch, window = can.branch_nodes, can.window_nodes
    if isinstance(tree, DynamicTree):
        parents = np.arange(-1, tree.size - 1, dtype=np.int32)  # the longest chain; the rest are children of the root
        parents[tree.depth + 1 :] = 0
        most_children = tree.most_children
    elif branch or window or can.chooses_nodes:
        parents, most_children = tree.parents, max(tree.max_rank + 1, 1)
    else:
        return tree.topology
    parents = np.concatenate([parents, [0] * min(branch, 1), np.arange(tree.size, tree.size + branch - 1)])
    parents = np.pad(parents, (0, window), constant_values=-1).astype(np.int32)
    return from_parents(np.tile(parents, (batch, 1)), engine.depth, most_children + (branch > 0))


class StepTimer:
    """Time an executor's step and its phases. Each method compiles one of them and returns it as `Timed`, which runs
    it once and returns the milliseconds per iteration, for `hydrajax.bench.rounds.in_rounds`.

    Sequences have ``context`` random tokens. The program's ``max_new_tokens`` must be at least ``n_steps`` (K + 1), so
    that no sequence finishes in a timed loop. ``compile_seconds`` is the total of all compilations so far.
    """

    def __init__(self, executor: Executor, batch: int, context: int, n_steps: int):
        self.engine, self.params = executor.engine, executor.params
        self._jit = partial(jit_on, executor.mesh)
        self.batch, self.context, self.n_steps = batch, context, n_steps
        self.compile_seconds = 0.0
        vocab_size = executor.model.config.vocab_size
        random = np.random.default_rng(0)
        self._arguments = (
            self.params,
            random.integers(0, vocab_size, (batch, context), dtype=np.int32),
            np.full(batch, context, np.int32),
            sampling_params([executor.request] * batch, jax.random.key(0), vocab_size),
        )

    @cached_property
    def _prefill(self) -> Callable[[], DecodeState]:
        run = self._jit(self.engine.prefill)
        self.compile_seconds += seconds(run, *self._arguments)
        return lambda: run(*self._arguments)

    @cached_property
    def state(self) -> DecodeState:
        """The decode state after ``context`` random tokens."""
        return self._prefill()

    def _rewound(self, state: DecodeState) -> DecodeState:
        """Rewind to ``context`` tokens per sequence, nothing emitted. States of recurrent layers stay: times do not
        depend on them.
        """
        back = jnp.full(self.batch, self.context, jnp.int32)
        state, zero = self.engine.rewind(state, back), jnp.zeros_like(back)
        limits = zero + self.engine.program.max_new_tokens
        return state._replace(output=state.output._replace(lengths=zero, steps=zero, limits=limits, done=zero > 0))

    def _time(self, body: Callable[[Params, Any], Any], carry: Any) -> Timed:
        """Compile a loop of ``carry = body(params, carry)`` that donates the carry, and run it from the same state."""
        n = self.n_steps
        loop = self._jit(
            lambda params, carry: jax.lax.fori_loop(0, n, lambda _, c: body(params, c), carry),
            donate_argnums=1,
            compiler_options=ops.compiler_options(),  # as the decode loop
        )
        rewind = self._jit(
            lambda carry: jax.tree.map(
                lambda x: self._rewound(x) if isinstance(x, DecodeState) else x,
                carry,
                is_leaf=lambda x: isinstance(x, DecodeState),
            ),
            donate_argnums=0,
        )
        compiled = []
        self.compile_seconds += seconds(lambda: compiled.append(loop.lower(self.params, carry).compile()))
        kept = [compiled[0](self.params, jax.tree.map(jnp.copy, carry))]  # warm-up

        def run() -> None:
            kept[0] = jax.block_until_ready(compiled[0](self.params, kept[0]))

        def timed(number: int = 0) -> float:
            kept[0] = jax.block_until_ready(rewind(kept[0]))
            return seconds(run) * 1e3 / n

        return timed

    # --- inputs that the phases share ---------------------------------------------------------------------------

    @cached_property
    def _start(self):
        """A state, a proposal and the base's output for it, random: compiling their computation would take longer than
        all timed work, and the times do not depend on the values.
        """
        engine, state = self.engine, self.state
        key, more = jax.random.split(jax.random.key(1))
        proposal = random_like(jax.eval_shape(engine.propose, self.params, state), key)
        tokens = jax.random.randint(more, proposal.tokens.shape, 0, engine.model.config.vocab_size)
        proposal = proposal._replace(tokens=tokens, tree=example_topology(engine, self.batch))
        shapes = jax.eval_shape(engine.verify, self.params, state.target.cache, proposal)
        return state, proposal, *random_like(shapes, more)

    # --- what is timed ------------------------------------------------------------------------------------------

    def step(self) -> Timed:
        """Time the whole step. The phases need not add up to it exactly."""
        return self._time(self.engine.decode_step, self.state)

    def propose(self) -> Timed:
        vocab = self.engine.model.config.vocab_size

        def body(params, state):
            # The next root depends on every candidate, so none can be dropped. The hidden state depends on the root:
            # heads that read nothing else (Medusa's) would be hoisted out of the loop.
            root = jnp.sum(self.engine.propose(params, state).tokens, axis=1) % vocab
            nudge = root[:, None] % 2 * jnp.float32(1e-6)
            draft = jax.tree.map(
                lambda x: x + nudge.astype(x.dtype) if x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.floating) else x,
                state.draft,
            )
            return state._replace(target=state.target._replace(root=root), draft=draft)

        return self._time(body, self._start[0])

    def verify(self) -> Timed:
        def body(params, carry):
            state, proposal = carry
            cache, tokens = state.target.cache, proposal.tokens
            _, logits = self.engine.verify(params, cache, Proposal(tokens, example_topology(self.engine, len(tokens))))
            # A maximum over the vocabulary is the cheapest operation that reads all logits.
            shift = (jnp.max(logits, axis=-1) > 0).astype(jnp.int32)
            # The lengths depend on the logits: otherwise masks and rotary angles are hoisted out of the loop.
            cache = cache._replace(lengths=after_reads(cache.lengths, shift[:, 0]))
            tokens = (tokens + shift) % self.engine.model.config.vocab_size
            return state._replace(target=state.target._replace(cache=cache)), proposal._replace(tokens=tokens)

        return self._time(body, self._start[:2])

    def accept_commit(self) -> Timed:
        def body(params, carry):
            state, proposal, forward, logits = carry
            # Adding a changing number keeps the argmax inside the loop; the addition fuses into it.
            nudged = logits + (state.target.root[:, None, None] % 2) * jnp.float32(1e-6)
            accepted = self.engine.accept(state, nudged, proposal)
            state, _ = self.engine.commit(state, forward, nudged, proposal, accepted)
            return state, proposal, forward, logits

        return self._time(body, self._start)

    def observe(self) -> Timed:
        state, proposal, forward, logits = self._start

        def outcome(*args):
            return self.engine.commit(*args, proposal, self.engine.accept(args[0], args[2], proposal))[1]

        outcome = random_like(jax.eval_shape(outcome, state, forward, logits), jax.random.key(0))

        def body(params, carry):
            state, outcome = carry
            state = self.engine.observe(params, state, proposal, outcome)
            # Feed the new draft state back, so that iterations depend on each other.
            changed = [jnp.max(x).astype(jnp.float32) for x in jax.tree.leaves(state.draft) if x.ndim == 2]
            nudge = sum(changed, jnp.float32(0)).astype(outcome.aux_hidden_states.dtype) * 1e-6
            return state, outcome._replace(aux_hidden_states=outcome.aux_hidden_states + nudge)

        return self._time(body, (state, outcome))

    def prefill(self, repeats: int) -> float:
        """Return the median milliseconds of a prefill of ``context`` random tokens per sequence."""
        return median_ms(self._prefill, repeats)
