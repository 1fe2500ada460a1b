"""Draw the two pictures of the README, the tree of one step and the measured speeds, and write its table of speeds.

python experiments/front_page.py --images docs/images --readme README.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from peer_picture import front_table, speed_picture

import hydrajax
from hydrajax.bench.report.drawing import draw_step, save_png
from hydrajax.bench.report.tables import markdown_table
from hydrajax.bench.step_trace import TracedStep, trace_steps
from hydrajax.cli import run_command
from hydrajax.text.continuation import visible
from hydrajax.text.tokenizer import decode_text
from hydrajax.trees.static_tree import TreeTopology

BEGIN, END = "<!-- table of speeds: begin, written by experiments/front_page.py -->", "<!-- table of speeds: end -->"
ROOT = Path(__file__).resolve().parents[1]
QUESTION = "What is the capital of France, and what is it famous for?"
TREE = [[0], [1], [2], [0, 0], [0, 1], [0, 2], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    images = str(ROOT / "docs" / "images")
    parser.add_argument("--images", metavar="DIR", default=images, help="output directory (default %(default)s)")
    results = ROOT / "experiments" / "results" / "cpu_peers_smollm2.json"
    parser.add_argument(
        "--peers", metavar="FILE.json", default=str(results), help="from cpu_peers.py (default %(default)s)"
    )

    parser.add_argument("--readme", metavar="FILE", help="replace the table of speeds in this page (default: print it)")
    parser.add_argument("--only-speed", action="store_true", help="leave the picture of the tree as it is")


def run(args: argparse.Namespace) -> None:
    if not args.only_speed:
        tree_picture(Path(args.images) / "tree.png")
    content = json.loads(Path(args.peers).read_text())
    save_png(speed_picture(content), Path(args.images) / "speed.png", "images")
    table = "\n".join(markdown_table(*front_table(content)))
    if args.readme is None:
        print(table)
        return
    page = Path(args.readme).read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    Path(args.readme).write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")


def tree_picture(path: Path) -> None:
    """Draw the best of the first 16 steps of the answer to `QUESTION`."""
    m, tree = hydrajax.load("smollm2", "hydra++", dtype="float32"), TreeTopology(TREE)
    executor = hydrajax.make_executor(m, m.program(tree=tree))

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


if __name__ == "__main__":
    sys.exit(run_command("front_page.py", __doc__.splitlines()[0], add_arguments, run, sys.argv[1:]))
