"""Checks of structured output and tool calls: valid, and equal to the reference's."""

import json
from collections.abc import Callable
from typing import Any

from hydrajax.certify.servers.answers import Answer
from hydrajax.certify.servers.client import Refused
from hydrajax.certify.servers.comparison import FAULT, Finding, shown
from hydrajax.certify.servers.questions import Question
from hydrajax.certify.servers.sides import Compared, Sides

MOST_TOKENS = 128  # the longest valid text is shorter
CITIES = ("Paris", "Lima", "Oslo")
# Only enumerations, so that every model ends in time.
FIELDS: dict[str, list[Any]] = {
    "city": list(CITIES),
    "weather": ["sunny", "rainy", "cloudy", "snowy"],
    "degrees": [-10, 0, 10, 20, 30],
    "windy": [True, False],
}
SCHEMA = {
    "type": "object",
    "properties": {name: {"enum": values} for name, values in FIELDS.items()},
    "required": list(FIELDS),
    "additionalProperties": False,
}
REQUESTS = tuple(f"Report the weather of {city} in {month}." for city in CITIES for month in ("May", "January"))
FUNCTION = "get_weather"
TOOL = {
    "type": "function",
    "function": {
        "name": FUNCTION,
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(CITIES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def structured_output(sides: Sides) -> Compared:
    """Ask for JSON under a schema, one at a time and together."""
    response_format = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
    return _checked(sides, {"response_format": response_format}, _wrong_json, "structured output")


def tool_calls(sides: Sides) -> Compared:
    """Ask for a call of a tool, one at a time, together, and as streams."""
    return _checked(sides, {"tools": [TOOL], "tool_choice": "required"}, _wrong_call, "tool call")


def _checked(sides: Sides, more: dict[str, Any], wrong: Callable[[Answer], str], kind: str) -> Compared:
    """Check that answers are valid, and compare them with valid ones of the reference, if it has any."""
    questions = [Question(text, True, MOST_TOKENS, more=more) for text in REQUESTS]
    together, found = max(sides.settings.concurrency), Compared()
    (outcome,) = sides.served(questions[:1])
    if isinstance(outcome, Refused):
        found.refusals.append(str(outcome))
        return found
    expected = sides.expected(questions) if sides.reference.shares_grammars else [None] * len(questions)
    streams = [each.but(stream=True) for each in questions]
    for asked, workers, setting in (
        (questions, 1, "1 at a time"),
        (questions * max(1, together // len(questions)), together, f"{together} at once"),
        (streams, 1, "streamed"),
    ):
        for number, (question, served) in enumerate(zip(asked, sides.served(asked, workers), strict=True)):
            if (reply := found.reply(question, served, setting)) is None:
                continue
            at = number % len(questions)
            wanted = expected[at]
            if message := wrong(reply[0]):
                if isinstance(wanted, tuple) and wrong(wanted[0]):
                    found.refusals.append(f"not valid on either side: {message}")
                    continue
                found.compared += 1
                found.findings.append(Finding(kind, FAULT, setting, question, message))
            elif isinstance(wanted, tuple):
                found.add(sides, question, served, expected, at, setting)
            else:
                found.compared += 1
    invalid = [each for each in found.findings if each.kind == kind]
    if not sides.reference.shares_grammars and 0 < len(invalid) == found.compared:
        found.refusals.append(f"no answer is valid, for which the model may be the reason: {invalid[0].message}")
        found.findings = [each for each in found.findings if each.kind != kind]
        found.compared = 0
    return found


def _wrong_json(answer: Answer) -> str:
    """Return the mistake of a text under `SCHEMA`, or an empty text."""
    if answer.finish_reason == "length":
        return f"not complete within {MOST_TOKENS} tokens: {shown(answer.text)}"
    try:
        value = json.loads(answer.text)
    except ValueError:
        return f"not JSON: {shown(answer.text, 80)}"
    valid = isinstance(value, dict) and set(value) == set(FIELDS)
    typed = {name: [(type(each), each) for each in allowed] for name, allowed in FIELDS.items()}
    if not valid or any((type(value[name]), value[name]) not in allowed for name, allowed in typed.items()):
        return f"not valid under the schema: {shown(answer.text, 80)}"
    return ""


def _wrong_call(answer: Answer) -> str:
    """Return the mistake of a call of `TOOL`, or an empty text."""
    if not answer.calls:
        return f"no tool_calls, but the text {shown(answer.text, 80)}"
    whole = answer.calls[:-1] if answer.finish_reason == "length" else ()  # the limit may cut the last of several
    for name, arguments in whole or answer.calls:
        if name != FUNCTION:
            return f"expected a call of {FUNCTION}, found {shown(name)}"
        try:
            value = json.loads(arguments)
        except ValueError:
            return f"arguments that are not JSON: {shown(arguments, 80)}"
        if not isinstance(value, dict) or set(value) != {"city"} or value["city"] not in CITIES:
            return f"arguments that are not valid under the tool's schema: {shown(arguments, 80)}"
    return ""
