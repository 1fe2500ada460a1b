"""P-EAGLE (arXiv 2602.01469): EAGLE-3 that predicts all positions in one pass.

As in EAGLE-3 (`hydrajax.drafters.eagle3`), the row at position p reads the base's fused hidden states g_p and the
embedding of the token that follows, and predicts token p + 2. The K - 1 further guesses come from mask rows at the next
positions, which read a mask token's embedding and one learned vector in the place of the base's hidden states. Mask
rows see the text and earlier mask rows; their keys and values are never cached.

Training has the paper's conditional drop-token (COD, of PARD, arXiv 2504.18583) if `PEagleSettings.retention` is less
than 1 and ``num_anchors`` is at least the length of the text: the first guess is trained at every position, and guess
g only in ``retention ** g`` of the rollouts, all of which have guess g - 1 too. Dropped guesses are not computed.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax import ops
from hydrajax.drafters.block import ROWS_AT_ONCE, BlockDrafter, BlockSettings, one_by_one
from hydrajax.drafters.block_network import Text
from hydrajax.drafters.drafter import following_tokens, last_observed
from hydrajax.drafters.eagle import EagleState
from hydrajax.drafters.eagle3 import Eagle3Network, default_aux_hidden_layers
from hydrajax.drafters.kind import DrafterKind
from hydrajax.drafters.settings import vocabulary_of
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import KVSegment, causal_mask, rope_table
from hydrajax.models.cache import Block, append, init_cache
from hydrajax.models.layers import DecoderLayer, RMSNorm
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.packed_forward import row_layout
from hydrajax.models.weights import declare


@dataclass(frozen=True)
class PEagleSettings(BlockSettings):
    """Settings of P-EAGLE drafts.

    Attributes:
        retention: r of COD; 1 drops nothing.
        least_retention: At least this part of the rollouts has each guess.
    """

    retention: float = 1.0
    least_retention: float = 0.2

    def __post_init__(self):
        super().__post_init__()
        for name in ("retention", "least_retention"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise HydrajaxError(f"draft.{name}: got {value}, expected more than 0 and at most 1")


class PEagleNetwork(Eagle3Network):
    """EAGLE-3's network with several layers, of which the first reads [norm(E), norm(g)], and a vector for masks.

    Attributes:
        own_embedding: It has its own embedding, which speculators trains.
    """

    own_embedding: bool = False

    def setup(self):
        c, normal = self.config, nn.initializers.normal(0.02)
        self.fc = declare(self, "fc", (self.n_reads * c.width, c.width), ("width", "mlp"), normal)
        self.mask_hidden = declare(
            self, "mask_hidden", (self.n_reads * c.width,), ("width",), nn.initializers.normal(1)
        )
        self.embedding_norm = RMSNorm(c.norm_eps, self.dtype)
        self.hidden_norm = RMSNorm(c.norm_eps, self.dtype)
        self.layers = [DecoderLayer(c, self.dtype) for _ in range(c.n_layers)]
        self.norm = RMSNorm(c.norm_eps, self.dtype)
        self.lm_params = self.lm_head.declare(self, c.width, c.vocab_size)
        if self.own_embedding:
            self.embedding = declare(self, "embedding", (c.vocab_size, c.width), ("vocab", "width"), normal)

    def embed(self, tokens, base_embed):
        """Return the embeddings of tokens."""
        return ops.take_rows(self.embedding, tokens) if self.own_embedding else base_embed(tokens)

    def masks(self) -> Float[Array, "1 1 D"]:
        """Return what mask rows read in the place of the base's hidden states."""
        return self.fused(self.mask_hidden[None, None])

    def __call__(
        self, embeddings, hidden, positions, block_mask, past: Sequence[Sequence[KVSegment]]
    ) -> tuple[Float[Array, "B T D"], Block]:
        """Return outputs before the norm, and keys and values by layer."""
        normed = self.hidden_norm(hidden)
        both = jnp.concatenate([self.embedding_norm(embeddings), normed], axis=-1)
        x, added, rope = normed if self.norm_before_residual else hidden, None, rope_table(self.config, positions)
        block = []
        for layer, segments in zip(self.layers, past, strict=True):
            x, added, keys = layer(x, added, rope, block_mask, segments, both)
            block.append(keys)
            both = None
        return x + added, tuple(block)

    def everything(self, aux_hidden_states, x, positions, base_logits):
        """Touch every parameter, for `init`."""
        self.masks()
        past = [()] * self.config.n_layers
        hidden = self.fused(aux_hidden_states)
        return self.logits(self(x, hidden, positions, np.ones((1, 1), bool), past)[0], base_logits)


@dataclass(frozen=True)
class PEagle(BlockDrafter):
    """P-EAGLE. Other attributes are those of `hydrajax.drafters.dflash.DFlash`.

    Attributes:
        mask_token: Id of the token whose embedding mask rows read.
        block_size: K, the number of guesses.
        num_anchors: Rollouts per row of training text.
        norm_before_residual, own_embedding: See `PEagleNetwork`.
        retention, least_retention: See `PEagleSettings`.
    """

    config: LlamaConfig
    aux_hidden_layers: tuple[int, ...]
    mask_token: int
    block_size: int = 8
    vocabulary: Vocabulary | None = None
    dtype: DType = jnp.float32
    num_anchors: int = 64
    norm_before_residual: bool = False
    own_embedding: bool = False
    retention: float = 1.0
    least_retention: float = 0.2
    first_slot: ClassVar[int] = 0
    ends_at_gaps: ClassVar[bool] = False
    causal: ClassVar[bool] = True
    windows: ClassVar[tuple[int, ...]] = ()
    shares_lm_head = False
    Settings = PEagleSettings

    def __post_init__(self):
        self.check_block()

    @classmethod
    def for_base(cls, base, dtype, settings=None, target_counts=None):
        """Return a draft with layers like the base's, which reads EAGLE-3's layers unless the settings name others."""
        s = settings or PEagleSettings()
        return cls(
            base.plain_layer.replace(n_layers=s.n_layers),
            s.reads(base) if s.target_layers else default_aux_hidden_layers(base.n_layers),
            s.mask_of(base),
            s.block_size,
            vocabulary_of(s.vocabulary, base, target_counts),
            jnp.dtype(dtype),
            s.num_anchors,
            retention=s.retention,
            least_retention=s.least_retention,
        )

    @property
    def network(self) -> PEagleNetwork:
        reads, own = len(self.aux_hidden_layers), self.own_embedding
        return PEagleNetwork(self.config, self.dtype, reads, self.lm_head, self.norm_before_residual, own)

    def init_state(self, batch, slots):
        cache = init_cache(self.config, batch, slots, self.dtype)
        return EagleState(cache, jnp.zeros((batch, self.config.width), self.dtype))

    def advance(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        """Run the rows of positions that the base has processed, each with the token that followed."""
        cache, n_tokens = state.cache, tokens.shape[1]
        positions = cache.lengths[:, None] + jnp.arange(n_tokens)
        embeddings = self._embed(params, following_tokens(tokens, counts, bonus_token), base)
        fused = self._apply(params, aux_hidden_states, method="fused")
        past = [cache.segments(layer) for layer in range(self.config.n_layers)]
        hidden, block = self._apply(params, embeddings, fused, positions, causal_mask(n_tokens), past)
        return EagleState(append(cache, block, counts, after=hidden[:, 0, 0]), last_observed(hidden, counts))

    def slots(self, params, state, root, n_levels, base):
        cache, first = state.cache, state.hidden[:, None]
        if n_levels == 1:
            return first
        past = [cache.segments(layer) for layer in range(self.config.n_layers)]
        positions = cache.lengths[:, None] + jnp.arange(n_levels - 1)
        own = np.tri(n_levels - 1, dtype=bool)
        return jnp.concatenate([first, self._masks(params, positions, own, past, base)], axis=1)

    def _masks(self, params, positions, block_mask, past, base) -> Float[Array, "B T D"]:
        """Return the outputs of mask rows at these positions."""
        embeddings = self._embed(params, jnp.full(positions.shape, self.mask_token), base)
        hidden = jnp.broadcast_to(self._apply(params, method="masks"), embeddings.shape)
        return self._apply(params, embeddings, hidden, positions, block_mask, past)[0]

    def _embed(self, params, tokens, base):
        return self._apply(params, tokens, base.embed, method="embed").astype(self.dtype)

    # --- training -----------------------------------------------------------------------------------------------------

    def trained_on(self, found):
        drafter = super().trained_on(found)
        return dataclasses.replace(drafter, retention=self.retention, least_retention=self.least_retention)

    def read(self, params, aux_hidden_states, tokens, segments, base):
        positions, mask = row_layout(tokens, segments)
        embeddings = self._embed(params, jnp.roll(tokens, -1, axis=1), base)
        fused = self._apply(params, aux_hidden_states, method="fused")
        hidden, block = self._apply(params, embeddings, fused, positions, mask, [()] * self.config.n_layers)
        return Text(tokens, positions, segments, block, hidden)

    def blocks_after(self, params, text, anchors, base):
        (batch, n_blocks), size = anchors.shape, self.depth - 1
        first = self._first(text, anchors)[:, :, None]
        if not size:
            return first
        block, level = np.divmod(np.arange(n_blocks * size), size)
        masks = self._masks_after(params, text, anchors[:, block], block, level, base)
        return jnp.concatenate([first, masks.reshape(batch, n_blocks, size, -1)], axis=2)

    def guesses(self, n_blocks):
        """Return the first guesses of all rollouts, then those of the mask rows of each pass."""
        rollouts, level = self._mask_rows(n_blocks)
        masks = np.where(rollouts >= 0, rollouts * self.depth + level + 1, -1)
        return np.concatenate([np.arange(n_blocks) * self.depth, masks.ravel()])[:, None]

    def hidden_of_guesses(self, params, text, anchors, base):
        first, (rollouts, level) = self._first(text, anchors), self._mask_rows(anchors.shape[1])
        if not len(level):
            return first[:, :, None]
        masks = one_by_one(
            lambda anchors: self._masks_after(params, text, anchors, rollouts[0], level, base),
            jnp.moveaxis(anchors[:, rollouts], 1, 0),
        )
        return jnp.concatenate([first, masks], axis=1)[:, :, None]

    def _mask_rows(self, n_blocks: int) -> tuple[Int[np.ndarray, "passes rows"], Int[np.ndarray, " rows"]]:
        """Return the rollouts of the mask rows of each pass in training, and the guesses of these rows, less 1.

        The rollouts have a random order, so guess g is in the first n r^g of them. The passes take them in turn, and so
        differ by at most one rollout with a guess. It is -1 where a pass has none; the first pass has all.
        """
        retained = np.maximum(self.retention ** np.arange(1, self.depth), self.least_retention)
        counts = (n_blocks * retained).astype(int)
        n_passes = max(-(-int(counts.sum()) // ROWS_AT_ONCE), 1)
        place, level = np.nonzero(np.arange(n_blocks)[:, None] < -(-counts // n_passes))
        rollouts = place * n_passes + np.arange(n_passes)[:, None]
        return np.where(rollouts < counts[level], rollouts, -1), level

    def _first(self, text: Text, anchors) -> Float[Array, "B A D"]:
        """Return the outputs at the row before each anchor.

        It pairs the anchor's embedding with the last hidden states that the base has computed.
        """
        return jnp.take_along_axis(text.hidden, jnp.maximum(anchors - 1, 0)[:, :, None], axis=1)

    def _masks_after(self, params, text: Text, anchors, block, level, base) -> Float[Array, "B rows D"]:
        """Return the outputs of mask rows, each of the rollout ``block`` and ``level`` positions after its anchor."""
        before, places = text.seen_by(anchors, level)
        own = (block[:, None] == block) & (level[:, None] >= level)
        past = [(KVSegment(*pair, before[:, None, None]),) for pair in text.block]
        return self._masks(params, places, own, past, base)


KIND = DrafterKind("P-EAGLE", PEagle, PEagleSettings(4, 8))
