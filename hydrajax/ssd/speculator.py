"""The draft devices' side of SSD: draft a round, fill the speculation cache, look up the verification outcome.

Pure functions of arrays, called by `hydrajax.ssd.split_executor`. The outcomes in the speculation cache do not copy
the draft model's state. They share its KV cache and the tokens of the round under verification, and each adds K tokens
that the others do not attend to, like the branches of a tree. One pass of the draft model runs one token of every
outcome.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.random_keys import position_keys
from hydrajax.decoding.step import exact
from hydrajax.drafters.draft_model import FIRST, DraftModel, DraftState, Scratch
from hydrajax.drafters.drafter import Outcome, Proposal
from hydrajax.models.arrays import Array
from hydrajax.models.cache import Block, PendingKVCache, write_tokens
from hydrajax.ops import over_rows
from hydrajax.ssd.fan_out import FanOut
from hydrajax.trees.static_tree import TreeTopology

MISS, NO_ROUND = -1, -2  # in `SpeculatorState.record`; other values are indices into the speculation cache


class VerificationOutcome(NamedTuple):
    """The base's result of a round, as sent to the draft devices.

    Attributes:
        counts: int32 ``[B]`` tokens emitted, root included; 0 for a finished sequence.
        bonus_token: int32 ``[B]`` the base's token after the accepted path.
        done: bool ``[B]`` the sequence has finished with this round.
    """

    counts: Int[Array, " B"]
    bonus_token: Int[Array, " B"]
    done: Bool[Array, " B"]


class Speculation(NamedTuple):
    """The draft of a round: a chain of K tokens below a root.

    Attributes:
        tokens: int32 ``[B, K+1]`` root and chain, which the base verifies.
        log_q: float32 ``[B, K, V]`` as `Proposal.log_q`; None if nothing was sampled.
        runners_up: int32 ``[B, S]`` the draft model's next guesses at each accept length below K, as `FanOut` counts
            them.
        block: Keys and values of K+1 tokens: two of `DraftModel`'s first pass, and the chain without its last token.
    """

    tokens: Int[Array, "B chain"]
    log_q: Float[Array, "B K V"] | None
    runners_up: Int[Array, "B S"]
    block: Block


class SpeculationCache(NamedTuple):
    """The next round's drafts for F outcomes; axes 0 and 1 of the fields are B and F.

    Attributes:
        bonus_tokens: int32 ``[B, F]``; the accept lengths are `FanOut.accept_lengths`.
        tokens, log_q, runners_up: As in `Speculation`.
        block: Keys and values of the ``K * F`` tokens, those of one pass next to each other.
        last: Keys and values of the last token of the chain under verification.
    """

    bonus_tokens: Int[Array, "B F"]
    tokens: Int[Array, "B F chain"]
    log_q: Float[Array, "B F K V"] | None
    runners_up: Int[Array, "B F S"]
    block: Block
    last: Block


class SpeculatorState(NamedTuple):
    """The state that stays on the draft devices from round to round.

    Attributes:
        lengths: int32 ``[B]`` tokens emitted.
        done: bool ``[B]``.
        keys, rule: As in `hydrajax.decoding.state.OutputState`, so that samples equal those of the fused step.
        record: int32 ``[B, max_new + 1]`` for each round that a sequence continued after, the index of the outcome in
            the speculation cache or `MISS`; `NO_ROUND` beyond.
        rounds: int32 ``[B]`` entries of ``record``.
    """

    draft: DraftState
    speculation: Speculation
    lengths: Int[Array, " B"]
    done: Bool[Array, " B"]
    keys: Array
    rule: AcceptanceRule
    record: Int[Array, "B max_rounds"]
    rounds: Int[Array, " B"]


@dataclass(frozen=True)
class Speculator:
    """A draft model that drafts chains of ``fan_out.depth`` tokens and fills a speculation cache by ``fan_out``."""

    drafter: DraftModel
    fan_out: FanOut
    max_new_tokens: int

    @property
    def model(self):
        """The model whose dtype `exact` reads."""
        return self.drafter.model

    @property
    def depth(self) -> int:
        return self.fan_out.depth

    @cached_property
    def tree(self) -> TreeTopology:
        """The chain, with the runners-up as leaves. Leaves are never run, so they cost no pass."""
        chain = [[0] * (level + 1) for level in range(self.depth)]
        leaves = [[0] * level + [rank + 1] for level in range(self.depth) for rank in range(self.fan_out.counts[level])]
        return TreeTopology.from_choices(chain + leaves)

    @cached_property
    def on_chain(self) -> Bool[np.ndarray, " N"]:
        """Mask of the tree's nodes that are the root or on the chain."""
        return np.array([True, *(not any(choice) for choice in self.tree.choices)])

    # --- a round ------------------------------------------------------------------------------------------------------

    @exact
    def empty(self, params: Any, batch: int, slots: int, keys: Array, rule: AcceptanceRule) -> SpeculatorState:
        """Return the state of finished sequences without tokens, with a KV cache of ``slots`` positions."""
        state, zeros = self.drafter.init_state(batch, slots), jnp.zeros(batch, jnp.int32)
        like = jax.eval_shape(self.begin, params, state, zeros, keys, rule, zeros == 0)
        return self._begun(state, _zeros(like.speculation), zeros, zeros == 0, keys, rule)

    @exact
    def feed(self, params: Any, state: DraftState, text: Int[Array, "B T"], lengths: Int[Array, " B"]) -> DraftState:
        """Prefill right-padded tokens."""
        return self.drafter.begin(params, state, None, text, lengths, None, None)

    @exact
    def begin(
        self, params: Any, state: DraftState, root: Int[Array, " B"], keys: Array, rule: AcceptanceRule, done
    ) -> SpeculatorState:
        """Draft the first round from the root, keys, rule and done flags of the base's prefill."""
        lengths = jnp.zeros_like(root)
        speculation = self._draft(params, state, root, lengths, keys, rule)
        return self._begun(state, speculation, lengths, done, keys, rule)

    @exact
    def prepare(self, params: Any, state: SpeculatorState) -> SpeculationCache:
        """Fill the speculation cache: K + 1 passes, the first one to guess the token after the whole chain."""

        def filled():
            return self._filled(params, state)

        like = jax.eval_shape(filled)
        return jax.lax.cond(jnp.all(state.done), lambda: _zeros(like), filled)

    @exact
    def resolve(
        self, params: Any, state: SpeculatorState, cache: SpeculationCache | None, outcome: VerificationOutcome
    ) -> SpeculatorState:
        """Apply the verification outcome and return the next round's draft: from the cache, or drafted now.

        The lookup runs on the device. If any continuing sequence misses, the whole batch waits for its draft.
        """
        draft = self._observed(params, state, cache, outcome)
        lengths, done = state.lengths + outcome.counts, outcome.done

        def drafted():
            return self._draft(params, draft, outcome.bonus_token, lengths, state.keys, state.rule)

        if cache is None:
            index, like = jnp.full_like(lengths, MISS), jax.eval_shape(drafted)
            speculation = jax.lax.cond(jnp.all(done), lambda: _zeros(like), drafted)
        else:
            matches = (self.fan_out.accept_lengths == outcome.counts[:, None] - 1) & (
                cache.bonus_tokens == outcome.bonus_token[:, None]
            )
            hit = jnp.any(matches, axis=1)
            at = jnp.argmax(matches, axis=1).astype(jnp.int32)
            index = jnp.where(hit, at, MISS)
            cached = self._lookup(cache, at)

            def some_drafted():
                return jax.tree.map(
                    lambda ready, new: jnp.where(hit.reshape(-1, *(1,) * (new.ndim - 1)), ready, new), cached, drafted()
                )

            speculation = jax.lax.cond(jnp.all(hit | done), lambda: cached, some_drafted)
        index = jnp.where(done, NO_ROUND, index)
        record = write_tokens(state.record, index[:, None], state.rounds)
        return SpeculatorState(draft, speculation, lengths, done, state.keys, state.rule, record, state.rounds + ~done)

    # --- its parts ----------------------------------------------------------------------------------------------------

    def _begun(self, draft, speculation: Speculation, lengths, done, keys: Array, rule) -> SpeculatorState:
        """Return a state with an empty record."""
        record = jnp.full((len(lengths), self.max_new_tokens + 1), NO_ROUND, jnp.int32)
        return SpeculatorState(draft, speculation, lengths, done, keys, rule, record, jnp.zeros_like(lengths))

    def _draft(self, params, state: DraftState, root, lengths, keys, rule) -> Speculation:
        """Draft as the fused step does, plus the runners-up."""
        draw = rule.draw(position_keys(keys, lengths[:, None] + 1 + np.arange(self.depth + 1)))
        proposal = self.drafter.propose(params, state, root, self.tree, None, draw)
        tokens = proposal.tokens
        return Speculation(tokens[:, self.on_chain], proposal.log_q, tokens[:, ~self.on_chain], proposal.scratch.block)

    def _filled(self, params, state: SpeculatorState) -> SpeculationCache:
        drafter, draft, speculation = self.drafter, state.draft, state.speculation
        accepts, n_outcomes, depth = self.fan_out.accept_lengths, self.fan_out.total, self.depth
        batch, waits = len(speculation.tokens), draft.waits[:, None]
        root_at = (draft.cache.lengths + draft.waits)[:, None]  # position of the root
        # Run the chain's last token, which `propose` leaves out because nothing is drafted below it.
        positions = jnp.concatenate(
            [draft.cache.lengths[:, None] + np.arange(FIRST), root_at + np.arange(1, depth)], axis=1
        )
        first = jnp.concatenate([jnp.ones_like(waits), waits], axis=1)  # the second token is padding if none waited
        sees = jnp.concatenate([first, jnp.ones((batch, depth - 1), bool)], axis=1)[:, None]
        pending = PendingKVCache(draft.cache, speculation.block, sees, positions)
        last = drafter.forward(params, speculation.tokens[:, -1:], root_at + depth, np.ones((1, 1), bool), pending)
        best = drafter.lm_head.top(drafter.logits(params, last.hidden[:, 0]), self.fan_out.counts[-1])
        bonus_tokens = jnp.concatenate([speculation.runners_up, best], axis=1)

        # From here on, each pass runs one token of every outcome.
        block = _concatenated(speculation.block, last.block)
        positions = jnp.concatenate([positions, root_at + depth], axis=1)
        up_to = np.arange(1, depth + 1) <= accepts[:, None]  # [F, K]: the accepted tokens of the chain
        sees = jnp.concatenate(
            [
                jnp.broadcast_to(first[:, None], (batch, n_outcomes, FIRST)),
                jnp.broadcast_to(up_to, (batch, *up_to.shape)),
            ],
            axis=-1,
        )
        itself = np.eye(n_outcomes, dtype=bool)
        n_shared = positions.shape[1]
        # Keys by output position: those that `_draft` would use after each outcome.
        draw = state.rule.draw(
            position_keys(state.keys, state.lengths[:, None, None] + accepts[:, None] + 2 + np.arange(depth))
        )
        tokens, runners_up, log_q = [bonus_tokens], [], []
        for level in range(depth):
            at = root_at + accepts + 1 + level
            pending = PendingKVCache(draft.cache, block, sees, positions)
            forward = drafter.forward(params, tokens[-1], at, itself, pending)
            block = _concatenated(block, forward.block)
            positions = jnp.concatenate([positions, at], axis=1)
            sees = jnp.concatenate([sees, jnp.broadcast_to(itself, (batch, *itself.shape))], axis=-1)
            logits, width = drafter.logits(params, forward.hidden), 1 + self.fan_out.counts[level]
            if draw is None:
                guesses = drafter.lm_head.top(logits, width)
            else:
                logits = logits / over_rows(draw.temperature, logits)
                rows = logits.reshape(batch * n_outcomes, 1, -1)  # each is sampled with the keys of its position
                guesses = drafter.lm_head.sampled(draw.keys[:, :, level].reshape(-1), rows, width)
                guesses = guesses.reshape(batch, n_outcomes, width)
                log_q.append(drafter.lm_head.over_all_tokens(logits, drafter.vocab_size))
            tokens.append(guesses[:, :, 0])
            runners_up.append(guesses[:, :, 1:])
        return SpeculationCache(
            bonus_tokens,
            jnp.stack(tokens, axis=-1),
            jnp.stack(log_q, axis=2) if log_q else None,
            jnp.concatenate(runners_up, axis=-1),
            jax.tree.map(lambda x: x[:, :, n_shared:], block),
            last.block,
        )

    def _lookup(self, cache: SpeculationCache, at: Int[Array, " B"]) -> Speculation:
        """Return the draft for outcome ``at[b]`` of each sequence."""

        def of_outcome(x):
            return jnp.take_along_axis(x, at.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)[:, 0]

        # The layout of `DraftModel`'s first pass: the root, a token that none attends to, the chain without its last.
        passes = np.array([0, *range(self.depth)])
        index = (passes * self.fan_out.total + at[:, None])[:, None, :, None]
        block = jax.tree.map(lambda x: jnp.take_along_axis(x, index, axis=2), cache.block)
        log_q = None if cache.log_q is None else of_outcome(cache.log_q)
        return Speculation(of_outcome(cache.tokens), log_q, of_outcome(cache.runners_up), block)

    def _observed(self, params, state: SpeculatorState, cache: SpeculationCache | None, outcome) -> DraftState:
        """Commit the accepted tokens. None is left to run if `prepare` has run the chain's last token."""
        speculation, chain = state.speculation, np.arange(self.depth + 1, dtype=np.int32)
        if cache is None:
            block, place = speculation.block, np.where(chain < self.depth, chain, -1)
        else:
            block, place = _concatenated(speculation.block, cache.last), chain
        path = jnp.minimum(chain, jnp.maximum(outcome.counts - 1, 0)[:, None])
        tokens = jnp.take_along_axis(speculation.tokens, path, axis=1)
        # This program does not read the cache before it writes it, so it has no read to wait for.
        scratch = Scratch(block, place, jnp.zeros(len(tokens)))
        accepted = Outcome(path, tokens, outcome.counts, outcome.bonus_token, None, None)
        proposal = Proposal(speculation.tokens, self.tree.topology, speculation.log_q, scratch)
        return self.drafter.observe(params, state.draft, proposal, accepted, None)


def _zeros(like: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def _concatenated(block: Block, more: Block) -> Block:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=2), block, more)
