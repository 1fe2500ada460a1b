"""The two pictures of the front page: one step's tree with what was accepted, and the measured speed.

python experiments/front_page.py --images docs/images
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import jax
import numpy as np

import hydrajax
from hydrajax.cli import run_command
from hydrajax.report.drawing import new_figure, save_png, side_by_side
from hydrajax.trees.tree import TreeTopology

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "def quicksort(items):"
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
GREEN, GREY = "#1a7f37", "#8c959f"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", metavar="DIR", default=str(ROOT / "docs" / "images"), help="default %(default)s")
    results = ROOT / "experiments" / "results" / "peers.json"
    parser.add_argument("--peers", metavar="FILE.json", default=str(results), help="what peers.py wrote")


def run(args: argparse.Namespace) -> None:
    tree_picture(Path(args.images) / "tree.png")
    speed_picture(Path(args.peers), Path(args.images) / "speed.png")


def tree_picture(path: Path) -> None:
    """Of the first 16 steps that continue `PROMPT`, the one that accepts the most, better by a second guess."""
    m, tree = hydrajax.load("shipped", "hydra++", dtype="float32"), TreeTopology(TREE)
    engine = hydrajax.make_decode_fn(m, tree=tree, max_new_tokens=64).engine

    @jax.jit
    def step(state):
        proposal = engine.propose(m.params, state)
        forward, logits = engine.verify(m.params, state.target.cache, proposal)
        accepted = engine.accept(state, logits, proposal)
        state, outcome = engine.commit(state, forward, logits, proposal, accepted)
        return engine.observe(m.params, state, proposal, outcome), proposal.tokens[0], accepted

    prompt, lengths = m.encode([PROMPT])
    state = jax.jit(engine.prefill)(m.params, prompt, lengths, jax.random.key(0), hydrajax.Greedy())
    best, text, before = None, list(prompt[0]), ""
    for _ in range(16):
        state, tokens, accepted = step(state)
        length, nodes = int(accepted.accept_length[0]), np.asarray(accepted.path[0])
        path_nodes = nodes[: length + 1].tolist()
        words = [m.tokenizer.decode([int(token)]) for token in tokens]
        # A path that leaves the first guesses says why this is a tree and not a chain.
        merit = any(rank for rank in (tree.choices[path_nodes[-1] - 1] if length else ())), length
        if best is None or merit > best[0]:
            before = m.tokenizer.decode(text)
            best = merit, words, path_nodes, m.tokenizer.decode([int(accepted.next_root[0])])
        text += [int(tokens[node]) for node in path_nodes]
    _, words, path_nodes, following = best
    save_png(drawn(tree, words, path_nodes, before, following), path, "images")


def drawn(tree: TreeTopology, words: list[str], path: list[int], before: str, following: str):
    """The tree from left to right: the root, then each depth; the accepted path in green."""
    parents, depths = tree.parents, tree.depths
    y = {node: -row for node, row in side_by_side(tree, min).items()}  # a node stands beside its best child
    figure = new_figure(9.6, 3.5)
    axes = figure.subplots()
    for node in range(tree.size):
        kept = node in path
        if node:
            ends = [depths[parents[node]], depths[node]], [y[parents[node]], y[node]]  # the boxes cover what they hide
            axes.plot(*ends, color=GREEN if kept else "#d0d7de", linewidth=2.2 if kept else 1.2, zorder=1)
        box = {"boxstyle": "round,pad=0.35", "facecolor": "#dafbe1" if kept else "white", "linewidth": 1.2}
        box["edgecolor"] = GREEN if kept else "#d0d7de"
        axes.text(
            depths[node], y[node], shown(words[node]), ha="center", va="center", family="monospace", fontsize=11,
            color="#0b3d1a" if kept else GREY, bbox=box, zorder=2, parse_math=False,
        )  # fmt: skip
    tail = before.splitlines()[-1][-24:] if before else ""
    axes.text(-0.42, y[0], f"{tail}", ha="right", va="center", family="monospace", fontsize=10, parse_math=False)
    note = f"One pass of the base over these {tree.size} nodes: {len(path)} tokens accepted (green), "
    note += f"and {shown(following)} to go on from."
    axes.text(-1.7, min(y.values()) - 1.1, note, ha="left", va="top", fontsize=10.5, color=GREEN)
    titles = ["the base's\nown choice", *(f"guess {k} ahead" for k in range(1, tree.depth + 1))]
    for depth, title in enumerate(titles):
        axes.text(depth, 0.75, title, ha="center", va="bottom", fontsize=9, color="#57606a")
    axes.set(xlim=(-1.75, tree.depth + 0.6), ylim=(min(y.values()) - 1.7, 1.6))
    axes.set_axis_off()
    return figure


def shown(word: str) -> str:
    """A token with its spaces and line ends made visible."""
    return repr(word)[1:-1].replace(" ", "·") or "∅"


def speed_picture(peers: Path, path: Path) -> None:
    """Bars from what `peers.py` measured: every way to decode the shipped model, in one run."""
    content = json.loads(peers.read_text())
    rows, here = content["results"], content["machine"]
    names = [row["name"].replace("the searched one of", "tree of") for row in rows]
    speeds = [row["tokens_per_second"] for row in rows]
    colours = [GREY if "transformers" in name else "#57606a" if "autoregressive" in name else GREEN for name in names]
    figure = new_figure(8.6, 2.9)
    axes = figure.subplots()
    axes.barh(range(len(rows)), speeds, color=colours)
    for at, speed in enumerate(speeds):
        axes.text(speed + 8, at, f"{speed:.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), names, fontsize=9)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("tokens per second, the same tokens from all", fontsize=9)
    title = f"shipped 18M model, float32, {here['cores']} cores of an {here['device']}"
    axes.set_title(title, fontsize=10, loc="left")
    save_png(figure, path, "images")


if __name__ == "__main__":
    sys.exit(run_command("front_page.py", __doc__.splitlines()[0], add_arguments, run, sys.argv[1:]))
