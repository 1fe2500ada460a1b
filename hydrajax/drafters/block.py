"""Drafts of one pass: a block of masked positions, predicted at once from hidden states of several base layers.

The published drafts differ in how they read the block: DFlash and JetSpec (`hydrajax.drafters.dflash`), DSpark
(`hydrajax.drafters.dspark`). The network is the same (`hydrajax.drafters.block_network`). The *context* is the text
that the base has processed: the draft fuses the base's hidden states of several layers into one vector per position,
from which every draft layer computes keys and values (KV injection, DFlash 3). The *block* is the anchor, the last
known token, followed by mask tokens. Only the block passes through the layers. It attends to the context and to itself.

The cache holds keys and values of the context alone, so rejected tokens never enter it.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.drafters.best_first import best_first
from hydrajax.drafters.block_network import BlockNetwork, BlockState, Text
from hydrajax.drafters.clusters import ChosenLogits
from hydrajax.drafters.drafter import DrafterSpec, Draw, Proposal
from hydrajax.drafters.filling import fill
from hydrajax.drafters.markov import MarkovHead
from hydrajax.drafters.ranks import ranks_among
from hydrajax.drafters.settings import Settings, at_least, below, vocabulary_of
from hydrajax.drafters.trained import OneNetwork
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import KVSegment
from hydrajax.models.base_model import BoundBase
from hydrajax.models.cache import append, init_cache
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.packed_forward import into_chunks, row_layout
from hydrajax.trees.dynamic import BestFirstTree, CandidateTree, guesses_of
from hydrajax.trees.topology import take

# Rows of blocks in one pass over texts. Attention compares them with each other, also those of different blocks.
ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class BlockSettings(Settings):
    """Settings of drafts of one pass.

    Attributes:
        n_layers: Number of draft layers.
        block_size: Positions of a block, the anchor included.
        target_layers: The base's layers, counted from 0, whose outputs the draft reads, ascending; the last one's is
            read after the final norm. Empty for one per draft layer, evenly spaced (`default_target_layers`), and for
            EAGLE-3's in P-EAGLE (`hydrajax.drafters.eagle3.default_aux_hidden_layers`).
        mask_token: Id of the token whose embedding marks positions to predict; by default the vocabulary's last.
        vocabulary: The number of tokens that the draft can propose, see `hydrajax.drafters.settings.HeadSettings`.
        num_anchors: Blocks per row of training text, at random positions.
    """

    n_layers: int = 1
    block_size: int = 8
    target_layers: tuple[int, ...] = ()
    mask_token: int | None = None
    vocabulary: int | None = None
    num_anchors: int = 64

    def __post_init__(self):
        at_least("draft.n_layers", self.n_layers, 1)
        at_least("draft.block_size", self.block_size, 2)
        at_least("draft.vocabulary", self.vocabulary, 1)
        at_least("draft.num_anchors", self.num_anchors, 1)
        at_least("draft.mask_token", self.mask_token, 0)
        layers = list(self.target_layers)
        if layers != sorted(set(layers)) or (layers and layers[0] < 0):
            raise HydrajaxError(f"draft.target_layers: got {layers}, expected ascending layers from 0 up")

    def mask_of(self, base: LlamaConfig) -> int:
        """Return the mask token's id."""
        if self.mask_token is None:
            return base.vocab_size - 1
        below("draft.mask_token", self.mask_token, base.vocab_size)
        return self.mask_token

    def reads(self, base: LlamaConfig) -> tuple[int, ...]:
        """Return ``aux_hidden_layers`` of the drafter."""
        layers = self.target_layers or default_target_layers(base.n_layers, self.n_layers)
        below("draft.target_layers", max(layers), base.n_layers)
        return tuple(from_last(layer, base.n_layers) for layer in layers)


def default_target_layers(n_base: int, n_draft: int) -> tuple[int, ...]:
    """Return the base's layers whose outputs a draft of ``n_draft`` layers reads: evenly spaced from 1 to L - 3.

    These are the numbers in released DFlash drafts. A small base gives fewer layers.
    """
    if n_draft == 1:
        return (n_base // 2,)
    first, last = min(1, n_base - 1), max(n_base - 3, 0)
    return tuple(sorted({round(first + i * (last - first) / (n_draft - 1)) for i in range(n_draft)}))


def from_last(layer: int, n_layers: int) -> int:
    """Return the output of a layer as `hydrajax.models.base_model.BaseModel` counts hidden states; -1 is the
    embedding's.
    """
    return n_layers - 1 - layer


def one_by_one(work: Callable[[Array], Array], chunks: Int[Array, "chunks B ..."]) -> Float[Array, "B rows ..."]:
    """Return the results ``[B, rows of a chunk, ...]`` of all chunks, side by side."""
    if len(chunks) == 1:
        return work(chunks[0])
    # The gradient computes each chunk again: the scores of all together would be the square of their rows.
    found = jnp.moveaxis(jax.lax.map(jax.checkpoint(work), chunks), 0, 1)
    return found.reshape(len(found), -1, *found.shape[3:])


class BlockDrafter(OneNetwork):
    """The procedure of drafts of one pass.

    A subclass is a frozen dataclass with the fields of `BlockNetwork` and ``aux_hidden_layers``, ``mask_token``,
    ``block_size``, ``num_anchors`` and ``windows``. It defines the class variables below.

    Attributes:
        first_slot: The first slot whose output is a guess. Slot s predicts the token at its own position if this is 1,
            that of the next position if it is 0.
        ends_at_gaps: In training, no guess after the first one without a target has a target (DeepSpec).
        causal: A slot attends to the slots before it only; so it does in layers with a sliding window.
        windows: The number of tokens that a slot attends to in each layer, itself included; 0 for all. Empty for no
            windows.
        both_ways: In layers with a window a slot sees as many later slots as earlier ones (Muse Glimmer's assistant).
        plain_logits: Guesses are from the lm head's matmul, without the base's divisor and cap of logits.
    """

    first_slot: int
    ends_at_gaps: bool
    causal: bool
    config: LlamaConfig
    dtype: DType
    vocabulary: Vocabulary | None
    windows: tuple[int, ...]
    both_ways: bool = False
    plain_logits: bool = False
    markov: MarkovHead | None = None
    confidence_head: str | None = None
    confidence: float = 0.0

    @classmethod
    def for_base(cls, base, dtype, settings=None, target_counts=None):
        """Return a draft whose layers have the base's shape and norms of queries and keys, as released."""
        s = settings or cls.Settings()
        return cls(
            base.plain_layer.replace(n_layers=s.n_layers, qk_norm=True), s.reads(base), s.mask_of(base), s.block_size,
            vocabulary=vocabulary_of(s.vocabulary, base, target_counts), dtype=jnp.dtype(dtype),
            num_anchors=s.num_anchors,
        )  # fmt: skip

    def check_block(self) -> None:
        """Raise `HydrajaxError` for numbers out of range."""
        at_least("block_size", self.block_size, 1 + self.first_slot)
        if self.windows and (len(self.windows) != self.config.n_layers or min(self.windows) < 0):
            raise HydrajaxError(f"windows: got {list(self.windows)}, expected one for each layer, 0 for none")
        if not 0 <= self.mask_token < self.config.vocab_size:
            raise HydrajaxError(
                f"mask_token: got {self.mask_token}, expected a token of the vocabulary of {self.config.vocab_size}"
            )

    @property
    def depth(self) -> int:
        """K, the number of positions that a block predicts."""
        return self.block_size - self.first_slot

    @cached_property
    def spec(self) -> DrafterSpec:
        return DrafterSpec(
            depth=self.depth,
            default_tree=f"chain-{self.depth}",
            aux_hidden_layers=self.aux_hidden_layers,
            supports_sampling=True,
            supports_dynamic_tree=True,
            fills_levels=not self.confidence,
            one_pass=self.markov is None,
            num_draft_heads=self.depth,
            shared_lm_head=self.lm_head.shared,
        )

    @property
    def network(self) -> BlockNetwork:
        n_reads = len(self.aux_hidden_layers)
        return BlockNetwork(self.config, self.dtype, n_reads, self.lm_head, self.markov, self.confidence_head)

    # --- decoding -----------------------------------------------------------------------------------------------------

    def init_state(self, batch, slots):
        return BlockState(init_cache(self.config, batch, slots, self.dtype))

    def advance(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        """Add positions that the base has processed to the context."""
        positions = state.cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        block = self._apply(params, aux_hidden_states, positions, method="context")
        return BlockState(append(state.cache, block, counts, after=bonus_token))

    def propose(self, params, state, root, tree, base, draw=None):
        """Predict all positions in one pass, then fill the tree.

        The tokens of a block are independent given the text, so q of a node depends on its depth alone, also below a
        drawn token. With a Markov head q is conditioned on the node's parent too (with the recurrent one on its whole
        path). Both are the distributions from which a node's children are drawn, which is all that rejection sampling
        needs (`Proposal.log_q`).
        """
        n_levels = len(guesses_of(tree))
        hidden = self.slots(params, state, root, n_levels, base) if n_levels else None
        logits = self._apply(params, hidden, self._base_logits(params, base), method="logits") if n_levels else None
        if isinstance(tree, BestFirstTree) and draw is None and self.markov is None:
            proposal = best_first(tree, root, logits, self.lm_head)
        else:
            proposal = self._filled(params, root, tree, hidden, logits, draw)
        return self._cut(params, proposal, hidden) if self.confidence and n_levels else proposal

    def slots(self, params, state, root: Int[Array, " B"], n_levels: int, base) -> Float[Array, "B n D"]:
        """Return the lm head's inputs for the first ``n_levels`` positions after the root."""
        cache = state.cache
        # Slots that see only earlier ones do not need the later ones.
        causal = all(self._is_causal(layer) for layer in range(self.config.n_layers))
        size = n_levels + self.first_slot if causal else self.block_size
        tokens = jnp.concatenate([root[:, None], jnp.full((len(root), size - 1), self.mask_token)], axis=1)
        x = base.embed(tokens, normed=False).astype(self.dtype)
        positions = cache.lengths[:, None] + jnp.arange(size)
        past = [
            cache.segments(layer, positions - window + 1 if window else None)
            for layer, window in enumerate(self._windows)
        ]
        masks = [self._block_mask(layer, size) for layer in range(self.config.n_layers)]
        hidden = self._apply(params, x, positions, masks, past)
        return hidden[:, self.first_slot : self.first_slot + n_levels]

    @property
    def _windows(self) -> tuple[int, ...]:
        return self.windows or (0,) * self.config.n_layers

    def _is_causal(self, layer: int) -> bool:
        return self.causal or (bool(self._windows[layer]) and not self.both_ways)

    def _block_mask(self, layer: int, size: int) -> Bool[np.ndarray, "n n"]:
        distance = np.subtract.outer(np.arange(size), np.arange(size))
        near = np.abs(distance) < (self._windows[layer] or size)
        return near & (distance >= 0) if self._is_causal(layer) else near

    def _base_logits(self, params, base) -> Callable:
        if self.plain_logits:
            return partial(base.logits, plain=True)
        return self.lm_head.base_logits(params, base)

    def _filled(self, params, root, tree: CandidateTree, hidden, logits, draw: Draw | None) -> Proposal:
        """Fill the tree level by level, with the Markov head if there is one."""

        def guess(state, beam):
            level = logits[:, beam.depth, None]
            if self.markov is None:
                return state, level
            state = take(state, beam.parents) if beam.depth else state
            rows = jnp.broadcast_to(hidden[:, beam.depth, None], (*beam.tokens.shape, hidden.shape[-1]))
            state, correction = self._apply(params, state, beam.tokens, rows, method="corrected")
            return state, level + correction

        start = None if self.markov is None else jnp.zeros((len(root), 1, self.markov.rank), self.dtype)
        return fill(tree, root, guess, start, self.lm_head, self.config.vocab_size, draw)[0]

    def _cut(self, params, proposal: Proposal, hidden: Float[Array, "B D n"]) -> Proposal:
        """Remove the tokens below nodes whose next slot has a confidence of less than the threshold.

        This is decided by a node and never by its children, so sampling stays exact.
        """
        tree, tokens = proposal.tree, proposal.tokens
        depths = jnp.broadcast_to(tree.depths, tokens.shape)
        rows = jnp.take_along_axis(hidden, jnp.minimum(depths, hidden.shape[1] - 1)[:, :, None], axis=1)
        logits = self._apply(params, rows, tokens, method="confidence_logits")
        unsure = jax.nn.sigmoid(logits) < self.confidence
        above = tree.mask & ~np.eye(tree.size, dtype=bool)
        return proposal._replace(tokens=jnp.where(jnp.any(above & unsure[:, None, :], axis=-1), -1, tokens))

    # --- training -----------------------------------------------------------------------------------------------------

    def blocks(
        self,
        params: Any,
        aux_hidden_states: Float[Array, "B T nD"],
        tokens: Int[Array, "B T"],
        anchors: Int[Array, "B A"],
        base: BoundBase,
        segments: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B A K D"]:
        """Return the lm head's inputs for the K positions of blocks at A anchors of each text, in one pass.

        A block attends to the text before its anchor, in the same document, and to itself.

        Args:
            anchors: int32 ``[B, A]`` indices of the last known tokens; index 0 has no context.
        """
        return self.blocks_of(params, self.read(params, aux_hidden_states, tokens, segments, base), anchors, base)

    def blocks_of(self, params, text: Text, anchors: Int[Array, "B A"], base: BoundBase) -> Float[Array, "B A K D"]:
        """Return `blocks` of the result of `read`."""
        n_blocks, at_once = anchors.shape[1], max(ROWS_AT_ONCE // self.block_size, 1)
        chunks = into_chunks(anchors, -(-n_blocks // -(-n_blocks // at_once)))
        return one_by_one(lambda anchors: self.blocks_after(params, text, anchors, base), chunks)[:, :n_blocks]

    def guesses(self, n_blocks: int) -> Int[np.ndarray, "N k"]:
        """Return the numbers of the guesses that `hidden_of_guesses` computes.

        Guess g of block a has the number ``a * depth + g``. A place without a guess has -1.
        """
        return np.arange(n_blocks * self.depth).reshape(n_blocks, self.depth)

    def hidden_of_guesses(
        self, params, text: Text, anchors: Int[Array, "B A"], base: BoundBase
    ) -> Float[Array, "B N k D"]:
        """Return the lm head's inputs for `guesses`, of whole blocks or, if some are left out, of single guesses."""
        return self.blocks_of(params, text, anchors, base)

    def read(self, params, aux_hidden_states, tokens, segments, base) -> Text:
        """Return what the blocks of these texts attend to."""
        positions, _ = row_layout(tokens, segments)
        return Text(tokens, positions, segments, self._apply(params, aux_hidden_states, positions, method="context"))

    def blocks_after(self, params, text: Text, anchors: Int[Array, "B A"], base) -> Float[Array, "B A K D"]:
        """Return `blocks_of`, all in one pass."""
        (batch, n_blocks), size = anchors.shape, self.block_size
        rows = n_blocks * size
        known = jnp.take_along_axis(text.tokens, anchors, axis=1)[:, :, None]
        fill = jnp.full((batch, n_blocks, size - 1), self.mask_token)
        tokens = jnp.concatenate([known, fill], axis=2).reshape(batch, rows)
        x = base.embed(tokens, normed=False).astype(self.dtype)
        before, places = text.seen_by(jnp.repeat(anchors, size, axis=1), np.tile(np.arange(size), n_blocks))
        distance, masks, past = places[:, :, None] - text.positions[:, None, :], [], []
        for layer, window in enumerate(self._windows):
            visible = before & (distance < window) if window else before
            masks.append(np.kron(np.eye(n_blocks, dtype=bool), self._block_mask(layer, size)))
            past.append((KVSegment(*text.block[layer], visible[:, None, None]),))
        hidden = self._apply(params, x, places, masks, past)
        return hidden.reshape(batch, n_blocks, size, -1)[:, :, self.first_slot :]

    def block_logits(
        self, params, hidden: Float[Array, "*rows K D"], before: Int[Array, "*rows K"], base
    ) -> Float[Array, "*rows K V_"] | ChosenLogits:
        """Return the float32 logits of whole blocks, given the tokens before each position."""
        logits = self._apply(params, hidden, self._base_logits(params, base), method="logits")
        return logits if self.markov is None else logits + self._apply(params, before, hidden, method="corrections")

    def confidence_logits(self, params, hidden, before) -> Float[Array, "*rows K"]:
        """Return `BlockNetwork.confidence_logits` of whole blocks."""
        return self._apply(params, hidden, before, method="confidence_logits")

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        """Return the ranks from a block at every position, given the text's tokens before each of its positions."""
        tokens = batch["tokens"]
        n_rows, length = tokens.shape
        text = self.read(params, aux_hidden_states, tokens, batch.get("segments"), base)
        # The root at position t is the text's token t + 1.
        anchors = jnp.broadcast_to(jnp.minimum(jnp.arange(length) + 1, length - 1), tokens.shape)
        width = max(min(ROWS_AT_ONCE // self.block_size, chunk_tokens // (n_rows * depth)), 1)

        def rank(anchors):
            hidden = self.blocks_after(params, text, anchors, base)[:, :, :depth]
            places = jnp.minimum(anchors[:, :, None] + jnp.arange(depth + 1), length - 1)
            known = jnp.take_along_axis(tokens[:, None], places, axis=2)
            logits = self.block_logits(params, hidden, known[..., :-1], base)
            return ranks_among(logits, known[..., 1:], self.vocabulary, base.config.vocab_size)

        ranks = jax.lax.map(rank, into_chunks(anchors, min(width, length)))  # [chunks, B, width, depth]
        return jnp.moveaxis(ranks, (3, 1), (0, 1)).reshape(depth, n_rows, -1)[:, :, :length]

    def trained_on(self, found):
        """Return the draft that was read, with the settings' number of anchors."""
        return dataclasses.replace(super().trained_on(found), num_anchors=self.num_anchors)
