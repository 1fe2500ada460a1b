"""JSONL files that a run appends to and a later run resumes, with the settings they were made with."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile, sync
from hydrajax.text.jsonl import shown
from hydrajax.text.records import read_record


def json_line(record: dict[str, Any]) -> str:
    # ASCII, as FastChat opens its files in the locale's encoding.
    return json.dumps(record) + "\n"


def append(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append a line for each record; they are on disk when this returns."""
    try:
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write("".join(map(json_line, records)))
            file.flush()
            sync(file.fileno())
    except OSError as error:
        raise HydrajaxError(f"output: cannot write {path}: {error.strerror}") from None


def whole_lines(path: Path) -> list[bytes]:
    """Return the complete lines; a last line without an end was being written when its run was killed."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise HydrajaxError(f"output: cannot read {path}: {error.strerror}") from None


def keep_settings(path: Path, settings: dict[str, Any], holder: str, *, begun: bool, otherwise: str) -> None:
    """Write the settings (a JSON object) to ``path``, or compare them with those in the file if the run has ``begun``.

    Args:
        settings: ``from.KEY.NAME`` is a setting from which the digest ``KEY`` follows; it may change alone.
        holder: what was made with them, such as ``"out holds answers"``.

    Raises:
        HydrajaxError: naming the first setting that differs.
    """
    settings = json.loads(json.dumps(settings))  # as read back: tuples become lists
    if not begun:
        with WholeFile(path, "output") as file:
            file.write_json(settings)
        return
    try:
        before = read_record(path, {}, "output")
    except HydrajaxError as error:
        reason = str(error).removeprefix("output: ")
        raise HydrajaxError(f"output: {holder}, but no readable {path.name} ({reason}); {otherwise}") from None
    for key in dict.fromkeys([*settings, *before]):
        if settings.get(key) != before.get(key) and not key.startswith("from."):
            causes = [name for name in settings if name.startswith(f"from.{key}.")]
            cause = next((name for name in causes if before.get(name, settings[name]) != settings[name]), key)
            raise HydrajaxError(
                f"output: {holder} made with other settings: {cause.removeprefix(f'from.{key}.')}: got "
                f"{shown(settings.get(cause))}, expected {shown(before.get(cause))}; {otherwise}"
            )
