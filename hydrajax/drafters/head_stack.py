"""Stacks of draft heads: each head is residual blocks, then an lm head. Kinds of heads differ in what they read."""

import dataclasses
from collections.abc import Callable
from functools import cached_property

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from hydrajax.drafters.clusters import ChosenLogits
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.drafter import DrafterSpec, last_observed
from hydrajax.drafters.prefix import Prefix
from hydrajax.drafters.settings import below
from hydrajax.drafters.trained import TrainedStack
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.models.arrays import Array, DType
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import declare, project, project_parts
from hydrajax.ops import drop
from hydrajax.ops.sharded import all_tokens, by_feature, by_token, replicate_features
from hydrajax.trees import presets


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); W starts at zero, so the block starts as the identity (medusa 2.1.1)."""

    dtype: DType

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        width = x.shape[-1]
        kernel = declare(self, "kernel", (width, width), ("width", "mlp"), nn.initializers.zeros)
        bias = declare(self, "bias", (width,), ("mlp",), nn.initializers.zeros)
        return x + jax.nn.silu(project(x, kernel) + bias)


class ConditionedBlock(nn.Module):
    """R x + r + SiLU(W x + b) over concatenated vectors, reducing them to one (hydra 3, docs/design.md 4).

    W and R read the same input, so they are one product: ``kernel[:, 0]`` is W, ``kernel[:, 1]`` is R. The input is
    [h, E(root)] followed by the embeddings of ``path_length`` tokens. Only the latter differ between the paths of a
    tree, so the two parts have separate kernels, and the shared part is multiplied once per tree.
    """

    path_length: int
    dtype: DType

    @nn.compact
    def __call__(
        self, shared: Float[Array, "*rows twoD"], path: Float[Array, "*paths kD"] | None
    ) -> Float[Array, "*paths D"]:
        width = shared.shape[-1] // 2
        axes = ("width", None, "mlp")
        kernel = declare(self, "shared_kernel", (2 * width, 2, width), axes, _hidden_state_passes)
        bias = declare(self, "bias", (2, width), axes[1:], nn.initializers.zeros)
        added, residual = project_parts(shared, kernel, trained=width)  # embeddings are the base's, which is frozen
        added, residual = added + bias[0], residual + bias[1]
        if self.path_length:
            rows = self.path_length * width
            kernel = declare(self, "path_kernel", (rows, 2, width), axes, nn.initializers.zeros)
            of_path = project_parts(path, kernel)
            added, residual = added + of_path[0], residual + of_path[1]
        return residual + jax.nn.silu(added)


def _hidden_state_passes(rng, shape, dtype):
    """Return W = 0 and R = [identity; 0], so that a fresh head starts from the base's hidden state."""
    del rng
    fan_in, _, width = shape
    passing = jnp.eye(fan_in, width, dtype=dtype)
    return jnp.stack([jnp.zeros_like(passing), passing], axis=1)


class Head(nn.Module):
    """A draft head: ``n_layers`` blocks and an lm head.

    `hidden` and `logits` are separate so that training can chunk the vocabulary product. ``dropout`` precedes every
    block and the lm head (docs/design.md 4), only if a key is given; a shared block gets a new mask at each
    application.

    Attributes:
        path_length: None for a head that reads only the hidden state (Medusa), else the number of tokens after the root
            that its first, conditioned block reads (k for Hydra's head k).
        share_blocks: Every unconditioned block is the same block applied repeatedly, as in the released code.
    """

    path_length: int | None
    n_layers: int
    share_blocks: bool
    lm_head: LmHead
    width: int
    vocab_size: int
    dtype: DType
    dropout: float = 0.0

    @property
    def n_plain(self) -> int:
        """Number of applications of unconditioned blocks."""
        return self.n_layers - (self.path_length is not None)

    def setup(self):
        distinct = min(self.n_plain, 1) if self.share_blocks else self.n_plain
        self.blocks = [ResidualBlock(self.dtype) for _ in range(distinct)]
        if self.path_length is not None:
            self.conditioned = ConditionedBlock(self.path_length, self.dtype)
        self.lm_params = self.lm_head.declare(self, self.width, self.vocab_size)

    def hidden(
        self, x: Float[Array, "*rows D_or_2D"], path: Float[Array, "*paths kD"] | None = None, rng: Array | None = None
    ) -> Float[Array, "*paths D"]:
        """Return the input of the lm head (before its dropout). ``x`` is h_t, or [h_t, E(root)] for a conditioned
        head. On a mesh the result's features are sharded, until a caller replicates them (`replicate_features`).
        """

        def dropped(x, place, sharding):
            return drop(x, self.dropout, None if rng is None else jax.random.fold_in(rng, place), sharding)

        def read(x, place):
            return all_tokens(dropped(x, place, by_token), trained=self.width)

        conditioned = self.path_length is not None
        if conditioned:
            x = self.conditioned(read(x, 0), read(path, 1) if self.path_length else None)
        for i in range(self.n_plain):
            first = i == 0 and not conditioned
            x = self.blocks[0 if self.share_blocks else i](
                read(x, 2) if first else replicate_features(dropped(x, 2 + i, by_feature))
            )
        return x

    def logits(
        self, hidden: Float[Array, "*rows D"], base_logits: Callable, rng: Array | None = None
    ) -> Float[Array, "*rows V_"] | ChosenLogits:
        """Return float32 logits over the lm head's tokens (`LmHead.logits`)."""
        return self.lm_head.logits(
            self.lm_params, replicate_features(drop(hidden, self.dropout, rng, by_feature)), base_logits
        )

    def __call__(
        self,
        x: Float[Array, "*rows D_or_2D"],
        path: Float[Array, "*paths kD"] | None = None,
        base_logits: Callable | None = None,
    ) -> Float[Array, "*paths V_"] | ChosenLogits:
        return self.logits(self.hidden(x, path), base_logits)


class HeadStack(TrainedStack):
    """Base of Medusa, Hydra and Amphista: K heads with parameters ``{"head_0": ...}``, and their training.

    A subclass is a frozen dataclass with ``num_draft_heads``, ``width``, ``vocab_size``, ``n_layers``,
    ``share_blocks``, ``dtype``, ``dropout``, ``hidden_state_offset``, ``lm_head`` and ``prefix``; ``teacher_inputs``
    returns what its heads read in training, ``propose`` drafts.

    The state is the last hidden state ``[B, D]``, or with a prefix layer its `hydrajax.drafters.prefix.PrefixState`.
    The parameters are then ``{"prefix": ..., "heads": {"head_0": ...}}``. In both cases they may have a
    copy of the base's lm head (`LmHead.with_copy`).
    """

    def __post_init__(self):
        below("dropout", self.dropout, 1)

    def path_length(self, k: int) -> int | None:
        """Return `Head.path_length` of head k."""
        return None

    def head(self, k: int) -> Head:
        return Head(
            self.path_length(k), self.n_layers, self.share_blocks, self.lm_head, self.width, self.vocab_size,
            self.dtype, self.dropout,
        )  # fmt: skip

    def with_prefix(self, config: LlamaConfig, window: int | None = None):
        """Return these heads with a prefix layer for a base of this shape, see `Prefix`."""
        return dataclasses.replace(self, prefix=Prefix(config, window))

    @cached_property
    def spec(self) -> DrafterSpec:
        return DrafterSpec(
            depth=self.num_draft_heads,
            default_tree=presets.default_name(self.num_draft_heads, self.lm_head.size(self.vocab_size)),
            aux_hidden_layers=(self.hidden_state_offset,),
            supports_sampling=True,
            supports_dynamic_tree=True,
            fills_levels=True,
            num_draft_heads=self.num_draft_heads,
            shared_lm_head=self.lm_head.shared,
            prefix_layer=self.prefix is not None,
        )

    @property
    def vocabulary(self) -> Vocabulary | None:
        return self.lm_head.vocabulary

    # --- decoding -----------------------------------------------------------------------------------------------------

    def init_state(self, batch, slots):
        if self.prefix is not None:
            return self.prefix.init_state(batch, slots, self.dtype)
        return jnp.zeros((batch, self.width), self.dtype)

    def advance(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        if self.prefix is not None:
            return self.prefix.advance(params["prefix"], state, aux_hidden_states, counts, self.dtype)
        return last_observed(aux_hidden_states, counts)

    def hidden_in(self, state) -> Float[Array, "B D"]:
        """Return the hidden state that the heads read."""
        # Replicated where it is made and where it is read, or XLA shards it between two steps.
        return replicate_features(state if self.prefix is None else state.hidden)

    # --- one head -----------------------------------------------------------------------------------------------------

    def apply_head(self, params, k: int, *inputs, method: str, **settings):
        heads = params if self.prefix is None else params["heads"]
        return self.head(k).apply({"params": heads[f"head_{k}"]}, *inputs, method=method, **settings)

    def head_logits(self, params, k, hidden, base, rng=None) -> Float[Array, "*rows V_"] | ChosenLogits:
        return self.apply_head(params, k, hidden, self.lm_head.base_logits(params, base), rng, method="logits")
