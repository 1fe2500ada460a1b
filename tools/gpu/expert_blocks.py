"""The expected number of blocks of tokens of one expert each, into which programs cut the tokens of a step.

A program shows the number that there can be; a device leaves out those that are not in use. Each reads its expert.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from compiled_program import Instruction, array_bytes

from hydrajax.bench.shapes import SHAPES

if TYPE_CHECKING:
    from compiled_step import Case


def expected_blocks(count: int, per_token: int, tokens: int, size: int) -> float:
    """Return the expected number of blocks of up to ``size`` tokens, each of which chooses ``per_token`` experts.

    Under the assumption of `hydrajax.bench.device_memory.woken`, to which this is equal for ``size >= tokens``.
    """
    p = per_token / count
    chances = (math.comb(tokens, n) * p**n * (1 - p) ** (tokens - n) for n in range(tokens + 1))
    return count * sum(chance * math.ceil(n / size) for n, chance in enumerate(chances))


def blocks_of(case: Case, size: int) -> float:
    """Return the expected blocks of a layer in a step of this program; 0 without experts."""
    experts = SHAPES[case.shape].any_experts
    return expected_blocks(experts.count, experts.per_token, case.tokens, size) if experts else 0.0


def moved_by_experts(case: Case, instruction: Instruction, operands: tuple[str, ...]) -> tuple[int, int]:
    """Return the bytes that `hydrajax.ops.gpu.experts` reads and writes, for the expected blocks."""
    x, rows, _, *weights = operands
    result = re.match(r"\w+\[(\d+),(\d+)", instruction.shape)
    n_blocks, tile = int(result[1]), int(result[2])
    count, tokens = (int(re.match(r"\w+\[(\d+)", shape)[1]) for shape in (weights[0], x))
    blocks = blocks_of(case, tile)
    read = sum(map(array_bytes, weights)) / count + tile * array_bytes(x) / tokens
    return round(blocks * read) + array_bytes(rows), round(blocks / n_blocks * array_bytes(instruction.shape))
