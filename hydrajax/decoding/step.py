"""The decode step, the same for every drafter and rule: propose, verify, accept, commit, observe (docs/design.md 5)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from hydrajax.decoding.acceptance import Acceptance, VerifyResult
from hydrajax.decoding.program import Program
from hydrajax.decoding.random_keys import position_keys
from hydrajax.decoding.state import DecodeState, Params, TargetState
from hydrajax.drafters.drafter import Outcome, Proposal
from hydrajax.models.arrays import Array, DType
from hydrajax.models.base_model import BaseModel, BoundBase, Forward
from hydrajax.models.cache import KVCache, append, write_tokens
from hydrajax.ops import best_token, over_rows
from hydrajax.ops.trace import Allowed, tracing


def true_float32(dtype: DType) -> AbstractContextManager:
    """Trace with true float32 products for a float32 model: GPUs would round their inputs to TF32.

    Models of fewer bits keep the default: the setting makes XLA's GPU compiler turn products of one row, and only
    those, into sums of products rounded to bfloat16, which is slower and differs from the products of a tree.
    """
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else nullcontext()


def exact(method: Callable) -> Callable:
    """Trace a method with `true_float32`; unrelated to the rule of this name."""

    @functools.wraps(method)
    def traced(self, *args, **settings):
        with true_float32(self.model.dtype):
            return method(self, *args, **settings)

    return traced


@dataclass(frozen=True)
class Step:
    """The decode step of a base and a `Program`, as pure functions of arrays."""

    model: BaseModel
    program: Program

    @property
    def depth(self) -> int:
        """K, the maximum number of accepted draft tokens per step."""
        return self.program.longest_path

    @property
    def aux_hidden_layers(self) -> tuple[int, ...]:
        """The hidden states of the base that the drafter reads."""
        return self.program.drafter.spec.aux_hidden_layers

    def tempered(self, logits: Float[Array, "B *n V"], rule: Any) -> Float[Array, "B *n V"]:
        """Return the logits from which log-probabilities are taken (`Program.tempered_logprobs`)."""
        if not self.program.tempered_logprobs or not hasattr(rule, "temperature"):
            return logits
        temperature = jnp.asarray(rule.temperature)
        return logits / over_rows(jnp.where(temperature > 0, temperature, 1.0), logits)

    def bind(self, params: Params, cache: KVCache | None = None) -> BoundBase:
        return BoundBase(self.model, params.base, cache=cache)

    # --- the five verbs ---------------------------------------------------------------------------------------

    @exact
    def propose(self, params: Params, state: DecodeState, allowed: Allowed | None = None) -> Proposal:
        """Return candidate tokens in node order: best guesses or draws, as the rule requires.

        Args:
            params: Parameters of base and drafter.
            state: The state before the step.
            allowed: The tokens that may follow a path; None for all.
        """
        draw = state.output.rule.draw(self._keys_below(state))
        base = self.bind(params, state.target.cache)
        given = params.draft, state.draft, state.target.root, self.program.tree, base, draw
        with tracing(allowed=allowed):
            return self.program.drafter.propose(*given)

    @exact
    def verify(self, params: Params, cache: KVCache, proposal: Proposal) -> tuple[Forward, Float[Array, "B N V"]]:
        """Run the base once over the N nodes under the tree mask; return the logits at every node."""
        tree, base = proposal.tree, self.bind(params)
        positions = cache.lengths[:, None] + tree.depths
        forward = base.forward(proposal.tokens, positions, tree.attention_mask, cache, self.aux_hidden_layers)
        return forward, base.logits(forward.hidden)

    def accept(
        self, state: DecodeState, logits: Float[Array, "B N V"], proposal: Proposal, extra: Sequence[Any] = ()
    ) -> Acceptance:
        """Return the accepted path and the bonus token.

        Args:
            state: The state before the step.
            logits: The base's logits at the nodes.
            proposal: The candidate tree.
            extra: Processors for this step alone, which are not part of the state.
        """
        out = state.output
        verify_result = VerifyResult(logits, proposal, (*out.processors, *extra), out.counts)
        return out.rule.accept(verify_result, self._keys_below(state))

    def commit(
        self,
        state: DecodeState,
        forward: Forward,
        logits: Float[Array, "B N V"],
        proposal: Proposal,
        accepted: Acceptance,
    ) -> tuple[DecodeState, Outcome]:
        """Emit root and accepted tokens, cut at EOS and at the limit, and append their keys and values to the cache.

        Returns:
            The new state, still with the old draft state, and the outcome for the drafter.
        """
        target, out = state.target, state.output
        tokens = jnp.take_along_axis(proposal.tokens, accepted.path, axis=1)
        counts = jnp.minimum(accepted.accept_length + 1, out.limits - out.lengths)
        if self.program.eos_ids:
            is_eos = jnp.isin(tokens, jnp.asarray(self.program.eos_ids))
            if out.ignore_eos is not None:
                is_eos &= ~out.ignore_eos[:, None]
            until_eos = jnp.where(is_eos.any(axis=1), jnp.argmax(is_eos, axis=1) + 1, tokens.shape[1] + 1)
            ended = until_eos <= counts
            counts = jnp.minimum(counts, until_eos)
        else:
            ended = jnp.zeros_like(out.done)
        counts = jnp.where(out.done, 0, counts)
        lengths = out.lengths + counts
        step_record = jnp.where(out.done, -1, counts - 1)
        cache = append(target.cache, forward.block, counts, index=accepted.path, after=accepted.bonus_token)
        logprobs, root_logprobs = out.logprobs, target.root_logprobs
        if logprobs is not None:
            tempered = self.tempered(logits, out.rule)
            logprobs, root_logprobs = logprobs.after_step(root_logprobs, tempered, tokens, accepted, out.lengths)
        output = out._replace(
            tokens=write_tokens(out.tokens, tokens, out.lengths),
            lengths=lengths,
            done=out.done | ended | (lengths >= out.limits),
            accept_lengths=write_tokens(out.accept_lengths, step_record[:, None], out.steps),
            steps=out.steps + ~out.done,
            counts=None if out.counts is None else out.counts.with_output(tokens, counts),
            logprobs=logprobs,
        )
        # XLA drops the base's choices if the drafter does not use them.
        outcome = Outcome(
            accepted.path, tokens, counts, accepted.bonus_token, forward.aux_hidden_states, best_token(logits)
        )
        return DecodeState(TargetState(cache, accepted.bonus_token, root_logprobs), state.draft, output), outcome

    @exact
    def observe(
        self, params: Params, state: DecodeState, proposal: Proposal, outcome: Outcome, as_text: bool = False
    ) -> DecodeState:
        """Pass the outcome to the drafter.

        Args:
            params: Parameters of base and drafter.
            state: The state after `commit`.
            proposal: The candidate tree.
            outcome: The accepted path, as `commit` returns it.
            as_text: The tree has nodes that the drafter has not run, such as forced tokens: it reads the emitted tokens
                as it reads a prompt.
        """
        given = params.draft, state.draft
        if as_text:
            draft = self.program.drafter.begin(*given, *outcome.as_text(), self.bind(params))
        else:
            draft = self.program.drafter.observe(*given, proposal, outcome, self.bind(params))
        return state._replace(draft=draft)

    # --- one step ---------------------------------------------------------------------------------------------

    def decode_step(self, params: Params, state: DecodeState) -> DecodeState:
        """Emit between 1 and K+1 tokens for every unfinished sequence."""
        proposal = self.propose(params, state)
        forward, logits = self.verify(params, state.target.cache, proposal)
        return self.settle(params, state, forward, logits, proposal)

    def settle(
        self,
        params: Params,
        state: DecodeState,
        forward: Forward,
        logits: Float[Array, "B N V"],
        proposal: Proposal,
        extra: Sequence[Any] = (),
        as_text: bool = False,
    ) -> DecodeState:
        """Accept, commit and observe: the part of a step after the base's pass."""
        accepted = self.accept(state, logits, proposal, extra)
        state, outcome = self.commit(state, forward, logits, proposal, accepted)
        return self.observe(params, state, proposal, outcome, as_text)

    def _keys_below(self, state: DecodeState) -> Array:
        """Return random keys ``[B, K+1]`` for the positions after a node of depth 0 .. K."""
        places = state.output.lengths[:, None] + 1 + jnp.arange(self.depth + 1)
        return position_keys(state.output.keys, places)
