"""`Engine`: the decode step, and the states from which it starts: of prompts, of more text and of cut text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from hydrajax.decoding.batching import broadcast
from hydrajax.decoding.logprobs import Logprobs
from hydrajax.decoding.processing import NodeContext, TokenCounts, count_tokens, process
from hydrajax.decoding.random_keys import position_keys, row_keys
from hydrajax.decoding.request import SamplingParams
from hydrajax.decoding.state import DecodeState, OutputState, Params, TargetState
from hydrajax.decoding.step import Step, exact
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import Forward
from hydrajax.models.cache import KVCache, States, append, cut_caches, with_states


class Beginning(NamedTuple):
    """Prefilled prompts, from each of which any number of sequences can start (`Engine.start`).

    Attributes:
        cache: The base's keys and values of the prompts.
        draft: The draft's state after all tokens but the last.
        counts: Token counts of the prompts; None if no processor reads them.
        last: int32 ``[B, 1]`` the last tokens.
        forward: The base's pass over them, without keys and values.
    """

    cache: KVCache
    draft: Any
    counts: TokenCounts | None
    last: Int[Array, "B 1"]
    forward: Forward


@dataclass(frozen=True)
class Engine(Step):
    """The static half of decoding: a base and a `Program`, which `Program.check` has found to fit.

    Its methods are pure functions of arrays. Rule and processors are part of the state (`OutputState`), so one
    engine serves any of them.
    """

    @exact
    def prefill(
        self,
        params: Params,
        prompt: Int[Array, "B P"],
        lengths: Int[Array, " B"],
        sampling: SamplingParams,
        *,
        slots: int | None = None,
        extra: Sequence[Any] = (),
    ) -> DecodeState:
        """Run right-padded prompts through base and drafter and choose the first root. Nothing is emitted yet.

        Args:
            params: Parameters of base and drafter.
            prompt: int32 ``[B, P]``.
            lengths: int32 ``[B]`` prompt lengths.
            sampling: Keys, rule, processors and limits.
            slots: Slots of the cache, by default `cache_slots`.
            extra: Processors for the first root alone.
        """
        forward, cache, draft, counts = self._read(params, prompt, lengths, sampling, slots)
        return self._started(params, lambda root: cache, draft, forward, prompt, lengths, sampling, counts, extra)

    @exact
    def read(
        self,
        params: Params,
        prompt: Int[Array, "B P"],
        lengths: Int[Array, " B"],
        sampling: SamplingParams,
        *,
        slots: int | None = None,
    ) -> Beginning:
        """Prefill prompts without choosing a root: several sequences `start` from each. See `prefill`."""
        forward, cache, draft, counts = self._read(params, prompt, lengths, sampling, slots)
        last, hidden, aux = (
            jnp.take_along_axis(x, jnp.reshape(lengths - 1, (-1,) + (1,) * (x.ndim - 1)), axis=1)
            for x in (prompt, forward.hidden, forward.aux_hidden_states)
        )
        given = forward.aux_hidden_states, prompt, lengths - 1, last[:, 0], self.bind(params)
        draft = self.program.drafter.begin(params.draft, draft, *given)
        return Beginning(cache, draft, counts, last, Forward(hidden, aux, block=()))

    @exact
    def start(
        self, params: Params, beginning: Beginning, sampling: SamplingParams, *, extra: Sequence[Any] = ()
    ) -> DecodeState:
        """Choose the first root of a sequence after each prompt, without a pass of the base.

        Args:
            params: Parameters of base and drafter.
            beginning: The prompts; not donated, as other sequences may follow.
            sampling: As for `prefill`.
            extra: Processors for the first root alone.
        """
        cache, draft, counts, last, forward = beginning
        one = jnp.ones_like(cache.lengths)
        return self._started(params, lambda root: cache, draft, forward, last, one, sampling, counts, extra)

    @exact
    def extend(
        self,
        params: Params,
        state: DecodeState,
        text: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        sampling: SamplingParams,
        *,
        extra: Sequence[Any] = (),
    ) -> DecodeState:
        """Prefill more text, such as the next message of a conversation, on top of the cache.

        The output starts anew, and penalties treat everything before as prompt.

        Args:
            params: Parameters of base and drafter.
            state: The state before; donated by executors.
            text: int32 ``[B, T]``, right-padded. The cache needs T free slots: a write beyond them would be moved.
            lengths: int32 ``[B]`` tokens per sequence that follow everything it has emitted.
            sampling: As for `prefill`.
            extra: Processors for the first root alone.

        Raises:
            HydrajaxError: For a processor that counts tokens if the earlier text was decoded without counting.
        """
        cache, width, counts = state.target.cache, text.shape[1], None
        if count_tokens(sampling.processors):
            if state.output.counts is None:
                raise HydrajaxError(
                    "processors: got one that counts tokens, expected none: the text before was decoded without counts"
                )
            counts = state.output.counts.with_prompt(text, lengths)
        positions = cache.lengths[:, None] + jnp.arange(width)
        mask = causal_mask(width, lengths)
        forward = self.bind(params).forward(text, positions, mask, cache, self.aux_hidden_layers)
        given = state.draft, forward, text, lengths, sampling, counts, extra
        # The root comes from the last hidden state, which has read every layer's cache.
        return self._started(params, lambda root: append(cache, forward.block, lengths, after=root), *given)

    def empty(self, batch: int, slots: int, sampling: SamplingParams) -> DecodeState:
        """Return sequences without text, to prefill a prompt in chunks: `feed` all chunks but the last, which `extend`
        takes.

        The sequences are done, so a step changes nothing in them.

        Args:
            batch: Number of sequences.
            slots: Slots of the cache: at least `Program.verified_nodes` more than the longest text, and at least as
                many as a chunk with its padding.
            sampling: As for `prefill`.
        """
        nothing = jnp.zeros(batch, jnp.int32)
        sampling = self._of_rows(sampling, batch)
        counts = None
        if count_tokens(sampling.processors):
            counts = TokenCounts.of_prompt(nothing[:, None], nothing, self.model.config.vocab_size)
        target = TargetState(self.model.init_cache(batch, slots), nothing, self._no_logprobs(batch))
        sampling = sampling._replace(rng=row_keys(sampling.rng, batch), limits=nothing)
        return DecodeState(target, self.program.drafter.init_state(batch, slots), self._output(sampling, counts))

    @exact
    def feed(
        self,
        params: Params,
        state: DecodeState,
        text: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        following: Int[Array, " B"],
    ) -> DecodeState:
        """Prefill a chunk that is not the last one. No root is chosen; `extend` must follow.

        Args:
            params: Parameters of base and drafter.
            state: The state before; donated by executors.
            text: int32 ``[B, T]``, right-padded; the cache needs T free slots.
            lengths: int32 ``[B]`` tokens per sequence.
            following: int32 ``[B]`` the token after the chunk.
        """
        cache, base = state.target.cache, self.bind(params)
        width = text.shape[1]
        positions = cache.lengths[:, None] + jnp.arange(width)
        forward = base.forward(text, positions, causal_mask(width, lengths), cache, self.aux_hidden_layers)
        cache = append(cache, forward.block, lengths, after=forward.hidden[:, -1, 0])
        draft = self.program.drafter.begin(
            params.draft, state.draft, forward.aux_hidden_states, text, lengths, following, base
        )
        counts = state.output.counts
        output = state.output._replace(counts=None if counts is None else counts.with_prompt(text, lengths))
        return DecodeState(state.target._replace(cache=cache), draft, output)

    def rewind(
        self,
        state: DecodeState,
        lengths: Int[Array, " B"],
        counts: TokenCounts | None = None,
        states: States = (),
    ) -> DecodeState:
        """Cut each sequence to its first ``lengths[b]`` tokens; `extend` must follow.

        Args:
            state: The state before; donated by executors.
            lengths: int32 ``[B]``, at most the present lengths.
            counts: Token counts of the remaining text, required if a processor reads them.
            states: Of the recurrent layers after these tokens (`hydrajax.models.cache.states_of`). Without them a
                sequence with recurrent layers can only keep its length or become empty.
        """
        cache = cut_caches(state.target.cache, lengths)
        target = state.target._replace(cache=with_states(cache, states) if states else cache)
        output = state.output if counts is None else state.output._replace(counts=counts)
        return DecodeState(target, self.program.drafter.rewind(state.draft, lengths), output)

    def _read(
        self, params: Params, prompt, lengths, sampling: SamplingParams, slots: int | None
    ) -> tuple[Forward, KVCache, Any, TokenCounts | None]:
        """Run the base over prompts; return the pass, the base's cache, the draft's empty state and token counts."""
        batch, width = prompt.shape
        slots = self.cache_slots(width) if slots is None else slots
        positions = jnp.broadcast_to(jnp.arange(width), prompt.shape)
        forward = self.bind(params).forward(
            prompt, positions, causal_mask(width, lengths), aux_hidden_layers=self.aux_hidden_layers
        )
        cache = append(self.model.init_cache(batch, slots), forward.block, lengths)
        # The barrier keeps XLA from folding the first pass over an empty draft cache at compile time, which is slow.
        draft = jax.lax.optimization_barrier(self.program.drafter.init_state(batch, slots))
        counts = None
        if count_tokens(sampling.processors):
            counts = TokenCounts.of_prompt(prompt, lengths, self.model.config.vocab_size)
        return forward, cache, draft, counts

    def _of_rows(self, sampling: SamplingParams, batch: int) -> SamplingParams:
        """Return the sampling parameters with one value per sequence."""
        return sampling._replace(rule=broadcast(sampling.rule, batch), processors=broadcast(sampling.processors, batch))

    def _started(
        self, params: Params, cache_after: Callable[[Array], KVCache], draft, forward: Forward, tokens, lengths,
        sampling: SamplingParams, counts: TokenCounts | None, extra: Sequence[Any],
    ) -> DecodeState:  # fmt: skip
        """Choose the roots after the first ``lengths`` of these tokens, and let the draft read the tokens."""
        batch, base = len(lengths), self.bind(params)
        sampling = self._of_rows(sampling, batch)._replace(rng=row_keys(sampling.rng, batch))
        last_hidden = jnp.take_along_axis(forward.hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        logits = base.logits(last_hidden)
        processed = process((*sampling.processors, *extra), logits, NodeContext(jnp.zeros(batch, jnp.int32), counts))
        root = sampling.rule.first_root(processed, position_keys(sampling.rng, jnp.zeros(batch, jnp.int32)))
        logprobs = None
        if self.program.logprobs is not None:
            logprobs = Logprobs.of(self.tempered(logits, sampling.rule), root, self.program.logprobs)
        target = TargetState(cache_after(root), root, logprobs)
        draft = self.program.drafter.begin(params.draft, draft, forward.aux_hidden_states, tokens, lengths, root, base)
        limits = sampling.limits
        most = self.program.max_new_tokens if limits is None else jnp.clip(limits, 0, self.program.max_new_tokens)
        limits = jnp.clip(self.model.config.max_positions - target.cache.lengths, 0, most)
        return DecodeState(target, draft, self._output(sampling._replace(limits=limits), counts))

    def _output(self, sampling: SamplingParams, counts: TokenCounts | None) -> OutputState:
        """Return an empty output."""
        batch = len(sampling.limits)
        room = (batch, self.program.max_new_tokens + self.depth + 1)
        return OutputState(
            tokens=jnp.zeros(room, jnp.int32),
            lengths=jnp.zeros(batch, jnp.int32),
            limits=sampling.limits,
            done=sampling.limits <= 0,
            accept_lengths=jnp.full((batch, self.program.max_new_tokens + 1), -1, jnp.int32),
            steps=jnp.zeros(batch, jnp.int32),
            keys=sampling.rng,
            rule=sampling.rule,
            counts=counts,
            logprobs=self._no_logprobs(*room),
            processors=sampling.processors,
            ignore_eos=sampling.ignore_eos,
        )

    def _no_logprobs(self, *places: int) -> Logprobs | None:
        return None if self.program.logprobs is None else Logprobs.nothing(places, self.program.logprobs)

    def cache_slots(self, prompt_width: int) -> int:
        """Return slots for the longest text plus the nodes of one step, so that no slice update is clamped."""
        longest = min(prompt_width + self.program.max_new_tokens, max(self.model.config.max_positions, prompt_width))
        return longest + self.program.verified_nodes
