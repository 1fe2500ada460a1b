"""``hydrajax report``: print the tables of the result files in a directory and write them as Markdown."""

import argparse
import sys
from pathlib import Path

from hydrajax.errors import HydrajaxError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="directory, searched at any depth for the files of 'bench --json', 'tree search' and 'evaluate', "
        "metrics.jsonl of training, and results of experiments/",
    )
    parser.add_argument("--output", metavar="FILE.md", help="Markdown file to write (default DIR/REPORT.md)")


def run(args: argparse.Namespace) -> None:
    from hydrajax.bench.report.markdown import table_of, write_report
    from hydrajax.bench.report.outputs import find_results
    from hydrajax.bench.report.tables import print_table

    results, others = find_results(args.directory)
    if not results:
        raise HydrajaxError(f"report: no results in {args.directory}")
    output = args.output or Path(args.directory) / "REPORT.md"
    write_report(results, output)
    for _, result in results:
        columns, rows = table_of(result)
        print_table(columns, rows, left=columns[:1], title=result.title)
    if others:
        names = ", ".join(str(path.relative_to(args.directory)) for path in others)
        print(f"skipped, not a result: {names}", file=sys.stderr)
    print(f"{len(results)} results: {output}")
