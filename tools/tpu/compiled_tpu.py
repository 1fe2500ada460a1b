"""Cycles and copies of the instructions of a program of the TPU's compiler."""

from __future__ import annotations

import re

from compiled_program import CompiledProgram, Instruction, array_bytes
from compiled_step import LARGE


def cycles_of(instruction: Instruction) -> int:
    """Return the compiler's estimate; 0 for instructions without one, such as prefetches and Pallas kernels."""
    found = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    return int(found[1]) if found else 0


def cycles_of_loop(hlo: str) -> int:
    """Return the sum of the estimates over one iteration of the decode loop."""
    return sum(map(cycles_of, CompiledProgram(hlo).loop_instructions()))


def repeated(program: CompiledProgram, instructions: list[Instruction]) -> list[Instruction]:
    """Return the instructions with those of counting loops as often as they run."""
    found = []
    for one in instructions:
        found.append(one)
        if one.opcode == "while" and (turns := program.turns(one)):
            found += repeated(program, program.loop_body(one)) * turns
    return found


def is_large_copy(instruction: Instruction) -> bool:
    """Return whether the instruction copies, converts or transposes a large array and does nothing else."""
    return instruction.opcode in ("copy", "convert", "transpose") and array_bytes(instruction.shape) > LARGE


def operands_of(instruction: Instruction) -> list[tuple[int, ...]]:
    """Return the shapes of a custom call's operands."""
    shapes = re.search(r"operand_layout_constraints=\{(.*?\})\}", instruction.attributes)[1]
    return [tuple(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\w+\[([\d,]*)\]", shapes)]
