"""DFlash (arXiv 2602.06036) and JetSpec (arXiv 2606.18394): each masked slot predicts the token at its own position.

DFlash's slots see the whole block (a block diffusion model of one step). JetSpec's see the slots before them, and its
trees are wide (``fanout-N-K``).
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from hydrajax.drafters.block import BlockDrafter, BlockSettings
from hydrajax.drafters.kind import DrafterKind
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.models.arrays import DType
from hydrajax.models.llama_config import LlamaConfig


@dataclass(frozen=True)
class DFlash(BlockDrafter):
    """DFlash.

    Attributes:
        config: Shape of the draft's layers, with the base's width and vocabulary.
        aux_hidden_layers: The hidden states of the base that it reads (`hydrajax.models.base_model.BaseModel`).
        mask_token: Id of the token whose embedding marks positions to predict.
        block_size: Slots of a block; the anchor's predicts nothing.
        vocabulary: The tokens that it can propose; None for all.
        num_anchors: Blocks per row of training text.
        windows, both_ways, plain_logits: See `hydrajax.drafters.block.BlockDrafter`.
    """

    config: LlamaConfig
    aux_hidden_layers: tuple[int, ...]
    mask_token: int
    block_size: int = 16
    vocabulary: Vocabulary | None = None
    dtype: DType = jnp.float32
    num_anchors: int = 64
    windows: tuple[int, ...] = ()
    both_ways: bool = False
    plain_logits: bool = False
    first_slot: ClassVar[int] = 1
    ends_at_gaps: ClassVar[bool] = False
    causal: ClassVar[bool] = False
    Settings = BlockSettings

    def __post_init__(self):
        self.check_block()


@dataclass(frozen=True)
class JetSpec(DFlash):
    """JetSpec; the attributes are those of `DFlash`."""

    causal: ClassVar[bool] = True


DFLASH = DrafterKind("DFlash", DFlash, BlockSettings(5, 16))
JETSPEC = DrafterKind("JetSpec", JetSpec, BlockSettings(5, 16))
