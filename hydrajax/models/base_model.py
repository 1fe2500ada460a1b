"""The interface of base models for the decode step, drafters and training.

A base consists of a Flax module (`BaseModel`) and its parameters; `BoundBase` holds both for callers.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from hydrajax.models.arrays import Array, DType
from hydrajax.models.attention import Mask
from hydrajax.models.cache import Block, KVCache, PendingKVCache
from hydrajax.models.llama_config import LlamaConfig

BEFORE_FINAL_NORM = -1  # among ``aux_hidden_layers`` of `BaseModel.__call__`


class Forward(NamedTuple):
    """The result of a forward pass over T tokens.

    Attributes:
        hidden: ``[B, T, D]`` after the final norm; the lm head's input.
        aux_hidden_states: ``[B, T, n * D]`` the n requested hidden states side by side.
        block: Keys and values of the T tokens by layer, not yet in any cache.
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
        """Run T tokens per sequence through the model, over an optional cache.

        Args:
            block_mask: bool ``[T, T]`` (or ``[B, 1, 1, T, T]``): which of these tokens attends to which, such as a tree
                mask; or `hydrajax.models.attention.Causal` for a text with consecutive positions. All filled slots of
                the cache are visible.
            aux_hidden_layers: The hidden states to return for the drafter: 0 is the output after the final norm, n > 0
                the input of the n-th layer from the end (``hidden_state_offset`` in the released Hydra code), and
                `BEFORE_FINAL_NORM` the input of the final norm.
        """

    def embed(self, tokens: Int[Array, "*rows"], normed: bool = True) -> Float[Array, "*rows D"]:
        """Return the input embeddings E(x) as the first layer reads them, or before their norm if they have one."""

    def logits(
        self,
        hidden: Float[Array, "*rows D"],
        tokens: Int[np.ndarray, " V_"] | Int[Array, "*rows V_"] | None = None,
        plain: bool = False,
    ) -> Float[Array, "*rows V_"]:
        """Return float32 next-token logits from hidden states after the final norm.

        Args:
            tokens: Ids of the tokens whose logits to return, in this order; constants of the program. None for all.
                Or int32 ``[*rows, n]``, tokens of each row.
            plain: Return the lm head's matmul, without the base's divisor and cap of logits.
        """

    def head_kernel(self, tokens: Int[np.ndarray, " V_"] | None = None) -> Float[Array, "D V_"]:
        """Return the lm head of all tokens, or of these, as one float array."""

    def init_cache(self, batch: int, slots: int) -> KVCache:
        """Return an empty cache for this many sequences and tokens."""

    def apply(self, variables: Any, *args: Any, **settings: Any) -> Any:
        """Call the module, or its method named ``method``, with parameters (Flax's ``apply``)."""

    def init(self, rng: Array, *args: Any) -> Any:
        """Return random parameters (Flax's ``init``)."""


@dataclass(frozen=True)
class BoundBase:
    """A base with its parameters. Drafters read it instead of keeping a copy.

    Attributes:
        rng: Enables the dropout of the base's adapter, in training.
        cache: The committed text, for drafters that read it (`hydrajax.drafters.drafter.DrafterSpec.reads_cache`).
        block: In training, what these read instead: `Forward.block` of the rows.
    """

    model: BaseModel
    params: Any
    rng: Array | None = None
    cache: KVCache | None = None
    block: tuple[Any, ...] | None = None

    @property
    def config(self) -> LlamaConfig:
        return self.model.config

    def forward(
        self, tokens, positions, block_mask, cache: KVCache | PendingKVCache | None = None, aux_hidden_layers=(0,)
    ) -> Forward:
        """Run the model; see `BaseModel.__call__`."""
        return self._apply(tokens, positions, block_mask, cache, aux_hidden_layers)

    def embed(self, tokens: Int[Array, "*rows"], normed: bool = True) -> Float[Array, "*rows D"]:
        """Return the input embeddings E(x) as the first layer reads them, or before their norm."""
        return self._apply(tokens, normed, method="embed")

    def logits(
        self,
        hidden: Float[Array, "*rows D"],
        tokens: Int[np.ndarray, " V_"] | Int[Array, "*rows V_"] | None = None,
        plain: bool = False,
    ) -> Float[Array, "*rows V_"]:
        """Return the base's next-token logits, float32; see `BaseModel.logits`."""
        return self._apply(hidden, tokens, plain, method="logits")

    def head_kernel(self, tokens: Int[np.ndarray, " V_"] | None = None) -> Float[Array, "D V_"]:
        """Return the base's lm head, from which draft lm heads start (medusa 2.1.1), of all tokens or of these."""
        return self._apply(tokens, method="head_kernel")

    def _apply(self, *args, **settings):
        rngs = None if self.rng is None else {"dropout": self.rng}
        return self.model.apply({"params": self.params}, *args, rngs=rngs, **settings)
