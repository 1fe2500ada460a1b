"""Print the operational intensities in medusa's tables 6 to 8 (LLaMA-33B, float16) next to the roofline's.

The tables' other numbers are TFLOP/s measured on an A100; they are not repeated here. Oddities of the tables:

- Table 5 gives the shapes of PV, ``(b, n, s, q)`` in and of QKᵀ out, transposed against the attention matrix
  ``(b, n, q, s)``; the complexities are not affected. It omits the out projection.
- s counts all keys that are attended to, without the q candidates' own keys, which tree decoding adds.
- Tables 6 and 7 are of one of QKᵀ and PV (they agree), without softmax; table 8 is of one of up, gate and down, so its
  two inputs are not counted as shared.
- Intensity does not depend on the batch in attention (table 7: equal rows) nor in table 8 on how batch x candidates is
  divided (equal diagonals).
- G.3 takes the tokens per step to be 0.477 log(candidates), without the base of the logarithm: 0, not 1, at one
  candidate. `hydrajax roofline` therefore takes tokens_per_step as an argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from hydrajax.bench.report.tables import print_table
from hydrajax.bench.roofline.operators import Operator
from hydrajax.bench.roofline.traced import trace
from hydrajax.bench.shapes import PRESETS

CANDIDATES = (1, 16, 32, 48, 64, 80, 96, 112)  # the columns of all three
BATCH_6, KEYS_7 = 16, 1024

_SHAPE = PRESETS["33b"]


def product(spec: str, left: tuple[int, ...], right: tuple[int, ...]) -> Operator:
    """Return the operator of an einsum of two float16 arrays."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in (left, right)]
    operators, _ = trace(lambda _, *arrays: jnp.einsum(spec, *arrays), (), *arrays)
    return next(operator for operator in operators if operator.kind == "attention")


def queries_by_keys(batch: int, queries: int, keys: int) -> Operator:
    """Return QKᵀ of one layer."""
    heads, head_dim = _SHAPE.n_heads, _SHAPE.head_dim
    return product("bnqd,bnsd->bnqs", (batch, heads, queries, head_dim), (batch, heads, keys, head_dim))


@dataclass(frozen=True)
class PrintedTable:
    """A printed table. row_name: meaning of the keys of ``printed``. operator: ours at (row, candidates)."""

    number: int
    title: str
    row_name: str
    printed: dict[int, tuple[float, ...]]
    operator: Callable[[int, int], Operator]

    def ours(self, row: int) -> tuple[float, ...]:
        """Return our intensities, not rounded; the paper prints two decimals and drops trailing zeros."""
        found = (self.operator(row, candidates) for candidates in CANDIDATES)
        return tuple(operator.flops / operator.bytes for operator in found)


TABLES = (
    PrintedTable(
        6,
        "attention products, batch size 16",
        "sequence length",
        {
            128: (0.98, 12.8, 21.33, 27.43, 32.0, 35.56, 38.4, 40.73),
            256: (0.99, 13.47, 23.27, 30.72, 36.57, 41.29, 45.18, 48.43),
            512: (0.99, 13.84, 24.38, 32.68, 39.38, 44.91, 49.55, 53.49),
            1024: (0.99, 14.03, 24.98, 33.76, 40.96, 46.97, 52.07, 56.44),
            2048: (0.99, 14.12, 25.28, 34.32, 41.8, 48.08, 53.43, 58.04),
            4096: (0.99, 14.17, 25.44, 34.61, 42.23, 48.65, 54.13, 58.87),
            8192: (0.99, 14.2, 25.52, 34.76, 42.45, 48.94, 54.49, 59.3),
        },
        lambda keys, candidates: queries_by_keys(BATCH_6, candidates, keys),
    ),
    PrintedTable(
        7,
        "attention products, sequence length 1024",
        "batch size",
        dict.fromkeys((1, 2, 4, 8, 16, 32, 64), (0.99, 14.03, 24.98, 33.76, 40.96, 46.97, 52.07, 56.44)),
        lambda batch, candidates: queries_by_keys(batch, candidates, KEYS_7),
    ),
    PrintedTable(
        8,
        "linear layers (up/gate/down)",
        "batch size",
        {
            1: (1.0, 15.95, 31.79, 47.53, 63.17, 78.7, 94.14, 109.47),
            2: (2.0, 31.79, 63.17, 94.14, 124.71, 154.89, 184.69, 214.12),
            4: (4.0, 63.17, 124.71, 184.69, 243.17, 300.21, 355.85, 410.14),
            8: (7.99, 124.71, 243.17, 355.85, 463.14, 565.44, 663.07, 756.36),
            16: (15.95, 243.17, 463.14, 663.07, 845.59, 1012.87, 1166.74, 1308.76),
            32: (31.79, 463.14, 845.59, 1166.74, 1440.25, 1675.97, 1881.24, 2061.59),
            64: (63.17, 845.59, 1440.25, 1881.24, 2221.31, 2491.55, 2711.46, 2893.91),
        },
        lambda batch, candidates: product(
            "rd,df->rf", (batch * candidates, _SHAPE.width), (_SHAPE.width, _SHAPE.mlp_width)
        ),
    ),
)


def main() -> int:
    equal = total = 0
    for table in TABLES:
        rows = []
        for row, printed in table.printed.items():
            ours = [round(value, 2) for value in table.ours(row)]
            rows += [[row, "ours", *map(str, ours)], ["", "printed", *map(str, printed)]]
            equal += sum(a == b for a, b in zip(ours, printed, strict=True))
            total += len(printed)
        title = f"medusa table {table.number}: {table.title}, LLaMA-33B; FLOP/byte by candidate tokens"
        print_table([table.row_name, "", *map(str, CANDIDATES)], rows, title=title)
    print(f"{equal} of {total} equal to the printed digits")
    return equal != total


if __name__ == "__main__":
    sys.exit(main())
