"""`Way`: a model with everything that decides how it decodes, under a name. Whatever is measured here is a way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from hydrajax.bundle import Bundle
from hydrajax.decoding.acceptance import AcceptanceRule, ExactSampling, Greedy, Typical
from hydrajax.decoding.decode import DecodeResult, make_decode_fn
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.state import Params
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.none import NoDrafter
from hydrajax.models.base import BaseModel
from hydrajax.ssd.decode import are_apart, make_apart_fn
from hydrajax.ssd.fan_out import FanOut
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree

AUTOREGRESSIVE = "autoregressive"


@dataclass(frozen=True, eq=False)
class Way:
    """One way to decode: a base, a drafter with their parameters, a tree and an acceptance rule, under a name.

    The decode function is made at the first use and kept, so a way that is measured twice is compiled once.
    ``max_new_tokens`` and ``eos_ids`` are those of `hydrajax.make_decode_fn`; so is ``fan_out``, of parameters that lie
    on devices of their own.
    """

    name: str
    model: BaseModel
    drafter: Drafter
    params: Params = field(repr=False)
    tree: CandidateTree
    rule: AcceptanceRule = field(default_factory=Greedy)
    max_new_tokens: int = 128
    eos_ids: tuple[int, ...] = ()
    fan_out: int | FanOut | None = None

    @classmethod
    def of(
        cls,
        loaded: Bundle,
        name: str,
        tree: CandidateTree | None = None,
        rule: AcceptanceRule | None = None,
        *,
        max_new_tokens: int = 128,
    ) -> Way:
        """The way in which a loaded model decodes, by default with the tree that belongs to its drafter."""
        tree = tree or loaded.default_tree()
        model, drafter, params = loaded.model, loaded.drafter, loaded.params
        return cls(name, model, drafter, params, tree, rule or Greedy(), max_new_tokens, loaded.eos_ids)

    @property
    def nodes(self) -> int:
        """How many nodes a step feeds to the base, the root counted."""
        return self.drafter.spec.verified_nodes(self.tree)

    @property
    def depth(self) -> int:
        """The most tokens after the root that a step may accept."""
        return self.drafter.spec.longest_path(self.tree)

    @property
    def promises_same_output(self) -> bool:
        """Whether its output is, token for token, that of `autoregressive`; see the function of the same name."""
        return promises_same_output(self.rule)

    @cached_property
    def decode_fn(self) -> Callable[..., DecodeResult]:
        """See `hydrajax.make_decode_fn`. Raises `HydrajaxError` for a tree that the drafter cannot fill."""
        settings = {"max_new_tokens": self.max_new_tokens, "eos_ids": self.eos_ids}
        if are_apart(self.params):
            parts = self.model, self.drafter, self.tree, self.rule
            return make_apart_fn(*parts, fan_out=self.fan_out, **settings)
        return make_decode_fn(self.model, self.drafter, self.tree, self.rule, **settings)

    def decode(self, prompt, lengths=None, key=None) -> DecodeResult:
        """Generate for int32 prompts ``[B, P]``, right-padded, of these lengths ``[B]``; ``key`` is for sampling."""
        return self.decode_fn(self.params, prompt, lengths, key)

    def with_tree(self, tree: CandidateTree, name: str) -> Way:
        """The same with another tree, under another name."""
        return dataclasses.replace(self, tree=tree, name=name)

    def autoregressive(self, name: str = AUTOREGRESSIVE) -> Way:
        """The baseline: the same base and settings without a draft, by the rule that then has the same meaning."""
        return dataclasses.replace(
            self,
            name=name,
            drafter=NoDrafter(),
            params=Params(self.params.base, {}),
            tree=presets.root(),
            rule=baseline_rule(self.rule),
        )


def baseline_rule(rule: AcceptanceRule) -> AcceptanceRule:
    """The rule without a draft: rejection comes to plain sampling, typical acceptance to the likeliest token."""
    if isinstance(rule, RejectionSampling):
        return ExactSampling(rule.temperature, rule.top_k, rule.top_p, min_p=rule.min_p)
    return Greedy() if isinstance(rule, Typical) else rule


def promises_same_output(rule: AcceptanceRule) -> bool:
    """Whether a rule promises the tokens of decoding without a draft. The others promise a distribution at most."""
    return isinstance(rule, (Greedy, ExactSampling))
