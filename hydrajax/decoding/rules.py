"""The acceptance rules by their names, for whoever gives them as text: the command line, or a call in Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np

from hydrajax.decoding.acceptance import AcceptanceRule, ExactSampling, Greedy, Typical
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.errors import HydrajaxError, not_allowed


class Numbers(TypedDict, total=False):
    """The numbers of all rules, as keywords of a call; one that is a list gives every prompt its own."""

    temperature: float | Sequence[float]
    top_k: int | Sequence[int]
    top_p: float | Sequence[float]
    min_p: float | Sequence[float]
    repetition_penalty: float | Sequence[float]
    presence_penalty: float | Sequence[float]
    frequency_penalty: float | Sequence[float]
    epsilon: float | Sequence[float]
    alpha: float | Sequence[float]
    draft_temperature: float | Sequence[float]


RULES: dict[str, type[AcceptanceRule]] = {
    "greedy": Greedy,
    "typical": Typical,
    "exact": ExactSampling,
    "rejection": RejectionSampling,
}


def numbers_of(name: str) -> tuple[str, ...]:
    """The numbers that a rule takes: its fields."""
    return tuple(field.name for field in dataclasses.fields(RULES[name]))


def make_rule(name: str, **numbers: Any) -> AcceptanceRule:
    """The rule of this name with these numbers; one that is None is left at the rule's default.

    Raises `HydrajaxError` for an unknown name, and for a number that is out of range or that the rule does not have.
    """
    if name not in RULES:
        raise not_allowed("rule", name, RULES)
    given = {number: value for number, value in numbers.items() if value is not None}
    for number in given:
        if number not in numbers_of(name):
            takers = ", ".join(other for other in RULES if number in numbers_of(other))
            only = f", only with {takers}" if takers else ""
            raise HydrajaxError(f"{number}: has no meaning with the rule {name}{only}")
    return RULES[name](**given)


def rules_for(
    rule: str | AcceptanceRule | Sequence[AcceptanceRule] | None, count: int, **numbers: Any
) -> AcceptanceRule | list[AcceptanceRule]:
    """What a call in Python means by its rule: one for all prompts, or a list of one for each of ``count`` prompts.

    rule: a name, a rule, a list of rules, or None for greedy. numbers: of a rule that is named; one that is a list
    gives every prompt its own. Raises `HydrajaxError` as `make_rule`, and for lists of another length.
    """
    given = {name: value for name, value in numbers.items() if value is not None}
    if rule is not None and not isinstance(rule, str):
        if given:
            raise HydrajaxError(
                f"{next(iter(given))}: belongs to a rule that is named; set it in the rule that is given"
            )
        return rule if isinstance(rule, AcceptanceRule) else one_each("rule", rule, count)
    name = rule or "greedy"
    lists = {key: one_each(key, value, count) for key, value in given.items() if np.ndim(value)}
    if not lists:
        return make_rule(name, **given)
    return [make_rule(name, **given | {key: values[row] for key, values in lists.items()}) for row in range(count)]


def one_rule(rule: str | AcceptanceRule | None, **numbers: Any) -> AcceptanceRule:
    """`rules_for` a single prompt."""
    found = rules_for(rule, 1, **numbers)
    return found[0] if isinstance(found, list) else found


def one_each(name: str, value: Any, count: int) -> list:
    """One for each of so many prompts, from one for all or a list, which `HydrajaxError` refuses at another length."""
    if not isinstance(value, (Sequence, np.ndarray)):
        return [value] * count
    if len(value) != count:
        raise HydrajaxError(f"{name}: must be one for all prompts or one for each, found {len(value)} for {count}")
    return list(value)
