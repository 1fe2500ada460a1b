"""Count the kernels, bytes and copies of a compiled program in the text of XLA's optimised HLO.

The text exists wherever a program can be compiled, also for a described GPU (`compile_report.py`). Kernels count with
the bytes of their shapes: the device's caches are not modelled, and for a kernel that XLA did not generate the caller
gives the bytes that it reads.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

ITEMSIZES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
ITEMSIZES |= {"f8e4m3fn": 1, "s64": 8, "u64": 8, "f64": 8}

_ARRAY = re.compile(r"\b(" + "|".join(ITEMSIZES) + r")\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")

# No kernel: they name, group or reinterpret values, or end an operation that is counted already.
_NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "copy-done", "async-done"}
_NO_KERNEL |= {"opt-barrier", "partition-id"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_NO_KERNEL |= {f"{name}-done" for name in COLLECTIVES}
_CALLS = {"call", "async-start"}
_CONTROL = {"while", "conditional"}
_MOVES = {"copy", "transpose", "reshape", "broadcast"}


def array_bytes(shape: str) -> int:
    """Bytes of all arrays in a shape such as ``(bf16[8,128]{1,0}, s32[])``."""
    sizes = ((ITEMSIZES[kind], dims) for kind, dims in _ARRAY.findall(shape))
    return sum(size * math.prod(int(dim) for dim in dims.split(",") if dim) for size, dims in sizes)


@dataclass(frozen=True)
class Instruction:
    """One line of HLO. called: the computation that it calls, if any. target: of a custom call. constant: its value if
    it is one whole number.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    constant: int | None = None

    @property
    def called(self) -> str | None:
        found = re.search(r"(?:calls|to_apply|body)=%?([\w.\-]+)", self.attributes)
        return found and found[1]

    @property
    def all_called(self) -> list[str]:
        """The computations that it runs, without those that a reduction applies to two numbers."""
        one = re.findall(r"(?:calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)", self.attributes)
        branches = re.search(r"branch_computations=\{(.*?)\}", self.attributes)
        one += re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
        return one + ([self.called] if self.opcode == "call" and self.called not in one else [])

    @property
    def target(self) -> str:
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def is_collective(self) -> bool:
        """True for a collective operation and for the start of an asynchronous one."""
        return self.opcode.removesuffix("-start") in COLLECTIVES

    @property
    def result(self) -> str:
        """The shape without the operands that the start of an asynchronous collective repeats."""
        repeats = self.is_collective and self.opcode.endswith("-start") and self.opcode != "all-reduce-start"
        return _parts(self.shape)[1] if repeats else self.shape

    @property
    def source(self) -> str:
        """The path of the operation in the traced program, by JAX's names."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclass(frozen=True)
class Kernel:
    """One launch on the device.

    kind: "matmul", "custom call", "collective", "sort", "write" (in place into something larger), "copy" (also a
    transpose), "reduce", "elementwise" or "control" (a loop or a branch, without its body). read, written: bytes.
    operands: their shapes.
    """

    name: str
    kind: str
    read: int
    written: int
    shape: str
    operands: tuple[str, ...]
    source: str

    @property
    def moved(self) -> int:
        return self.read + self.written


# Bytes read and written by a custom call; None to count its shapes.
Moves = Callable[[Instruction, tuple[str, ...]], tuple[int, int] | None]


class CompiledProgram:
    """The computations of an optimised HLO module, by name."""

    def __init__(self, text: str):
        self._computations: dict[str, list[Instruction]] = {}
        self._entry = ""
        lines: list[Instruction] = []
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                lines = self._computations.setdefault(head[2], [])
                self._entry = head[2] if head[1] else self._entry
            elif found := _INSTRUCTION.match(line):
                lines.append(_instruction(*found.groups()))

    def entry(self, moves: Moves = lambda instruction, shapes: None) -> list[Kernel]:
        """Return the kernels outside loops."""
        return list(self._kernels(self._entry, {}, moves))

    def loop(self, moves: Moves = lambda instruction, shapes: None) -> list[Kernel]:
        """Return the kernels of one iteration of the loop with the largest carry; empty without a loop."""
        body = self._loop_body()
        return list(self._kernels(body, {}, moves)) if body else []

    def entry_instructions(self) -> list[Instruction]:
        """Return the instructions outside loops."""
        return self._computations[self._entry]

    def loop_instructions(self) -> list[Instruction]:
        """Return the instructions of that loop's body."""
        return self._computations.get(self._loop_body(), [])

    def loop_body(self, loop: Instruction) -> list[Instruction]:
        """Return the instructions of one iteration of a loop."""
        return self._computations[loop.called or ""]

    def turns(self, loop: Instruction) -> int | None:
        """Return how often a loop runs that counts from 0 to a constant: the one in its condition."""
        condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
        found = self._computations[condition[1]] if condition else []
        counts = any(one.opcode == "compare" and "direction=LT" in one.attributes for one in found)
        ends = [one.constant for one in found if one.constant is not None]
        return ends[0] if counts and len(ends) == 1 else None

    def loop_collectives(self) -> list[Instruction]:
        """Return the collectives of one iteration of that loop, also those in fusions, branches and inner loops."""
        body = self._loop_body()
        return [one for one in self._everything(body) if one.is_collective] if body else []

    def collectives(self) -> list[Instruction]:
        """Return the collectives of the whole program, each once: a TPU's are split into parts with one channel."""
        found = {}
        for one in self._everything(self._entry):
            if one.is_collective:
                channel = re.search(r"channel_id=(\d+)", one.attributes)
                found.setdefault(channel[1] if channel else one.name, one)
        return list(found.values())

    def _everything(self, computation: str) -> Iterator[Instruction]:
        for one in self._computations[computation]:
            yield one
            for called in [] if one.is_collective else one.all_called:
                yield from self._everything(called)

    def _loop_body(self) -> str | None:
        loops = self._loops(self._entry)
        largest = max(loops, key=lambda found: array_bytes(found.shape), default=None)
        return largest and largest.called

    def _loops(self, computation: str) -> list[Instruction]:
        found = []
        for instruction in self._computations[computation]:
            if instruction.opcode == "while":
                found.append(instruction)
            elif instruction.opcode in _CALLS:
                found += self._loops(instruction.called)
        return found

    def _kernels(self, computation: str, outer: dict[str, str], moves: Moves) -> Iterator[Kernel]:
        instructions = self._computations[computation]
        shapes = outer | {instruction.name: instruction.shape for instruction in instructions}
        for one in instructions:
            if one.opcode in _NO_KERNEL:
                continue
            if one.opcode in _CALLS:
                yield from self._kernels(one.called, shapes, moves)
                continue
            operands = tuple(shapes.get(name, "") for name in one.operands)
            read, written = (0, 0) if one.opcode in _CONTROL else self._moved(one, operands, moves)
            yield Kernel(one.name, self._kind(one), read, written, one.shape, operands, one.source)

    def _kind(self, one: Instruction) -> str:
        if one.opcode in _CONTROL:
            return "control"
        if one.is_collective:
            return "collective"
        if one.opcode == "custom-call":
            return "matmul" if "gemm" in one.target or "matmul" in one.target else "custom call"
        inside = {i.opcode for i in self._computations[one.called]} if one.opcode == "fusion" else {one.opcode}
        if "dot" in inside or "__cublas" in one.attributes or "__cudnn" in one.attributes:
            return "matmul"
        if "custom-call" in inside:
            return "custom call"
        for opcodes, kind in (
            ({"sort"}, "sort"),
            ({"dynamic-update-slice", "scatter"}, "write"),
            ({"reduce"}, "reduce"),
        ):
            if inside & opcodes:
                return kind
        return "copy" if inside - _NO_KERNEL <= _MOVES else "elementwise"

    # --- bytes ----------------------------------------------------------------------------------------------------

    def _moved(self, one: Instruction, operands: tuple[str, ...], moves: Moves) -> tuple[int, int]:
        """Read and written; a slice of an operand counts as the slice, an update in place as the update."""
        if one.opcode == "fusion":
            return self._fusion_reads(one.called), self._fusion_writes(one.called)
        if one.opcode == "dynamic-update-slice":
            return array_bytes(operands[1]), array_bytes(operands[1])
        if one.opcode == "custom-call" and (found := moves(one, operands)):
            return found
        shape = one.result
        if "cublas" in one.target:
            shape = re.sub(r", s8\[\d+\]\{0\}\)$", ")", shape)  # its workspace
        return sum(map(array_bytes, operands)), array_bytes(shape)

    def _fusion_reads(self, computation: str) -> int:
        instructions = self._computations[computation]
        by_name = {one.name: one for one in instructions}
        users = defaultdict(list)
        for one in instructions:
            for place, operand in enumerate(one.operands):
                users[operand].append((one, place))

        def touched(name: str) -> int:
            total = 0
            for user, place in users[name]:
                if user.opcode in ("bitcast", "reshape"):
                    total += touched(user.name)
                elif place == 0 and user.opcode in ("dynamic-slice", "slice", "gather"):
                    total += array_bytes(user.shape)
                elif not (place == 0 and user.opcode in ("dynamic-update-slice", "scatter")):
                    total += array_bytes(by_name[name].shape)
            return total

        inputs = (one for one in instructions if one.opcode == "parameter")
        return sum(min(array_bytes(one.shape), touched(one.name)) for one in inputs)

    def _fusion_writes(self, computation: str) -> int:
        by_name = {one.name: one for one in self._computations[computation]}

        def written(name: str) -> int:
            one = by_name[name]
            if one.opcode == "bitcast" and one.operands:
                return written(one.operands[0])
            if one.opcode == "tuple":
                return sum(map(written, one.operands))
            if one.opcode == "dynamic-update-slice":
                return array_bytes(by_name[one.operands[1]].shape)
            if one.opcode == "scatter":
                return array_bytes(by_name[one.operands[-1]].shape)
            return array_bytes(one.shape)

        return written(next(one.name for one in by_name.values() if one.is_root))


def _parts(shape: str) -> list[str]:
    """Return the elements of a tuple's shape, with tuples inside left whole."""
    parts, depth, begun = [], 0, 1
    for place, character in enumerate(shape):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            parts.append(shape[begun:place].strip())
            begun = place + 1
    return parts


def _instruction(root: str | None, name: str, shape: str, opcode: str, rest: str) -> Instruction:
    """rest: the line after the opening bracket of the operands."""
    depth, end = 1, len(rest)
    for place, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            end = place
            break
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[:end]))
    constant = int(rest[:end]) if opcode == "constant" and rest[:end].isdecimal() else None
    return Instruction(name, shape, opcode, operands, rest[end + 1 :], bool(root), constant)
