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

from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.eagle import DEPTH, EagleDrafter, EagleSettings
from hydrajax.drafters.kind import DrafterKind
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import rope_table
from hydrajax.models.base_model import BEFORE_FINAL_NORM
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
        self.embedding_norm, self.hidden_norm = norm(), norm()
        self.fc = declare(self, "fc", (2 * c.width, c.width), ("width", "mlp"), nn.initializers.normal(0.02))
        self.layer = DecoderLayer(c, self.dtype)
        self.norm = norm()

    def fused(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Return norm(h), of the base's hidden states or of the module's own outputs."""
        return self.hidden_norm(hidden.astype(self.dtype))

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
    Settings = EagleSettings

    @staticmethod
    def layer_of(base):
        """Return the configuration of the base's last layer of attention, attending to all tokens."""
        last = max((i for i, source in enumerate(base.kv_layers) if source == i), default=None)
        if last is None:
            raise HydrajaxError("heads: got mtp, which needs a base with layers of attention")
        return base.of_layer(last).replace(n_layers=1, sliding_window=None, per_layer_width=0, per_layer_vocab=0)

    @property
    def aux_hidden_layers(self) -> tuple[int, ...]:
        return (BEFORE_FINAL_NORM if self.before_final_norm else 0,)

    @property
    def network(self) -> MTPNetwork:
        return MTPNetwork(self.config, self.dtype, self.lm_head, self.embedding_first)

    def _fed_back(self, params, hidden):
        return self._apply(params, hidden, method="fused")


KIND = DrafterKind("MTP", MTP)
