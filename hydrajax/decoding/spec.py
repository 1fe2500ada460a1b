"""How to decode, as one value: `DecodeSpec`; and `SamplingParams`, the numbers of it that every row has for itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from hydrajax.decoding.acceptance import AcceptanceRule, Greedy
from hydrajax.decoding.numbers import batched
from hydrajax.decoding.processors import batched_processors
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree, DynamicTree


def check_max_new_tokens(value: int) -> int:
    """Return the limit; raises `HydrajaxError` for one that leaves nothing to decode."""
    if value < 1:
        raise HydrajaxError(f"max_new_tokens: must be at least 1, found {value}")
    return value


class SamplingParams(NamedTuple):
    """What each row of a batch decodes with, beyond the program: arguments, so that other numbers compile nothing.

    rng: a random key, or one per row ``[B]``. What a row draws depends on its key alone; a single key makes one for
        each row number.
    rule, processors: their numbers arrays ``[B]``.
    limits: int32 ``[B]`` most tokens each row may emit, at most those of the engine; None for these.
    """

    rng: Array
    rule: AcceptanceRule
    processors: tuple[Any, ...] = ()
    limits: Int[Array, " B"] | None = None


@dataclass(frozen=True)
class DecodeSpec:
    """How to decode: a hashable value that everything which decodes is given, whoever carries it out.

    drafter:        proposes candidate tokens; its parameters come with the model's.
    tree:           the candidate tree, static or grown on the device.
    rule:           judges the verified tree. Its numbers hold for all rows; other rows' may be given with a batch.
    processors:     change the base's logits before the rule reads them (`hydrajax.decoding.processors`).
    max_new_tokens: most tokens of a row; also limited by the context, prompt + output <= max_positions.
    eos_ids:        a row ends with the first of these that it emits.
    logprobs:       K to keep the log-probability of each emitted token and of the K most likely tokens in its place,
                    under the base's own distribution (`hydrajax.decoding.decode.DecodeResult`); 0 for the emitted
                    tokens alone, None for nothing.

    Raises `HydrajaxError` for parts that do not fit each other; what depends on the base, `check` refuses.
    """

    drafter: Drafter = field(default_factory=NoDrafter)
    tree: CandidateTree = field(default_factory=presets.root)
    rule: AcceptanceRule = field(default_factory=Greedy)
    processors: Sequence[Any] = ()
    max_new_tokens: int = 256
    eos_ids: Sequence[int] = ()
    logprobs: int | bool | None = None

    def __post_init__(self):
        check_max_new_tokens(self.max_new_tokens)
        if isinstance(self.logprobs, bool):  # "log-probabilities: yes"
            object.__setattr__(self, "logprobs", 0 if self.logprobs else None)
        for name in ("processors", "eos_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        kinds = [type(one).__name__ for one in self.processors]
        if twice := [name for number, name in enumerate(kinds) if name in kinds[:number]]:
            raise HydrajaxError(f"processors: must be one of a kind, found {twice[0]} twice")

    def check(self, config: LlamaConfig) -> None:
        """Refuse a spec for a base of this shape: a tree that the drafter cannot fill or the rule cannot judge, a rule
        that the drafter cannot serve, more than the context or the vocabulary holds.
        """
        can, tree = self.drafter.spec, self.tree
        name = type(self.drafter).__name__
        if isinstance(tree, DynamicTree) and not can.supports_dynamic_tree:
            raise HydrajaxError(f"tree: {tree.name} needs a drafter that can grow trees, not {name}")
        tree.check(can.depth, config.vocab_size)
        self.rule.check(tree)
        if self.rule.needs_draws and can.longest_path(tree) and not can.supports_sampling:
            raise HydrajaxError(f"rule: {type(self.rule).__name__} needs a drafter that samples, not {name}")
        if can.reach >= config.max_positions:
            raise HydrajaxError(
                f"draft: looks {can.reach} tokens ahead, which a context of {config.max_positions} has no room for"
            )
        batched_processors([self.processors], config.vocab_size)  # refuses token ids beyond the vocabulary
        if self.logprobs is not None and not 0 <= self.logprobs <= config.vocab_size:
            raise HydrajaxError(
                f"logprobs: must be from 0 to the vocabulary's {config.vocab_size}, found {self.logprobs}"
            )

    def replace(self, **changes: Any) -> DecodeSpec:
        return dataclasses.replace(self, **changes)

    def autoregressive(self) -> DecodeSpec:
        """Return the baseline: the same without a draft, by the rule that then has the same meaning."""
        return self.replace(drafter=NoDrafter(), tree=presets.root(), rule=self.rule.baseline())

    @property
    def verified_nodes(self) -> int:
        """How many nodes a step feeds to the base, root included."""
        return self.drafter.spec.verified_nodes(self.tree)

    @property
    def longest_path(self) -> int:
        """The most tokens after the root that a step may accept."""
        return self.drafter.spec.longest_path(self.tree)

    def shown_rule(self) -> str:
        """Return the rule with its numbers, and the processors, as reports record them."""
        return " with ".join([str(self.rule), *map(str, self.processors)])


def sampling_params(
    specs: Sequence[DecodeSpec], rng: Array, vocab_size: int, like: Sequence[DecodeSpec] = ()
) -> SamplingParams:
    """Return the numbers of a batch from the specs of its rows, whose rules are of one kind.

    like: give them the structure that they would have with these in the batch, too, so that all batches share a
    program.
    """
    return SamplingParams(
        rng,
        batched([spec.rule for spec in specs], [spec.rule for spec in like]),
        batched_processors([spec.processors for spec in specs], vocab_size, [spec.processors for spec in like]),
        np.array([spec.max_new_tokens for spec in specs], np.int32),
    )
