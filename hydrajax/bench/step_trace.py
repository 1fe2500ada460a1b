"""Record single decode steps: the proposed tree, the draft's probability of each path, and the accepted path."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax.decoding.executor import Executor
from hydrajax.decoding.prompt_batch import TokenIds, bucket
from hydrajax.decoding.request import sampling_params
from hydrajax.decoding.step import true_float32
from hydrajax.drafters.block import BlockDrafter
from hydrajax.drafters.clusters import over_all
from hydrajax.drafters.trainable import Trainable
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import run_base
from hydrajax.sharding import jit_on
from hydrajax.trees.static_tree import TreeTopology


@dataclass(frozen=True)
class TracedStep:
    """One decode step of one sequence.

    Attributes:
        before: Token ids up to the root, the prompt included.
        tree: The tree of this step; all fields use its node order. Ranks of a dynamic tree are those among siblings.
        tokens: int ``[N]``, -1 for nodes without a candidate.
        path: The accepted nodes, the root first.
        bonus_token: The base's token after them; None if the sequence ends here.
    """

    number: int
    before: tuple[int, ...]
    tree: TreeTopology
    tokens: Int[np.ndarray, " N"]
    path: tuple[int, ...]
    bonus_token: int | None


def trace_steps(executor: Executor, prompt: TokenIds, *, most: int, seed: int = 0) -> Iterator[TracedStep]:
    """Yield the first ``most`` decode steps after a prompt, fewer if the sequence ends."""
    # More than these steps can emit: this limit must not end the sequence.
    room = min((most + 1) * (executor.program.longest_path + 1), executor.model.config.max_positions)
    executor = executor.with_program(max_new_tokens=room)
    engine, params, program = executor.engine, executor.params, executor.program
    tree, can = program.tree, program.drafter.spec

    # The shape changes with the text for dynamic trees, lookup branches, merged drafts and lookahead windows.
    is_static = isinstance(tree, TreeTopology) and not (can.window_nodes or can.branch_nodes or can.chooses_nodes)
    n_candidates = can.candidate_nodes(tree)

    @partial(jit_on, executor.mesh)
    def step(params, state):
        proposal = engine.propose(params, state)
        forward, logits = engine.verify(params, state.target.cache, proposal)
        accepted = engine.accept(state, logits, proposal)
        state, outcome = engine.commit(state, forward, logits, proposal, accepted)
        parents = jnp.broadcast_to(proposal.tree.parents, proposal.tokens.shape)[0, :n_candidates]
        found = parents, proposal.tokens[0, :n_candidates], outcome.path[0], outcome.counts[0], outcome.bonus_token[0]
        return engine.observe(params, state, proposal, outcome), (*found, state.output.done[0])

    ids = np.asarray(prompt, np.int32)[None]
    lengths = np.full(1, ids.shape[1], np.int32)
    sampling = sampling_params([executor.request], jax.random.key(seed), executor.model.config.vocab_size)
    state = executor.prefill(ids, lengths, sampling)
    before, done = tuple(map(int, ids[0])), bool(state.output.done[0])
    for number in itertools.count(1):
        if done or number > most:
            return
        state, found = step(params, state)
        parents, tokens, path, count, bonus_token, done = jax.device_get(found)
        shape, order = (tree, np.arange(tree.size)) if is_static else tree_of(parents)
        tokens, accepted = tokens[order], tuple(int(np.flatnonzero(order == node)[0]) for node in path[:count])
        yield TracedStep(number, before, shape, tokens, accepted, None if done else int(bonus_token))
        before += tuple(int(tokens[node]) for node in accepted)


def tree_of(parents: Int[np.ndarray, " N"]) -> tuple[TreeTopology, Int[np.ndarray, " N"]]:
    """Return the tree with these parents, and ``order``: node n of the tree is node ``order[n]`` of the parents.

    The first child of a node has rank 0.
    """
    choices: list[tuple[int, ...]] = [()]
    for node in range(1, len(parents)):
        rank = int(np.sum(parents[:node] == parents[node]))
        choices.append((*choices[parents[node]], rank))
    order = sorted(range(len(choices)), key=lambda node: (len(choices[node]), choices[node]))
    return TreeTopology.from_choices(choices[1:]), np.array(order)


def path_probabilities(executor: Executor, step: TracedStep) -> Float[np.ndarray, " N"] | None:
    """Return the draft's probability of the path to each node, given the text and the root, at temperature 1.

    Computed by a teacher-forced pass, as in training, so it works for static trees too. None for a draft without
    probabilities, such as prompt lookup, and for a tree of the root alone.
    """
    drafter, model, tree = executor.program.drafter, executor.model, step.tree
    if not drafter.spec.num_draft_heads or not tree.depth:
        return None
    leaves = np.setdiff1d(np.arange(tree.size), tree.parents)
    paths, known = tree.node_paths[leaves], len(step.before)
    rows = np.zeros((len(leaves), bucket(known + tree.depth + 1, model.config.max_positions)), np.int32)
    rows[:, :known] = step.before
    rows[:, known : known + tree.depth + 1] = np.maximum(step.tokens[paths], 0)
    log_p = np.asarray(_log_probabilities(model, drafter, tree.depth)(executor.params, rows, known))
    found = np.ones(tree.size)
    for path, sums in zip(paths, np.cumsum(log_p, axis=1), strict=True):
        found[path[1:]] = np.exp(sums)[tree.depths[path[1:]] - 1]
    has_candidates = np.array([(step.tokens[path] >= 0).all() for path in tree.node_paths])
    return np.where(has_candidates, found, 0.0)


def _log_probabilities(model, drafter: Trainable, depth: int):
    """Compile the draft's log-probabilities of the ``depth`` tokens after the root, which follows ``known`` tokens."""
    drafter, vocabulary = drafter.reaching(depth), drafter.vocabulary

    def logits_after(params, base, aux_hidden_states, known, row):
        if isinstance(drafter, BlockDrafter):
            anchor = jnp.reshape(known, (1, 1))
            hidden = drafter.blocks(params.draft, aux_hidden_states, row[None], anchor, base)[0, :, :depth]
            before = jax.lax.dynamic_slice_in_dim(row, known, depth)
            return drafter.block_logits(params.draft, hidden, before[None], base)[0]
        hidden = drafter.teacher_hidden(params.draft, aux_hidden_states, row[None], base)
        return [drafter.head_logits(params.draft, k, hidden[k][0, known - 1][None], base)[0] for k in range(depth)]

    def of_row(params, base, aux_hidden_states, known, row):
        indices = row if vocabulary is None else vocabulary.places_of(row, model.config.vocab_size)
        found = []
        for k, logits in enumerate(logits_after(params, base, aux_hidden_states, known, row)):
            index = indices[known + 1 + k]
            found.append(jnp.where(index < 0, -jnp.inf, jax.nn.log_softmax(over_all(logits))[index]))
        return jnp.stack(found)

    @jax.jit
    def run(params, rows, known):
        with true_float32(model.dtype):
            # All rows are equal up to the root, and no guess reads the base's hidden states after it.
            forward = run_base(model, params.base, rows[:1], drafter.spec.aux_hidden_layers)
            base = BoundBase(model, params.base, block=forward.block)
            return jax.lax.map(partial(of_row, params, base, forward.aux_hidden_states, known), rows)

    return run
