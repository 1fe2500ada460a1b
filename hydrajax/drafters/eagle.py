"""EAGLE (Li et al. 2024): the draft predicts the base's next hidden state, and from it the next token.

One decoder layer with its own KV cache reads at position i the base's hidden state and the embedding of the token that
*follows*, i + 1. Its output predicts the hidden state at i + 1, from which the lm head predicts token i + 2. Deeper
predictions build on it: at a drafted node the layer reads its own output at the node's parent. EAGLE-3
(`hydrajax.drafters.eagle3`) has another network and the same procedure.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.drafters.clusters import ChosenLogits
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.drafter import Beam, DrafterSpec, following_tokens, last_observed
from hydrajax.drafters.filling import fill
from hydrajax.drafters.kind import DrafterKind
from hydrajax.drafters.settings import Settings, at_least, vocabulary_of
from hydrajax.drafters.trained import OneNetwork
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import KVSegment, SamePosition, causal_mask, rope_table
from hydrajax.models.cache import KVCache, append, init_cache
from hydrajax.models.kv_vectors import KeyValue
from hydrajax.models.layers import DecoderLayer
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.packed_forward import row_layout
from hydrajax.models.weights import declare, project
from hydrajax.trees import presets
from hydrajax.trees.topology import take

DEPTH = 10  # each further token is another pass, so the tree sets the practical limit


class EagleState(NamedTuple):
    """The state of EAGLE.

    Attributes:
        cache: Of positions whose hidden states the base has computed, never of guesses.
        hidden: ``[B, D]`` the draft's output at the last of them, from which the root's children are predicted.
    """

    cache: KVCache
    hidden: Float[Array, "B D"]


class Branches(NamedTuple):
    """The nodes of a tree that the draft has run so far.

    Attributes:
        hidden: ``[B, n, D]`` outputs at the n nodes that were run last.
        kept: Keys and values of all M nodes. The root is not among them: it is the token at the last position of the
            cache.
        sees: bool ``[n, M]`` or ``[B, n, M]``: which of the M a child of each of the n nodes attends to, which are the
            node and its ancestors.
    """

    hidden: Float[Array, "B n D"]
    kept: KeyValue
    sees: Bool[Array, "*B n M"]


class EagleNetwork(nn.Module):
    """fc([E(x_{i+1}), h_i]), then a LLaMA decoder layer without the norm before its attention; the base's lm head."""

    config: LlamaConfig
    dtype: DType
    fc_bias: bool
    lm_head: LmHead

    def setup(self):
        width, axes = self.config.width, ("width", "mlp")
        self.fc = declare(self, "fc", (2 * width, width), axes, nn.initializers.normal(0.02))
        if self.fc_bias:
            self.bias = declare(self, "fc_bias", (width,), axes[1:], nn.initializers.zeros)
        self.layer = DecoderLayer(self.config, self.dtype)

    def fused(self, aux_hidden_states: Float[Array, "B T nD"]) -> Float[Array, "B T D"]:
        """Return the layer's input at positions that the base has processed; elsewhere it reads its own output."""
        return aux_hidden_states.astype(self.dtype)

    def __call__(self, embeddings, hidden, positions, block_mask, past=()):
        """Return outputs ``[B, T, D]`` at T positions, and their keys and values."""
        x = project(jnp.concatenate([embeddings, hidden], axis=-1), self.fc)
        x = x + self.bias if self.fc_bias else x
        x, added, block = self.layer(x, None, rope_table(self.config, positions), block_mask, past, x)
        return x + added, block

    def logits(self, hidden, base_logits):
        """Return float32 logits over the draft's vocabulary."""
        return self.lm_head.of_base(hidden, base_logits)

    def everything(self, aux_hidden_states, embeddings, positions, base_logits):
        """Touch every parameter, for `init`."""
        return self.logits(
            self(embeddings, self.fused(aux_hidden_states), positions, np.ones((1, 1), bool))[0], base_logits
        )


@dataclass(frozen=True)
class EagleSettings(Settings):
    """Settings of EAGLE drafts.

    Attributes:
        ttt_length: See `EagleDrafter`; None for the released number, 1 for EAGLE and 7 for EAGLE-3.
        vocabulary: See `hydrajax.drafters.settings.HeadSettings`. EAGLE-1 then uses the base's lm head for these
            tokens, and is saved in hydrajax's own format.
    """

    ttt_length: int | None = None
    vocabulary: int | None = None

    def __post_init__(self):
        at_least("draft.ttt_length", self.ttt_length, 1)
        at_least("draft.vocabulary", self.vocabulary, 1)


class EagleDrafter(OneNetwork):
    """The procedure of EAGLE for any of its networks.

    A subclass is a frozen dataclass with ``config`` (of its layer, with the base's width and vocabulary), ``dtype``,
    ``depth``, ``ttt_length``, ``aux_hidden_layers``, ``vocabulary`` and ``network``. ``ttt_length`` is the number of
    successive predictions in training (EAGLE-3's training-time test). The lm head is the base's unless a subclass has
    its own.
    """

    @classmethod
    def for_base(cls, base, dtype, settings=None, target_counts=None):
        """Return a draft with a layer like the base's."""
        s = settings or EagleSettings()
        vocabulary = vocabulary_of(s.vocabulary, base, target_counts)
        layer, ttt_length = cls.layer_of(base), s.ttt_length or cls.ttt_length
        return cls(layer, dtype=jnp.dtype(dtype), ttt_length=ttt_length, vocabulary=vocabulary)

    @staticmethod
    def layer_of(base: LlamaConfig) -> LlamaConfig:
        """Return the configuration of the layer."""
        return base.plain_layer

    @cached_property
    def spec(self) -> DrafterSpec:
        return DrafterSpec(
            depth=self.depth,
            default_tree=presets.default_name(self.depth, self.lm_head.size(self.config.vocab_size), "eagle_26"),
            aux_hidden_layers=self.aux_hidden_layers,
            supports_sampling=True,
            supports_dynamic_tree=True,
            fills_levels=True,
            num_draft_heads=self.ttt_length,  # each successive prediction is a head in training, with shared parameters
            shared_lm_head=self.lm_head.shared,
        )

    # --- decoding -----------------------------------------------------------------------------------------------------

    def init_state(self, batch, slots):
        cache = init_cache(self.config, batch, slots, self.dtype)
        return EagleState(cache, jnp.zeros((batch, self.config.width), self.dtype))

    def advance(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        """Replace guessed hidden states by the base's, each with the token that followed."""
        hidden, block = self._apply(
            params,
            self._embed(base, following_tokens(tokens, counts, bonus_token)),
            self._apply(params, aux_hidden_states, method="fused"),
            state.cache.lengths[:, None] + jnp.arange(tokens.shape[1]),
            causal_mask(tokens.shape[1]),
            state.cache.segments(0),
        )
        cache = append(state.cache, (block,), counts, after=hidden[:, 0, 0])
        return EagleState(cache, last_observed(hidden, counts))

    def propose(self, params, state, root, tree, base, draw=None):
        """Fill the tree level by level; only nodes that have (or in a dynamic tree may have) children are run."""

        def guess(so_far, beam):
            if beam.depth:
                so_far = self._run(params, state.cache, so_far, beam, base)
            return so_far, self._logits(params, so_far.hidden, base)

        return fill(tree, root, guess, self._at_root(state), self.lm_head, self.config.vocab_size, draw)[0]

    def _at_root(self, state: EagleState) -> Branches:
        """Return the state before any node was run: the root's children are predicted from the last cached position."""
        nothing = jax.tree.map(lambda x: x[:, :, :0], state.cache.layers[0])
        return Branches(state.hidden[:, None], nothing, np.zeros((1, 0), bool))

    def _run(self, params, cache: KVCache, so_far: Branches, beam: Beam, base) -> Branches:
        """Run the nodes of a beam, which attend to the cache, their ancestors and themselves."""
        slot, n_nodes = beam.parents, beam.tokens.shape[1]
        if isinstance(slot, np.ndarray):
            sees = so_far.sees[slot]
        else:
            sees = take(so_far.sees, slot) if so_far.sees.ndim == 3 else jnp.asarray(so_far.sees)[slot]
        above = KVSegment.of(so_far.kept, sees if sees.ndim == 2 else sees[:, None, None])
        itself = np.eye(n_nodes, dtype=bool)
        hidden, kept = self._apply(
            params,
            self._embed(base, beam.tokens),
            self._fed_back(params, take(so_far.hidden, slot)),
            jnp.broadcast_to((cache.lengths + beam.depth - 1)[:, None], beam.tokens.shape),
            itself,
            (*([above] if sees.shape[-1] else []), *cache.segments(0)),
        )
        xp = np if sees.ndim == 2 else jnp
        return Branches(
            hidden,
            jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), so_far.kept, kept),
            xp.concatenate([sees, xp.broadcast_to(itself, (*sees.shape[:-1], n_nodes))], axis=-1),
        )

    def _fed_back(self, params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Return the network's input at drafted positions, from its output at the parent."""
        return hidden

    def _embed(self, base, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        return base.embed(tokens).astype(self.dtype)

    def _logits(self, params, hidden: Float[Array, "*rows D"], base) -> Float[Array, "*rows V_"] | ChosenLogits:
        return self._apply(params, hidden, self.lm_head.base_logits(params, base), method="logits")

    # --- training -----------------------------------------------------------------------------------------------------

    def teacher_hidden(self, params, aux_hidden_states, tokens, base, rng=None, positions=None, mask=None):
        """Return outputs ``[B, T, D]`` for each of the ``ttt_length`` predictions at every position t, given the text
        up to t.

        The first reads the base's hidden states. The k-th reads the previous output at the *same* position, with token
        t + 1 + k, at position t + k; it attends to what the first attends to and to its own chain: EAGLE-3's
        training-time test (eagle-3 3.2, figure 6). Decoding computes the same along a path of correct guesses, so ranks
        are computed in the same way for any ``ttt_length``.
        """
        if positions is None:
            positions, mask = row_layout(tokens)
        hidden, outputs, past = self._apply(params, aux_hidden_states, method="fused"), [], []
        for k in range(self.ttt_length):
            embeddings = self._embed(base, jnp.roll(tokens, -(k + 1), axis=1))
            visible = SamePosition() if k else mask
            hidden, block = self._apply(params, embeddings, hidden, positions + k, visible, tuple(past))
            past.append(KVSegment.of(block, visible))
            outputs.append(hidden)
            hidden = self._fed_back(params, hidden)
        return tuple(outputs)

    def head_logits(self, params, k, hidden, base, rng=None):
        """Return float32 logits ``[..., V']`` of any rows of ``teacher_hidden(...)[k]``; they do not depend on k."""
        return self._logits(params, hidden, base)

    def reaching(self, depth):
        return dataclasses.replace(self, ttt_length=depth)

    def trained_on(self, found):
        """Return a draft of the same kind with the layer and the vocabulary that were read."""
        return dataclasses.replace(super().trained_on(found), ttt_length=self.ttt_length)


@dataclass(frozen=True)
class Eagle(EagleDrafter):
    """EAGLE-1, which with dynamic trees is EAGLE-2.

    Attributes:
        config: Configuration of the layer, with the base's width and vocabulary.
        fc_bias: The map from [embedding, hidden state] to the layer's input has a bias, as in most released drafts.
        ttt_length: See `EagleDrafter`; 1 as released.
        vocabulary: The tokens that it can propose; None for all, as released.
    """

    config: LlamaConfig
    dtype: DType = jnp.float32
    fc_bias: bool = True
    depth: int = DEPTH
    ttt_length: int = 1
    vocabulary: Vocabulary | None = None
    aux_hidden_layers: ClassVar[tuple[int, ...]] = (0,)
    Settings = EagleSettings

    @property
    def network(self) -> EagleNetwork:
        return EagleNetwork(self.config, self.dtype, self.fc_bias, self.lm_head)


KIND = DrafterKind("EAGLE", Eagle)
