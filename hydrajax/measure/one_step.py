"""Decode steps to be looked at: which tree was proposed, how likely the draft held each path, and what was accepted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax.decoding.engine import true_float32
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.prompt_batch import TokenIds, bucket
from hydrajax.decoding.spec import sampling_params
from hydrajax.drafters.drafter import Trainable
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import run_base
from hydrajax.trees.static_tree import TreeTopology


@dataclass(frozen=True)
class SeenStep:
    """What happened in one step.

    number: of the step, from 1. before: the text's token ids up to the root, the prompt's included. tree: as it was at
    this step; all is told in its node order, and the ranks of one that was grown are those among its siblings. tokens:
    int ``[N]``, -1 where the draft had nothing to say. path: the emitted nodes, the root first. next_root: the base's
    token that follows them; None where the text ends here.
    """

    number: int
    before: tuple[int, ...]
    tree: TreeTopology
    tokens: Int[np.ndarray, " N"]
    path: tuple[int, ...]
    bonus_token: int | None


def seen_steps(executor: Executor, prompt: TokenIds, *, most: int, seed: int = 0) -> Iterator[SeenStep]:
    """Yield the steps that continue the token ids of a prompt, at most ``most`` of them, fewer where the text ends."""
    # More than these steps can emit, so that it is not this limit that ends the text.
    room = min((most + 1) * (executor.spec.longest_path + 1), executor.model.config.max_positions)
    executor = executor.with_spec(max_new_tokens=room)
    engine, params, spec = executor.engine, executor.params, executor.spec
    tree, can = spec.tree, spec.drafter.spec

    # Text decides the shape of a grown tree, and of candidates beside a lookahead window who begins like whom.
    stays = isinstance(tree, TreeTopology) and not (can.window_nodes or can.branch_nodes)
    shown = can.candidate_nodes(tree)

    @jax.jit
    def step(params, state):
        proposal = engine.propose(params, state)
        forward, logits = engine.verify(params, state.target.cache, proposal)
        accepted = engine.accept(state, logits, proposal)
        state, outcome = engine.commit(state, forward, logits, proposal, accepted)
        parents = jnp.broadcast_to(proposal.tree.parents, proposal.tokens.shape)[0, :shown]
        found = parents, proposal.tokens[0, :shown], outcome.path[0], outcome.counts[0], outcome.bonus_token[0]
        return engine.observe(params, state, proposal, outcome), (*found, state.output.done[0])

    ids = np.asarray(prompt, np.int32)[None]
    lengths = np.full(1, ids.shape[1], np.int32)
    sampling = sampling_params([spec], jax.random.key(seed), executor.model.config.vocab_size)
    state = executor.prefill(ids, lengths, sampling)
    before, done = tuple(map(int, ids[0])), bool(state.output.done[0])
    for number in itertools.count(1):
        if done or number > most:
            return
        state, found = step(params, state)
        parents, tokens, path, count, following, done = jax.device_get(found)
        shape, order = (tree, np.arange(tree.size)) if stays else shape_of(parents)
        tokens, emitted = tokens[order], tuple(int(np.flatnonzero(order == node)[0]) for node in path[:count])
        yield SeenStep(number, before, shape, tokens, emitted, None if done else int(following))
        before += tuple(int(tokens[node]) for node in emitted)


def shape_of(parents: Int[np.ndarray, " N"]) -> tuple[TreeTopology, Int[np.ndarray, " N"]]:
    """A tree with these parents, in which the first child of a node has rank 0, and where its nodes stand among those
    that were given: ``order[n]`` is the given node that has become node n.
    """
    choices: list[tuple[int, ...]] = [()]
    for node in range(1, len(parents)):
        rank = int(np.sum(parents[:node] == parents[node]))
        choices.append((*choices[parents[node]], rank))
    order = sorted(range(len(choices)), key=lambda node: (len(choices[node]), choices[node]))
    return TreeTopology.from_choices(choices[1:]), np.array(order)


def likelihoods(executor: Executor, step: SeenStep) -> Float[np.ndarray, " N"] | None:
    """How likely the draft held the whole path to each node, given the text and the root, at temperature 1.

    From a pass over the text as in training, not from the step itself, which keeps no such numbers; so it works for
    static trees as well. None for a draft without probabilities, such as looked up text, and for the root alone.
    """
    drafter, model, tree = executor.spec.drafter, executor.model, step.tree
    if not drafter.spec.num_draft_heads or not tree.depth:
        return None
    leaves = np.setdiff1d(np.arange(tree.size), tree.parents)
    paths, known = tree.node_paths[leaves], len(step.before)
    rows = np.zeros((len(leaves), bucket(known + tree.depth + 1, model.config.max_positions)), np.int32)
    rows[:, :known] = step.before
    rows[:, known : known + tree.depth + 1] = np.maximum(step.tokens[paths], 0)
    log_p = np.asarray(_log_probabilities(model, drafter, tree.depth)(executor.params, rows, known))
    found = np.ones(tree.size)
    for path, steps in zip(paths, np.cumsum(log_p, axis=1), strict=True):
        found[path[1:]] = np.exp(steps)[tree.depths[path[1:]] - 1]
    nothing = np.array([(step.tokens[path] < 0).any() for path in tree.node_paths])
    return np.where(nothing, 0.0, found)


def _log_probabilities(model, drafter: Trainable, depth: int):
    """Compiled: of every row of tokens, of which the first ``known`` are text, the log-probability that the draft gives
    to each of the ``depth`` tokens after the root.
    """

    drafter, vocabulary = drafter.reaching(depth), drafter.vocabulary

    def of_row(params, base, aux_hidden_states, known, row):
        places = row if vocabulary is None else vocabulary.places_of(row, model.config.vocab_size)
        hidden = drafter.teacher_hidden(params.draft, aux_hidden_states, row[None], base)
        found = []
        for k in range(depth):
            logits = drafter.head_logits(params.draft, k, hidden[k][0, known - 1][None], base)[0]
            place = places[known + 1 + k]
            found.append(jnp.where(place < 0, -jnp.inf, jax.nn.log_softmax(logits)[place]))
        return jnp.stack(found)

    @jax.jit
    def run(params, rows, known):
        with true_float32(model.dtype):
            # The rows are one text up to the root, and no guess is made from what the base says of later places.
            aux_hidden_states = run_base(model, params.base, rows[:1], drafter.spec.aux_hidden_layers).aux_hidden_states
            return jax.lax.map(partial(of_row, params, BoundBase(model, params.base), aux_hidden_states, known), rows)

    return run
