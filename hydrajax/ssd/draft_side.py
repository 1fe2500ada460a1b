"""What the draft's devices do: draft, prepare the next round for what may come of this one, take what came of it.

Functions of arrays, like the verbs of `hydrajax.decoding.engine`; `hydrajax.ssd.split_executor` calls them. An
outcome that is prepared for is no copy of the draft's state. All of them share its cache and the tokens of the round
that is being verified, and each adds K tokens of its own that no other sees, as the branches of a tree do: one pass
of the draft runs a token of every outcome.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.engine import exact
from hydrajax.decoding.sampling import position_keys
from hydrajax.drafters.draft_model import FIRST, DraftModel, DraftState, Scratch
from hydrajax.drafters.drafter import Outcome, Proposal
from hydrajax.models.arrays import Array
from hydrajax.models.cache import Block, PendingKVCache, write_tokens
from hydrajax.models.ranking import over_rows
from hydrajax.ssd.fan_out import FanOut
from hydrajax.trees.static_tree import TreeTopology

MISS, NO_ROUND = -1, -2  # in `Carry.record`, where others are the number of a prepared outcome


class Verdict(NamedTuple):
    """What the base tells the draft of a round, three numbers a row.

    counts: int32 ``[B]`` tokens emitted, the root counted; 0 in a row that had finished. next_root: int32 ``[B]``.
    done: bool ``[B]`` whether the row has finished with this round.
    """

    counts: Int[Array, " B"]
    bonus_token: Int[Array, " B"]
    done: Bool[Array, " B"]


class Drafted(NamedTuple):
    """The draft of a round: a chain of K tokens below a root.

    tokens:     int32 ``[B, K+1]`` the root and the chain; what the base is to verify.
    log_q:      float32 ``[B, K, V]`` as `Proposal.log_q`; None where nothing was drawn.
    runners_up: int32 ``[B, S]`` the draft's next guesses at each accept length below K, those that `FanOut` asks for.
    block:      keys and values of K+1 tokens: the two of `DraftModel`'s first pass, and the chain but its last token.
    """

    tokens: Int[Array, "B chain"]
    log_q: Float[Array, "B K V"] | None
    runners_up: Int[Array, "B S"]
    block: Block


class Prepared(NamedTuple):
    """The next round's drafts for F outcomes of this one, the first axes of whose fields are B and F.

    roots: int32 ``[B, F]``; the accept lengths are `FanOut.accept_lengths`. tokens, log_q, runners_up: as `Drafted`.
    block: keys and values of the ``K * F`` tokens that were run, those of one pass beside each other.
    last: keys and values of the last token of the chain that is being verified.
    """

    roots: Int[Array, "B F"]
    tokens: Int[Array, "B F chain"]
    log_q: Float[Array, "B F K V"] | None
    runners_up: Int[Array, "B F S"]
    block: Block
    last: Block


class Carry(NamedTuple):
    """What stays on the draft's devices from round to round.

    state: of the text so far. drafted: what is being verified. lengths: int32 ``[B]`` tokens emitted. done: bool
    ``[B]``. keys, rule: as in `hydrajax.decoding.state.OutputState`, so that the draws are those of the ordinary step.
    record: int32 ``[B, max_new + 1]``, for each round of a row after which it went on, the number of the prepared
    outcome that came about, `MISS` if none did; `NO_ROUND` beyond. rounds: int32 ``[B]`` how many of them.
    """

    state: DraftState
    drafted: Drafted
    lengths: Int[Array, " B"]
    done: Bool[Array, " B"]
    keys: Array
    rule: AcceptanceRule
    record: Int[Array, "B max_rounds"]
    rounds: Int[Array, " B"]


@dataclass(frozen=True)
class DraftSide:
    """A draft model that drafts chains of ``fan_out.depth`` tokens, and prepares that many of the next round's."""

    drafter: DraftModel
    fan_out: FanOut
    max_new_tokens: int

    @property
    def model(self):
        """Whose dtype `exact` asks for."""
        return self.drafter.model

    @property
    def depth(self) -> int:
        return self.fan_out.depth

    @cached_property
    def comb(self) -> TreeTopology:
        """The chain, with the runners-up as leaves beside it. Leaves are never run, so they cost no pass."""
        chain = [[0] * (level + 1) for level in range(self.depth)]
        beside = [[0] * level + [rank + 1] for level in range(self.depth) for rank in range(self.fan_out.counts[level])]
        return TreeTopology.from_choices(chain + beside)

    @cached_property
    def on_chain(self) -> Bool[np.ndarray, " N"]:
        """Which nodes of the comb are the root or in the chain."""
        return np.array([True, *(not any(choice) for choice in self.comb.choices)])

    # --- a round ------------------------------------------------------------------------------------------------------

    @exact
    def empty(self, params: Any, batch: int, slots: int, keys: Array, rule: AcceptanceRule) -> Carry:
        """Return rows without any text, with room for so many cache slots. They are done, and nothing is drafted."""
        state, nothing = self.drafter.init_state(batch, slots), jnp.zeros(batch, jnp.int32)
        like = jax.eval_shape(self.first, params, state, nothing, keys, rule, nothing == 0)
        drafted = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like.drafted)
        return self._begun(state, drafted, nothing, nothing == 0, keys, rule)

    @exact
    def read(self, params: Any, state: DraftState, text: Int[Array, "B T"], lengths: Int[Array, " B"]) -> DraftState:
        """Feed more right-padded text to the draft."""
        return self.drafter.begin(params, state, None, text, lengths, None, None)

    @exact
    def first(
        self, params: Any, state: DraftState, root: Int[Array, " B"], keys: Array, rule: AcceptanceRule, done
    ) -> Carry:
        """Draft the first round. root, keys, rule, done: as the base's prefill left them."""
        lengths = jnp.zeros_like(root)
        drafted = self._in_turn(params, state, root, lengths, keys, rule)
        return self._begun(state, drafted, lengths, done, keys, rule)

    @exact
    def prepare(self, params: Any, carry: Carry) -> Prepared:
        """The drafts for the outcomes of `FanOut`: K + 1 passes, the first to guess what follows the whole chain."""

        def prepared():
            return self._prepared(params, carry)

        # When nothing is left to do, nobody shall have to wait for it.
        nothing = jax.eval_shape(prepared)
        return jax.lax.cond(
            jnp.all(carry.done), lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nothing), prepared
        )

    @exact
    def answer(self, params: Any, carry: Carry, prepared: Prepared | None, verdict: Verdict) -> Carry:
        """Take in the base's verdict, and have the next round's draft: a prepared one, or one that is made now.

        Whether one was prepared is decided on the device. Where it was not in any row that goes on, all rows wait until
        it has been drafted.
        """
        state = self._observed(params, carry, prepared, verdict)
        lengths, done = carry.lengths + verdict.counts, verdict.done

        def in_turn():
            return self._in_turn(params, state, verdict.bonus_token, lengths, carry.keys, carry.rule)

        if prepared is None:
            nothing = jax.eval_shape(in_turn)
            number = jnp.full_like(lengths, MISS)
            drafted = jax.lax.cond(
                jnp.all(done), lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nothing), in_turn
            )
        else:
            agrees = (self.fan_out.accept_lengths == verdict.counts[:, None] - 1) & (
                prepared.roots == verdict.bonus_token[:, None]
            )
            hit = jnp.any(agrees, axis=1)
            at = jnp.argmax(agrees, axis=1).astype(jnp.int32)
            number = jnp.where(hit, at, MISS)
            found = self._taken(prepared, at)

            def some_in_turn():
                return jax.tree.map(
                    lambda ours, new: jnp.where(hit.reshape(-1, *(1,) * (new.ndim - 1)), ours, new), found, in_turn()
                )

            drafted = jax.lax.cond(jnp.all(hit | done), lambda: found, some_in_turn)
        number = jnp.where(done, NO_ROUND, number)
        record = write_tokens(carry.record, number[:, None], carry.rounds)
        return Carry(state, drafted, lengths, done, carry.keys, carry.rule, record, carry.rounds + ~done)

    # --- its parts ----------------------------------------------------------------------------------------------------

    def _begun(self, state: DraftState, drafted: Drafted, lengths, done, keys: Array, rule: AcceptanceRule) -> Carry:
        """A carry in which no round was taken."""
        record = jnp.full((len(lengths), self.max_new_tokens + 1), NO_ROUND, jnp.int32)
        return Carry(state, drafted, lengths, done, keys, rule, record, jnp.zeros_like(lengths))

    def _in_turn(self, params, state: DraftState, root, lengths, keys, rule) -> Drafted:
        """As the ordinary step drafts, with the runners-up besides."""
        draw = rule.draw(position_keys(keys, lengths[:, None] + 1 + np.arange(self.depth + 1)))
        proposal = self.drafter.propose(params, state, root, self.comb, None, draw)
        tokens = proposal.tokens
        return Drafted(tokens[:, self.on_chain], proposal.log_q, tokens[:, ~self.on_chain], proposal.scratch.block)

    def _prepared(self, params, carry: Carry) -> Prepared:
        drafter, state, drafted = self.drafter, carry.state, carry.drafted
        accepts, n_outcomes, depth = self.fan_out.accept_lengths, self.fan_out.total, self.depth
        batch, waits = len(drafted.tokens), state.waits[:, None]
        after_root = (state.cache.lengths + state.waits)[:, None]  # where the first token of the chain stands, less one
        # The chain's last token, which `propose` leaves out as nothing is drafted below it.
        positions = jnp.concatenate(
            [state.cache.lengths[:, None] + np.arange(FIRST), after_root + np.arange(1, depth)], axis=1
        )
        of_first = jnp.concatenate([jnp.ones_like(waits), waits], axis=1)  # the second is nobody's where none waited
        sees = jnp.concatenate([of_first, jnp.ones((batch, depth - 1), bool)], axis=1)[:, None]
        past = PendingKVCache(state.cache, drafted.block, sees, positions)
        alone = np.ones((1, 1), bool)
        last = drafter.forward(params, drafted.tokens[:, -1:], after_root + depth, alone, past)
        best = drafter.lm_head.top(drafter.logits(params, last.hidden[:, 0]), self.fan_out.counts[-1])
        roots = jnp.concatenate([drafted.runners_up, best], axis=1)

        # From here on a token for every outcome in each pass.
        block = _beside(drafted.block, last.block)
        positions = jnp.concatenate([positions, after_root + depth], axis=1)
        up_to = np.arange(1, depth + 1) <= accepts[:, None]  # [F, K]: the tokens of the chain that it accepts
        sees = jnp.concatenate(
            [
                jnp.broadcast_to(of_first[:, None], (batch, n_outcomes, FIRST)),
                jnp.broadcast_to(up_to, (batch, *up_to.shape)),
            ],
            axis=-1,
        )
        itself = np.eye(n_outcomes, dtype=bool)
        n_shared = positions.shape[1]
        # The places in the output that the draft of each outcome guesses: after its own root and so on.
        draw = carry.rule.draw(
            position_keys(carry.keys, carry.lengths[:, None, None] + accepts[:, None] + 2 + np.arange(depth))
        )
        tokens, runners_up, log_q = [roots], [], []
        for level in range(depth):
            places = after_root + accepts + 1 + level
            forward = drafter.forward(
                params, tokens[-1], places, itself, PendingKVCache(state.cache, block, sees, positions)
            )
            block = _beside(block, forward.block)
            positions = jnp.concatenate([positions, places], axis=1)
            sees = jnp.concatenate([sees, jnp.broadcast_to(itself, (batch, *itself.shape))], axis=-1)
            logits, width = drafter.logits(params, forward.hidden), 1 + self.fan_out.counts[level]
            if draw is None:
                guesses = drafter.lm_head.top(logits, width)
            else:
                logits = logits / over_rows(draw.temperature, logits)
                rows = logits.reshape(batch * n_outcomes, 1, -1)  # each draws with the keys of its own places
                guesses = drafter.lm_head.sampled(draw.keys[:, :, level].reshape(-1), rows, width)
                guesses = guesses.reshape(batch, n_outcomes, width)
                log_q.append(drafter.lm_head.over_all_tokens(logits, drafter.vocab_size))
            tokens.append(guesses[:, :, 0])
            runners_up.append(guesses[:, :, 1:])
        return Prepared(
            roots,
            jnp.stack(tokens, axis=-1),
            jnp.stack(log_q, axis=2) if log_q else None,
            jnp.concatenate(runners_up, axis=-1),
            jax.tree.map(lambda x: x[:, :, n_shared:], block),
            last.block,
        )

    def _taken(self, prepared: Prepared, at: Int[Array, " B"]) -> Drafted:
        """The draft that was prepared for outcome ``at[b]`` of each row."""

        def of_outcome(x):
            return jnp.take_along_axis(x, at.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)[:, 0]

        # As `DraftModel`'s first pass lays them: the root, one that nobody sees, and the chain but its last token.
        passes = np.array([0, *range(self.depth)])
        index = (passes * self.fan_out.total + at[:, None])[:, None, :, None]
        block = jax.tree.map(lambda x: jnp.take_along_axis(x, index, axis=2), prepared.block)
        log_q = None if prepared.log_q is None else of_outcome(prepared.log_q)
        return Drafted(of_outcome(prepared.tokens), log_q, of_outcome(prepared.runners_up), block)

    def _observed(self, params, carry: Carry, prepared: Prepared | None, verdict: Verdict) -> DraftState:
        """The state with the accepted tokens: none waits if the last of the chain was run, as preparing does."""
        drafted, chain = carry.drafted, np.arange(self.depth + 1, dtype=np.int32)
        if prepared is None:
            block, place = drafted.block, np.where(chain < self.depth, chain, -1)
        else:
            block, place = _beside(drafted.block, prepared.last), chain
        path = jnp.minimum(chain, jnp.maximum(verdict.counts - 1, 0)[:, None])
        tokens = jnp.take_along_axis(drafted.tokens, path, axis=1)
        # This program has not read the cache before it is written, so there is nothing to wait for.
        scratch = Scratch(block, place, jnp.zeros(len(tokens)))
        outcome = Outcome(path, tokens, verdict.counts, verdict.bonus_token, None, None)
        proposal = Proposal(drafted.tokens, self.comb.topology, drafted.log_q, scratch)
        return self.drafter.observe(params, carry.state, proposal, outcome, None)


def _beside(block: Block, more: Block) -> Block:
    """The tokens of both."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=2), block, more)
