"""Specs from keywords: rules by name, and numbers of rules and logits processors, as calls and commands give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from hydrajax.decoding.acceptance import AcceptanceRule, ExactSampling, Greedy, Typical
from hydrajax.decoding.constraints import GrammarLike
from hydrajax.decoding.processors import PROCESSOR_OF, make_processors
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.spec import DecodeSpec
from hydrajax.errors import HydrajaxError, hint, not_allowed


class Numbers(TypedDict, total=False):
    """The numbers of all rules and processors as keywords of a call; a list gives one per prompt."""

    temperature: float | Sequence[float]
    top_k: int | Sequence[int]
    top_p: float | Sequence[float]
    min_p: float | Sequence[float]
    epsilon: float | Sequence[float]
    alpha: float | Sequence[float]
    draft_temperature: float | Sequence[float]
    repetition_penalty: float | Sequence[float]
    presence_penalty: float | Sequence[float]
    frequency_penalty: float | Sequence[float]
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]]


Rule = AcceptanceRule | str  # or its name
RULES: dict[str, type[AcceptanceRule]] = {
    "greedy": Greedy,
    "typical": Typical,
    "exact": ExactSampling,
    "rejection": RejectionSampling,
}


def numbers_of(name: str) -> tuple[str, ...]:
    """Return the names of a rule's numbers: its fields."""
    return tuple(field.name for field in dataclasses.fields(RULES[name]))


# The other keywords of `hydrajax.LanguageModel`'s methods, and the names of other libraries for them.
ARGUMENTS = (
    "draft", "tree", "rule", "processors", "max_new_tokens", "stop", "batch_size", "seed", "logprobs", "grammar",
    "on_status", "template",
)  # fmt: skip
OTHERS_WORDS = {
    "max_tokens": "max_new_tokens", "max_length": "max_new_tokens", "temp": "temperature",
    "do_sample": "temperature=0.7, which samples (0 is greedy)", "stop_strings": "stop", "stopping_criteria": "stop",
    "chat_template": "template", "response_format": "grammar", "guided_json": "grammar",
    "logits_processor": "processors", "output_scores": "logprobs", "output_logits": "logprobs",
    "assistant_model": "draft", "prompt_lookup_num_tokens": 'draft="lookup"',
    "num_assistant_tokens": 'tree="chain-K"', "streamer": "the method stream",
    **dict.fromkeys(("num_return_sequences", "best_of", "n"), "a list with the prompt several times"),
    **dict.fromkeys(("num_beams", "num_beam_groups", "early_stopping", "length_penalty"), "no beam search"),
    **dict.fromkeys(("min_length", "min_new_tokens"), "no minimum length"),
    **dict.fromkeys(("no_repeat_ngram_size", "bad_words_ids"), "no bans of n-grams; logit_bias bans single tokens"),
}  # fmt: skip
# Nodes for the tokens that a grammar forces; measured, see docs/structured_output.md.
FORCED_NODES = 8


def check_names(names: Iterable[str]) -> None:
    """Raise `HydrajaxError` with what to write for a keyword that is not in `Numbers`."""
    known = [*Numbers.__annotations__, *ARGUMENTS]
    for name in names:
        if name not in Numbers.__annotations__:
            what = hint(name, known, OTHERS_WORDS) or f"; expected one of {', '.join(known)}"
            raise HydrajaxError(f"{name}: unknown argument{what}")


def default_rule(numbers: Mapping[str, Any]) -> str:
    """Return the rule for numbers without a rule's name: exact with a temperature, else greedy.

    Temperature 0 alone is greedy; a list with one temperature per prompt is exact if any of them is not 0.

    Args:
        numbers: Keywords; only the numbers of rules count.
    """
    numbers = {name: value for name, value in numbers.items() if name not in (*PROCESSOR_OF, "processors")}
    temperature = numbers.get("temperature")
    several = isinstance(temperature, (Sequence, np.ndarray)) and not isinstance(temperature, str)
    if all(value is None or value == 0 for value in (temperature if several else [temperature])):
        others = any(value is not None for name, value in numbers.items() if name != "temperature")
        return "exact" if temperature is not None and others else "greedy"
    return "exact"


def make_rule(name: str, **numbers: Any) -> AcceptanceRule:
    """Return the rule of this name with these numbers; a number that is None keeps its default.

    Raises:
        HydrajaxError: For an unknown name, and for a number that is out of range or that the rule does not have.
    """
    if name not in RULES:
        raise not_allowed("rule", name, RULES)
    given = {number: value for number, value in numbers.items() if value is not None}
    if name == "greedy" and given.get("temperature") == 0:
        del given["temperature"]
    for number in given:
        if number not in numbers_of(name):
            takers = ", ".join(other for other in RULES if number in numbers_of(other))
            only = f", only with {takers}" if takers else ""
            only += " or with a temperature" if name == "greedy" and number in ("top_k", "top_p", "min_p") else ""
            raise HydrajaxError(f"{number}: got a value for the rule {name}, expected none{only}")
    return RULES[name](**given)


def with_keywords(
    spec: DecodeSpec,
    rule: Rule | None = None,
    processors: Sequence[Any] = (),
    **numbers: Any,
) -> DecodeSpec:
    """Return the spec with a rule, by default `default_rule`, and with processors.

    Args:
        spec: The other fields stay.
        rule: A rule, or the name of one.
        processors: Applied after those that the numbers construct.
        numbers: Numbers of a named rule, and of processors (`hydrajax.decoding.processors.PROCESSORS`) with any rule.

    Raises:
        HydrajaxError: As `make_rule`, for an unknown keyword, and for a rule's number together with a rule object.
    """
    check_names(numbers)
    given = {name: value for name, value in numbers.items() if value is not None}
    of_rule = {name: value for name, value in given.items() if name not in PROCESSOR_OF}
    of_processors = {name: value for name, value in given.items() if name in PROCESSOR_OF}
    if rule is None or isinstance(rule, str):
        rule = make_rule(rule or default_rule(of_rule), **of_rule)
    elif of_rule:
        raise HydrajaxError(
            f"{next(iter(of_rule))}: got a value next to a rule object, expected none: set it in the rule"
        )
    return spec.replace(rule=rule, processors=(*make_processors(**of_processors), *processors))


def with_grammar(spec: DecodeSpec, grammar: GrammarLike | None) -> DecodeSpec:
    """Return the spec with a grammar, and with nodes for the tokens that it forces; unchanged for None."""
    return spec if grammar is None else spec.replace(grammar=grammar, forced_nodes=FORCED_NODES)


def specs_of_prompts(
    spec: DecodeSpec,
    count: int,
    *,
    rule: Rule | Sequence[AcceptanceRule] | None = None,
    max_new_tokens: int | Sequence[int] = 256,
    grammar: GrammarLike | Sequence[GrammarLike | None] | None = None,
    **keywords: Any,
) -> list[DecodeSpec]:
    """Return `with_keywords` for each of ``count`` prompts, from values for all or lists with one per prompt.

    Raises:
        HydrajaxError: As `with_keywords`, and for lists of another length.
    """
    check_names(keywords.keys() - {"processors"})
    if rule is None:
        rule = default_rule(keywords)
    of_all = {"rule": rule, "max_new_tokens": max_new_tokens, "grammar": grammar, **keywords}
    each = {
        name: one_each(name, value, count)
        for name, value in of_all.items()
        if isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str) and name != "processors"
    }
    found = []
    for row in range(max(count, 1)):  # invalid values are refused without prompts, too
        own = {name: value for name, value in of_all.items() if name not in each}
        own |= {name: values[row] for name, values in each.items() if count}
        limit = own.pop("max_new_tokens", spec.max_new_tokens)
        one = with_grammar(spec.replace(max_new_tokens=limit), own.pop("grammar", None))
        found.append(with_keywords(one, **own))
    return found[:count]


def one_each(name: str, value: Any, count: int) -> list:
    """Return ``count`` values from one for all or a list; raises `HydrajaxError` for a list of another length."""
    if not isinstance(value, (Sequence, np.ndarray)):
        return [value] * count
    if len(value) != count:
        raise HydrajaxError(f"{name}: got {len(value)} values for {count} prompts, expected one or one per prompt")
    return list(value)
