"""One decode step, the same for every drafter and rule: propose, verify, accept, commit, observe (docs/design.md 5)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.decoding.acceptance import Acceptance, AcceptanceRule
from hydrajax.decoding.logprobs import Logprobs
from hydrajax.decoding.penalties import Seen
from hydrajax.decoding.sampling import per_row, position_keys, row_keys
from hydrajax.decoding.state import DecodeState, OutputState, Params, TargetState
from hydrajax.drafters.drafter import Drafter, Outcome, Proposal
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import causal_mask
from hydrajax.models.base import BaseModel, BoundBase, Forward
from hydrajax.models.cache import KVCache, append, cut_caches, write_tokens
from hydrajax.models.ranking import best_token
from hydrajax.trees.dynamic import CandidateTree


def true_float32(dtype: DType) -> AbstractContextManager:
    """Trace with true float32 matmuls if that is the model's dtype: GPUs would round its inputs to TF32.

    A model of fewer bits is left alone: the setting would make XLA's GPU compiler turn products of one row, and only
    those, into sums of products rounded to bfloat16, slower and other than in a tree.
    """
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else nullcontext()


def exact(method: Callable) -> Callable:
    """A method of `Engine`, traced with `true_float32`."""

    @functools.wraps(method)
    def traced(self, *args, **settings):
        with true_float32(self.model.dtype):
            return method(self, *args, **settings)

    return traced


@dataclass(frozen=True)
class Engine:
    """The static half of decoding: model, drafter, tree and limits. Its methods are pure functions of arrays.

    The rule is part of the state, where its numbers are arrays (`OutputState.rule`).

    max_new_tokens: most tokens a row may emit; also limited by the context, prompt + emitted <= max_positions.
    eos_ids:        a row ends with the first of these it emits.
    logprobs:       whether to keep every emitted token's log-probability (`hydrajax.decoding.decode.DecodeResult`).
    top_logprobs:   of how many of the base's likeliest tokens to keep it besides, at every place; then those of the
                    emitted tokens are kept in any case.
    """

    model: BaseModel
    drafter: Drafter
    tree: CandidateTree
    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def depth(self) -> int:
        """K, the most tokens after the root that a step may accept."""
        return self.drafter.spec.longest_path(self.tree)

    @property
    def reads(self) -> tuple[int, ...]:
        """The hidden states of the base that the drafter reads."""
        return self.drafter.spec.aux_hidden_layers

    def bind(self, params: Params) -> BoundBase:
        return BoundBase(self.model, params.base)

    # --- the five verbs ---------------------------------------------------------------------------------------

    @exact
    def propose(self, params: Params, state: DecodeState) -> Proposal:
        """Candidate tokens in node order, as the rule wants them: the best guesses or draws."""
        draw = state.output.rule.draw(self._keys_below(state))
        return self.drafter.propose(params.draft, state.draft, state.target.root, self.tree, self.bind(params), draw)

    @exact
    def verify(self, params: Params, cache: KVCache, proposal: Proposal) -> tuple[Forward, Float[Array, "B N V"]]:
        """One forward pass of the base over the N nodes under the tree's mask, and logits at every node."""
        tree, base = proposal.tree, self.bind(params)
        positions = cache.lengths[:, None] + tree.depths
        forward = base.forward(proposal.tokens, positions, tree.attention_mask, cache, self.reads)
        return forward, base.logits(forward.hidden)

    def accept(self, state: DecodeState, logits: Float[Array, "B N V"], proposal: Proposal) -> Acceptance:
        """The rule's verdict: the path that is kept and the token that follows it."""
        return state.output.rule.accept(logits, proposal, self._keys_below(state), state.output.seen)

    def commit(
        self,
        state: DecodeState,
        forward: Forward,
        logits: Float[Array, "B N V"],
        proposal: Proposal,
        accepted: Acceptance,
    ) -> tuple[DecodeState, Outcome]:
        """Emit root and accepted tokens, cut at EOS and at the limit, and keep their keys and values.

        Returns the new state, in which the drafter's part is still the old one, and what the drafter may learn.
        """
        target, out = state.target, state.output
        tokens = jnp.take_along_axis(proposal.tokens, accepted.path, axis=1)
        counts = jnp.minimum(accepted.accept_length + 1, out.limits - out.lengths)
        if self.eos_ids:
            is_eos = jnp.isin(tokens, jnp.asarray(self.eos_ids))
            until_eos = jnp.where(is_eos.any(axis=1), jnp.argmax(is_eos, axis=1) + 1, tokens.shape[1] + 1)
            ended = until_eos <= counts
            counts = jnp.minimum(counts, until_eos)
        else:
            ended = jnp.zeros_like(out.done)
        counts = jnp.where(out.done, 0, counts)
        lengths = out.lengths + counts
        step_record = jnp.where(out.done, -1, counts - 1)
        cache = append(target.cache, forward.block, counts, index=accepted.path, after=accepted.next_root)
        logprobs, root_logprobs = out.logprobs, target.root_logprobs
        if logprobs is not None:
            logprobs, root_logprobs = logprobs.after_step(root_logprobs, logits, tokens, accepted, out.lengths)
        output = out._replace(
            tokens=write_tokens(out.tokens, tokens, out.lengths),
            lengths=lengths,
            done=out.done | ended | (lengths >= out.limits),
            accept_lengths=write_tokens(out.accept_lengths, step_record[:, None], out.steps),
            steps=out.steps + ~out.done,
            seen=None if out.seen is None else out.seen.with_output(tokens, counts),
            logprobs=logprobs,
        )
        # A drafter that does not ask for the base's choices costs nothing by them: XLA drops what is not used.
        outcome = Outcome(accepted.path, tokens, counts, accepted.next_root, forward.features, best_token(logits))
        return DecodeState(TargetState(cache, accepted.next_root, root_logprobs), state.draft, output), outcome

    @exact
    def observe(self, params: Params, state: DecodeState, proposal: Proposal, outcome: Outcome) -> DecodeState:
        """Show the drafter what became of its proposal."""
        draft = self.drafter.observe(params.draft, state.draft, proposal, outcome, self.bind(params))
        return state._replace(draft=draft)

    # --- one step, and where it starts ------------------------------------------------------------------------

    def decode_step(self, params: Params, state: DecodeState) -> DecodeState:
        """Emit between 1 and K+1 tokens for every unfinished row."""
        proposal = self.propose(params, state)
        forward, logits = self.verify(params, state.target.cache, proposal)
        accepted = self.accept(state, logits, proposal)
        state, outcome = self.commit(state, forward, logits, proposal, accepted)
        return self.observe(params, state, proposal, outcome)

    @exact
    def prefill(
        self,
        params: Params,
        prompt: Int[Array, "B P"],
        lengths: Int[Array, " B"],
        rng: Array,
        rule: AcceptanceRule,
        limits: Int[Array, " B"] | None = None,
        *,
        slots: int | None = None,
    ) -> DecodeState:
        """Run right-padded prompts through the base and the drafter; choose the first root. Emits nothing yet.

        rng: a key, or one per row. rule: for all rows, or with arrays ``[B]`` for its numbers (`per_row`). limits: most
        tokens each row may emit, at most and by default ``max_new_tokens``. slots: of the cache (default
        `cache_slots`).
        """
        batch, width = prompt.shape
        rule = per_row(rule, batch)
        slots = self.cache_slots(width) if slots is None else slots
        positions = jnp.broadcast_to(jnp.arange(width), prompt.shape)
        forward = self.bind(params).forward(prompt, positions, causal_mask(width), reads=self.reads)
        cache = append(self.model.init_cache(batch, slots), forward.block, lengths)
        # The barrier keeps XLA from folding the first pass over an empty draft cache at compile time, which is slow.
        draft = jax.lax.optimization_barrier(self.drafter.init_state(batch, slots))
        seen = Seen.of_prompt(prompt, lengths, self.model.config.vocab_size) if rule.penalises else None
        keys, root, logprobs = self._first_root(params, forward, lengths, rng, rule, seen)
        target = TargetState(cache, root, logprobs)
        return self._ready(params, target, draft, forward, prompt, lengths, keys, rule, seen, limits)

    @exact
    def extend(
        self,
        params: Params,
        state: DecodeState,
        more: Int[Array, "B T"],
        counts: Int[Array, " B"],
        rng: Array,
        rule: AcceptanceRule,
        limits: Int[Array, " B"] | None = None,
    ) -> DecodeState:
        """Go on after more text, such as the next message of a conversation, with the cache that is there.

        more: right-padded, ``counts[b]`` tokens of row b that follow all it has emitted. Beyond that as `prefill`: the
        counts of what is emitted begin anew, and to a penalty all that came before is prompt. T slots must be left in
        the cache: a write beyond them would be moved.

        Raises `HydrajaxError` for a rule with penalties where the text so far was decoded without.
        """
        cache, (batch, width) = state.target.cache, more.shape
        rule = per_row(rule, batch)
        seen = state.output.seen if rule.penalises else None
        if seen is not None:
            seen = seen.with_prompt(more, counts)
        elif rule.penalises:
            raise HydrajaxError("rule: has penalties, but the tokens before were not counted: their rule had none")
        positions = cache.lengths[:, None] + jnp.arange(width)
        forward = self.bind(params).forward(more, positions, causal_mask(width), cache, self.reads)
        keys, root, logprobs = self._first_root(params, forward, counts, rng, rule, seen)
        # The root comes from the last hidden state, which has read every layer's cache.
        cache = append(cache, forward.block, counts, after=root)
        target = TargetState(cache, root, logprobs)
        return self._ready(params, target, state.draft, forward, more, counts, keys, rule, seen, limits)

    def empty(self, batch: int, slots: int, rule: AcceptanceRule) -> DecodeState:
        """Rows without any text, to begin a prompt that comes in pieces: `feed` all but the last, `extend` by that.

        Their rows are done: a step changes nothing in them. slots: of the cache; they hold at least
        `DrafterSpec.verified_nodes` more than the longest text, and never less than a piece that is written into them,
        padding included.
        """
        nothing = jnp.zeros(batch, jnp.int32)
        rule = per_row(rule, batch)
        seen = Seen.of_prompt(nothing[:, None], nothing, self.model.config.vocab_size) if rule.penalises else None
        target = TargetState(self.model.init_cache(batch, slots), nothing, self._no_logprobs(batch))
        keys = row_keys(jax.random.key(0), batch)
        return DecodeState(target, self.drafter.init_state(batch, slots), self._output(keys, rule, seen, nothing))

    @exact
    def feed(
        self,
        params: Params,
        state: DecodeState,
        more: Int[Array, "B T"],
        counts: Int[Array, " B"],
        following: Int[Array, " B"],
    ) -> DecodeState:
        """Take in text that goes on, with ``following``, the token after it. No root is chosen: `extend` must follow.

        more: right-padded, ``counts[b]`` tokens of row b; T slots must be left in the cache.
        """
        cache, base = state.target.cache, self.bind(params)
        width = more.shape[1]
        positions = cache.lengths[:, None] + jnp.arange(width)
        forward = base.forward(more, positions, causal_mask(width), cache, self.reads)
        cache = append(cache, forward.block, counts, after=forward.hidden[:, -1, 0])
        draft = self.drafter.begin(params.draft, state.draft, forward.features, more, counts, following, base)
        seen = state.output.seen
        output = state.output._replace(seen=None if seen is None else seen.with_prompt(more, counts))
        return DecodeState(state.target._replace(cache=cache), draft, output)

    def rewind(self, state: DecodeState, lengths: Int[Array, " B"]) -> DecodeState:
        """Back to the first ``lengths[b]`` tokens of each row's text, at most all of it; `extend` must follow.

        Of what a penalty has counted nothing is left: where the rule has penalties, that is the caller's to mend.
        """
        target = state.target._replace(cache=cut_caches(state.target.cache, lengths))
        return DecodeState(target, self.drafter.rewind(state.draft, lengths), state.output)

    def _first_root(
        self, params: Params, forward: Forward, counts, rng, rule, seen
    ) -> tuple[Array, Int[Array, " B"], Logprobs | None]:
        """Every row's random key, the token that follows the last of its ``counts[b]`` tokens, and its logprobs."""
        keys = row_keys(rng, len(counts))
        last_hidden = jnp.take_along_axis(forward.hidden, (counts - 1)[:, None, None], axis=1)[:, 0]
        first_place = position_keys(keys, jnp.zeros(len(counts), jnp.int32))
        logits = self.bind(params).logits(last_hidden)
        root = rule.first_root(logits, first_place, seen)
        return keys, root, Logprobs.of(logits, root, self.top_logprobs) if self._keeps_logprobs else None

    def _ready(
        self, params, target: TargetState, draft, forward, tokens, counts, keys, rule, seen, limits
    ) -> DecodeState:
        """The state after the first ``counts`` of these tokens were fed to the base."""
        base = self.bind(params)
        draft = self.drafter.begin(params.draft, draft, forward.features, tokens, counts, target.root, base)
        most = self.max_new_tokens if limits is None else jnp.clip(limits, 0, self.max_new_tokens)
        limits = jnp.clip(self.model.config.max_positions - target.cache.lengths, 0, most)
        return DecodeState(target, draft, self._output(keys, rule, seen, limits))

    def _output(self, keys, rule, seen, limits: Int[Array, " B"]) -> OutputState:
        """What has been emitted when nothing has."""
        batch = len(limits)
        room = (batch, self.max_new_tokens + self.depth + 1)
        return OutputState(
            tokens=jnp.zeros(room, jnp.int32),
            lengths=jnp.zeros(batch, jnp.int32),
            limits=limits,
            done=limits <= 0,
            accept_lengths=jnp.full((batch, self.max_new_tokens + 1), -1, jnp.int32),
            steps=jnp.zeros(batch, jnp.int32),
            keys=keys,
            rule=rule,
            seen=seen,
            logprobs=self._no_logprobs(*room),
        )

    @property
    def _keeps_logprobs(self) -> bool:
        return self.logprobs or self.top_logprobs > 0

    def _no_logprobs(self, *places: int) -> Logprobs | None:
        return Logprobs.nothing(places, self.top_logprobs) if self._keeps_logprobs else None

    def cache_slots(self, prompt_width: int) -> int:
        """Slots for the longest text plus the nodes of one step, so that no slice update is ever clamped."""
        longest = min(prompt_width + self.max_new_tokens, max(self.model.config.max_positions, prompt_width))
        return longest + self.drafter.spec.verified_nodes(self.tree)

    def _keys_below(self, state: DecodeState) -> Array:
        """Random keys ``[B, K+1]`` of the places after a node of depth 0 .. K."""
        places = state.output.lengths[:, None] + 1 + jnp.arange(self.depth + 1)
        return position_keys(state.output.keys, places)
