"""Draw the two pictures of the README: the tree of one step with its accepted path, and the measured speed.

python experiments/front_page.py --images docs/images
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import hydrajax
from hydrajax.cli import run_command
from hydrajax.measure.step_trace import TracedStep, trace_steps
from hydrajax.report.drawing import GREEN, GREY, draw_step, new_figure, save_png
from hydrajax.text.tokenizer import decode_text, visible
from hydrajax.trees.static_tree import TreeTopology

DARK = "#57606a"
ROOT = Path(__file__).resolve().parents[1]
QUESTION = "What is the capital of France, and what is it famous for?"
TREE = [[0], [1], [2], [0, 0], [0, 1], [0, 2], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    images = str(ROOT / "docs" / "images")
    parser.add_argument("--images", metavar="DIR", default=images, help="output directory (default %(default)s)")
    results = ROOT / "experiments" / "results" / "peers_smollm2.json"
    parser.add_argument(
        "--peers", metavar="FILE.json", default=str(results), help="from peers.py (default %(default)s)"
    )


def run(args: argparse.Namespace) -> None:
    tree_picture(Path(args.images) / "tree.png")
    speed_picture(Path(args.peers), Path(args.images) / "speed.png")


def tree_picture(path: Path) -> None:
    """Draw the best of the first 16 steps of the answer to `QUESTION`."""
    m, tree = hydrajax.load("smollm2", "hydra++", dtype="float32"), TreeTopology(TREE)
    executor = hydrajax.make_executor(m, m.spec(tree=tree))

    def merit(step: TracedStep) -> tuple[bool, int]:
        """Prefer a path with a second guess, which a chain could not accept, then the longest."""
        ranks = tree.choices[step.path[-1] - 1] if len(step.path) > 1 else ()
        return any(ranks), len(step.path)

    prompt = m.prompt_ids([{"role": "user", "content": QUESTION}], "prompt")
    step = max(trace_steps(executor, prompt, most=16), key=merit)
    words = [visible(m.tokenizer, token) for token in step.tokens]
    note = f"One pass of the base over these {tree.size} nodes: {len(step.path)} tokens emitted (green). "
    note += f"{visible(m.tokenizer, step.bonus_token)} is the bonus token."
    save_png(draw_step(tree, words, step.path, decode_text(m.tokenizer, step.before), note), path, "images")


def speed_picture(peers: Path, path: Path) -> None:
    """Draw the speeds that `peers.py` measured in one run, relative to no draft."""
    content = json.loads(peers.read_text())
    rows, here, asked = content["results"], content["machine"], content["arguments"]
    names = [row["name"].replace("autoregressive", "no draft").replace("greedy", "no draft") for row in rows]
    names = [re.sub("(llama.cpp|OpenVINO)", r"\1 Q4_1", name) for name in names]
    plain = next(row["tokens_per_second"] for row in rows if row["name"] == "hydrajax, autoregressive")
    speeds = [row["tokens_per_second"] / plain for row in rows]
    colours = [GREEN if "hydrajax" in name else GREY for name in names]
    colours = [DARK if name == "hydrajax, no draft" else colour for name, colour in zip(names, colours, strict=True)]
    figure = new_figure(8.6, 0.9 + 0.23 * len(rows))
    axes = figure.subplots()
    axes.barh(range(len(rows)), speeds, color=colours)
    for at, speed in enumerate(speeds):
        axes.text(speed + max(speeds) / 150, at, f"{speed:.2f}x", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), names, fontsize=9)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    asked_of = f"{rows[0]['prompts']} questions of MT-Bench"
    axes.set_xlabel(f"speed relative to hydrajax without a draft, {asked_of}", fontsize=9)
    base = asked["base"] or "shipped"
    axes.set_title(
        f"{base}, float32 unless named, {here['cores']} cores of an {here['device']}", fontsize=10, loc="left"
    )
    save_png(figure, path, "images")


if __name__ == "__main__":
    sys.exit(run_command("front_page.py", __doc__.splitlines()[0], add_arguments, run, sys.argv[1:]))
