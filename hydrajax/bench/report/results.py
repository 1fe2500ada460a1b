"""The result file format: measured rows of one kind, with the command, the machine and the settings.

A file is JSON: ``{"hydrajax_result": 1, kind, source, title, command, machine, settings, remarks, rows}``. The JSON of
commands holds a list of these under ``hydrajax_results``.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.text.jsonl import shown
from hydrajax.text.records import BOOL, NUMBER, OBJECT, TEXT, Kind, checked, list_of, or_null
from hydrajax.text.records import INTEGER as WHOLE

FORMAT = 1
RECORDS = "hydrajax_results"  # the field of such objects in the JSON of commands
MAX_CHARACTERS, MAX_ROWS, MAX_DEPTH = 1000, 1000, 8  # of a text, a file, the settings
FIELDS = {"kind": TEXT, "source": TEXT, "title": TEXT, "rows": list_of(OBJECT), "command": TEXT}
FIELDS |= {"machine": OBJECT, "settings": OBJECT, "remarks": list_of(TEXT)}

_RATE = {"tokens_per_step": NUMBER, "tokens_per_second": NUMBER, "low": or_null(NUMBER), "high": or_null(NUMBER)}
_RATE |= {"speedup": NUMBER}
# The fields of a row, by kind. Times are milliseconds; low and high are the 95% interval of the rate (of the speed-up
# in "categories"). Other fields are allowed and ignored. Rows of other kinds, those of ``experiments/``, may have any.
KINDS: dict[str, dict[str, Kind]] = {
    # Decode configurations at one batch size or several (hydra figures 2, 3, 5, 6; medusa table 3).
    "speed": {"name": TEXT, "batch": WHOLE, "nodes": WHOLE, **_RATE, "equal": or_null(BOOL)},
    # Trees (hydra figures 7 to 9, medusa figure 4). family: "searched", "dynamic", "chain", "dense" ...
    # expected: tokens_per_step predicted from calibration text.
    "trees": {"drafter": TEXT, "batch": WHOLE, "family": TEXT, "name": TEXT, "nodes": WHOLE}
    | {"expected": or_null(NUMBER), **_RATE},
    # Decode configurations by category of question (hydra table 2).
    "categories": {"name": TEXT, "category": TEXT, "questions": WHOLE, **_RATE, "equal": or_null(BOOL)},
    # Share of positions at which the ``top`` likeliest tokens of a head (from 0) include the true one (amphista
    # figure 1).
    "accuracy": {"drafter": TEXT, "head": WHOLE, "top": WHOLE, "accuracy": NUMBER},
    # A decode step and its phases.
    "steps": {"tree": TEXT, "batch": WHOLE, "nodes": WHOLE, "autoregressive_step": NUMBER, "step": NUMBER}
    | {"propose": NUMBER, "verify": NUMBER, "accept_commit": NUMBER, "observe": NUMBER, "break_even": NUMBER},
}


@dataclass(frozen=True)
class Result:
    """Measurements of one command.

    Attributes:
        kind: Gives the fields of ``rows`` (`KINDS`).
        source: The matching figure or table of a paper, such as "hydra figure 2", or "".
        machine: From `hydrajax.machine.machine`.
    """

    kind: str
    source: str
    title: str
    rows: list[dict[str, Any]]
    command: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def result_from(content: Mapping[str, Any], where: str) -> Result:
    """Return the result of a file's content.

    Raises:
        HydrajaxError: the content is of another version, or a field is missing or wrong.
    """
    version = content.get("hydrajax_result") if isinstance(content, dict) else None
    if version != FORMAT:
        raise HydrajaxError(
            f"{where}: hydrajax_result: got {shown(version)}, expected {FORMAT}: the file is from another version"
        )
    check(content, where)
    return Result(**{name: content[name] for name in Result.__dataclass_fields__ if name in content})


def in_lines(value: Any) -> Any:
    """Return the same JSON value with every text on one line of at most `MAX_CHARACTERS`, all of it printable."""

    def line(text: str) -> str:
        printable = "".join(letter if letter.isprintable() else " " for letter in text[:MAX_CHARACTERS])
        return printable if len(text) <= MAX_CHARACTERS else f"{printable}..."

    return map_texts(value, line)


def map_texts(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """Apply ``change`` to every text in a JSON value, field names included; drop what is nested below `MAX_DEPTH`."""
    if isinstance(value, str):
        return change(value)
    if depth == MAX_DEPTH and isinstance(value, dict | list):
        return "..."
    if isinstance(value, dict):
        return {map_texts(name, change): map_texts(item, change, depth + 1) for name, item in value.items()}
    return [map_texts(item, change, depth + 1) for item in value] if isinstance(value, list) else value


def write_result(file: WholeFile, result: Result) -> None:
    """Write a result file.

    Raises:
        HydrajaxError: rows do not have the fields of their kind.
    """
    check(asdict(result), "result")
    file.write_json({"hydrajax_result": FORMAT} | asdict(result))


def check(content: Mapping[str, Any], where: str) -> None:
    """Raise `HydrajaxError` unless ``content`` has the fields of a `Result` and of its kind."""
    checked(content, FIELDS, where)
    if not 1 <= len(content["rows"]) <= MAX_ROWS:
        raise HydrajaxError(f"{where}: rows: got {len(content['rows'])}, expected 1 to {MAX_ROWS}")
    for number, row in enumerate(content["rows"]):
        checked(row, KINDS.get(content["kind"], {}), f"{where}: rows[{number}]")
        if (row.get("low") is None) != (row.get("high") is None):
            raise HydrajaxError(f"{where}: rows[{number}]: low and high must both be numbers or both be null")
