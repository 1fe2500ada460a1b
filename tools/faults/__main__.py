"""Inject faults into the hydrajax commands and count failures.

    python -m tools.faults [--only NAME] [--seeds N] [--seconds S]

Run it from the root of the repository. README.md in this directory lists the faults.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from hydrajax.bench.report.tables import print_table
from hydrajax.cli import options, run_command
from hydrajax.errors import not_allowed
from tools.faults.registry import FAULTS, run

MODULES = ("training", "decoding", "system", "inputs", "models", "text_files", "reports", "drafts")
MODULES += ("continuation", "devices", "process", "chat", "serving")
for module in MODULES:  # each registers its faults
    importlib.import_module(f"tools.faults.{module}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", metavar="NAME", action="append", help=f"inject this fault, repeatable: {', '.join(FAULTS)}")
    add("--seeds", metavar="N", type=options.positive, help="seeds of each fault (default: its own number)")
    add("--first-seed", metavar="S", type=options.seed, default=0, help="first seed (default %(default)s)")
    add("--seconds", metavar="S", type=options.positive, default=600,
        help="time after which a fault gets no new seed (default %(default)s)")  # fmt: skip
    add("--command-seconds", metavar="S", type=options.positive, default=300,
        help="time limit of one command (default %(default)s)")  # fmt: skip
    add("--folder", metavar="DIR", help="working directory (default: a temporary one)")


def inject(args: argparse.Namespace) -> int:
    for name in args.only or []:
        if name not in FAULTS:
            raise not_allowed("only", name, FAULTS)
    rows, made, failed = [], {}, False
    with (
        tempfile.TemporaryDirectory(prefix="faults", dir=args.folder) as folder,
        Console(stderr=True).status("") as line,
    ):
        for name in args.only or FAULTS:
            line.update(name)
            seeds = range(args.first_seed, args.first_seed + (args.seeds or FAULTS[name].seeds))
            began = time.monotonic()
            found = run(name, seeds, args.seconds, args.command_seconds, Path(folder), made)
            failed |= found.failures > 0
            first = "" if found.first_seed is None else str(found.first_seed)
            seconds = f"{time.monotonic() - began:.0f}"
            rows.append((name, found.trials, found.failures, first, seconds))
            text = f"{name}: {found.trials} trials, {found.failures} failures. {found.message}".strip()
            print(text, file=sys.stderr, flush=True)
    print_table(("fault", "trials", "failures", "first seed", "seconds"), rows, left=["fault"])
    return int(failed)


def main(argv: list[str]) -> int:
    return run_command("faults", __doc__.splitlines()[0], add_arguments, inject, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
