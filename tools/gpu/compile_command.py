"""The common part of the compile reports of GPUs and TPUs: arguments, errors and the result file.

It does not import JAX, so that a report can set what JAX and XLA read at their import.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

ONE_NODE = ("ar", "ar-step", "prefill", "train")  # programs without a tree


def words(text: str) -> list[str]:
    return text.split(",")


def integers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def parser_of(doc: str, layers: int | None) -> argparse.ArgumentParser:
    """Return a parser with the common arguments; ``layers`` is the default of ``--layers``."""
    lines = doc.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=lines[0], epilog=lines[2], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="7b", help="shape of the base (default %(default)s)")
    parser.add_argument(
        "--layers", type=int, default=layers, help=f"layers of the base (default: {layers or 'those of the shape'})"
    )
    parser.add_argument("--what", type=words, default=["ar", "verify", "medusa", "hydra++"])
    parser.add_argument("--batches", type=integers, default=[1])
    parser.add_argument("--contexts", type=integers, default=[2048], help="filled slots of each sequence")
    parser.add_argument("--nodes", type=integers, default=[64], help="first nodes of the released tree (default 64)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--weights", type=words, default=["float"], help="of the base: float (in --dtype), int8, int4 (default float)"
    )
    parser.add_argument("--devices", type=integers, default=[1], help="1, or 8 that share all weights (default 1)")
    parser.add_argument(
        "--collectives", action="store_true", help="list the loop's collectives and the lines of code they come from"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a result for hydrajax report")
    return parser


def cells_of(args: argparse.Namespace) -> Iterator[tuple]:
    """Yield devices, weights, program, nodes, batch and context of all cases."""
    for devices, weights, what in itertools.product(devices_of(args), args.weights, args.what):
        nodes = args.nodes[:1] if what in ONE_NODE else args.nodes
        yield from itertools.product([devices], [weights], [what], nodes, args.batches, args.contexts)


def remarks_of(args: argparse.Namespace) -> list[str]:
    """Return the remarks about a base with experts."""
    from hydrajax.bench.shapes import SHAPES

    if not SHAPES[args.shape].any_experts:
        return []
    return [
        "experts: the floor has those that the tokens are expected to choose, each token without regard to the others, "
        "and the program's blocks of tokens of one expert count as often as expected"
    ]


def devices_of(args: argparse.Namespace) -> list[int]:
    """Return the numbers of devices.

    Raises:
        HydrajaxError: another number than 1 and 8, or several devices with a program that has no loop.
    """
    from hydrajax.errors import HydrajaxError

    if unknown := set(args.devices) - {1, 8}:
        raise HydrajaxError(f"--devices: got {unknown.pop()}, expected 1 or 8")
    if max(args.devices) > 1 and (alone := sorted({"ar-step", "prefill"} & set(args.what))):
        raise HydrajaxError(f"--what: got {alone[0]}, which has no loop; with --devices 8 use ar, verify or a drafter")
    return args.devices


def run(args: argparse.Namespace, make_cases: Callable[[], list], report: Callable[[Any, list], list[dict]], **result):
    """Report all cases and write the result if asked for; return the exit code.

    Args:
        make_cases: Returns the cases, or raises `HydrajaxError` for a wrong argument.
        report: Compiles and prints all cases, and returns the rows of the result.
        result: Its ``kind``, ``title``, ``settings`` and ``remarks``.
    """
    from hydrajax.errors import HydrajaxError
    from hydrajax.files import WholeFile

    try:
        cases = make_cases()
        # An unwritable path fails before the compilations.
        with WholeFile(args.json, "--json") if args.json else contextlib.nullcontext() as file:
            rows = report(args, cases)
            if file:
                _write(file, rows, **result)
    except HydrajaxError as error:
        print(f"compile_report.py: {error}", file=sys.stderr)
        return 2
    return 0


def _write(file: IO, rows: list[dict], *, kind: str, title: str, settings: dict, remarks: list[str]) -> None:
    from hydrajax.bench.report.results import Result, write_result
    from hydrajax.machine import machine

    script = Path(sys.argv[0]).resolve()
    command = shlex.join(["python", str(script.relative_to(script.parents[2])), *sys.argv[1:]])
    write_result(file, Result(kind, "", title, rows, command, machine(), settings, remarks))
