"""EAGLE-3 (Li et al. 2025): EAGLE that reads the base at three depths and need not predict its hidden states."""

import itertools
from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.eagle import DEPTH, EagleDrafter, EagleSettings
from hydrajax.drafters.kind import DrafterKind
from hydrajax.drafters.settings import vocabulary_of, within_base
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import rope_table
from hydrajax.models.layers import DecoderLayer, RMSNorm
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import declare, project


class Eagle3Network(nn.Module):
    """A decoder layer whose attention reads [norm(E(x_{i+1})), norm(g_i)], with a norm and an lm head.

    g_i is fc of the base's hidden states at position i, or the layer's own output at a drafted position. The layer adds
    to g_i, or to norm(g_i) with ``norm_before_residual``.
    """

    config: LlamaConfig
    dtype: DType
    n_reads: int
    lm_head: LmHead
    norm_before_residual: bool = False

    def setup(self):
        c = self.config
        normal = nn.initializers.normal(0.02)
        self.fc = declare(self, "fc", (self.n_reads * c.width, c.width), ("width", "mlp"), normal)
        self.embedding_norm = RMSNorm(c.norm_eps, self.dtype)
        self.hidden_norm = RMSNorm(c.norm_eps, self.dtype)
        self.layer = DecoderLayer(c, self.dtype)
        self.norm = RMSNorm(c.norm_eps, self.dtype)
        self.lm_params = self.lm_head.declare(self, c.width, c.vocab_size)

    def fused(self, aux_hidden_states: Float[Array, "B T nD"]) -> Float[Array, "B T D"]:
        """Return the layer's input at positions that the base has processed; elsewhere it reads its own output."""
        return project(aux_hidden_states.astype(self.dtype), self.fc)

    def __call__(self, embeddings, hidden, positions, block_mask, past=()):
        """Return outputs ``[B, T, D]`` at T positions, before the norm, and their keys and values."""
        normed = self.hidden_norm(hidden)
        both = jnp.concatenate([self.embedding_norm(embeddings), normed], axis=-1)
        start = normed if self.norm_before_residual else hidden
        x, added, block = self.layer(start, None, rope_table(self.config, positions), block_mask, past, both)
        return x + added, block

    def logits(self, hidden, base_logits):
        """Return float32 logits over the draft's vocabulary."""
        return self.lm_head.logits(self.lm_params, self.norm(hidden), base_logits)

    def everything(self, aux_hidden_states, embeddings, positions, base_logits):
        """Touch every parameter, for `init`."""
        block_mask = jnp.ones((1, 1), bool)
        return self.logits(self(embeddings, self.fused(aux_hidden_states), positions, block_mask)[0], base_logits)


def default_aux_hidden_layers(n_layers: int) -> tuple[int, ...]:
    """Return the hidden states to read of a base with this many layers: inputs of a low, a middle and a high layer
    (eagle-3 3.1).

    Counted from 0, these are layers 2, L // 2 and L - 3, as in the released code, where they are distinct: for 3 layers
    and from 7 up. A base with fewer than 3 layers gives the nearest ones, and duplicates are dropped. The result counts
    from the end, see `hydrajax.models.base_model.BaseModel.__call__`.
    """
    layers = sorted({min(2, n_layers - 1), n_layers // 2, max(n_layers - 3, 0)})
    return tuple(n_layers - layer for layer in layers)


@dataclass(frozen=True)
class Eagle3Settings(EagleSettings):
    """Settings of EAGLE-3 drafts.

    Attributes:
        aux_hidden_layers: The layers, counted from 0, whose inputs it reads; the number after the last layer means the
            base's last hidden states. Empty for 2, L // 2 and L - 3 of L.
    """

    aux_hidden_layers: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if any(low >= high for low, high in itertools.pairwise((-1, *self.aux_hidden_layers))):
            raise HydrajaxError(
                f"draft.aux_hidden_layers: got {list(self.aux_hidden_layers)}, expected ascending layers from 0 up"
            )


@dataclass(frozen=True)
class Eagle3(EagleDrafter):
    """EAGLE-3.

    Attributes:
        config: Configuration of the layer, with the base's width and vocabulary.
        aux_hidden_layers: The hidden states of the base that it reads (`default_aux_hidden_layers`).
        vocabulary: The tokens that it can propose; None for all.
        ttt_length: See `hydrajax.drafters.eagle.EagleDrafter`; 7 as released.
        norm_before_residual: As in many drafts of vLLM's library speculators, see `Eagle3Network`.
    """

    config: LlamaConfig
    aux_hidden_layers: tuple[int, ...]
    vocabulary: Vocabulary | None = None
    dtype: DType = jnp.float32
    depth: int = DEPTH
    ttt_length: int = 7
    norm_before_residual: bool = False
    shares_lm_head = False
    Settings = Eagle3Settings

    @classmethod
    def for_base(cls, base, dtype, settings=None, target_counts=None):
        """Return a draft with a layer like the base's."""
        s = settings or Eagle3Settings()
        within_base("draft.aux_hidden_layers", max(s.aux_hidden_layers, default=0), base.n_layers, "layers")
        return cls(
            base.plain_layer,
            tuple(base.n_layers - layer for layer in s.aux_hidden_layers) or default_aux_hidden_layers(base.n_layers),
            vocabulary_of(s.vocabulary, base, target_counts),
            jnp.dtype(dtype),
            ttt_length=s.ttt_length or cls.ttt_length,
        )

    @property
    def network(self) -> Eagle3Network:
        n_reads = len(self.aux_hidden_layers)
        return Eagle3Network(self.config, self.dtype, n_reads, self.lm_head, self.norm_before_residual)


KIND = DrafterKind("EAGLE-3", Eagle3)
