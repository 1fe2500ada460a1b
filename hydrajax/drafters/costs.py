"""What a drafter computes, described so that anybody can count it: the roofline in seconds, training in operations.

Each drafter says in its own file which of these a step and a training pass consist of (`propose_costs`, `observe_costs`
and `teacher_costs` of `hydrajax.drafters.drafter`), so whoever counts need not know any kind of drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydrajax.models.config import LlamaConfig
from hydrajax.trees.dynamic import CandidateTree


@dataclass(frozen=True)
class Matmul:
    """``rows`` vectors times a weight ``[fan_in, fan_out]``.

    repeats: how often the product is computed one after the other with the same weight, which is then read from memory
    once. float32_out: the output is float32 whatever the model's dtype, as logits are.
    """

    name: str
    rows: int
    fan_in: int
    fan_out: int
    repeats: int = 1
    float32_out: bool = False


@dataclass(frozen=True)
class Ranking:
    """An argmax or top-k over the float32 logits of ``rows`` vectors."""

    name: str
    rows: int
    vocab_size: int


@dataclass(frozen=True)
class DecoderLayers:
    """``config.n_layers`` decoder layers over ``tokens`` new tokens per row and a cache of ``slots`` per row.

    causal: whether a new token has no need of those after it; else each needs all of them.
    """

    name: str
    config: LlamaConfig
    batch: int
    tokens: int
    slots: int = 0
    causal: bool = True


Cost = Matmul | Ranking | DecoderLayers


class CostsNothing:
    """For drafters that multiply no matrices to inherit."""

    def propose_costs(self, tree: CandidateTree, batch: int, slots: int) -> Sequence[Cost]:
        return ()

    def observe_costs(self, batch: int, tokens: int, slots: int) -> Sequence[Cost]:
        return ()

    def begin_costs(self, batch: int, tokens: int, slots: int) -> Sequence[Cost]:
        return ()

    def teacher_costs(self, length: int) -> Sequence[Cost]:
        return ()
