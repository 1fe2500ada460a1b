"""Attack this package from outside: kill it, fill its disk, run it twice, feed it what no one should, and count.

    python experiments/attack.py [--only "training is killed"] [--seeds 3] [--seconds 600]

Each attack is tried with seeds from ``--first-seed`` on. A row says how often it was tried, with how many of the seeds
something gave way, and the first of these, with which ``--only NAME --first-seed SEED --seeds 1`` shows it again.
docs/reliability.md holds what was found. Linux and macOS; where no small disk can be mounted, some are not tried.
"""

import sys
import tempfile
import time
from pathlib import Path

from attacks import (  # noqa: F401 (each registers its attacks)
    amounts,
    decoding,
    drafted,
    going_on,
    hostile,
    inputs,
    lasting,
    networks,
    pickles,
    placed,
    power,
    programs,
    reports,
    surroundings,
    talking,
    training,
)
from attacks.registry import ATTACKS, run
from rich.console import Console

from hydrajax.cli import options, run_command
from hydrajax.cli.screen import figure_table, wide_console
from hydrajax.errors import not_allowed


def add_arguments(parser) -> None:
    parser.add_argument("--only", metavar="NAME", action="append", help=f"of {', '.join(ATTACKS)}; default all")
    parser.add_argument("--seeds", metavar="N", type=options.positive, help="of each (default: as many as it asks for)")
    parser.add_argument("--first-seed", metavar="S", type=options.seed, default=0, help="default %(default)s")
    parser.add_argument(
        "--seconds", metavar="S", type=options.positive, default=600, help="after which no new seed of an attack is "
        "tried (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--command-seconds", metavar="S", type=options.positive, default=300, help="that one command may take before "
        "it counts as hanging (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--folder", metavar="DIR", help="where to work (default: a temporary folder)")


def attack(args) -> int:
    for name in args.only or []:
        if name not in ATTACKS:
            raise not_allowed("only", name, ATTACKS)
    table, failed = figure_table("attack", "tried", "failed", "first seed", "seconds", left="attack"), 0
    with (
        tempfile.TemporaryDirectory(prefix="attack", dir=args.folder) as folder,
        Console(stderr=True).status("") as line,
    ):
        made = {}
        for name in args.only or ATTACKS:
            line.update(name)
            seeds = range(args.first_seed, args.first_seed + (args.seeds or ATTACKS[name].count))
            began = time.monotonic()
            found = run(name, seeds, args.seconds, args.command_seconds, Path(folder), made)
            first = "" if found.first is None else str(found.first)
            table.add_row(name, str(found.tried), str(found.failed), first, f"{time.monotonic() - began:.0f}")
            failed += found.failed
            print(
                f"{name}: {found.tried} tried, {found.failed} failed. {found.said}".strip(), file=sys.stderr, flush=True
            )
    wide_console().print(table)
    return 1 if failed else 0


def main(argv: list[str]) -> int:
    return run_command("attack.py", __doc__.splitlines()[0], add_arguments, attack, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
