"""Decode with weights in pages of the default size and in huge pages, in turns.

    python experiments/huge_pages.py --draft none --draft draft-model --output experiments/results/huge_pages.json

The weights of one executor are copied, and copies lie in pages of the default size where huge pages are only for
programs that ask for them (`madvise` in /sys/kernel/mm/transparent_hugepage/enabled).
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import jax
from common import held_out_chunks

import hydrajax
from hydrajax.bench.contests.contest import contest
from hydrajax.cli import options, run_command
from hydrajax.files import WholeFile
from hydrajax.machine import machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", default="shipped", metavar="DIR|NAME")
    parser.add_argument("--draft", action="append", default=[], metavar="NAME", help="a draft or none, repeatable")
    parser.add_argument("--count", type=options.positive, default=4, metavar="N", help="prompts of a round")
    parser.add_argument("--rounds", type=options.positive, default=20, metavar="R")
    parser.add_argument("--output", type=Path, metavar="FILE.json")


def run(args: argparse.Namespace) -> None:
    # An unwritable path fails before the measurements.
    with nullcontext() if args.output is None else WholeFile(args.output, "--output") as file:
        rows = list(measured(args))
        if file is not None:
            settings = {"base": args.base, "count": args.count, "rounds": args.rounds}
            file.write_json({"machine": machine(), "settings": settings, "rows": rows})


def measured(args: argparse.Namespace) -> Iterator[dict]:
    """Print and yield each draft's speed with huge pages, relative to pages of the default size."""
    base = hydrajax.load(args.base, dtype="float32")
    drafted = [(draft, base.with_draft(draft)) for draft in args.draft or ["none"]]
    prompts = held_out_chunks(base.tokenizer, args.count, 64)
    for draft, m in drafted:
        huge = m.executor(m.program(max_new_tokens=64))
        small = copy.copy(huge)
        small.params = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, huge.params)
        _, found = contest({"small": small, "huge": huge}, prompts, batch_size=1, repeats=args.rounds)
        low, high = found.speedup_low, found.speedup_high
        interval = "" if low is None else f" ({low:.2f} to {high:.2f})"
        print(f"{draft:20} {found.speedup:.2f}{interval} of the speed with default pages", flush=True)
        yield {"draft": draft, "nodes": found.nodes, "speedup": found.speedup, "low": low, "high": high}


if __name__ == "__main__":
    sys.exit(run_command(Path(sys.argv[0]).name, __doc__.splitlines()[0], add_arguments, run, sys.argv[1:]))
