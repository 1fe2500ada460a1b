"""Result files: what an experiment measured, in rows of a known kind, with the command, the machine and the versions.

`hydrajax.report.markdown` draws them. A file is JSON: ``{"hydrajax_result": 1, kind, source, title, command, machine,
settings, remarks, rows}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.text.jsonl import shown
from hydrajax.text.records import INTEGER
from hydrajax.text.records import NUMBER as FINITE

FORMAT = 1
TEXT, WHOLE, NUMBER, BOOL, NUMBERS = "text", "integer", "number", "true or false", "list of numbers"
OR_NULL = " or null"
LONGEST, MOST_ROWS, MOST_NUMBERS = 1000, 1000, 64  # characters of a text, rows of a file, numbers of a row's list
DEEPEST = 8  # of what is said beside the rows
INTERVALS = (("low", "high"), ("difference_low", "difference_high"))

_RATE = {"tokens_per_step": NUMBER, "tokens_per_second": NUMBER, "low": NUMBER + OR_NULL, "high": NUMBER + OR_NULL}
_RATE |= {"speedup": NUMBER}
# What each row of a result holds, by the result's kind. Times are milliseconds; low and high a 95% interval of the rate
# (of the speed-up in "categories"). Further fields are kept and not drawn.
KINDS: dict[str, dict[str, str]] = {
    # Ways to decode, at one batch size or several (hydra figures 2, 3, 5, 6; medusa table 3).
    "speed": {"name": TEXT, "batch": WHOLE, "nodes": WHOLE, **_RATE, "equal": BOOL + OR_NULL},
    # Trees (hydra figures 7 to 9, medusa figure 4). family: "searched", "dynamic", "chain", "dense" ...
    # expected: the tokens_per_step that calibration text foretold.
    "trees": {"drafter": TEXT, "batch": WHOLE, "family": TEXT, "name": TEXT, "nodes": WHOLE}
    | {"expected": NUMBER + OR_NULL, **_RATE},
    # Acceptance rules (hydra figure 4, medusa figure 5). parameter: what is varied, "epsilon" or "temperature", and its
    # value, or null. nats: negative log-likelihood of a token of the output under the base at temperature 1.
    "acceptance": {"drafter": TEXT, "rule": TEXT, "parameter": TEXT + OR_NULL, "value": NUMBER + OR_NULL}
    | {"tokens_per_step": NUMBER, "nats": NUMBER + OR_NULL},
    # What drafting costs (hydra table 1). heads: milliseconds of each.
    "overhead": {"drafter": TEXT, "prefix_attention": NUMBER + OR_NULL, "heads": NUMBERS}
    | {"verify": NUMBER, "autoregressive_step": NUMBER},
    # Ways to decode by category of question (hydra table 2).
    "categories": {"name": TEXT, "category": TEXT, "questions": WHOLE, **_RATE, "equal": BOOL + OR_NULL},
    # Scores of answers, by rule and way to decode (amphista table 3). score, low, high and the difference to the base
    # alone, question by question, with its interval, as tables show them: shares times 100.
    "quality": {"set": TEXT, "metric": TEXT, "rule": TEXT, "name": TEXT, "questions": WHOLE, "score": NUMBER}
    | {"low": NUMBER + OR_NULL, "high": NUMBER + OR_NULL, "difference": NUMBER}
    | {"difference_low": NUMBER + OR_NULL, "difference_high": NUMBER + OR_NULL}
    | {"tokens_per_step": NUMBER, "speedup": NUMBER, "equal": BOOL + OR_NULL},
    # How often a head's first guesses hold the true token (amphista figure 1). head from 0; top: how many guesses.
    "accuracy": {"drafter": TEXT, "head": WHOLE, "top": WHOLE, "accuracy": NUMBER},
    # Drafts of several sizes, and the Pareto front. draft_ms: of a step. predicted_gigabytes and
    # predicted_speedup: of such a draft for a larger base, as the remarks say.
    "pareto": {"drafter": TEXT, "lm_head": TEXT, "nodes": WHOLE, "draft_megabytes": NUMBER}
    | {"draft_ms": NUMBER, **_RATE, "equal": BOOL + OR_NULL}
    | {"predicted_gigabytes": NUMBER, "predicted_speedup": NUMBER},
    # A decode step and its verbs.
    "steps": {"tree": TEXT, "batch": WHOLE, "nodes": WHOLE, "autoregressive_step": NUMBER, "step": NUMBER}
    | {"propose": NUMBER, "verify": NUMBER, "accept_commit": NUMBER, "observe": NUMBER, "break_even": NUMBER},
    # A step as the roofline predicts it and as it was measured.
    "prediction": {"batch": WHOLE, "context": WHOLE, "nodes": WHOLE, "predicted_step": NUMBER, "step": NUMBER}
    | {"predicted_autoregressive_step": NUMBER, "autoregressive_step": NUMBER},
    # A step's compiled program. gigabytes: moved per step, beside the floor (weights, filled slots, draft). copies:
    # kernels that only copy or lay out anew more than a megabyte, in the loop or around it. temporary: memory.
    "program": {"what": TEXT, "batch": WHOLE, "context": WHOLE, "nodes": WHOLE, "kernels": WHOLE}
    | {"kernels_per_layer": NUMBER, "gigabytes": NUMBER, "floor_gigabytes": NUMBER, "copies": WHOLE}
    | {"copied_megabytes": NUMBER, "temporary_megabytes": NUMBER, "one_graph": BOOL},
}


@dataclass(frozen=True)
class Result:
    """What one command measured.

    kind: of `KINDS`, which names the fields of ``rows``. source: the figure or table it corresponds to, such as "hydra
    figure 2", or "". title: what is shown, a line. settings: what the figures depend on. remarks: what the reader of
    the picture should know. machine: from `hydrajax.machine.machine`.
    """

    kind: str
    source: str
    title: str
    rows: list[dict[str, Any]]
    command: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def write_result(file: WholeFile, result: Result) -> None:
    """Write a result file. Raises `HydrajaxError` for rows that are not of their kind."""
    check(asdict(result), "result")
    file.write_text(json.dumps({"hydrajax_result": FORMAT} | asdict(result), indent=1) + "\n")


def result_from(content: Mapping[str, Any], where: str) -> Result:
    """A result file's content. Raises `HydrajaxError` naming what is missing or wrong in it."""
    if content["hydrajax_result"] != FORMAT:
        found = shown(content["hydrajax_result"])
        raise HydrajaxError(f"{where}: hydrajax_result: this version reads {FORMAT}, found {found}")
    check(content, where)
    return Result(**{name: content[name] for name in Result.__dataclass_fields__ if name in content})


def in_lines(value: Any) -> Any:
    """The same with every text on one line of at most `LONGEST`, without control characters."""
    return each_text(value, _line)


def each_text(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """A value of JSON with another text for each, the names of fields included; what is nested deeper than `DEEPEST` is
    left out.
    """
    if isinstance(value, str):
        return change(value)
    if depth == DEEPEST and isinstance(value, dict | list):
        return "..."
    if isinstance(value, dict):
        return {each_text(name, change): each_text(item, change, depth + 1) for name, item in value.items()}
    return [each_text(item, change, depth + 1) for item in value] if isinstance(value, list) else value


def _line(text: str) -> str:
    line = "".join(letter if letter.isprintable() else " " for letter in text[:LONGEST])
    return line if len(text) <= LONGEST else f"{line}..."


def check(content: Mapping[str, Any], where: str) -> None:
    """Raises `HydrajaxError` unless these are the fields of a `Result`."""
    types = {"kind": str, "source": str, "title": str, "rows": list, "command": str}
    types |= {"machine": dict, "settings": dict, "remarks": list}
    for name, wanted in types.items():
        if not isinstance(content.get(name), wanted):
            raise HydrajaxError(f"{where}: {name}: must be of type {wanted.__name__}, found {shown(content.get(name))}")
    if content["kind"] not in KINDS:
        raise HydrajaxError(f"{where}: kind: found {shown(content['kind'])}, known are {', '.join(KINDS)}")
    if not 1 <= len(content["rows"]) <= MOST_ROWS:
        raise HydrajaxError(f"{where}: rows: there are {len(content['rows'])}, allowed are 1 to {MOST_ROWS}")
    for number, row in enumerate(content["rows"]):
        for name, wanted in KINDS[content["kind"]].items():
            if not isinstance(row, dict) or name not in row:
                raise HydrajaxError(f"{where}: rows[{number}]: field {name} is missing")
            if not _fits(row[name], wanted):
                raise HydrajaxError(f"{where}: rows[{number}].{name}: must be {wanted}, found {shown(row[name])}")
        for low, high in INTERVALS:
            if (row.get(low) is None) != (row.get(high) is None):
                raise HydrajaxError(f"{where}: rows[{number}]: {low} and {high} must be numbers both, or both null")


def _fits(value: Any, wanted: str) -> bool:
    if value is None:
        return wanted.endswith(OR_NULL)
    wanted = wanted.removesuffix(OR_NULL)
    if isinstance(value, bool) or wanted == BOOL:
        return wanted == BOOL and isinstance(value, bool)
    if wanted == NUMBERS:
        return isinstance(value, list) and len(value) <= MOST_NUMBERS and all(_fits(item, NUMBER) for item in value)
    if wanted == TEXT:
        return isinstance(value, str)
    return (INTEGER if wanted == WHOLE else FINITE).holds(value)
