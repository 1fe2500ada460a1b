"""A small model as the draft (Leviathan et al. 2023, Chen et al. 2023): any base that says the same tokens.

It knows nothing of the big one. It reads the text with a cache of its own and guesses, token by token, how it goes on;
a level of a tree is one pass. Every token that is accepted is run through it once. Nodes that have no children are not
run while drafting, so the last accepted token is mostly not in the cache yet: it *waits*, and is run with the root in
the first pass of the next proposal. So K tokens cost K passes of the draft, never K + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.drafters.draft_lm_head import LmHead, Vocabulary
from hydrajax.drafters.drafter import DrafterSpec, Draw, Outcome
from hydrajax.drafters.filling import fill
from hydrajax.drafters.growing import Beam
from hydrajax.drafters.ranks import token_ranks
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BaseModel, BoundBase, Forward, init_base
from hydrajax.models.cache import Block, KVCache, PendingKVCache, append, cut_caches
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.packed_forward import run_base
from hydrajax.models.ranking import log_probabilities
from hydrajax.trees.static_tree import TreeTopology
from hydrajax.trees.topology import take

DEPTH = 16  # how far it drafts; each further token is another pass, so a tree is where the limit really is
FIRST = 2  # tokens of the first pass: the one that waits, and the root


def check_confidence(value: float) -> None:
    if not 0 <= value < 1:
        raise HydrajaxError(f"draft_confidence: must be at least 0 and below 1, found {value}")


class DraftState(NamedTuple):
    """cache: of the text's tokens but the last, if that one waits; never of guesses. waiting: int32 ``[B]`` the token
    that is to be run before the next root; waits: bool ``[B]`` whether there is one.
    """

    cache: KVCache
    waiting: Int[Array, " B"]
    waits: Bool[Array, " B"]


class Drafted(NamedTuple):
    """What the draft model has run of a tree so far: M tokens, the first two being the one that waited and the root.

    (Where none waited: the root and one that nobody sees.)

    hidden:    ``[B, n, D]`` after the final norm, at the n nodes that were run last.
    block:     keys and values of all M.
    sees:      bool ``[B, n, M]`` which of them a child of each of the n nodes sees.
    positions: int32 ``[B, M]`` in the text.
    """

    hidden: Float[Array, "B n D"]
    block: Block
    sees: Bool[Array, "B n M"]
    positions: Int[Array, "B M"]


class Scratch(NamedTuple):
    """What `DraftModel.observe` wants back of a proposal.

    block: keys and values of all that was run. place: int32 ``[N]`` or ``[B, N]``, where each node stands among them
    after the first pass, which is -1 + `FIRST` for the first one; 0 is the root, -1 a node that was not run.
    witness: ``[B]``, computed from the last read of the cache (`hydrajax.models.cache.after_reads`).
    """

    block: Block
    place: Int[Array, "*B N"]
    witness: Float[Array, " B"]


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts for another one. Its parameters are those of ``model``.

    vocab_size: V of the model that it drafts for. Either may have been padded beyond the tokens that both know: what
    the other does not have is never drafted. depth: how far it may draft. confidence: a node of a static tree that it
    gives a smaller probability (at temperature 1, given the node's parent) gets no children, and once no node of a
    level has any in any row, the draft's passes for the rest of the tree are left out: transformers'
    ``assistant_confidence_threshold``. 0 for never. It decides after a token what is drafted below it and never which
    tokens these are, so that sampling stays exact.

    Methods: `hydrajax.drafters.drafter.Drafter`. Raises `HydrajaxError` for numbers that make no sense.
    """

    model: BaseModel
    vocab_size: int
    depth: int = DEPTH
    confidence: float = 0.0

    def __post_init__(self):
        if self.depth < 1:
            raise HydrajaxError(f"depth: must be at least 1, found {self.depth}")
        check_confidence(self.confidence)

    @classmethod
    def for_base(cls, config: LlamaConfig, dtype, settings: None = None) -> DraftModel:
        """With an eighth of the base's layers; there are no settings."""
        small = config.replace(n_layers=-(-config.n_layers // 8))
        return cls(Llama(small, jnp.dtype(dtype)), config.vocab_size)

    @property
    def spec(self) -> DrafterSpec:
        return DrafterSpec(
            depth=self.depth,
            default_tree="chain-5",
            supports_sampling=True,
            supports_dynamic_tree=True,
            has_distribution=True,
            independent=True,
        )

    @property
    def config(self) -> LlamaConfig:
        """Of the draft model."""
        return self.model.config

    @property
    def dtype(self) -> DType:
        return self.model.dtype

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The tokens that it can say, None for all of the base's."""
        return Vocabulary(range(self.config.vocab_size)) if self.config.vocab_size < self.vocab_size else None

    @property
    def lm_head(self) -> LmHead:
        return LmHead(vocabulary=self.vocabulary)

    def init(self, rng, base):
        return init_base(self.model, rng)

    # --- decoding -----------------------------------------------------------------------------------------------------

    def init_state(self, batch, slots):
        # One more slot: `observe` writes the token that waits beside a whole path.
        cache = self.model.init_cache(batch, slots + 1)
        return DraftState(cache, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool))

    def begin(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        """The end of the last answer, if it waits, and then the text: two passes, the first of a single token.

        The cache is written after both, as what is read in between would be copied (`after_reads`).
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
        cut = lengths <= state.cache.lengths  # the token that waits is behind the cut, too
        return cut_caches(state, lengths)._replace(waits=state.waits & ~cut)

    def propose(self, params, state, root, tree, base, draw=None):
        """Only nodes that have children are run, a level at a time; of a dynamic tree those that may have some."""
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

    def observe(self, params, state, proposal, outcome: Outcome, base):
        """Keep the keys and values of the token that waited, the root and the accepted nodes that were run.

        Of these only the last can have no children, so it alone may not have been run, and waits.
        """
        block, place, witness = proposal.scratch
        path = outcome.path
        place = jnp.asarray(place)[path] if place.ndim == 1 else jnp.take_along_axis(place, path, axis=1)
        counts, emitted = outcome.counts, outcome.counts > 0
        n_run = jnp.sum((place >= 0) & (jnp.arange(path.shape[1]) < counts[:, None]), axis=1, dtype=jnp.int32)
        waits = state.waits[:, None]
        # In the block the root is behind the token that waited, if there was one; then come the nodes.
        index = jnp.where(place == 0, waits, place - 1 + FIRST)
        index = jnp.where(waits, jnp.pad(index, ((0, 0), (1, 0))), jnp.pad(index, ((0, 0), (0, 1))))
        kept = jnp.where(emitted, n_run + state.waits, 0)
        cache = append(state.cache, block, kept, index=jnp.maximum(index, 0), after=witness)
        last = jnp.take_along_axis(outcome.tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
        # A row that has finished may be given more text later: its state stays as it is.
        return DraftState(
            cache, jnp.where(emitted, last, state.waiting), jnp.where(emitted, n_run < counts, state.waits)
        )

    def _first_pass(self, params, state: DraftState, root: Int[Array, " B"]) -> Drafted:
        """Run the token that waits and the root, or the root and another that nobody sees."""
        waits = state.waits[:, None]
        tokens = jnp.where(waits, jnp.stack([state.waiting, root], axis=1), root[:, None])
        positions = state.cache.lengths[:, None] + jnp.arange(FIRST)
        forward = self.forward(params, tokens, positions, causal_mask(FIRST), state.cache)
        hidden = jnp.where(waits[:, :, None], forward.hidden[:, 1:], forward.hidden[:, :1])
        sees = jnp.concatenate([jnp.ones_like(waits), waits], axis=1)[:, None]
        return Drafted(hidden, forward.block, sees, positions)

    def _run(
        self, params, state: DraftState, drafted: Drafted, beam: Beam, goes_on: Bool[Array, ""] | None = None
    ) -> Drafted:
        """Run the nodes of a beam.

        goes_on: whether to run them at all; their keys, values and hidden states are zeros if not.
        """
        tokens, sees = beam.tokens, take(drafted.sees, beam.parents)
        after_root = state.cache.lengths + state.waits
        positions = jnp.broadcast_to((after_root + beam.depth)[:, None], tokens.shape)
        itself = np.eye(tokens.shape[1], dtype=bool)

        def forward():
            past = PendingKVCache(state.cache, drafted.block, sees, drafted.positions)
            found = self.forward(params, tokens, positions, itself, past)
            return found.hidden, found.block

        if goes_on is None:
            hidden, block = forward()
        else:
            nothing = jax.eval_shape(forward)
            hidden, block = jax.lax.cond(
                goes_on, forward, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nothing)
            )
        return Drafted(
            hidden,
            jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=2), drafted.block, block),
            jnp.concatenate([sees, jnp.broadcast_to(itself, (*tokens.shape, tokens.shape[1]))], axis=-1),
            jnp.concatenate([drafted.positions, positions], axis=1),
        )

    def _filled_where_sure(self, params, state, first: Drafted, root, tree: TreeTopology, draw: Draw | None):
        """A static tree, what was run for it, and where each node stands in that (`Scratch.place`)."""
        # Of every level: whether each of its parents may have children, and whether they were run at all.
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
        for level, may, was in zip(tree.levels, sure, ran, strict=False):  # of the root alone nothing is guessed
            tokens = tokens.at[:, level.children].set(
                jnp.where(may[:, level.parent_slot], tokens[:, level.children], -1)
            )
            place = place.at[level.parents].set(jnp.where(was, place[level.parents], -1))
        return proposal._replace(tokens=tokens), drafted, place

    def forward(self, params, tokens, positions, mask, past: KVCache | PendingKVCache) -> Forward:
        """A pass of the draft model; the arguments are those of `BaseModel.__call__`."""
        return BoundBase(self.model, params).forward(tokens, positions, mask, past)

    def logits(self, params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V_"]:
        """Over the tokens that both models have."""
        logits = BoundBase(self.model, params).logits(hidden)
        return logits[..., : self.vocab_size]

    # --- how good its guesses are -------------------------------------------------------------------------------------

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        """A guess k places further on is the guess at the place k tokens later: one pass tells all of them."""
        tokens, segments = batch["tokens"], batch.get("segments")
        hidden = run_base(self.model, params, tokens, segments=segments).hidden

        def logits(hidden):
            return self.logits(params, hidden)

        following = jnp.roll(tokens, -1, axis=1)
        ranks = token_ranks(logits, hidden, following, self.vocabulary, self.vocab_size, chunk_tokens)
        return jnp.stack([jnp.roll(ranks, -(k + 1), axis=1) for k in range(depth)])

    def next_logits(self, params: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Float32 logits over the base's tokens of what follows each token of a text; -inf for those it cannot say."""
        hidden = run_base(self.model, params, tokens).hidden
        return self.lm_head.over_all_tokens(self.logits(params, hidden), self.vocab_size)


def _places(tree: TreeTopology) -> Int[np.ndarray, " N"]:
    """Where each node of a static tree stands among those that are run: `Scratch.place`."""
    place = np.full(tree.size, -1, np.int32)
    run = [0, *(node for level in tree.levels[1:] for node in level.parents)]
    place[run] = np.arange(len(run))
    return place
