"""Multi-token prediction (MTP): the draft module that some bases are trained and published with.

DeepSeek-V3 (arXiv 2412.19437, section 2.2): at position i the module reads the base's hidden state h_i and the
embedding of the token that *follows*, and predicts token i + 2 with the base's own lm head,

    h'_i = norm(layer(M [norm(h_i); norm(E(x_{i+1}))]))    logits = lm_head(h'_i)

This is EAGLE's procedure (`hydrajax.drafters.eagle`) with another network: both inputs have a norm, the layer is a
whole decoder layer of the base's own kind, and the output has a norm too. Its KV cache holds accepted tokens only.

Published modules differ in two facts (`MTP`): which input comes first in M, and whether h is the base's hidden state
before or after its final norm. For further tokens the one module is applied again, to its own *normed* output, as in
SGLang and in vLLM's MiMo. A base with several modules, one for each further token, is used with its first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from hydrajax.drafters.draft_lm_head import LmHead, Vocabulary
from hydrajax.drafters.eagle import DEPTH, EagleDrafter, EagleSettings
from hydrajax.drafters.settings import vocabulary_of
from hydrajax.models import backend
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import rope_table
from hydrajax.models.layers import DecoderLayer, RMSNorm
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import declare, project


class MTPNetwork(nn.Module):
    """M [norm(h_i), norm(E(x_{i+1}))], a decoder layer, and a norm in front of the base's lm head."""

    config: LlamaConfig
    dtype: DType
    lm_head: LmHead
    embedding_first: bool

    def setup(self):
        c = self.config
        norm = partial(RMSNorm, c.norm_eps, self.dtype, c.norm_offset)
        start = nn.initializers.zeros if c.norm_offset else nn.initializers.ones
        self.embedding_norm = norm()
        self.hidden_scale = declare(self, "hidden_norm", (c.width,), ("width",), start)
        self.fc = declare(self, "fc", (2 * c.width, c.width), ("width", "mlp"), nn.initializers.normal(0.02))
        self.layer = DecoderLayer(c, self.dtype)
        self.norm = norm()

    def normed(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Return norm(h), which the module reads."""
        return backend.add_norm(hidden, None, self._scale(), self.config.norm_eps)[1]

    def fused(
        self, aux_hidden_states: Float[Array, "B T D"], final_norm: Float[Array, " D"] | None = None
    ) -> Float[Array, "B T D"]:
        """Return norm(h) of the base's hidden states.

        With ``final_norm`` h is the input x of the base's final norm, of which the base returns the output,
        x / rms(x) * final_norm. So norm(h) = x / rms(x) * scale follows without x, and exactly.
        """
        hidden = aux_hidden_states.astype(self.dtype)
        if final_norm is None:
            return self.normed(hidden)
        ratio = self._scale().astype(jnp.float32) / jnp.where(final_norm == 0, 1, final_norm)
        return (hidden * ratio).astype(self.dtype)

    def _scale(self) -> Float[Array, " D"]:
        return 1 + self.hidden_scale.astype(jnp.float32) if self.config.norm_offset else self.hidden_scale

    def __call__(self, embeddings, hidden, positions, block_mask, past=()):
        """Return normed outputs ``[B, T, D]`` at T positions, and their keys and values."""
        both = [hidden, self.embedding_norm(embeddings)]
        x = project(jnp.concatenate(both[::-1] if self.embedding_first else both, axis=-1), self.fc)
        x, added, block = self.layer(x, None, rope_table(self.config, positions), block_mask, past)
        return self.norm.of_sum(x, added)[1], block

    def logits(self, hidden, base_logits):
        """Return float32 logits over the draft's vocabulary."""
        return self.lm_head.of_base(hidden, base_logits)

    def everything(self, aux_hidden_states, embeddings, positions, base_logits):
        """Touch every parameter, for `init`."""
        outputs, _ = self(embeddings, self.fused(aux_hidden_states), positions, np.ones((1, 1), bool))
        return self.logits(outputs, base_logits)


def layer_of(base: LlamaConfig) -> LlamaConfig:
    """Return the module's layer: the base's last one, attending to all tokens."""
    return base.of_layer(base.n_layers - 1).replace(n_layers=1, sliding_window=None)


@dataclass(frozen=True)
class MTP(EagleDrafter):
    """An MTP module.

    Attributes:
        config: Configuration of the layer, with the base's width and vocabulary.
        embedding_first: M multiplies [embedding, hidden state] (GLM-4, DeepSeek-V3, Qwen3-Next) or the other way round
            (MiMo).
        before_final_norm: h is the base's hidden state before its final norm (MiMo).
        ttt_length: See `EagleDrafter`; 1 as released.
        vocabulary: The tokens that it can propose; None for all, as released.
    """

    config: LlamaConfig
    dtype: DType = jnp.float32
    embedding_first: bool = True
    before_final_norm: bool = False
    depth: int = DEPTH
    ttt_length: int = 1
    vocabulary: Vocabulary | None = None
    aux_hidden_layers: ClassVar[tuple[int, ...]] = (0,)
    Settings = EagleSettings

    @classmethod
    def for_base(cls, base, dtype, settings=None, target_counts=None):
        """Return a module as in GLM-4 and DeepSeek-V3, with a layer like the base's last."""
        s = settings or EagleSettings()
        vocabulary = vocabulary_of(s.vocabulary, base, target_counts)
        return cls(layer_of(base), jnp.dtype(dtype), ttt_length=s.ttt_length or cls.ttt_length, vocabulary=vocabulary)

    @property
    def lm_head(self) -> LmHead:
        return LmHead(shared=True, vocabulary=self.vocabulary)

    @property
    def network(self) -> MTPNetwork:
        return MTPNetwork(self.config, self.dtype, self.lm_head, self.embedding_first)

    def _fused(self, params, aux_hidden_states, base):
        if not self.before_final_norm:
            return super()._fused(params, aux_hidden_states, base)
        final_norm = base.params["norm"]["scale"].astype(jnp.float32) + base.config.norm_offset
        return self._apply(params, aux_hidden_states, final_norm, method="fused")

    def _fed_back(self, params, hidden):
        return self._apply(params, hidden, method="normed")
