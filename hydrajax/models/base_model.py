"""What the decode step, the drafters and training need of a base model, whichever family it is of.

A base is a Flax module (`BaseModel`) and its parameters, two things. `BoundBase` is both together, for those who call
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import Mask
from hydrajax.models.cache import Block, KVCache, PendingKVCache
from hydrajax.models.llama_config import LlamaConfig


class Forward(NamedTuple):
    """What one forward pass over T tokens returns.

    hidden:   ``[B, T, D]`` after the final norm; the lm head reads it.
    features: ``[B, T, n * D]`` what the drafter reads: of each of the n places it asked for, side by side.
    block:    keys and values of the T tokens, layer by layer, not yet in any cache.
    """

    hidden: Float[Array, "B T D"]
    aux_hidden_states: Float[Array, "B T nD"]
    block: Block


@runtime_checkable
class BaseModel(Protocol):
    """A base model: an immutable, hashable Flax module.

    Its methods other than `init_cache` read parameters, so they are called through `apply`, as `BoundBase` does.
    """

    config: LlamaConfig
    dtype: DType

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        block_mask: Mask,
        cache: KVCache | PendingKVCache | None = None,
        aux_hidden_layers: tuple[int, ...] = (0,),
    ) -> Forward:
        """Run T tokens per row at ``positions`` through the model, over an optional cache.

        block_mask: bool ``[T, T]`` (or ``[B, 1, 1, T, T]``): which of the fed tokens sees which, such as a tree's; or
            `hydrajax.models.attention.Causal` of a text, whose positions follow each other.
            Cached tokens are all visible up to each row's length.
        reads: which hidden states the drafter wants: 0 is the output after the final norm, n > 0 the input of the n-th
            layer from the end (``hidden_state_offset`` in the released Hydra code).
        """

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        """Raw input embeddings E(x)."""

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Float32 next-token logits from hidden states after the final norm."""

    def head_kernel(self) -> Float[Array, "D V"]:
        """The lm head as one float array."""

    def init_cache(self, batch: int, slots: int) -> KVCache:
        """An empty cache for this many rows and tokens."""

    def apply(self, variables: Any, *args: Any, **settings: Any) -> Any:
        """Flax's: call the module, or its method of the name ``method``, with parameters."""

    def init(self, rng: Array, *args: Any) -> Any:
        """Flax's: random parameters."""


@dataclass(frozen=True)
class BoundBase:
    """A base with its parameters. Drafters read what they need of it instead of keeping a copy.

    rng: switches on the dropout of the base's adapter, in training.
    """

    model: BaseModel
    params: Any
    rng: Array | None = None

    @property
    def config(self) -> LlamaConfig:
        return self.model.config

    def forward(
        self, tokens, positions, block_mask, cache: KVCache | PendingKVCache | None = None, aux_hidden_layers=(0,)
    ) -> Forward:
        """See `BaseModel.__call__`."""
        return self._apply(tokens, positions, block_mask, cache, aux_hidden_layers)

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        """Raw input embeddings E(x)."""
        return self._apply(tokens, method="embed")

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """The base's own next-token logits, float32."""
        return self._apply(hidden, method="logits")

    def head_kernel(self) -> Float[Array, "D V"]:
        """The base's lm head, at which draft lm heads start (medusa 2.1.1)."""
        return self._apply(method="head_kernel")

    def _apply(self, *args, **settings):
        rngs = None if self.rng is None else {"dropout": self.rng}
        return self.model.apply({"params": self.params}, *args, rngs=rngs, **settings)


def init_boxed(model: BaseModel, rng: Array):
    """Random parameters with their logical axes attached (`flax.core.meta` boxes)."""
    position = jnp.zeros((1, 1), jnp.int32)
    return model.init(rng, position, position, np.ones((1, 1), bool))["params"]


def init_base(model: BaseModel, rng: Array) -> dict:
    """Random base parameters (normal, std 0.02) as a plain nested dict of arrays."""
    return nn.unbox(init_boxed(model, rng))


def abstract_base(model: BaseModel) -> dict:
    """Boxed `ShapeDtypeStruct` leaves: shapes, dtypes and logical axes of the base, nothing allocated."""
    return jax.eval_shape(lambda rng: init_boxed(model, rng), jax.random.key(0))
