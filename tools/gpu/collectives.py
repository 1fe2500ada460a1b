"""Count the collectives of a decode step that several devices share, and name the lines of code that they come from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from compiled_program import CompiledProgram, Instruction, array_bytes
from source_lines import SourceLines


def counted(hlo: str, whole: bool = False) -> dict[str, float]:
    """Return the fields of a result's row: the number of collectives in the loop, and MB of their results; ``whole``:
    in the whole program, each once.
    """
    found = _found(hlo, whole)
    return {"collectives": len(found), "collective_megabytes": sum(map(_bytes, found)) / 1e6}


def listed(hlo: str, whole: bool = False) -> list[str]:
    """Return a line for the collectives of each kind, shape and origin, largest first; as in `counted`."""
    places = SourceLines(hlo)
    found = Counter((_bytes(one), _described(one, places)) for one in _found(hlo, whole))
    return [
        f"{count:3} x {moved / 1e6:9.4f} MB  {text}" for (moved, text), count in sorted(found.items(), reverse=True)
    ]


def _found(hlo: str, whole: bool) -> list[Instruction]:
    program = CompiledProgram(hlo)
    return program.collectives() if whole else program.loop_collectives()


def _described(one: Instruction, places: SourceLines) -> str:
    """Return kind, shape, the operation's path, and the lines of code that led there."""
    shape = re.sub(r"\{[^{}]*\}", "", one.result)  # without its layout
    path = re.sub(r"^.*/(?:body|closed_call)/", "", one.source) or "(added by XLA)"
    return f"{one.opcode.removesuffix('-start')} {shape[:60]}  {path}  {' < '.join(_told_apart(places.of(one)))}"


def _bytes(one: Instruction) -> int:
    return array_bytes(one.result)


def _told_apart(lines: Sequence[str]) -> list[str]:
    """Return the innermost line and its two nearest callers outside shared helpers, which identify the product."""
    helpers = "hydrajax/ops/", "hydrajax/models/weights.py", "tools/"
    callers = [line for line in lines[1:] if not line.startswith(helpers)]
    return [*lines[:1], *callers[:2]]
