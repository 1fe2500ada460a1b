"""Drafters that are told some of the truth, so that long paths of any shape are accepted."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hydrajax.drafters.drafter import Drafter


class ToldState(NamedTuple):
    """inner: the drafter's own. observed: int32 ``[B]`` tokens of the text."""

    inner: object
    observed: object


def told(drafter: Drafter) -> Drafter:
    """The same drafter, whose proposals hold what really follows along the way to one of their nodes.

    Which node depends on the place in the text. Parameters: ``inner``, the drafter's; ``text`` int32 ``[B, S]``; and
    ``right`` bool ``[B, S]``, whether it is told the token at a place. What it keeps of its own guesses, such as keys
    and values, then belongs to other tokens: later guesses are worse by it, and the text must be the same.
    """

    class Told(
        type(drafter)
    ):  # so that it is whatever else a drafter can be: one that draws, looks ahead, has a branch
        def init(self, rng, base):
            return {"inner": drafter.init(rng, base)}

        def init_state(self, batch, slots):
            return ToldState(drafter.init_state(batch, slots), jnp.zeros(batch, jnp.int32))

        def begin(self, params, state, features, tokens, counts, bonus_token, base):
            inner = drafter.begin(params["inner"], state.inner, features, tokens, counts, bonus_token, base)
            return ToldState(inner, state.observed + counts)

        def rewind(self, state, lengths):
            return ToldState(drafter.rewind(state.inner, lengths), jnp.minimum(state.observed, lengths))

        def propose(self, params, state, root, tree, base, draw=None):
            proposal = drafter.propose(params["inner"], state.inner, root, tree, base, draw)
            if draw is not None:  # what was drawn must stay what was drawn
                return proposal
            found, n_nodes = proposal.tree, proposal.tokens.shape[1]
            node = (state.observed * 7919 + 13) % n_nodes
            on_path = found.at(found.mask, node) & (found.at(found.parents, node) >= 0)[:, None]
            depths = jnp.broadcast_to(found.depths, proposal.tokens.shape)
            at = jnp.minimum(state.observed[:, None] + depths, params["text"].shape[1] - 1)
            truth, right = (jnp.take_along_axis(params[name], at, axis=1) for name in ("text", "right"))
            tokens = jnp.where(on_path & right, truth, proposal.tokens).at[:, 0].set(root)
            return proposal._replace(tokens=tokens.astype(jnp.int32))

        def observe(self, params, state, proposal, outcome, base):
            inner = drafter.observe(params["inner"], state.inner, proposal, outcome, base)
            return ToldState(inner, state.observed + outcome.counts)

    made = object.__new__(Told)
    made.__dict__.update(vars(drafter))
    return made
