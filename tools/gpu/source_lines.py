"""The lines of Python that an instruction of XLA's HLO comes from.

HLO ends its metadata with the number of a stack frame, and the module begins with tables of frames and files.
"""

from __future__ import annotations

import re

from compiled_program import Instruction


class SourceLines:
    """The stack frames of an HLO module's text."""

    def __init__(self, text: str):
        files, functions = _names(text, "FileNames"), _names(text, "FunctionNames")
        self._places = {}
        for number, found in _numbers(text, "FileLocations").items():
            place = f"{_in_package(files[found['file_name_id']])}:{found['line']}"
            self._places[number] = f"{place} {functions[found['function_name_id']]}"
        self._frames = _numbers(text, "StackFrames")
        # jaxlib 0.10 prints a parent's number plus one, so that the first frame seems to be its own parent.
        self._excess = self._frames.get(1, {}).get("parent_frame_id", 0)

    def of(self, instruction: Instruction) -> list[str]:
        """Return ``file:line function`` of the instruction, callers last; empty for one that XLA added."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        number, lines = int(found[1]) if found else 0, []
        while number in self._frames:
            frame = self._frames[number]
            lines.append(self._places[frame["file_location_id"]])
            number = frame["parent_frame_id"] - self._excess
        return lines


def _section(text: str, name: str) -> list[str]:
    found = re.search(rf"^{name}\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    return found[1].splitlines() if found else []


def _names(text: str, section: str) -> dict[int, str]:
    lines = (line.split(" ", 1) for line in _section(text, section))
    return {int(number): name.strip('"') for number, name in lines}


def _numbers(text: str, section: str) -> dict[int, dict[str, int]]:
    lines = (line.split(" ", 1) for line in _section(text, section))
    return {int(number): {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", fields)} for number, fields in lines}


def _in_package(path: str) -> str:
    return re.sub(r"^.*/(hydrajax|tools)/", r"\1/", path)
