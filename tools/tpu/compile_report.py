#!/usr/bin/env python
"""Compile decode steps for a TPU without one, and compare the compiler's cycles with those of the bytes.

    pip install 'jax[tpu]'                       # libtpu, 140 MB, holds the compiler
    python tools/tpu/compile_report.py --what ar,verify,medusa,hydra++ --chips v5e,v6e
    hydrajax report OUTPUT_FOLDER

Nothing is allocated or run, so there are no timings. XLA's TPU compiler estimates the cycles of each of its kernels,
and the report adds them up over one turn of the decode loop. It adds the package's own kernels by their bytes and
operations, as the compiler has no estimate of them, and a turn of the loop over chosen experts for each expected one.
The floor is the larger of two times: that of the bytes that a step must move (weights, keys and values of the filled
slots, for a whole step the draft's weights), and that of the operations of the base's products. ``--what`` is any of

    ar        decoding without a draft
    verify    one pass of the base over the tree
    prefill   a prompt of ``--contexts`` tokens, without a loop
    medusa, hydra, hydra++, lookup    a whole step with this drafter
    train     a training step of the recipe hydra_pp on ``--batches`` rows of ``--contexts`` tokens, without a loop;
              operations are those of the base and the heads, bytes those of the weights and the optimizer's state
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TOOLS / "gpu"), str(TOOLS.parent)]

import described_tpu  # noqa: E402  first, as it sets what JAX reads at its import
from collectives import counted, listed  # noqa: E402
from compile_command import cells_of, parser_of, remarks_of, run, words  # noqa: E402
from compiled_program import CompiledProgram, Instruction  # noqa: E402
from compiled_step import Case, Compiled, compile_case  # noqa: E402
from compiled_tpu import cycles_of, is_large_copy, operands_of, repeated  # noqa: E402
from compiled_train import compile_train  # noqa: E402
from described_tpu import CHIPS, Chip  # noqa: E402
from expert_blocks import blocks_of  # noqa: E402

from hydrajax.errors import HydrajaxError  # noqa: E402
from hydrajax.lowbit.kernels import few_bits_tpu  # noqa: E402
from hydrajax.models import experts  # noqa: E402
from hydrajax.ops.tpu import tree_attention as tree_attention_tpu  # noqa: E402

VECTOR_OPERATIONS = 4 * 8 * 128  # of a cycle
SPLASH_PRODUCTS = {"dkv": 4, "dq": 3}  # of a gradient's kernels, which compute the scores again; forward 2
INT4_OPERATIONS = 6  # for a number: take it from its byte, widen, convert, multiply, round, pack


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, layers=2)
    parser.add_argument("--chips", type=words, default=["v5e"], help=f"of {', '.join(CHIPS)} (default v5e)")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="list the N longest kernels")
    return parser.parse_args()


def main(args: argparse.Namespace) -> int:
    def cases() -> list[Case]:
        for chip in args.chips:
            if chip not in CHIPS:
                raise HydrajaxError(f"--chips: got {chip}, expected some of {', '.join(CHIPS)}")
        if "ar-step" in args.what:
            raise HydrajaxError("--what: got ar-step, which has no loop; use ar, verify, prefill or a drafter's name")
        shared = {name: getattr(args, name) for name in ("shape", "dtype", "layers")}
        return [
            Case(
                what, batch=batch, context=context, nodes=nodes, device=chip, devices=devices, lm_head="full",
                weights=weights, more=("train",), **shared,
            )
            for chip in args.chips
            for devices, weights, what, nodes, batch, context in cells_of(args)
        ]  # fmt: skip

    return run(
        args, cases, report, kind="tpu_program",
        settings={name: getattr(args, name) for name in ("shape", "dtype", "layers")},
        title=f"cycles of a compiled step on TPUs, {args.shape}, {args.dtype}",
        remarks=[
            "compiled for described TPUs, not run: cycles are the compiler's estimates, not timings", *remarks_of(args)
        ],
    )  # fmt: skip


def report(args: argparse.Namespace, cases: list[Case]) -> list[dict]:
    """Compile and print every case; return the rows of the result."""
    rows = []
    for case in cases:
        row, step, hlo = row_of(case)
        rows.append(row)
        print(line_of(row), flush=True)
        for one in sorted(step, key=cycles_of, reverse=True)[: args.show]:
            print(f"    {cycles_of(one):9d} {one.opcode} {one.name} {one.shape[:100]}")
        if args.collectives and hlo:
            print("\n".join(listed(hlo, case.what == "train")), flush=True)
    return rows


def row_of(case: Case) -> tuple[dict, list[Instruction], str]:
    """Return a row of a "tpu_program" result, the instructions of a step, and the HLO."""
    chip = CHIPS[case.device]
    row = {
        "what": case.what,
        "chip": case.device,
        "batch": case.batch,
        "context": case.context,
        "nodes": 1 if case.what in ("ar", "prefill", "train") else case.nodes,
        "weights": case.stored_as,
        "devices": case.devices,
    }
    try:
        compiled = compile_train(case) if case.what == "train" else compile_case(case, described_tpu)
    except Exception as error:  # XLA's own type is not public
        if "Ran out of memory" not in str(error):
            raise
        missing = (
            "cycles",
            "own_cycles",
            "expert_cycles",
            "floor_cycles",
            "byte_cycles",
            "copies",
            "collectives",
            "temporary_megabytes",
        )
        return row | {"fits": False} | dict.fromkeys(missing), [], ""
    program = CompiledProgram(compiled.hlo)
    whole = case.what in ("prefill", "train")
    step = repeated(program, program.entry_instructions()) if whole else program.loop_instructions()
    own, of_experts = own_cycles(step, case, chip), expert_cycles(program, step, case)
    row |= {
        "fits": True,
        "cycles": sum(map(cycles_of, step)) + own + of_experts,
        "own_cycles": own,
        "expert_cycles": of_experts,
        "floor_cycles": floor_cycles(compiled, chip) / case.devices,
        "byte_cycles": compiled.floor / chip.device.bandwidth * chip.hertz / case.devices,
        "copies": sum(map(is_large_copy, step)),
        "temporary_megabytes": compiled.temporary / 1e6,
        "compile_seconds": compiled.seconds,
    } | counted(compiled.hlo, whole)
    return row, step, compiled.hlo


def floor_cycles(compiled: Compiled, chip: Chip) -> float:
    return max(compiled.floor / chip.device.bandwidth, compiled.flops / chip.device.flops) * chip.hertz


def own_cycles(step: list[Instruction], case: Case, chip: Chip) -> float:
    """Cycles of the package's kernels: the largest of those of bytes, of products and, for int4, of the vector unit."""
    seconds = 0.0
    for one in step:
        if one.opcode == "custom-call" and tree_attention_tpu.NAME in one.name:
            shapes = operands_of(one)
            queries, cache = shapes[2], shapes[-1]
            filled = cache[0] * case.context * cache[2]
            size = 4 if case.dtype == "float32" else 2
            seconds += max(2 * filled * size / chip.device.bandwidth, 4 * filled * queries[-2] / chip.device.flops)
        elif one.opcode == "custom-call" and "splash" in one.name:
            seconds += _text_seconds(one.name, operands_of(one), chip)
        elif one.opcode == "custom-call" and few_bits_tpu.NAMES["int8"] in one.name:
            (rows, depth), (parts, _, width), *_ = operands_of(one)
            numbers = parts * depth * width
            moved = numbers + rows * depth + rows * parts * width  # half as many sums, in 16 bits
            seconds += max(moved / chip.device.bandwidth, 2 * rows * numbers / (2 * chip.device.flops))
        elif one.opcode == "custom-call" and few_bits_tpu.NAMES["int4"] in one.name:
            (_, rows, _), _, (parts, _, groups, width), *_ = operands_of(one)
            numbers = 32 * parts * groups * width
            moved = numbers * 5 / 8 + rows * (64 * groups + 2 * parts * width)
            widened = INT4_OPERATIONS * numbers / (VECTOR_OPERATIONS * chip.hertz)
            seconds += max(moved / chip.device.bandwidth, 2 * rows * numbers / chip.device.flops, widened)
    return seconds * chip.hertz


def _text_seconds(name: str, shapes: list[tuple[int, ...]], chip: Chip) -> float:
    """Return the seconds of a text's attention or of its gradient: all products of the blocks on and below the
    diagonal.
    """
    (*_, blocks, _), (*heads, tokens, head_dim), keys = shapes[0], *shapes[2:4]
    pairs = tokens * (tokens + tokens // blocks) / 2
    products = next((count for part, count in SPLASH_PRODUCTS.items() if part in name), 2)
    moved = 2 * 2 * (math.prod(keys) + math.prod(heads) * tokens * head_dim)  # of 16 bits: keys and values, in and out
    flops = 2 * products * math.prod(heads) * pairs * head_dim
    return max(moved / chip.device.bandwidth, flops / chip.device.flops)


def expert_cycles(program: CompiledProgram, step: list[Instruction], case: Case) -> float:
    """Return the cycles of the loops over blocks of tokens of one expert: one turn's, for each expected block."""
    loops = (one for one in step if one.opcode == "while" and "/experts/" in one.source)
    turn = sum(cycles_of(one) for loop in loops for one in program.loop_body(loop))
    return turn * blocks_of(case, min(case.tokens, experts.ROWS_OF_BLOCK))


def line_of(row: dict) -> str:
    chips = row["chip"] if row["devices"] == 1 else f"{row['devices']} {row['chip']}"
    name = (
        f"{chips} {row['what']:8} batch {row['batch']} context {row['context']} nodes {row['nodes']} {row['weights']}"
    )
    if not row["fits"]:
        return f"{name}: does not fit into the chip's memory"
    ratio, bytes_only = row["cycles"] / row["floor_cycles"], row["cycles"] / row["byte_cycles"]
    return (
        f"{name}: {row['cycles'] / 1e6:.2f}M cycles, {ratio:.2f} of the floor ({bytes_only:.2f} of the bytes), "
        f"own kernels {row['own_cycles'] / 1e6:.2f}M, experts {row['expert_cycles'] / 1e6:.2f}M, "
        f"{row['copies']} large copies, "
        f"{row['collectives']} collectives of {row['collective_megabytes']:.2f} MB, "
        f"{row['temporary_megabytes']:.0f} MB temporary, compiled in {row['compile_seconds']:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main(arguments()))
