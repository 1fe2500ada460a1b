"""One decode step, the same for every drafter and rule: propose, verify, accept, commit, observe (DESIGN section 5)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hydrajax.decoding.acceptance import Acceptance, AcceptanceRule
from hydrajax.decoding.sampling import position_keys, row_keys
from hydrajax.drafters.drafter import BoundBase, Drafter
from hydrajax.models.cache import KVCache, append, init_cache, take_tokens
from hydrajax.models.layers import causal_mask
from hydrajax.models.llama import Forward, Llama
from hydrajax.trees.tree import TreeTopology


class Params(NamedTuple):
    """``base`` is frozen and shared; ``draft`` belongs to the drafter (an empty dict for autoregressive decoding)."""

    base: Any
    draft: Any


class DecodeState(NamedTuple):
    """Everything the loop carries; a pytree of static shapes, safe to donate.

    cache:          the base's keys and values of prompt and emitted tokens.
    draft:          the drafter's state.
    root:           int32 ``[B]`` the token the base has chosen and the next step emits.
    tokens:         int32 ``[B, max_new + K + 1]`` emitted tokens, garbage beyond ``lengths``. A finished row goes on
                    writing one whole path there, hence the room.
    lengths:        int32 ``[B]`` tokens emitted so far.
    limits:         int32 ``[B]`` tokens a row may emit.
    done:           bool ``[B]``.
    accept_lengths: int32 ``[B, max_new + 1]`` emitted draft tokens of each step, -1 where the row took no step.
    steps:          int32 ``[B]`` steps each row took.
    keys:           ``[B]`` each row's random key; what it draws depends on it and on the place in the row's output.
    """

    cache: KVCache
    draft: Any
    root: Int[Array, " B"]
    tokens: Int[Array, "B room"]
    lengths: Int[Array, " B"]
    limits: Int[Array, " B"]
    done: Array
    accept_lengths: Int[Array, "B max_steps"]
    steps: Int[Array, " B"]
    keys: Array


def exact_float32(method: Callable) -> Callable:
    """Trace ``method`` with true float32 matmuls: GPUs would round float32 inputs to TF32. bfloat16 is unaffected."""

    @functools.wraps(method)
    def traced(*args):
        with jax.default_matmul_precision("highest"):
            return method(*args)

    return traced


@dataclass(frozen=True)
class Engine:
    """The static half of decoding: model, drafter, tree, rule and limits. Its methods are pure functions of arrays.

    max_new_tokens: most tokens a row may emit; also limited by the context, prompt + emitted <= max_positions.
    eos_ids:        a row ends with the first of these it emits.
    """

    model: Llama
    drafter: Drafter
    tree: TreeTopology
    rule: AcceptanceRule
    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()

    def bind(self, params: Params) -> BoundBase:
        return BoundBase(self.model, params.base)

    def forward(self, params: Params, *args) -> Forward:
        return self.model.apply({"params": params.base}, *args, feature_offset=self.drafter.hidden_state_offset)

    # --- the five verbs ---------------------------------------------------------------------------------------

    def draft(self, params: Params, state: DecodeState) -> tuple:
        """``(candidates,)``, or for a rule that judges draws `sample`'s ``(candidates, draft_logits)``."""
        return self.sample(params, state) if self.samples else (self.propose(params, state),)

    @exact_float32
    def propose(self, params: Params, state: DecodeState) -> Int[Array, "B N"]:
        """Candidate tokens in node order."""
        return self.drafter.propose(params.draft, state.draft, state.root, self.tree, self.bind(params))

    @property
    def samples(self) -> bool:
        """Whether the rule judges drafts by the distributions they were drawn from."""
        return hasattr(self.rule, "draft") and self.tree.size > 1

    @exact_float32
    def sample(self, params: Params, state: DecodeState) -> tuple[Int[Array, "B N"], Float[Array, "B P V"]]:
        """Candidate tokens drawn from the draft, and its logits at the P nodes with children."""
        return self.rule.draft(
            self.drafter, params.draft, state.draft, state.root, self.tree, self.bind(params), self.keys_below(state)
        )

    @exact_float32
    def verify(
        self, params: Params, cache: KVCache, candidates: Int[Array, "B N"]
    ) -> tuple[Forward, Float[Array, "B N V"]]:
        """One forward pass of the base over the N nodes under the ancestor mask, and logits at every node."""
        positions = cache.lengths[:, None] + self.tree.depths
        forward = self.forward(params, candidates, positions, self.tree.ancestor_mask, cache)
        return forward, self.bind(params).logits(forward.hidden)

    def keys_below(self, state: DecodeState) -> Array:
        """Random keys ``[B, K+1]`` of the places after a node of depth 0 .. K."""
        return position_keys(state.keys, state.lengths[:, None] + 1 + jnp.arange(self.tree.depth + 1))

    def accept(
        self, state: DecodeState, logits: Float[Array, "B N V"], candidates: Int[Array, "B N"], *draft
    ) -> Acceptance:
        """``draft``: what `sample` gave beside the candidates."""
        return self.rule.accept(logits, candidates, self.tree, self.keys_below(state), *draft)

    def commit(
        self, state: DecodeState, forward: Forward, candidates: Int[Array, "B N"], accepted: Acceptance
    ) -> tuple[DecodeState, Int[Array, "B path"], Int[Array, " B"]]:
        """Emit root and accepted tokens, cut at EOS and at the limit, and keep their keys and values.

        Returns the new state (drafter not yet updated), the path's tokens ``[B, K+1]`` and how many of them count.
        """
        tokens = jnp.take_along_axis(candidates, accepted.path, axis=1)
        counts = jnp.minimum(accepted.accept_length + 1, state.limits - state.lengths)
        if self.eos_ids:
            is_eos = jnp.isin(tokens, jnp.asarray(self.eos_ids))
            until_eos = jnp.where(is_eos.any(axis=1), jnp.argmax(is_eos, axis=1) + 1, tokens.shape[1] + 1)
            ended = until_eos <= counts
            counts = jnp.minimum(counts, until_eos)
        else:
            ended = jnp.zeros_like(state.done)
        counts = jnp.where(state.done, 0, counts)
        write_rows = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
        lengths = state.lengths + counts
        step_record = jnp.where(state.done, -1, counts - 1)
        new_state = state._replace(
            cache=append(state.cache, take_tokens(forward.block, accepted.path), counts, accepted.next_root),
            root=accepted.next_root,
            tokens=write_rows(state.tokens, tokens, state.lengths),
            lengths=lengths,
            done=state.done | ended | (lengths >= state.limits),
            accept_lengths=write_rows(state.accept_lengths, step_record[:, None], state.steps),
            steps=state.steps + ~state.done,
        )
        return new_state, tokens, counts

    @exact_float32
    def observe(
        self, params: Params, state: DecodeState, forward: Forward, accepted: Acceptance, tokens, counts
    ) -> DecodeState:
        """Show the drafter the emitted tokens and the base's features at their nodes."""
        features = jnp.take_along_axis(forward.features, accepted.path[:, :, None], axis=1)
        draft = self.drafter.observe(params.draft, state.draft, features, tokens, counts, self.bind(params))
        return state._replace(draft=draft)

    # --- one step, and where it starts ------------------------------------------------------------------------

    def decode_step(self, params: Params, state: DecodeState) -> DecodeState:
        """Emit between 1 and K+1 tokens for every unfinished row."""
        candidates, *draft = self.draft(params, state)
        forward, logits = self.verify(params, state.cache, candidates)
        accepted = self.accept(state, logits, candidates, *draft)
        state, tokens, counts = self.commit(state, forward, candidates, accepted)
        return self.observe(params, state, forward, accepted, tokens, counts)

    @exact_float32
    def prefill(
        self,
        params: Params,
        prompt: Int[Array, "B P"],
        lengths: Int[Array, " B"],
        rng: Array,
        limits: Int[Array, " B"] | None = None,
    ) -> DecodeState:
        """Run right-padded prompts through the base and the drafter; choose the first root. Emits nothing yet.

        rng: a key, or one per row. limits: most tokens each row may emit, at most and by default ``max_new_tokens``.
        """
        batch, width = prompt.shape
        slots = self.cache_slots(width)
        positions = jnp.broadcast_to(jnp.arange(width), prompt.shape)
        forward = self.forward(params, prompt, positions, causal_mask(width))
        cache = append(init_cache(self.model.config, batch, slots, self.model.dtype), forward.block, lengths)
        # The barrier keeps XLA from folding the first pass over an empty draft cache at compile time, which is slow.
        draft = jax.lax.optimization_barrier(self.drafter.init_state(batch, slots))
        return self._ready(params, cache, draft, forward, prompt, lengths, rng, limits)

    @exact_float32
    def extend(
        self,
        params: Params,
        state: DecodeState,
        more: Int[Array, "B T"],
        counts: Int[Array, " B"],
        rng: Array,
        limits: Int[Array, " B"] | None = None,
    ) -> DecodeState:
        """Go on after more text, such as the next message of a conversation, with the cache that is there.

        more: right-padded, ``counts[b]`` tokens of row b that follow all it has emitted. Beyond that as `prefill`: the
        counts of what is emitted begin anew. T slots must be left in the cache: a write beyond them would be moved.
        """
        positions = state.cache.lengths[:, None] + jnp.arange(more.shape[1])
        forward = self.forward(params, more, positions, causal_mask(more.shape[1]), state.cache)
        cache = append(state.cache, forward.block, counts, more[:, 0])
        return self._ready(params, cache, state.draft, forward, more, counts, rng, limits)

    def _ready(self, params, cache: KVCache, draft, forward: Forward, tokens, counts, rng, limits) -> DecodeState:
        """The state after the first ``counts`` of these tokens were fed to the base."""
        batch = len(tokens)
        base = self.bind(params)
        draft = self.drafter.observe(params.draft, draft, forward.features, tokens, counts, base)
        last_hidden = jnp.take_along_axis(forward.hidden, (counts - 1)[:, None, None], axis=1)[:, 0]
        most = self.max_new_tokens if limits is None else jnp.clip(limits, 0, self.max_new_tokens)
        limits = jnp.clip(self.model.config.max_positions - cache.lengths, 0, most)
        keys = row_keys(rng, batch)
        return DecodeState(
            cache=cache,
            draft=draft,
            root=self.rule.first_root(base.logits(last_hidden), position_keys(keys, jnp.zeros(batch, jnp.int32))),
            tokens=jnp.zeros((batch, self.max_new_tokens + self.tree.depth + 1), jnp.int32),
            lengths=jnp.zeros(batch, jnp.int32),
            limits=limits,
            done=limits <= 0,
            accept_lengths=jnp.full((batch, self.max_new_tokens + 1), -1, jnp.int32),
            steps=jnp.zeros(batch, jnp.int32),
            keys=keys,
        )

    def cache_slots(self, prompt_width: int) -> int:
        """Slots for the longest text plus one tree, so that no slice update is ever clamped."""
        longest = min(prompt_width + self.max_new_tokens, max(self.model.config.max_positions, prompt_width))
        return longest + self.tree.size
