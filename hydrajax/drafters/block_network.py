"""The network of drafts of one pass (`hydrajax.drafters.block`), their state, and the texts that they train on."""

from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.drafters.clusters import ChosenLogits
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.markov import MarkovHead, MarkovNetwork
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import KVSegment, rope_table
from hydrajax.models.cache import Block, KVCache
from hydrajax.models.layers import DecoderLayer, RMSNorm
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import declare, project


class BlockState(NamedTuple):
    """The state: keys and values of the context, for each draft layer."""

    cache: KVCache


class Text(NamedTuple):
    """Texts that blocks read in training.

    Attributes:
        hidden: ``[B, T, D]`` outputs at the texts' own rows, of drafts that have such.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"] | None
    block: Block
    hidden: Float[Array, "B T D"] | None = None

    def seen_by(
        self, anchors: Int[Array, "B rows"], ahead: Int[np.ndarray, " rows"]
    ) -> tuple[Bool[Array, "B rows T"], Int[Array, "B rows"]]:
        """Return which tokens the rows of blocks see, by the rows' anchors, and the rows' positions, ``ahead`` of
        those.
        """
        before = jnp.arange(self.tokens.shape[1]) < anchors[:, :, None]
        if self.segments is not None:
            before &= self.segments[:, None, :] == jnp.take_along_axis(self.segments, anchors, axis=1)[:, :, None]
        return before, jnp.take_along_axis(self.positions, anchors, axis=1) + ahead


class BlockNetwork(nn.Module):
    """fc and norm of the base's hidden states, decoder layers over the block, a final norm, and the heads.

    Attributes:
        config: Shape of the draft layers, with the base's width and vocabulary.
        n_reads: Number of the base's hidden states that fc reads.
        markov: The Markov head; None without one.
        confidence: What the confidence head reads: the ``"hidden"`` state, or also the token before (``"markov"``).
            None without one.
    """

    config: LlamaConfig
    dtype: DType
    n_reads: int
    lm_head: LmHead
    markov: MarkovHead | None = None
    confidence: str | None = None

    def setup(self):
        c, normal = self.config, nn.initializers.normal(0.02)
        self.fc = declare(self, "fc", (self.n_reads * c.width, c.width), ("width", "mlp"), normal)
        self.hidden_norm = RMSNorm(c.norm_eps, self.dtype)
        self.layers = [DecoderLayer(c, self.dtype) for _ in range(c.n_layers)]
        self.norm = RMSNorm(c.norm_eps, self.dtype)
        self.lm_params = self.lm_head.declare(self, c.width, c.vocab_size)
        if self.markov is not None:
            sizes = c.vocab_size, self.lm_head.size(c.vocab_size)
            self.markov_head = MarkovNetwork(self.markov, c.width, sizes, self.dtype)
        if self.confidence is not None:
            inputs = c.width + (self.markov.rank if self.markov and self.confidence == "markov" else 0)
            self.confidence_kernel = declare(self, "confidence_kernel", (inputs, 1), (None, None), normal)
            self.confidence_bias = declare(self, "confidence_bias", (1,), (None,), nn.initializers.zeros)

    def context(self, aux_hidden_states: Float[Array, "B T nD"], positions: Int[Array, "B T"]) -> Block:
        """Return keys and values of the context, layer by layer."""
        fused = self.hidden_norm(project(aux_hidden_states.astype(self.dtype), self.fc))
        rope = rope_table(self.config, positions)
        return tuple(layer(fused, None, rope, None, (), fused, only_keys_values=True)[2] for layer in self.layers)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        block_masks: Sequence[Bool[np.ndarray, "T T"]],
        past: Sequence[Sequence[KVSegment]],
    ) -> Float[Array, "B T D"]:
        """Return the lm head's input at the T positions of blocks, which attend to ``past`` and each other by layer."""
        rope, added = rope_table(self.config, positions), None
        for layer, block_mask, segments in zip(self.layers, block_masks, past, strict=True):
            x, added, _ = layer(x, added, rope, block_mask, segments)
        return self.norm.of_sum(x, added)[1]

    def logits(self, hidden: Float[Array, "*rows D"], base_logits) -> Float[Array, "*rows V_"] | ChosenLogits:
        """Return float32 logits over the draft's vocabulary, without the Markov head's correction."""
        return self.lm_head.logits(self.lm_params, hidden, base_logits)

    def corrected(self, state, before, hidden):
        """Call the Markov head (`MarkovNetwork`)."""
        return self.markov_head(state, before, hidden)

    def corrections(self, before, hidden):
        """Return the Markov head's corrections of whole blocks (`MarkovNetwork.along`)."""
        return self.markov_head.along(before, hidden)

    def confidence_logits(self, hidden: Float[Array, "*rows D"], before: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
        """Return the float32 logit of the probability that a slot's token is accepted, given the token before it."""
        if self.confidence == "markov":
            hidden = jnp.concatenate([hidden, self.markov_head.embed(before)], axis=-1)
        out = project(hidden, self.confidence_kernel, jnp.float32) + self.confidence_bias.astype(jnp.float32)
        return out[..., 0]

    def everything(self, aux_hidden_states, x, positions, base_logits):
        """Touch every parameter, for `init`."""
        n_layers = self.config.n_layers
        hidden = self(x, positions, [np.ones((1, 1), bool)] * n_layers, [()] * n_layers)
        self.context(aux_hidden_states, positions)
        if self.markov is not None:
            self.corrections(positions, hidden)
        if self.confidence is not None:
            self.confidence_logits(hidden, positions)
        return self.logits(hidden, base_logits)
