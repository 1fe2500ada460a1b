"""Model configurations as frozen, hashable dataclasses, so that they can be static arguments of jitted functions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.models.expert_settings import Experts
from hydrajax.models.latent_settings import Latent
from hydrajax.models.recurrent_settings import Recurrent
from hydrajax.models.rope_scaling import RopeScaling

NORMS = ("before", "both", "after")
SEPARATE_GATES = ("muse_glimmer",)  # names: files have attention's gate as a tensor of its own
NORM_SCALES = ("all", "layers", "none")
KV_HEADS = 8  # of a plain layer for a base with latent attention
ACTIVATIONS = ("silu", "gelu_tanh", "relu2")
# Settings of a `LayerKind` that may be the configuration's.
OF_CONFIG = ("norms", "n_kv_heads", "head_dim", "mlp_width")


@dataclass(frozen=True)
class LayerKind:
    """The settings by which the layers of one model differ, as in `LlamaConfig`.

    Attributes:
        rope_theta: None for layers without rotary embedding.
        norms, n_kv_heads, head_dim, mlp_width: None for those of the configuration.
        recurrent: The layer keeps a state in place of keys and values; None for attention.
    """

    sliding_window: int | None = None
    rope_theta: float | None = 10_000.0
    rope_scaling: RopeScaling | None = None
    experts: Experts | None = None
    norms: str | None = None
    recurrent: Recurrent | None = None
    mlp: bool = True
    n_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_width: int | None = None
    shared_kv: bool = False
    values_are_keys: bool = False

    @property
    def parameters(self) -> LayerKind:
        """The settings by which the parameters and the operations of layers differ."""
        return dataclasses.replace(self, sliding_window=None, rope_theta=None, rope_scaling=None)

    @property
    def attention(self) -> LayerKind:
        """The settings by which what its attention sees, and its rotary embedding, differ."""
        return LayerKind(
            self.sliding_window, self.rope_theta, self.rope_scaling, recurrent=self.recurrent, head_dim=self.head_dim
        )


@dataclass(frozen=True)
class LlamaConfig:
    """Shapes and constants of a LLaMA-family model, named as in docs/design.md 2.

    Attributes:
        rope_theta: Base of the rotary frequencies; None for no rotary embedding.
        rotary_dim: Features of a head that are rotated, its first ones (Phi-4-mini); None for all.
        qkv_bias: Query, key and value projections have biases (Qwen 2).
        out_bias: The output projection of attention has one too (gpt-oss).
        attention_sinks: A learned logit of each head takes part in the softmax, without a value (gpt-oss).
        qk_norm: RMSNorm over each head's query and key features, before rotation (Qwen 3, Gemma 3).
        norm_after_rope: Norms of queries and keys come after the rotary embedding (HunYuan, nanochat).
        rope_reversed: Rotary angles are negative (nanochat).
        qk_norm_all_heads: RMSNorm over the query and key features of all heads together (OLMo 2, OLMo 3).
        sliding_window: Number of tokens attended to, itself included (Mistral); None for all.
        layer_kinds: The window, the rotary embedding and the experts of each layer, where layers differ. Empty: all
            layers have those of the config.
        norms: Norms of attention and MLP: ``"before"`` each (LLaMA), ``"both"`` before and after (Gemma 2, Gemma 3) or
            ``"after"`` (OLMo 2, OLMo 3).
        norm_offset: Norms multiply by 1 + scale, in float32 (Gemma).
        final_norm_offset: So does the final norm (not Muse Glimmer's).
        norm_scales: The norms that have scales: ``"all"``, ``"layers"``, those of layers and the final one but not
            those of queries and keys (Muse Glimmer), or ``"none"`` (nanochat).
        out_norm_eps: Of the norms after attention and MLP (Muse Glimmer); None for ``norm_eps``.
        activation: Of the MLP's gate; ``"relu2"``, the square of relu, is that of an MLP without a gate (Nemotron-H).
        embedding_norm: RMSNorm without scale over the embeddings (Muse Glimmer, nanochat).
        embedding_scale: Multiplies the embeddings (Gemma, Granite).
        residual_scale: Multiplies what attention and MLP add to the residual stream (Granite).
        attention_scale: Multiplies the scores; None for ``head_dim ** -0.5``.
        attention_softcap: Scores are ``cap * tanh(score / cap)`` (Gemma 2); None for no cap.
        logits_divisor: Divides the logits (Granite).
        logits_softcap: The same cap on logits (Gemma 2).
        fused_projections: Files hold query, key and value projections as one tensor, and gate and up as one (Phi 3).
        experts: The mixture of experts in place of each MLP; None for an MLP of ``mlp_width``.
        attention_gate: Attention is multiplied by the sigmoid of a product with its input, by head and feature
            (Qwen3-Next).
        head_gate: The same by head alone (LFM3).
        value_norm: Each head's values are divided by their root mean square (Gemma 4).
        values_are_keys: Values are the keys before their norm and rotation (Gemma 4).
        shared_kv: The layer has no keys and values of its own: it attends to those of the last layer before it that has
            some and whose window is the same (Gemma 4, Gemma 3n).
        latent: Latent attention (DeepSeek-V3): the cache has one key-value head, a token's latent and rotated key, for
            keys and values. `n_kv_heads`, `head_dim` and `rotary_dim` are those of this head.
        layer_scale: The residual stream is multiplied by a number after each layer (Gemma 4).
        per_layer_width: Width of the embedding that a token has for each layer (`hydrajax.models.per_layer`, Gemma 4);
            0 for none.
        per_layer_vocab: Number of tokens with such an embedding.
        recurrent: The layers keep a state in place of keys and values (`hydrajax.models.recurrent_settings`); None for
            attention.
        mlp: Layers have an MLP or experts; without, they end with attention or its like (Nemotron-H).
        names: Form of the tensors' names in files (`hydrajax.families.tensor_names.NAMES`).
    """

    vocab_size: int
    width: int
    mlp_width: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_positions: int = 2048
    norm_eps: float = 1e-6
    rope_theta: float | None = 10_000.0
    rope_scaling: RopeScaling | None = None
    tied_lm_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    qk_norm_all_heads: bool = False
    rotary_dim: int | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    norms: str = "before"
    norm_offset: bool = False
    activation: str = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    fused_projections: bool = False
    experts: Experts | None = None
    attention_gate: bool = False
    recurrent: Recurrent | None = None
    head_gate: bool = False
    mlp: bool = True
    final_norm_offset: bool = True
    norm_scales: str = "all"
    out_norm_eps: float | None = None
    embedding_norm: bool = False
    norm_after_rope: bool = False
    rope_reversed: bool = False
    names: str = "llama"
    out_bias: bool = False
    attention_sinks: bool = False
    value_norm: bool = False
    values_are_keys: bool = False
    shared_kv: bool = False
    layer_scale: bool = False
    per_layer_width: int = 0
    per_layer_vocab: int = 0
    latent: Latent | None = None

    def __post_init__(self):
        for name in ("vocab_size", "width", "mlp_width", "n_layers", "n_heads", "n_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise HydrajaxError(f"{name}: got {getattr(self, name)}, expected at least 1")
        for heads in {self.n_kv_heads, *(kind.n_kv_heads for kind in self.layer_kinds)} - {None}:
            if heads < 1 or self.n_heads % heads:
                raise HydrajaxError(f"n_kv_heads: got {heads} for {self.n_heads} heads, expected a divisor")
        for window in (self.sliding_window, *(kind.sliding_window for kind in self.layer_kinds)):
            if window is not None and window < 1:
                raise HydrajaxError(f"sliding_window: got {window}, expected at least 1")
        for size in {self.head_dim, *(kind.head_dim for kind in self.layer_kinds)} - {None}:
            if size % 2 or size < 1:
                raise HydrajaxError(f"head_dim: got {size}, expected an even number for rotary embeddings")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim):
            raise HydrajaxError(
                f"rotary_dim: got {self.rotary_dim}, expected an even number up to head_dim, {self.head_dim}"
            )
        if self.layer_kinds and len(self.layer_kinds) != self.n_layers:
            raise HydrajaxError(f"layer_kinds: got {len(self.layer_kinds)}, expected one for each of {self.n_layers}")
        for name, allowed in (("norms", NORMS), ("activation", ACTIVATIONS), ("norm_scales", NORM_SCALES)):
            if getattr(self, name) not in allowed:
                raise not_allowed(name, getattr(self, name), allowed)
        for name in ("attention_scale", "attention_softcap", "logits_divisor", "logits_softcap"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise HydrajaxError(f"{name}: got {getattr(self, name)}, expected a positive number")
        scaling, pairs = self.rope_scaling, (self.rotary_dim or self.head_dim) // 2
        for name in ("short_factors", "long_factors"):
            if scaling is not None and scaling.kind == "longrope" and len(getattr(scaling, name)) != pairs:
                raise HydrajaxError(f"rope scaling: {name}: got {len(getattr(scaling, name))}, expected {pairs}")

    @property
    def queries_per_kv(self) -> int:
        """Number of query heads per key-value head (1 for multi-head attention)."""
        return self.n_heads // self.n_kv_heads

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        if self.layer_kinds:
            return self.layer_kinds
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(LayerKind)}
        return (LayerKind(**own | dict.fromkeys(OF_CONFIG)),) * self.n_layers

    @property
    def kv_layers(self) -> tuple[int | None, ...]:
        """The layer whose keys and values each layer attends to, itself or an earlier one; None for a recurrent layer,
        and where no earlier layer has some (`hydrajax.drafters.gemma4_assistant`).
        """
        found: list[int | None] = []
        last: dict[int | None, int] = {}
        for i, kind in enumerate(self.kinds):
            if kind.recurrent is None and not kind.shared_kv:
                last[kind.sliding_window] = i
            found.append(last.get(kind.sliding_window) if kind.recurrent is None else None)
        return tuple(found)

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """Key-value heads and their features of each layer that has keys and values of its own."""
        return tuple(
            (kind.n_kv_heads or self.n_kv_heads, kind.head_dim or self.head_dim)
            for i, (kind, source) in enumerate(zip(self.kinds, self.kv_layers, strict=True))
            if source == i
        )

    @property
    def any_recurrent(self) -> bool:
        """Some layers keep a state in place of keys and values."""
        return any(kind.recurrent for kind in self.layer_kinds or (self,))

    @property
    def separable(self) -> bool:
        """A layer alone has the parameters and the operations that it has among the others."""
        return not (self.per_layer_width or any(kind.shared_kv for kind in self.layer_kinds or (self,)))

    @property
    def any_experts(self) -> Experts | None:
        """The experts of the layers that have some; None if no layer does."""
        return next((kind.experts for kind in self.kinds if kind.experts), None)

    def of_kind(self, kind: LayerKind) -> LlamaConfig:
        """Return the configuration with the settings of one kind of layer for all layers."""
        own = {name: value for name, value in vars(kind).items() if value is not None or name not in OF_CONFIG}
        return dataclasses.replace(self, layer_kinds=(), **own)

    def of_layer(self, layer: int) -> LlamaConfig:
        """Return the configuration with the settings of this layer for all layers."""
        return self.of_kind(self.layer_kinds[layer]) if self.layer_kinds else self

    @property
    def plain_layer(self) -> LlamaConfig:
        """One LLaMA layer of this shape without a family's extras, such as a prefix layer (hydra 3.1).

        It has the base's rotary embedding, except for longrope's, whose divisors belong to the base's features, and
        without a factor of queries.
        """
        scaling, heads, size = self.rope_scaling, self.n_kv_heads, self.head_dim
        if scaling is not None:
            scaling = None if scaling.kind == "longrope" else dataclasses.replace(scaling, query_beta=0.0)
        if self.latent is not None:  # heads of ordinary size, and as many keys as in other models
            heads, size = math.gcd(self.n_heads, KV_HEADS), self.latent.value_dim + self.latent.value_dim % 2
        return LlamaConfig(
            *(getattr(self, name) for name in ("vocab_size", "width", "mlp_width")),
            n_layers=1,
            n_heads=self.n_heads,
            n_kv_heads=heads,
            head_dim=size,
            max_positions=self.max_positions,
            norm_eps=self.norm_eps,
            rope_theta=self.rope_theta or LlamaConfig.rope_theta,
            rope_scaling=scaling,
            tied_lm_head=self.tied_lm_head,
        )

    def with_kinds(self, kinds: Iterable[LayerKind]) -> LlamaConfig:
        """Return the configuration with these kinds of layers; where all layers are alike it is of that kind."""
        kinds = tuple(kinds)
        return self.of_kind(kinds[0]) if len(set(kinds)) == 1 else self.replace(layer_kinds=kinds)

    def replace(self, **changes) -> LlamaConfig:
        """Return the configuration with some fields changed. With another number of layers, their kinds repeat."""
        if self.layer_kinds and "n_layers" in changes and "layer_kinds" not in changes:
            kinds = itertools.islice(itertools.cycle(self.layer_kinds), changes["n_layers"])
            changes["layer_kinds"] = tuple(kinds)
        return dataclasses.replace(self, **changes)
