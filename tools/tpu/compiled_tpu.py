"""Count the cycles and copies of a decode step in the text of the TPU compiler's optimised HLO."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

LARGE = 1_000_000  # bytes of a copied cache or weight, more than a few hidden states
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "s4": 0.5, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\(")


@dataclass(frozen=True)
class TpuKernel:
    """One instruction. cycles: the compiler's estimate, 0 for what runs beside others (prefetches) and for our kernels.

    operands: of a custom call, their shapes.
    """

    name: str
    opcode: str
    shape: str
    cycles: int
    operands: tuple[tuple[int, ...], ...] = ()

    @property
    def is_large_copy(self) -> bool:
        """Whether it only moves or converts more than a megabyte."""
        return self.opcode in ("copy", "convert", "transpose") and array_bytes(self.shape) > LARGE


def array_bytes(shape: str) -> float:
    """Bytes of all arrays in a shape such as ``(bf16[8,128]{1,0:T(8,128)}, s32[])``."""
    total = 0.0
    for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        size = _SIZES.get(kind, 0)
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        total += size
    return total


def loop_kernels(hlo: str) -> list[TpuKernel]:
    """Return the instructions of the longest loop's body: a decode step."""
    bodies = dict(_computations(hlo))
    loops = [bodies[body] for body in set(re.findall(r"body=%?([\w.\-]+)", hlo)) if body in bodies]
    return max(loops, key=lambda body: sum(kernel.cycles for kernel in body))


def _computations(hlo: str) -> Iterator[tuple[str, list[TpuKernel]]]:
    name, kernels = "", []
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            yield name, kernels
            name, kernels = header[1], []
        elif found := _INSTRUCTION.match(line):
            cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
            shapes = re.search(r"operand_layout_constraints=\{(.*?\})\}", line)
            operands = re.findall(r"\w+\[([\d,]*)\]", shapes[1]) if shapes else []
            dims = tuple(tuple(map(int, filter(None, operand.split(",")))) for operand in operands)
            kernels.append(TpuKernel(found[1], found[3], found[2], int(cycles[1]) if cycles else 0, dims))
    yield name, kernels
