"""`DecodeSpec` describes how to decode; `SamplingParams` are the numbers that each sequence has for itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from hydrajax.decoding.acceptance import AcceptanceRule, Greedy
from hydrajax.decoding.constraints import Constraint, GrammarLike
from hydrajax.decoding.numbers import batched
from hydrajax.decoding.processors import batched_processors
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.trees import presets
from hydrajax.trees.dynamic import BestFirstTree, CandidateTree, DynamicTree


def check_max_new_tokens(value: int) -> int:
    """Return the limit if it is at least 1, else raise `HydrajaxError`."""
    if value < 1:
        raise HydrajaxError(f"max_new_tokens: got {value}, expected at least 1")
    return value


class SamplingParams(NamedTuple):
    """Per-sequence parameters: arguments of the program, so other values do not recompile.

    Attributes:
        rng: A random key, or one per sequence ``[B]``. A sequence's draws depend only on its key; a single key is
            folded with the sequence's number.
        rule: The acceptance rule, its numbers arrays ``[B]``.
        processors: The logits processors, their numbers arrays ``[B]``.
        limits: int32 ``[B]`` maximum number of tokens, at most the engine's; None for the engine's.
        ignore_eos: bool ``[B]`` EOS does not end the sequence; None for no sequence.
        constraints: One per sequence, None for a sequence without; for the stepped executor alone, which copies them.
            They stay on the host. None for those of the executor's spec.
    """

    rng: Array
    rule: AcceptanceRule
    processors: tuple[Any, ...] = ()
    limits: Int[Array, " B"] | None = None
    ignore_eos: Bool[Array, " B"] | None = None
    constraints: tuple[Constraint | None, ...] | None = None


@dataclass(frozen=True)
class DecodeSpec:
    """How to decode: a frozen, hashable value for every function and executor that decodes.

    Attributes:
        drafter: Proposes candidate tokens; its parameters come with the model's.
        tree: The candidate tree, static or dynamic.
        rule: Judges the verified tree. Its numbers apply to all sequences unless a call gives others.
        processors: Change the base's logits before the rule reads them (`hydrajax.decoding.processors`).
        max_new_tokens: Maximum number of tokens per sequence; prompt and output must also fit the context.
        eos_ids: A sequence ends with the first of these that it emits.
        logprobs: K, to keep the log-probability of each emitted token and of the K most likely tokens at its position
            (`hydrajax.decoding.decode.DecodeResult`); 0 for the emitted tokens alone, None for neither.
        grammar: The texts that may be generated; needs a `hydrajax.decoding.stepped.SteppedExecutor`.
        forced_nodes: Nodes for tokens that a grammar forces: a branch next to the drafter's tree, verified only in
            steps in which there are such tokens.

    Raises:
        HydrajaxError: For parts that do not fit each other. `check` tests what depends on the base.
    """

    drafter: Drafter = field(default_factory=NoDrafter)
    tree: CandidateTree = field(default_factory=presets.root)
    rule: AcceptanceRule = field(default_factory=Greedy)
    processors: Sequence[Any] = ()
    max_new_tokens: int = 256
    eos_ids: Sequence[int] = ()
    logprobs: int | bool | None = None
    grammar: GrammarLike | None = None
    forced_nodes: int = 0

    def __post_init__(self):
        check_max_new_tokens(self.max_new_tokens)
        if self.forced_nodes < 0:
            raise HydrajaxError(f"forced_nodes: got {self.forced_nodes}, expected at least 0")
        if isinstance(self.tree, DynamicTree) and self.drafter.spec.supports_dynamic_tree:
            object.__setattr__(self, "tree", self.tree.reaching(self.drafter.spec.depth))
        if isinstance(self.logprobs, bool):  # "log-probabilities: yes"
            object.__setattr__(self, "logprobs", 0 if self.logprobs else None)
        for name in ("processors", "eos_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        kinds = [type(one).__name__ for one in self.processors]
        if twice := [name for number, name in enumerate(kinds) if name in kinds[:number]]:
            raise HydrajaxError(f"processors: got {twice[0]} twice, expected one of a kind")

    def check(self, config: LlamaConfig) -> None:
        """Check the spec against a base of this shape.

        Raises:
            HydrajaxError: For a tree that the drafter cannot fill or the rule cannot judge, a rule that the drafter
                cannot serve, and for numbers beyond the context or the vocabulary.
        """
        can, tree = self.drafter.spec, self.tree
        name = type(self.drafter).__name__
        if isinstance(tree, DynamicTree) and not can.supports_dynamic_tree:
            raise HydrajaxError(
                f"tree: got {tree.name}, expected a static tree because {name} cannot fill dynamic ones"
            )
        if isinstance(tree, BestFirstTree) and tree.top_k and (self.rule.needs_draws or not can.one_pass):
            drawn = f"{type(self.rule).__name__} draws the candidates" if can.one_pass else f"{name} drafts by levels"
            raise HydrajaxError(f"tree: got {tree.name}, expected best-{tree.size} because {drawn}")
        tree.check(can.depth, config.vocab_size)
        self.rule.check(tree)
        if self.rule.needs_draws and can.longest_path(tree) and not can.supports_sampling:
            raise HydrajaxError(
                f"rule: got {type(self.rule).__name__}, expected another one: {name} does not sample candidates"
            )
        if can.reach >= config.max_positions:
            raise HydrajaxError(
                f"draft: got a window of {can.reach}, expected less than the context of {config.max_positions}"
            )
        batched_processors([self.processors], config.vocab_size)  # refuses token ids beyond the vocabulary
        if self.logprobs is not None and not 0 <= self.logprobs <= config.vocab_size:
            raise HydrajaxError(f"logprobs: got {self.logprobs}, expected 0 to the vocabulary's {config.vocab_size}")

    def replace(self, **changes: Any) -> DecodeSpec:
        return dataclasses.replace(self, **changes)

    def autoregressive(self) -> DecodeSpec:
        """Return the autoregressive baseline: no draft, and the rule of the same meaning."""
        return self.replace(drafter=NoDrafter(), tree=presets.root(), rule=self.rule.baseline(), forced_nodes=0)

    @property
    def verified_nodes(self) -> int:
        """Number of nodes that a step feeds to the base, root included."""
        return self.drafter.spec.verified_nodes(self.tree) + self.forced_nodes

    @property
    def longest_path(self) -> int:
        """Maximum number of accepted draft tokens per step."""
        return self.drafter.spec.longest_path(self.tree) + self.forced_nodes

    @property
    def held_tokens(self) -> int:
        """Maximum number of forced tokens that the drafter's tree holds if a grammar masks each of its levels: those of
        the path of best guesses.
        """
        can, tree = self.drafter.spec, self.tree
        if not can.fills_levels or (can.one_pass and isinstance(tree, BestFirstTree)):
            return 0
        if isinstance(tree, DynamicTree):
            return tree.depth
        return max((len(choice) for choice in tree.choices if not any(choice)), default=0)

    def shown_rule(self) -> str:
        """Return the rule with its numbers, and the processors, as reports record them."""
        return " with ".join([str(self.rule), *map(str, self.processors)])


def sampling_params(
    specs: Sequence[DecodeSpec], rng: Array, vocab_size: int, like: Sequence[DecodeSpec] = ()
) -> SamplingParams:
    """Return the sampling parameters of a batch from the specs of its sequences, whose rules are of one kind.

    Args:
        specs: One per sequence.
        rng: A random key, or one per sequence.
        vocab_size: The base's.
        like: Give the result the structure that it would have with these in the batch, so that all batches share a
            program.
    """
    return SamplingParams(
        rng,
        batched([spec.rule for spec in specs], [spec.rule for spec in like]),
        batched_processors([spec.processors for spec in specs], vocab_size, [spec.processors for spec in like]),
        np.array([spec.max_new_tokens for spec in specs], np.int32),
    )
