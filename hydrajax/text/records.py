"""Checks of the fields of JSON objects that are read back from files."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.text.jsonl import file_content, json_value, objects, shown


@dataclass(frozen=True)
class Kind:
    """A type of field; ``words`` and the plural ``many`` name it in messages, such as "a number" and "numbers"."""

    words: str
    holds: Callable[[Any], bool]
    many: str = "items"


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63  # int64


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


TEXT = Kind("text", lambda value: isinstance(value, str), "texts")
INTEGER = Kind("an integer", _is_integer, "integers")
NUMBER = Kind("a finite number", _is_number, "finite numbers")
FLOAT = Kind("a number", lambda value: _is_integer(value) or isinstance(value, float))  # NaN and infinity too
BOOL = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict), "objects")


def either(*kinds: Kind) -> Kind:
    return Kind(" or ".join(kind.words for kind in kinds), lambda value: any(kind.holds(value) for kind in kinds))


def or_null(kind: Kind) -> Kind:
    return either(kind, Kind("null", lambda value: value is None))


def list_of(kind: Kind, length: int | None = None) -> Kind:
    def holds(value: Any) -> bool:
        return isinstance(value, list) and length in (None, len(value)) and all(map(kind.holds, value))

    items = kind.many if length is None else f"{length} {kind.many}"
    return Kind(f"a list of {items}", holds, f"lists of {items}")


def object_of(kind: Kind) -> Kind:
    return Kind(
        f"an object of {kind.many}", lambda value: isinstance(value, dict) and all(map(kind.holds, value.values()))
    )


def checked(value: Any, fields: Mapping[str, Kind], where: str) -> dict[str, Any]:
    """Return ``value`` if it is a JSON object with these fields; it may have others.

    Args:
        value: as `hydrajax.text.jsonl.json_value` returns it, which may be the error that the text is not JSON.
    """
    _, record = next(objects([(where, value)]))
    for name, kind in fields.items():
        if name not in record:
            raise HydrajaxError(f"{where}: field {name} is missing")
        if not kind.holds(record[name]):
            raise HydrajaxError(f"{where}: {name}: got {shown(record[name])}, expected {kind.words}")
    return record


def read_record(path: str | Path, fields: Mapping[str, Kind], what: str) -> dict[str, Any]:
    """Read a file of one JSON object, as `checked` does; ``what`` is the start of every message."""
    return checked(json_value(file_content(path, what), "file"), fields, f"{what}: {path}")
