"""A small model as the draft (Leviathan et al. 2023, Chen et al. 2023): any base with the same tokens.

It is independent of the large one. It has its own KV cache and predicts token by token; a level of a tree is one pass.
Every accepted token is run once. Nodes without children are not run while drafting, so the last accepted token is
usually not in the cache yet: it is *pending* and runs with the root in the first pass of the next proposal. K tokens
therefore cost K passes of the draft, never K + 1.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.drafter import Beam, DrafterSpec, Draw, Outcome
from hydrajax.drafters.filling import fill
from hydrajax.drafters.kind import DrafterKind
from hydrajax.drafters.ranks import token_ranks
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BaseModel, BoundBase, Forward
from hydrajax.models.cache import Block, KVCache, PendingKVCache, append, cut_caches
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.packed_forward import run_base
from hydrajax.ops import log_probabilities
from hydrajax.ops.trace import off_mesh
from hydrajax.trees.static_tree import TreeTopology
from hydrajax.trees.topology import take

DEPTH = 16  # each further token is another pass, so the tree sets the practical limit
FIRST = 2  # tokens of the first pass: the pending one and the root


def check_confidence(value: float) -> None:
    if not 0 <= value < 1:
        raise HydrajaxError(f"draft_confidence: got {value}, expected at least 0 and less than 1")


def check_layers(config: LlamaConfig) -> None:
    """Refuse a hybrid, whose recurrent layers cannot read tokens that are not committed yet (`PendingKVCache`)."""
    if config.any_recurrent:
        raise HydrajaxError("draft: got a model with recurrent layers, expected one with attention in every layer")


class DraftState(NamedTuple):
    """The state of a draft model.

    Attributes:
        cache: Of the text's tokens except a pending one; never of guesses.
        waiting: int32 ``[B]`` the pending token, to be run before the next root.
        waits: bool ``[B]`` whether there is one.
    """

    cache: KVCache
    waiting: Int[Array, " B"]
    waits: Bool[Array, " B"]


class Drafted(NamedTuple):
    """The tokens of a tree that the draft model has run so far: M tokens, the first two being the pending one and the
    root.

    (Without a pending token: the root and one that no token attends to.)

    Attributes:
        hidden: ``[B, n, D]`` after the final norm, at the n nodes that were run last.
        sees: bool ``[B, n, M]`` which of them a child of each of the n nodes attends to.
    """

    hidden: Float[Array, "B n D"]
    block: Block
    sees: Bool[Array, "B n M"]
    positions: Int[Array, "B M"]


class Scratch(NamedTuple):
    """The part of a proposal that `DraftModel.observe` needs again.

    Attributes:
        block: Keys and values of all tokens that were run.
        place: int32 ``[N]`` or ``[B, N]``, each node's index among them after the first pass, which is -1 + `FIRST` for
            the first one; 0 is the root, -1 a node that was not run.
        witness: ``[B]``, computed from the last read of the cache (`hydrajax.models.cache.after_reads`).
    """

    block: Block
    place: Int[Array, "*B N"]
    witness: Float[Array, " B"]


def _where_it_lies(verb):
    """Let every device of a mesh compute the verb by itself if each has the whole draft model."""

    @functools.wraps(verb)
    def found(self, *args, **settings):
        with off_mesh() if self.copied else contextlib.nullcontext():
            return verb(self, *args, **settings)

    return found


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts for another one. Its parameters are those of ``model``.

    Attributes:
        vocab_size: V of the model that it drafts for. Either vocabulary may be padded beyond the common tokens; tokens
            that the other model lacks are never drafted.
        depth: Maximum number of drafted tokens.
        confidence: A node of a static tree whose draft probability (at temperature 1, given its parent) is smaller
            gets no children; once no node of a level has children in any sequence, the remaining passes of the draft
            are skipped (transformers' ``assistant_confidence_threshold``). 0 for never. It decides after a token what
            is drafted below it and never which tokens these are, so sampling stays exact.
        copied: Every device of a mesh has a replica of the draft model. Sharding a small model saves less than its
            collectives take.

    Raises:
        HydrajaxError: For numbers out of range, and for a hybrid model.
    """

    model: BaseModel
    vocab_size: int
    depth: int = DEPTH
    confidence: float = 0.0
    copied: bool = False

    def __post_init__(self):
        if self.depth < 1:
            raise HydrajaxError(f"depth: got {self.depth}, expected at least 1")
        check_confidence(self.confidence)
        check_layers(self.config)

    @classmethod
    def for_base(cls, config: LlamaConfig, dtype, settings: None = None) -> DraftModel:
        """Return a draft model with an eighth of the base's layers, plain ones for a hybrid; there are no settings."""
        small = config.plain_layer if config.any_recurrent else config
        small = small.replace(n_layers=-(-config.n_layers // 8))
        return cls(Llama(small, jnp.dtype(dtype)), config.vocab_size)

    @property
    def spec(self) -> DrafterSpec:
        return DrafterSpec(
            depth=self.depth,
            default_tree="chain-5",
            supports_sampling=True,
            supports_dynamic_tree=True,
            fills_levels=not self.confidence,
            has_distribution=True,
            independent=True,
        )

    @property
    def config(self) -> LlamaConfig:
        """The draft model's configuration."""
        return self.model.config

    @property
    def dtype(self) -> DType:
        return self.model.dtype

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The tokens that it can propose; None for all of the base's."""
        return Vocabulary(range(self.config.vocab_size)) if self.config.vocab_size < self.vocab_size else None

    @property
    def lm_head(self) -> LmHead:
        return LmHead(vocabulary=self.vocabulary)

    def init(self, rng, base):
        return init_base(self.model, rng)

    # --- decoding -----------------------------------------------------------------------------------------------------

    @_where_it_lies
    def init_state(self, batch, slots):
        # One more slot: `observe` writes the pending token and a whole path.
        cache = self.model.init_cache(batch, slots + 1)
        return DraftState(cache, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool))

    @_where_it_lies
    def begin(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        """Run the pending token, if there is one, then the text: two passes, the first of a single token.

        The cache is written after both, because a cache that is read in between would be copied (`after_reads`).
        """
        cache, (batch, n_tokens) = state.cache, tokens.shape
        place = cache.lengths[:, None]
        first = self.forward(params, state.waiting[:, None], place, causal_mask(1), cache)
        sees = jnp.broadcast_to(state.waits[:, None, None], (batch, n_tokens, 1))
        positions = place + state.waits[:, None] + jnp.arange(n_tokens)
        text = self.forward(
            params, tokens, positions, causal_mask(n_tokens), PendingKVCache(cache, first.block, sees, place)
        )
        cache = append(cache, first.block, state.waits.astype(jnp.int32), after=text.hidden[:, -1, 0])
        cache = append(cache, text.block, counts, after=text.hidden[:, -1, 0])
        return DraftState(cache, jnp.zeros_like(state.waiting), jnp.zeros_like(state.waits))

    def rewind(self, state, lengths):
        cut = lengths <= state.cache.lengths  # the pending token is beyond the cut too
        return cut_caches(state, lengths)._replace(waits=state.waits & ~cut)

    @_where_it_lies
    def propose(self, params, state, root, tree, base, draw=None):
        """Fill the tree level by level; only nodes that have (or in a dynamic tree may have) children are run."""
        first = self._first_pass(params, state, root)
        if self.confidence and isinstance(tree, TreeTopology):
            proposal, drafted, place = self._filled_where_sure(params, state, first, root, tree, draw)
        else:

            def guess(drafted, beam):
                if beam.depth:
                    drafted = self._run(params, state, drafted, beam)
                return drafted, self.logits(params, drafted.hidden)

            proposal, drafted = fill(tree, root, guess, first, self.lm_head, self.vocab_size, draw)
            place = _places(tree) if isinstance(tree, TreeTopology) else proposal.scratch
        return proposal._replace(scratch=Scratch(drafted.block, place, drafted.hidden[:, -1, 0]))

    @_where_it_lies
    def observe(self, params, state, proposal, outcome: Outcome, base):
        """Append the keys and values of the pending token, the root and the accepted nodes that were run.

        Only the last of these can be without children, so only it may not have been run and becomes pending.
        """
        block, place, witness = proposal.scratch
        path = outcome.path
        place = jnp.asarray(place)[path] if place.ndim == 1 else jnp.take_along_axis(place, path, axis=1)
        counts, emitted = outcome.counts, outcome.counts > 0
        n_run = jnp.sum((place >= 0) & (jnp.arange(path.shape[1]) < counts[:, None]), axis=1, dtype=jnp.int32)
        waits = state.waits[:, None]
        # The block holds the pending token, if there was one, the root, then the nodes.
        index = jnp.where(place == 0, waits, place - 1 + FIRST)
        index = jnp.where(waits, jnp.pad(index, ((0, 0), (1, 0))), jnp.pad(index, ((0, 0), (0, 1))))
        kept = jnp.where(emitted, n_run + state.waits, 0)
        cache = append(state.cache, block, kept, index=jnp.maximum(index, 0), after=witness)
        last = jnp.take_along_axis(outcome.tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
        # A finished sequence may continue later, so its state stays as it is.
        return DraftState(
            cache, jnp.where(emitted, last, state.waiting), jnp.where(emitted, n_run < counts, state.waits)
        )

    def _first_pass(self, params, state: DraftState, root: Int[Array, " B"]) -> Drafted:
        """Run the pending token and the root, or the root and one that no token attends to."""
        waits = state.waits[:, None]
        tokens = jnp.where(waits, jnp.stack([state.waiting, root], axis=1), root[:, None])
        positions = state.cache.lengths[:, None] + jnp.arange(FIRST)
        forward = self.forward(params, tokens, positions, causal_mask(FIRST), state.cache)
        hidden = jnp.where(waits[:, :, None], forward.hidden[:, 1:], forward.hidden[:, :1])
        sees = jnp.concatenate([jnp.ones_like(waits), waits], axis=1)[:, None]
        return Drafted(hidden, forward.block, sees, positions)

    def _run(
        self, params, state: DraftState, drafted: Drafted, beam: Beam, enabled: Bool[Array, ""] | None = None
    ) -> Drafted:
        """Run the nodes of a beam.

        Args:
            enabled: Whether to run them; if not, their keys, values and hidden states are zeros.
        """
        tokens, sees = beam.tokens, take(drafted.sees, beam.parents)
        after_root = state.cache.lengths + state.waits
        positions = jnp.broadcast_to((after_root + beam.depth)[:, None], tokens.shape)
        itself = np.eye(tokens.shape[1], dtype=bool)

        def forward():
            past = PendingKVCache(state.cache, drafted.block, sees, drafted.positions)
            found = self.forward(params, tokens, positions, itself, past)
            return found.hidden, found.block

        if enabled is None:
            hidden, block = forward()
        else:
            nothing = jax.eval_shape(forward)
            hidden, block = jax.lax.cond(
                enabled, forward, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nothing)
            )
        return Drafted(
            hidden,
            jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=2), drafted.block, block),
            jnp.concatenate([sees, jnp.broadcast_to(itself, (*tokens.shape, tokens.shape[1]))], axis=-1),
            jnp.concatenate([drafted.positions, positions], axis=1),
        )

    def _filled_where_sure(self, params, state, first: Drafted, root, tree: TreeTopology, draw: Draw | None):
        """Return a static tree, the tokens that were run for it, and `Scratch.place`."""
        # Per level: whether each of its parents may have children, and whether they were run.
        sure, ran = [jnp.ones((len(root), 1), bool)], [jnp.asarray(True)]

        def guess(carry, beam):
            drafted, before = carry
            if beam.depth:
                known = jnp.clip(beam.tokens, 0, before.shape[-1] - 1)
                log_p = log_probabilities(take(before, beam.parents), known[:, :, None])[:, :, 0]
                above = sure[-1][:, beam.parents]
                sure.append(above & (beam.tokens >= 0) & (log_p >= np.log(self.confidence)))
                ran.append(jnp.any(sure[-1]))
                drafted = self._run(params, state, drafted, beam, ran[-1])
            logits = self.logits(params, drafted.hidden)
            return (drafted, logits), logits

        proposal, (drafted, _) = fill(tree, root, guess, (first, None), self.lm_head, self.vocab_size, draw)
        tokens, place = proposal.tokens, jnp.asarray(_places(tree))
        for level, may, was in zip(tree.levels, sure, ran, strict=False):  # a root-only tree has no guesses
            tokens = tokens.at[:, level.children].set(
                jnp.where(may[:, level.parent_slot], tokens[:, level.children], -1)
            )
            place = place.at[level.parents].set(jnp.where(was, place[level.parents], -1))
        return proposal._replace(tokens=tokens), drafted, place

    def forward(self, params, tokens, positions, mask, past: KVCache | PendingKVCache) -> Forward:
        """Run the draft model; the arguments are those of `BaseModel.__call__`."""
        return BoundBase(self.model, params).forward(tokens, positions, mask, past)

    def logits(self, params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V_"]:
        """Return float32 logits over the common tokens."""
        logits = BoundBase(self.model, params).logits(hidden)
        return logits[..., : self.vocab_size]

    # --- ranks and distribution ---------------------------------------------------------------------------------------

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        """Return the ranks from one pass: a guess k positions ahead is the guess at the position k tokens later."""
        tokens, segments = batch["tokens"], batch.get("segments")
        hidden = run_base(self.model, params, tokens, segments=segments).hidden

        def logits(hidden):
            return self.logits(params, hidden)

        following = jnp.roll(tokens, -1, axis=1)
        ranks = token_ranks(logits, hidden, following, self.vocabulary, self.vocab_size, chunk_tokens)
        return jnp.stack([jnp.roll(ranks, -(k + 1), axis=1) for k in range(depth)])

    def next_logits(self, params: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Return float32 next-token logits over the base's tokens after each token of a text; -inf for tokens it
        lacks.
        """
        hidden = run_base(self.model, params, tokens).hidden
        return self.lm_head.over_all_tokens(self.logits(params, hidden), self.vocab_size)


def _places(tree: TreeTopology) -> Int[np.ndarray, " N"]:
    """Return `Scratch.place` of a static tree."""
    place = np.full(tree.size, -1, np.int32)
    run = [0, *(node for level in tree.levels[1:] for node in level.parents)]
    place[run] = np.arange(len(run))
    return place


KIND = DrafterKind("draft model", DraftModel)
