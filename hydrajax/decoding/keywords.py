"""Rules by name, and rules and logits processors from keywords, as calls and commands give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from hydrajax import plugins
from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.constraints import GrammarLike
from hydrajax.decoding.processing import PROCESSORS
from hydrajax.decoding.request import Request
from hydrajax.errors import HydrajaxError, hint, not_allowed

OF_ALL = ("processors", "allowed_token_ids")  # lists that are values of all prompts


class SamplingKeywords(TypedDict, total=False):
    """The sampling parameters of all rules and processors as keywords of a call; a list gives one per prompt."""

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
    allowed_token_ids: Sequence[int]  # of all prompts


Rule = AcceptanceRule | str  # or its name
RULES = plugins.Group("rules")  # their classes


def rule_name(kind: type[Any]) -> str:
    """Return the name of a class of rules, that of the class if it has no other."""
    return next((name for name, other in RULES.items() if other is kind), kind.__name__)


def parameters_of(rule: type[Any]) -> tuple[str, ...]:
    """Return the names of a rule's parameters: its fields."""
    return tuple(field.name for field in dataclasses.fields(rule))


def processor_fields() -> dict[str, type]:
    """Return the class of each processor's parameter."""
    return {each.name: cls for cls in PROCESSORS.values() for each in dataclasses.fields(cls)}


def make_processors(**given: Any) -> tuple[Any, ...]:
    """Return the processors of these parameters (`processor_fields`), without those that have no effect.

    A parameter that is None keeps its default. Raises `HydrajaxError` for a parameter out of range.
    """
    made: dict[type, dict[str, Any]] = {cls: {} for cls in PROCESSORS.values()}
    for name, cls in processor_fields().items():
        if given.get(name) is not None:
            made[cls][name] = given[name]
    processors = [cls(**own) for cls, own in made.items() if own]
    return tuple(processor for processor in processors if processor.has_effect)


# The other keywords of `hydrajax.LanguageModel`'s methods, and the names of other libraries for them.
ARGUMENTS = (
    "draft", "tree", "rule", "processors", "max_new_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "min_tokens", "ignore_eos", "bad_words", "batch_size", "seed", "logprobs", "grammar", "on_status", "template",
)  # fmt: skip
OTHERS_WORDS = {
    "max_tokens": "max_new_tokens", "max_length": "max_new_tokens", "temp": "temperature",
    "do_sample": "temperature=0.7, which samples (0 is greedy)", "stop_strings": "stop", "stopping_criteria": "stop",
    "chat_template": "template", "response_format": "grammar", "guided_json": "grammar",
    "logits_processor": "processors", "output_scores": "logprobs", "output_logits": "logprobs",
    "assistant_model": "draft", "prompt_lookup_num_tokens": 'draft="lookup"',
    "num_assistant_tokens": 'tree="chain-K"', "streamer": "the method stream",
    **dict.fromkeys(("num_return_sequences", "best_of"), "n"),
    **dict.fromkeys(("num_beams", "num_beam_groups", "early_stopping", "length_penalty"), "no beam search"),
    **dict.fromkeys(("min_length", "min_new_tokens"), "min_tokens"),
    "no_repeat_ngram_size": "no bans of n-grams", "bad_words_ids": "bad_words",
}  # fmt: skip


def check_names(names: Iterable[str]) -> None:
    """Raise `HydrajaxError` with what to write for a keyword that is no parameter of a rule or processor."""
    parameters = [*(name for rule in RULES.values() for name in parameters_of(rule)), *processor_fields()]
    known = [*dict.fromkeys([*SamplingKeywords.__annotations__, *parameters]), *ARGUMENTS]
    for name in names:
        if name not in parameters:
            what = hint(name, known, OTHERS_WORDS) or f"; expected one of {', '.join(known)}"
            raise HydrajaxError(f"{name}: unknown argument{what}")


def default_rule(parameters: Mapping[str, Any]) -> str:
    """Return the rule for parameters without a rule's name: exact with a temperature, else greedy.

    Temperature 0 alone is greedy; a list with one temperature per prompt is exact if any of them is not 0.

    Args:
        parameters: Keywords; only the parameters of rules count.
    """
    others = {*processor_fields(), "processors"}
    parameters = {name: value for name, value in parameters.items() if name not in others}
    temperature = parameters.get("temperature")
    several = isinstance(temperature, (Sequence, np.ndarray)) and not isinstance(temperature, str)
    if all(value is None or value == 0 for value in (temperature if several else [temperature])):
        others = any(value is not None for name, value in parameters.items() if name != "temperature")
        return "exact" if temperature is not None and others else "greedy"
    return "exact"


def make_rule(name: str, **parameters: Any) -> AcceptanceRule:
    """Return the rule of this name with these parameters; a parameter that is None keeps its default.

    Raises:
        HydrajaxError: For an unknown name, and for a parameter that is out of range or that the rule does not have.
    """
    if name not in RULES:
        raise not_allowed("rule", name, RULES)
    given = {parameter: value for parameter, value in parameters.items() if value is not None}
    if name == "greedy" and given.get("temperature") == 0:
        del given["temperature"]
    for parameter in given:
        if parameter not in parameters_of(RULES[name]):
            takers = ", ".join(other for other, kind in RULES.items() if parameter in parameters_of(kind))
            only = f", only with {takers}" if takers else ""
            only += " or with a temperature" if name == "greedy" and parameter in ("top_k", "top_p", "min_p") else ""
            raise HydrajaxError(f"{parameter}: got a value for the rule {name}, expected none{only}")
    return RULES[name](**given)


def make_request(
    rule: Rule | None = None, processors: Sequence[Any] = (), *, fields: Mapping[str, Any] = {}, **parameters: Any
) -> Request:
    """Return a request with a rule, by default `default_rule`, and with processors.

    Args:
        rule: A rule, or the name of one.
        processors: Applied after those that the parameters construct.
        fields: The other fields of the request.
        parameters: Of a named rule, and of processors (`hydrajax.decoding.keywords.processor_fields`) with any rule.

    Raises:
        HydrajaxError: As `make_rule`, for an unknown keyword, and for a rule's parameter together with a rule object.
    """
    check_names(parameters)
    given = {name: value for name, value in parameters.items() if value is not None}
    of_processors = {name: given.pop(name) for name in processor_fields() if name in given}
    if rule is None or isinstance(rule, str):
        rule = make_rule(rule or default_rule(given), **given)
    elif given:
        raise HydrajaxError(
            f"{next(iter(given))}: got a value next to a rule object, expected none: set it in the rule"
        )
    return Request(rule, (*make_processors(**of_processors), *processors), **fields)


def requests_of_prompts(
    count: int,
    *,
    rule: Rule | Sequence[AcceptanceRule] | None = None,
    max_new_tokens: int | Sequence[int] = 256,
    grammar: GrammarLike | Sequence[GrammarLike | None] | None = None,
    **keywords: Any,
) -> list[Request]:
    """Return `make_request` for each of ``count`` prompts, from values for all or lists with one per prompt.

    Raises:
        HydrajaxError: As `make_request`, and for lists of another length.
    """
    check_names(keywords.keys() - {"processors"})
    if rule is None:
        rule = default_rule(keywords)
    of_all = {"rule": rule, "max_new_tokens": max_new_tokens, "grammar": grammar, **keywords}
    each = {
        name: value
        for name, value in of_all.items()
        if isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str) and name not in OF_ALL
    }
    for name, values in each.items():
        if len(values) != count:
            raise HydrajaxError(f"{name}: got {len(values)} values for {count} prompts, expected one or one per prompt")
    found = []
    for row in range(max(count, 1)):  # invalid values are refused without prompts, too
        own = {name: value for name, value in of_all.items() if name not in each}
        own |= {name: values[row] for name, values in each.items() if count}
        fields = {name: own.pop(name) for name in ("max_new_tokens", "grammar") if name in own}
        found.append(make_request(fields=fields, **own))
    return found[:count]
