"""Gemma 4's assistant: a draft that attends to the base's own keys and values and stores none.

A few narrow layers read, after the token x_n, its embedding and the base's last hidden state h_{n-1},

    z = layers(P [E(x_n); h_{n-1}])    logits = lm_head(norm(z))    h_n = Q norm(z)

and h_n replaces the base's hidden state for the next token. The layers have queries alone: each attends to the keys and
values of the base's last layer of its own kind, with a window or without. Only committed tokens have some, so every
drafted token is at the position of x_n, attends to the same cache and to no other drafted token: a level of a tree is
rows of one pass.

Smaller models' assistants have an ordered embedding: a row multiplies the tokens of its best clusters alone
(`hydrajax.drafters.clusters`).

transformers drafts chains so (its ``SinglePositionMultiTokenCandidateGenerator``), except that after a rejection the
rejected tokens' keys and values stay visible there until the next pass. Here they are gone.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.drafters.clusters import Clusters
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.drafter import last_observed
from hydrajax.drafters.eagle import DEPTH, EagleDrafter, EagleSettings
from hydrajax.drafters.filling import fill
from hydrajax.drafters.kind import DrafterKind
from hydrajax.drafters.settings import at_least, vocabulary_of
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import KVSegment, Mask, rope_table, windowed
from hydrajax.models.layers import DecoderLayer, RMSNorm
from hydrajax.models.llama_config import LayerKind, LlamaConfig
from hydrajax.models.packed_forward import row_layout
from hydrajax.models.weights import declare, project
from hydrajax.trees.topology import take

WIDTH, LAYERS, MLP_WIDTHS = 256, 4, 8  # of a new draft: at most, and the MLP's width over the layers'


@dataclass(frozen=True)
class OrderedEmbedding:
    """An lm head whose tokens stand by clusters of equal size.

    Attributes:
        clusters: Their number.
        chosen: Number of clusters that a row multiplies.
        tokens: All tokens in this order.
    """

    clusters: int
    chosen: int
    tokens: Vocabulary


class AssistantNetwork(nn.Module):
    """P, the layers, their norm, Q, and the lm head."""

    config: LlamaConfig
    dtype: DType
    base_width: int
    lm_head: LmHead
    ordered: OrderedEmbedding | None

    def setup(self):
        c, normal = self.config, nn.initializers.normal(0.02)
        self.reduce = declare(self, "reduce", (2 * self.base_width, c.width), ("width", "mlp"), normal)
        self.layers = [DecoderLayer(c.of_layer(i), self.dtype) for i in range(c.n_layers)]
        self.norm = RMSNorm(c.norm_eps, self.dtype)
        self.restore = declare(self, "restore", (c.width, self.base_width), (None, "width"), normal)
        if self.ordered is None:
            self.head = self.lm_head.declare(self, c.width, c.vocab_size)
        else:
            shape = (self.ordered.clusters, c.width, c.vocab_size // self.ordered.clusters)
            self.head = declare(self, "lm_clusters", shape, ("vocab", None, None), normal)
            self.centroids = declare(self, "centroids", (c.width, shape[0]), ("width", None), normal)

    def __call__(
        self,
        embeddings: Float[Array, "B T D"],
        hidden: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        segments: Sequence[KVSegment],
    ) -> Float[Array, "B T d"]:
        """Return what the lm head reads at T positions.

        Args:
            hidden: The base's hidden state before each of them, or its replacement.
            segments: What each layer attends to.
        """
        x, added = project(jnp.concatenate([embeddings, hidden.astype(self.dtype)], axis=-1), self.reduce), None
        kinds = dict.fromkeys(self.config.kinds)  # in order: a set's would give each process another program
        ropes = {kind: rope_table(self.config.of_kind(kind), positions) for kind in kinds}
        for layer, kind, segment in zip(self.layers, self.config.kinds, segments, strict=True):
            x, added, _ = layer(x, added, ropes[kind], None, (segment,))
        return self.norm.of_sum(x, added)[1]

    def restored(self, outputs: Float[Array, "*rows d"]) -> Float[Array, "*rows D"]:
        """Return the replacement of the base's hidden state."""
        return project(outputs, self.restore)

    def logits(self, outputs, base_logits):
        """Return float32 logits over the draft's vocabulary."""
        if self.ordered is None:
            return self.lm_head.logits(self.head, outputs, base_logits)
        tokens = self.ordered.tokens.tokens.reshape(self.ordered.clusters, -1)
        return Clusters(
            self.centroids, jnp.asarray(tokens), self.head, self.ordered.chosen, self.config.vocab_size
        ).logits(outputs)

    def everything(self, vector, positions, segments, base_logits):
        """Touch every parameter, for `init`."""
        outputs = self(vector, vector, positions, segments)
        return self.restored(outputs), self.logits(outputs, base_logits)


@dataclass(frozen=True)
class AssistantSettings(EagleSettings):
    """Settings of a new draft.

    Attributes:
        width: Of its layers; None for 256, or the base's if that is smaller.
        layers: Their number. Only the last one has no window, if the base's layers are of both kinds.
    """

    width: int | None = None
    layers: int = LAYERS

    def __post_init__(self):
        super().__post_init__()
        at_least("draft.width", self.width, 8)
        at_least("draft.layers", self.layers, 1)


class AssistantState(NamedTuple):
    """The base's hidden state at the last token of the cache, ``[B, D]``."""

    hidden: Float[Array, "B D"]


@dataclass(frozen=True)
class Gemma4Assistant(EagleDrafter):
    """The assistant of Gemma 4, for any base with attention.

    Attributes:
        config: Configuration of its layers, all with ``shared_kv``; the base's vocabulary.
        base_width: D.
        ttt_length: Number of successive predictions in training; see `hydrajax.drafters.eagle.EagleDrafter`.
        vocabulary: The tokens that it can propose; None for all, as released.
        ordered: An ordered embedding, of files alone.
    """

    config: LlamaConfig
    base_width: int
    dtype: DType = jnp.float32
    depth: int = DEPTH
    ttt_length: int = 4
    vocabulary: Vocabulary | None = None
    ordered: OrderedEmbedding | None = None
    aux_hidden_layers = (0,)
    shares_lm_head = False
    Settings = AssistantSettings

    @classmethod
    def for_base(cls, base, dtype, settings=None, target_counts=None):
        s = settings or AssistantSettings()
        return cls(
            _like(base, min(s.width or WIDTH, base.width), s.layers), base.width, jnp.dtype(dtype),
            ttt_length=s.ttt_length or cls.ttt_length, vocabulary=vocabulary_of(s.vocabulary, base, target_counts),
        )  # fmt: skip

    @property
    def network(self) -> AssistantNetwork:
        return AssistantNetwork(self.config, self.dtype, self.base_width, self.lm_head, self.ordered)

    @cached_property
    def spec(self):
        return dataclasses.replace(EagleDrafter.spec.func(self), reads_cache=True)

    # --- decoding -----------------------------------------------------------------------------------------------------

    def init_state(self, batch, slots):
        return AssistantState(jnp.zeros((batch, self.base_width), self.dtype))

    def advance(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        return AssistantState(last_observed(aux_hidden_states, counts).astype(self.dtype))

    def propose(self, params, state, root, tree, base, draw=None):
        """Fill the tree level by level; only nodes that have (or in a dynamic tree may have) children are run."""
        cache = base.cache
        sources, kinds = self.sources(base.config), self.config.kinds

        def guess(hidden, beam):
            before = take(hidden, beam.parents) if beam.depth else hidden
            positions = jnp.broadcast_to(cache.lengths[:, None], beam.tokens.shape)
            oldest = [None if k.sliding_window is None else positions - 1 - k.sliding_window for k in kinds]
            segments = [cache.segments(i, first_seen)[0] for i, first_seen in zip(sources, oldest, strict=True)]
            outputs = self._apply(params, self._embed(base, beam.tokens), before, positions, segments)
            return self._apply(params, outputs, method="restored"), self._logits(params, outputs, base)

        return fill(tree, root, guess, state.hidden[:, None], self.lm_head, self.config.vocab_size, draw)[0]

    def sources(self, base: LlamaConfig) -> tuple[int, ...]:
        """Return the base's layer whose keys and values each layer attends to: the last one with or without a window.

        Raises:
            HydrajaxError: The base has none, or other heads there.
        """
        last = _last_with_keys(base)
        found = []
        for kind in self.config.kinds:
            windowed = kind.sliding_window is not None
            if windowed not in last:
                raise HydrajaxError(f"layers: got one {'with' if windowed else 'without'} a window, the base has none")
            theirs, ours = base.of_layer(last[windowed]), self.config.of_kind(kind)
            if (theirs.n_kv_heads, theirs.head_dim) != (ours.n_kv_heads, ours.head_dim):
                raise HydrajaxError(
                    f"key-value heads: got {ours.n_kv_heads} of {ours.head_dim}, the base has {theirs.n_kv_heads} of "
                    f"{theirs.head_dim}; the assistant was made for another base"
                )
            found.append(last[windowed])
        return tuple(found)

    # --- parameters and training --------------------------------------------------------------------------------------

    def init_boxed(self, rng, base):
        """Return fresh parameters. The lm head starts as the base's on its leading directions, and queries so short
        that scores are not large.
        """
        vector, position = jnp.zeros((1, 1, self.base_width), self.dtype), jnp.zeros((1, 1), jnp.int32)
        of_kinds = map(self.config.of_kind, self.config.kinds)
        none = [jnp.zeros((1, kind.n_kv_heads, 1, kind.head_dim), self.dtype) for kind in of_kinds]
        segments = [KVSegment(keys, keys, jnp.ones((1, 1), bool)) for keys in none]
        fresh = dict(self.network.init(rng, vector, position, segments, base.logits, method="everything")["params"])
        if self.ordered is None:
            reduced = LmHead(rank=self.config.width, vocabulary=self.vocabulary)
            start = reduced.like_base(base.head_kernel(), self.dtype)["lm_up"]
            fresh["lm_kernel"] = fresh["lm_kernel"].replace_boxed(start)
        for i, keys in enumerate(none):
            scale = fresh[f"layers_{i}"]["query_norm"]["scale"]
            fresh[f"layers_{i}"]["query_norm"]["scale"] = scale.replace_boxed(scale.unbox() * keys.shape[-1] ** -0.5)
        return fresh

    def trained_on(self, found):
        """Return the drafter that was read; training needs the logits of all tokens."""
        if getattr(found, "ordered", None) is not None:
            raise HydrajaxError("draft.init: got an assistant with an ordered embedding, expected one without")
        return super().trained_on(found)

    def teacher_hidden(self, params, aux_hidden_states, tokens, base, rng=None, positions=None, mask=None):
        """Return what the lm head reads for each of the ``ttt_length`` predictions at every position t, given the text
        up to t: the first with token t + 1 and the base's hidden state at t, the k-th with token t + k and its own
        previous output, all at position t + 1.
        """
        if positions is None:
            positions, mask = row_layout(tokens)
        segments = [
            KVSegment.of(base.block[source], _visible(mask, positions, kind))
            for source, kind in zip(self.sources(base.config), self.config.kinds, strict=True)
        ]
        hidden, found = aux_hidden_states, []
        for k in range(self.ttt_length):
            embeddings = self._embed(base, jnp.roll(tokens, -(k + 1), axis=1))
            found.append(self._apply(params, embeddings, hidden, positions + 1, segments))
            hidden = self._apply(params, found[-1], method="restored")
        return tuple(found)


def _visible(mask: Mask, positions: Int[Array, "B T"], kind: LayerKind) -> Mask:
    """Return what the position after each token attends to: one more token than the token itself."""
    return windowed(mask, positions, None if kind.sliding_window is None else kind.sliding_window + 1)[0]


def _last_with_keys(base: LlamaConfig) -> dict[bool, int]:
    """Return the base's last layer that has keys and values, with a window and without."""
    own = [i for i, source in enumerate(base.kv_layers) if source == i]
    return {base.kinds[i].sliding_window is not None: i for i in own}


def _like(base: LlamaConfig, width: int, n_layers: int) -> LlamaConfig:
    """Return the layers of a new draft for this base, in the form of Gemma 4's."""
    last = _last_with_keys(base)
    if not last:
        raise HydrajaxError("heads: got gemma4-assistant, which needs a base with layers of attention")
    read = [base.of_layer(last[has_window]) for has_window in (*[max(last)] * (n_layers - 1), min(last))]
    of_all = {name: getattr(read[0], name) for name in ("n_kv_heads", "head_dim")}
    kinds = []
    for layer in read:
        own = {name: getattr(layer, name) for name, size in of_all.items() if getattr(layer, name) != size}
        kinds.append(LayerKind(layer.sliding_window, layer.rope_theta, layer.rope_scaling, shared_kv=True, **own))
    return LlamaConfig(
        base.vocab_size, width, MLP_WIDTHS * width, n_layers, base.n_heads, **of_all,
        max_positions=base.max_positions, norm_eps=base.norm_eps, rotary_dim=base.rotary_dim, tied_lm_head=True,
        norms="both", qk_norm=True, value_norm=True, attention_scale=1.0, embedding_scale=width**0.5,
        activation="gelu_tanh", layer_scale=True, names="gemma4",
    ).with_kinds(kinds)  # fmt: skip


KIND = DrafterKind("Gemma 4 assistant", Gemma4Assistant)
