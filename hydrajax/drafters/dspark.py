"""DSpark (arXiv 2607.05147): slots predict the *next* position, a Markov head links them, a confidence head cuts them.

DeepSpec, the released training code, has a variant of DFlash with the same slots. It is a `DSpark` without the two
heads.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp

from hydrajax.drafters.block import BlockDrafter, BlockSettings
from hydrajax.drafters.kind import DrafterKind
from hydrajax.drafters.markov import KINDS, MarkovHead
from hydrajax.drafters.settings import at_least, below, one_of
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import DType
from hydrajax.models.llama_config import LlamaConfig


@dataclass(frozen=True)
class DSparkSettings(BlockSettings):
    """Settings of DSpark drafts.

    Attributes:
        markov_rank: Rank of the Markov head; 0 for none.
        markov: Its kind, one of `hydrajax.drafters.markov.KINDS`.
        confidence_head: Train a confidence head. It reads the Markov head's embedding of the token before, too.
    """

    markov_rank: int = 64
    markov: str = "vanilla"
    confidence_head: bool = True

    def __post_init__(self):
        super().__post_init__()
        at_least("draft.markov_rank", self.markov_rank, 0)
        one_of("draft.markov", self.markov, KINDS)


@dataclass(frozen=True)
class DSpark(BlockDrafter):
    """DSpark. Other attributes are those of `hydrajax.drafters.dflash.DFlash`.

    Attributes:
        block_size: Slots of a block, each of which predicts a token.
        markov: The Markov head; None without one.
        confidence_head: What the confidence head reads, ``"hidden"`` or ``"markov"`` (both that and the token before);
            None without one.
        confidence: Threshold of the confidence head: tokens after a node whose next slot is less confident are removed
            from the tree. The number of verified nodes stays the same. 0 for no threshold.
    """

    config: LlamaConfig
    aux_hidden_layers: tuple[int, ...]
    mask_token: int
    block_size: int = 7
    markov: MarkovHead | None = None
    confidence_head: str | None = None
    confidence: float = 0.0
    vocabulary: Vocabulary | None = None
    dtype: DType = jnp.float32
    num_anchors: int = 64
    windows: tuple[int, ...] = ()
    first_slot: ClassVar[int] = 0
    ends_at_gaps: ClassVar[bool] = True
    causal: ClassVar[bool] = False
    Settings = DSparkSettings

    def __post_init__(self):
        self.check_block()
        below("draft_confidence", self.confidence, 1)
        if self.confidence and self.confidence_head is None:
            raise HydrajaxError(
                f"draft_confidence: got {self.confidence}, expected 0: the draft has no confidence head"
            )
        if self.confidence_head == "markov" and self.markov is None:
            raise HydrajaxError("confidence_head: got 'markov', expected 'hidden': the draft has no Markov head")

    @classmethod
    def for_base(cls, base, dtype, settings=None, target_counts=None):
        s = settings or DSparkSettings()
        return replace(
            super().for_base(base, dtype, s, target_counts),
            markov=MarkovHead(s.markov_rank, s.markov) if s.markov_rank else None,
            confidence_head=("markov" if s.markov_rank else "hidden") if s.confidence_head else None,
        )


KIND = DrafterKind("DSpark", DSpark, DSparkSettings(5, 7, markov_rank=256))
