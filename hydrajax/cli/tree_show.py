"""``hydrajax tree show``: draw a tree."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.tree import Tree

from hydrajax.trees import presets
from hydrajax.trees.dynamic import static

HELP = "draw a tree"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tree", metavar="NAME|FILE.json|JSON", help=f"{', '.join(presets.names())}, a file or the choices themselves"
    )
    parser.add_argument("--picture", metavar="FILE.png", help="draw it here (needs matplotlib)")


def run(args: argparse.Namespace) -> None:
    tree = static(presets.by_name(args.tree), "drawing")
    drawing = Tree(f"root ({tree.size} nodes, depth {tree.depth})")
    branches = {(): drawing}
    for path in tree.choices:
        branches[path] = branches[path[:-1]].add(str(path[-1]))
    Console(width=None if sys.stdout.isatty() else 200).print(drawing)
    if args.picture:
        from hydrajax.report.drawing import draw_tree, save_png

        save_png(draw_tree(tree), Path(args.picture), "--picture")
