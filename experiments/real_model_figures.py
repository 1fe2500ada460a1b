"""Draw the results of real_model.py: speed-up on MT-Bench and by category, tokens per step over training and context.

python experiments/real_model_figures.py experiments/results --images docs/images
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
from paper_figures import draw

from hydrajax.bench.contests.contest import AUTOREGRESSIVE
from hydrajax.bench.questions.summary import MT_BENCH
from hydrajax.bench.report.drawing import new_figure, save_png
from hydrajax.bench.report.markdown import distinct
from hydrajax.bench.report.outputs import find_results
from hydrajax.bench.report.results import Result
from hydrajax.cli import run_command
from hydrajax.errors import HydrajaxError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="directory of the results of real_model.py")
    parser.add_argument("--images", metavar="DIR", help="output directory (default DIR/figures)")


def run(args: argparse.Namespace) -> None:
    folder = Path(args.directory)
    if not draw_all(folder, Path(args.images or folder / "figures")):
        raise HydrajaxError(f"directory: no results of real_model.py in {folder}")


def draw_all(folder: Path, images: Path) -> list[Path]:
    """Draw the results that are in a directory, and return the paths of the pictures."""
    images.mkdir(parents=True, exist_ok=True)
    written = []
    for path, result in find_results(folder)[0]:
        if path.parent == folder and path.stem in PICTURES:
            name, make = PICTURES[path.stem]
            figure = make(result)
            figure.suptitle(caption(result), fontsize=8, x=0.02, ha="left")
            written.append(images / f"real_model_{name}.png")
            save_png(figure, written[-1], "images")
            print(f"written: {written[-1]}")
    return written


def caption(result: Result) -> str:
    """Return the base, the dtype, the numbers of questions and tokens, and the machine."""
    settings, here = result.settings, result.machine
    parts = [Path(settings["base"]).name, settings["dtype"]]
    if "rule" in settings:
        parts.append(settings["rule"])
    if "questions" not in settings:
        return f"{', '.join(parts)}, simulated on held-out text"
    parts += [f"{settings['questions']} questions", f"at most {settings['max_new_tokens']} tokens per answer"]
    device = f"{here['cores']} cores of {here['device']}" if here["platform"] == "cpu" else here["device"]
    return f"{', '.join(parts)}\n{device}"


def speedups(result: Result) -> Any:
    """Draw a bar for each draft and rule, with the interval of its speed-up and its tokens per step."""
    rows = [row for row in result.rows if row["draft"] != AUTOREGRESSIVE]
    drafts, rules = distinct(rows, "draft"), distinct(rows, "rule")
    figure = new_figure(max(5.5, 1.4 * len(drafts) + 1), 4.2)
    axes = figure.subplots()
    width = 0.8 / len(rules)
    for i, rule in enumerate(rules):
        mine = [row for row in rows if row["rule"] == rule]
        x = np.array([drafts.index(row["draft"]) for row in mine]) + (i + 0.5) * width - 0.4
        axes.bar(x, [row["speedup"] for row in mine], width, color=f"C{i}", label=rule)
        for at, row in zip(x, mine, strict=True):
            if row["speedup_low"] is not None:
                axes.plot([at, at], [row["speedup_low"], row["speedup_high"]], color="black", linewidth=0.8)
            top = row["speedup_high"] or row["speedup"]
            text = f"{row['speedup']:.2f}x\nτ {row['tokens_per_step']:.2f}"
            axes.annotate(text, (at, top), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    axes.axhline(1, color="0.4", linewidth=1, linestyle=":")
    axes.set_xticks(range(len(drafts)), drafts)
    axes.set_ylabel("speed-up on MT-Bench")
    axes.margins(y=0.15)
    axes.legend(fontsize=8)
    return figure


def categories(result: Result) -> Any:
    """Draw the categories that Spec-Bench reports, without the base alone."""
    rows = [row for row in result.rows if row["name"] != AUTOREGRESSIVE and row["category"] not in MT_BENCH]
    return draw(dataclasses.replace(result, rows=rows))


PICTURES = {
    "real_model_mt_bench": ("speedup", speedups),
    "real_model_spec_bench": ("categories", categories),
    "real_model_spec_bench_sampled": ("categories_sampled", categories),
    "real_model_curve": ("over_training", draw),
    "real_model_context": ("over_context", draw),
}


if __name__ == "__main__":
    sys.exit(run_command("real_model_figures.py", __doc__.splitlines()[0], add_arguments, run, sys.argv[1:]))
