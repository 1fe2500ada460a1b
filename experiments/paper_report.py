"""Write one report of result files with tables and pictures, in the order of the papers' figures and tables.

python experiments/paper_report.py experiments/results
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from paper_figures import DRAWN, draw

from hydrajax.bench.report.drawing import save_png
from hydrajax.bench.report.markdown import EQUAL, INTRODUCTION, RATE_COLUMNS, Table, rate_cells, section
from hydrajax.bench.report.outputs import find_results
from hydrajax.bench.report.results import Result
from hydrajax.cli import run_command
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile

PAPERS = ("hydra", "medusa", "amphista")
PICTURES = "figures"  # folder next to the report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="directory of result files, searched at any depth")
    parser.add_argument("--output", metavar="FILE.md", help="report to write (default DIR/REPORT.md)")


def run(args: argparse.Namespace) -> None:
    results, _ = find_results(args.directory)
    if not results:
        raise HydrajaxError(f"paper_report: no results in {args.directory}")
    written = write_paper_report(results, args.output or Path(args.directory) / "REPORT.md")
    print(f"{written[0]}, {len(written) - 1} pictures")


def write_paper_report(results: Sequence[tuple[Path, Result]], path: str | Path, pictures: bool = True) -> list[Path]:
    """Write the report and its pictures, and return their paths. The text is the same without ``pictures``."""
    folder, parts, written = Path(path).parent / PICTURES, [INTRODUCTION], []
    if pictures:
        folder.mkdir(exist_ok=True)
    names: set[str] = set()
    for source, result in sorted(results, key=lambda found: _order(*found)):
        stem = re.sub(r"[^\w.-]+", "-", source.stem if source.suffix == ".json" else result.kind)[:100]
        name = next(name for n in range(1, 1000) if (name := stem if n == 1 else f"{stem}-{n}") not in names)
        names.add(name)
        is_drawn = result.kind in DRAWN  # others are tables alone
        parts.append(section(result, source.name, f"{PICTURES}/{name}.png" if is_drawn else None, TABLES))
        if pictures and is_drawn:
            written.append(folder / f"{name}.png")
            save_png(draw(result), written[-1], "output")
    with WholeFile(path, "output") as file:
        file.write_text("\n".join(parts))
    return [Path(path), *written]


def _order(path: Path, result: Result) -> tuple:
    """Hydra's results first, then the other papers', tables after figures; results without a paper last."""
    paper, _, rest = result.source.partition(" ")
    number = re.search(r"\d+", rest)
    return (
        PAPERS.index(paper) if paper in PAPERS else len(PAPERS), rest.startswith("table"),
        int(number[0]) if number else 0, result.source, str(path),
    )  # fmt: skip


# --- tables of kinds that only the scripts in this folder write -------------------------------------------------------


def _quality(rows: list[dict]) -> Table:
    def interval(row: dict, prefix: str, sign: str) -> str:
        low, high = row[f"{prefix}low"], row[f"{prefix}high"]
        return "" if low is None else f"{low:{sign}.2f} to {high:{sign}.2f}"

    cells = []
    for row in rows:
        line = [row["set"], row["metric"], row["rule"], row["name"], row["questions"]]
        line += [f"{row['score']:.2f}", interval(row, "", "")]
        line += [f"{row['difference']:+.2f}", interval(row, "difference_", "+")]
        cells.append([*line, f"{row['tokens_per_step']:.2f}", f"{row['speedup']:.2f}x", EQUAL[row["equal"]]])
    columns = ("metric", "rule", "", "questions", "score", "95%", "difference", "95%", "τ", "speed-up", "equal output")
    return ("set", *columns), cells


def _prediction(rows: list[dict]) -> Table:
    cells = []
    for row in rows:
        line = [row["batch"], row["context"], row["nodes"]]
        for name in ("autoregressive_step", "step"):
            predicted, measured = row[f"predicted_{name}"], row[name]
            error = f"{predicted / measured - 1:+.0%}" if measured else ""
            line += [f"{predicted:.3g}", f"{measured:.3g}", error]
        cells.append(line)
    columns = ("AR step predicted (ms)", "measured", "error", "step predicted (ms)", "measured", "error")
    return ("batch", "context", "nodes", *columns), cells


def _acceptance(rows: list[dict]) -> Table:
    cells = []
    for row in rows:
        value = "" if row["value"] is None else f"{row['parameter']} {row['value']:g}"
        nats = "" if row["nats"] is None else f"{row['nats']:.3f}"
        cells.append([row["drafter"], row["rule"], value, f"{row['tokens_per_step']:.2f}", nats])
    return ("heads", "rule", "at", "τ", "nats per token"), cells


def _overhead(rows: list[dict]) -> Table:
    most = max(len(row["heads"]) for row in rows)
    cells = []
    for row in rows:
        heads = [f"{value:.3g}" for value in row["heads"]] + [""] * (most - len(row["heads"]))
        prefix = "" if row["prefix_attention"] is None else f"{row['prefix_attention']:.3g}"
        cells.append([row["drafter"], prefix, *heads, f"{row['verify']:.3g}", f"{row['autoregressive_step']:.3g}"])
    heads = [f"head {k + 1}" for k in range(most)]
    return ("ms", "prefix attention", *heads, "verify", "autoregressive step"), cells


def _pareto(rows: list[dict]) -> Table:
    cells = []
    for row in rows:
        size = [f"{row['draft_megabytes']:.3g}", f"{row['draft_ms']:.3g}"]
        predicted = [f"{row['predicted_gigabytes']:.2f}", f"{row['predicted_speedup']:.2f}x"]
        cells.append([row["drafter"], row["lm_head"], *size, *rate_cells(row), EQUAL[row["equal"]], *predicted])
    columns = ("lm head", "draft MB", "draft ms", *RATE_COLUMNS, "equal output", "predicted GB", "predicted speed-up")
    return ("heads", *columns), cells


def _program(rows: list[dict]) -> Table:
    cells, several = [], any("devices" in row for row in rows)
    for row in rows:
        line = [row[name] for name in ("what", "batch", "context", "nodes", "kernels")]
        line += [f"{row['kernels_per_layer']:g}", f"{row['gigabytes']:.2f}", f"{row['floor_gigabytes']:.2f}"]
        line += [f"{row['gigabytes'] / row['floor_gigabytes']:.3f}"]
        line += [f"{row['copies']} ({row['copied_megabytes']:.0f} MB)", f"{row['temporary_megabytes']:.0f}"]
        line.append("yes" if row["one_graph"] else "no")
        if several:
            exchanged = f"{row['collectives']} ({row['collective_megabytes']:.2f} MB)" if "devices" in row else ""
            line += [row.get("devices", 1), exchanged]
        cells.append(line)
    counts = ("batch", "context", "nodes", "kernels", "a layer", "GB", "floor (GB)", "ratio")
    counts += ("large copies", "temporary (MB)", "one CUDA graph")
    return ("program", *counts, *(("devices", "collectives") if several else ())), cells


def _tpu_program(rows: list[dict]) -> Table:
    cells = []
    for row in rows:
        line = [row[name] for name in ("what", "chip", "devices", "batch", "context", "nodes", "weights")]
        if row["fits"]:
            line += [f"{row[name] / 1e6:.2f}" for name in ("cycles", "own_cycles", "floor_cycles")]
            line += [f"{row['cycles'] / row['floor_cycles']:.2f}", f"{row['cycles'] / row['byte_cycles']:.2f}"]
            line += [row["copies"], row["collectives"], f"{row['temporary_megabytes']:.0f}"]
        else:
            line += ["does not fit", *[""] * 7]
        cells.append(line)
    counts = ("chip", "devices", "batch", "context", "nodes", "weights", "cycles (M)", "of our kernels", "floor (M)")
    counts += ("ratio", "ratio to bytes", "large copies", "collectives", "temporary (MB)")
    return ("program", *counts), cells


def _curve(rows: list[dict]) -> Table:
    fields = ("name", "over", "at", "tokens_per_step")
    return fields, [[row[name] for name in fields] for row in rows]


TABLES = {"acceptance": _acceptance, "overhead": _overhead, "pareto": _pareto, "curve": _curve}
TABLES |= {"program": _program, "tpu_program": _tpu_program, "quality": _quality, "prediction": _prediction}


if __name__ == "__main__":
    sys.exit(run_command("paper_report.py", __doc__.splitlines()[0], add_arguments, run, sys.argv[1:]))
