"""``hydrajax report``: tables and pictures from the result files of a directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from hydrajax.errors import HydrajaxError
from hydrajax.optional_deps import needs

HELP = "make Markdown tables and PNG figures from the result files below a directory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="results of experiments/, of 'bench --json', 'tree search', 'evaluate' and 'roofline --json', and "
        "metrics.jsonl of training, at any depth",
    )
    parser.add_argument(
        "--output", metavar="FILE.md", help="default DIR/REPORT.md; the pictures lie in a folder 'figures' beside it"
    )


def run(args: argparse.Namespace) -> None:
    from hydrajax.report.drawing import can_draw
    from hydrajax.report.markdown import write_report
    from hydrajax.report.outputs import find_results

    results, others = find_results(args.directory)
    if not results:
        raise HydrajaxError(f"report: found no results in {args.directory}")
    output = args.output or Path(args.directory) / "REPORT.md"
    with Console(stderr=True).status("drawing") as line:
        written = write_report(results, output, on_result=lambda name: line.update(f"drawing {name}"))
    if others:
        names = ", ".join(str(path.relative_to(args.directory)) for path in others)
        print(f"not drawn, as no results of a known kind: {names}", file=sys.stderr)
    if not can_draw():
        print(needs("matplotlib"), file=sys.stderr)
    print(f"{len(results)} results: {written[0]} and {len(written) - 1} pictures")
