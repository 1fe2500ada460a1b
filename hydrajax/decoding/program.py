"""`Program`: the compiled configuration of decoding. `hydrajax.decoding.request.Request` describes one sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.request import Request, check_max_new_tokens
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.trees import presets
from hydrajax.trees.dynamic import BestFirstTree, CandidateTree, DynamicTree

FORCED_NODES = 8  # by default for the tokens that grammars force (docs/structured_output.md)


@dataclass(frozen=True)
class Program:
    """The compiled configuration: a frozen, hashable value for every function and executor that decodes.

    Attributes:
        drafter: Proposes candidate tokens; its parameters come with the model's.
        tree: The candidate tree, static or dynamic.
        rule: The class of the rules that judge the verified tree, an `AcceptanceRule`.
        max_new_tokens: Room for the output: the largest limit of a request.
        eos_ids: A sequence ends with the first of these that it emits.
        logprobs: K, to keep the log-probability of each emitted token and of the K most likely tokens at its position
            (`hydrajax.decoding.decode.DecodeResult`); 0 for the emitted tokens alone, None for neither.
        tempered_logprobs: Divide the logits by the rule's temperature before log-probabilities are taken: those of the
            sampled distribution without truncation.
        grammars: Requests may have grammars; needs a `hydrajax.decoding.stepped.SteppedExecutor`.
        forced_nodes: Nodes for tokens that a grammar forces: a branch next to the drafter's tree, verified only in
            steps in which there are such tokens.

    Raises:
        HydrajaxError: For parts that do not fit each other. `check` tests what depends on the base.
    """

    drafter: Drafter = field(default_factory=NoDrafter)
    tree: CandidateTree = field(default_factory=presets.root)
    rule: type[Any] = Greedy
    max_new_tokens: int = 256
    eos_ids: Sequence[int] = ()
    logprobs: int | bool | None = None
    tempered_logprobs: bool = False
    grammars: bool = False
    forced_nodes: int = 0

    def __post_init__(self):
        check_max_new_tokens(self.max_new_tokens)
        if self.forced_nodes < 0:
            raise HydrajaxError(f"forced_nodes: got {self.forced_nodes}, expected at least 0")
        if isinstance(self.tree, DynamicTree) and self.drafter.spec.supports_dynamic_tree:
            object.__setattr__(self, "tree", self.tree.reaching(self.drafter.spec.depth))
        if isinstance(self.logprobs, bool):  # "log-probabilities: yes"
            object.__setattr__(self, "logprobs", 0 if self.logprobs else None)
        object.__setattr__(self, "eos_ids", tuple(self.eos_ids))

    def check(self, config: LlamaConfig) -> None:
        """Check the program against a base of this shape.

        Raises:
            HydrajaxError: For a tree that the drafter cannot fill or the rule cannot judge, a rule that the drafter
                cannot serve, and for numbers beyond the context or the vocabulary.
        """
        can, tree, rule = self.drafter.spec, self.tree, self.rule.__name__
        name = type(self.drafter).__name__
        if isinstance(tree, DynamicTree) and not can.supports_dynamic_tree:
            raise HydrajaxError(
                f"tree: got {tree.name}, expected a static tree because {name} cannot fill dynamic ones"
            )
        if isinstance(tree, BestFirstTree) and tree.top_k and (self.rule.needs_draws or not can.one_pass):
            drawn = f"{rule} draws the candidates" if can.one_pass else f"{name} drafts by levels"
            raise HydrajaxError(f"tree: got {tree.name}, expected best-{tree.size} because {drawn}")
        tree.check(can.depth, config.vocab_size)
        self.rule().check(tree)
        if self.rule.needs_draws and can.longest_path(tree) and not can.supports_sampling:
            raise HydrajaxError(f"rule: got {rule}, expected another one: {name} does not sample candidates")
        if can.reach >= config.max_positions:
            raise HydrajaxError(
                f"draft: got a window of {can.reach}, expected less than the context of {config.max_positions}"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= config.vocab_size:
            raise HydrajaxError(f"logprobs: got {self.logprobs}, expected 0 to the vocabulary's {config.vocab_size}")

    def replace(self, **changes: Any) -> Program:
        return dataclasses.replace(self, **changes)

    def serving(self, *requests: Request) -> Program:
        """Return the program with the kind of rule, the room and the nodes that these requests need."""
        grammars = any(request.grammar is not None for request in requests)
        return self.replace(
            rule=type(requests[0].rule),
            max_new_tokens=max(request.max_new_tokens for request in requests),
            grammars=grammars,
            forced_nodes=FORCED_NODES if grammars else 0,
        )

    def request(self, **fields: Any) -> Request:
        """Return a request that has by default the parameters of the rule's class and the program's room as limit."""
        return Request(**{"rule": self.rule(), "max_new_tokens": self.max_new_tokens} | fields)

    def fitting(self, request: Request) -> Request:
        """Return the request, with the baseline of its rule if this program decodes without a draft by that."""
        return request if type(request.rule) is self.rule else request.replace(rule=request.rule.baseline())

    def autoregressive(self) -> Program:
        """Return the autoregressive baseline: no draft, and the kind of rule of the same meaning."""
        baseline = type(self.rule().baseline())
        return self.replace(drafter=NoDrafter(), tree=presets.root(), rule=baseline, forced_nodes=0)

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
