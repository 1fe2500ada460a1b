"""Records that were written to be read back: every field is checked before it is used, and a wrong one is named.

`checked` is told the fields as a mapping from names to `Kind`. Whatever stands in a file, it is what the fields say or
a `HydrajaxError` that names file and field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.text.jsonl import file_content, json_value, shown


@dataclass(frozen=True)
class Kind:
    """What a field may hold. words: for the message, such as "a number"."""

    words: str
    holds: Callable[[Any], bool]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63  # as NumPy holds them


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


ANYTHING = Kind("anything", lambda value: True)
TEXT = Kind("text", lambda value: isinstance(value, str))
INTEGER = Kind("an integer", _is_integer)
NUMBER = Kind("a finite number", _is_number)
FLOAT = Kind("a number", lambda value: _is_integer(value) or isinstance(value, float))  # NaN and infinity too
BOOL = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))


def either(*kinds: Kind) -> Kind:
    return Kind(" or ".join(kind.words for kind in kinds), lambda value: any(kind.holds(value) for kind in kinds))


def or_null(kind: Kind) -> Kind:
    return either(kind, Kind("null", lambda value: value is None))


def list_of(kind: Kind, length: int | None = None) -> Kind:
    count = "" if length is None else f"{length} times "
    return Kind(
        f"a list ({count}{kind.words})",
        lambda value: (
            isinstance(value, list) and length in (None, len(value)) and all(kind.holds(item) for item in value)
        ),
    )


def object_of(kind: Kind) -> Kind:
    return Kind(
        f"an object (each value {kind.words})",
        lambda value: isinstance(value, dict) and all(kind.holds(item) for item in value.values()),
    )


def checked(value: Any, fields: Mapping[str, Kind], where: str) -> dict[str, Any]:
    """``value`` if it is a JSON object with all these fields; it may have others. ``where`` begins the message.

    value: as `hydrajax.text.jsonl.json_value` returns it, which may be the error that it is no JSON.
    """
    if isinstance(value, HydrajaxError):
        raise HydrajaxError(f"{where}: {value}")
    if not isinstance(value, dict):
        raise HydrajaxError(f"{where}: must be a JSON object, found {shown(value)}")
    for name, kind in fields.items():
        if name not in value:
            raise HydrajaxError(f"{where}: field {name} is missing")
        if not kind.holds(value[name]):
            raise HydrajaxError(f"{where}: {name}: must be {kind.words}, found {shown(value[name])}")
    return value


def read_record(path: str | Path, fields: Mapping[str, Kind], what: str) -> dict[str, Any]:
    """`checked` of a whole file. Raises `HydrajaxError` too where it cannot be read; ``what`` begins every message."""
    return checked(json_value(file_content(path, what), "file"), fields, f"{what}: {path}")
