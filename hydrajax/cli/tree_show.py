"""``hydrajax tree show``: draw a tree, or with a model what became of it in one step."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from hydrajax.cli import options
from hydrajax.errors import HydrajaxError
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree, static
from hydrajax.trees.static_tree import TreeTopology

HELP = "draw a tree, or with --base, --draft and --prompt what became of it in one step"
KEPT = "bold green"  # and a tick, for where no colours are shown
TICK = "✓"
FOLD_FROM = 24  # nodes: what was rejected in a larger tree is cut short
FEW = 3  # rejected children of one node that are then shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tree", metavar="NAME|FILE.json|JSON", help=f"{', '.join(presets.names())}, a file or the choices themselves"
    )
    parser.add_argument("--picture", metavar="FILE.png", help="draw it here (needs matplotlib)")
    options.add_model_arguments(parser, base_required=False, tree=False)
    group = parser.add_argument_group("step")
    group.add_argument("--prompt", metavar="TEXT", help="what the model continues")
    group.add_argument("--step", metavar="N", type=options.positive, help="which step is drawn (default: the first)")
    group.add_argument(
        "--all", action="store_true",
        help=f"every node; else of a tree of more than {FOLD_FROM} nodes little of what was rejected",
    )  # fmt: skip
    group.add_argument("--seed", metavar="S", type=options.seed, default=0, help="of a rule that draws (default 0)")
    options.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> None:
    tree = presets.by_name(args.tree)
    if args.base is not None:
        _show_step(args, tree)
        return
    for name in ("draft", "prompt", "step"):
        if getattr(args, name) is not None:
            raise HydrajaxError(f"--{name}: needs --base: a step is drawn of a model that decodes")
    tree = static(tree, "a drawing without --base, --draft and --prompt")
    drawing = Tree(f"root ({tree.size} nodes, depth {tree.depth})")
    _grow(drawing, tree, lambda node: Text(str(tree.choices[node - 1][-1])))
    _console().print(drawing)
    if args.picture:
        from hydrajax.report.drawing import draw_tree, save_png

        save_png(draw_tree(tree), Path(args.picture), "--picture")


def _show_step(args: argparse.Namespace, tree: CandidateTree) -> None:
    from hydrajax.files import WholeFile
    from hydrajax.language_model import make_executor
    from hydrajax.measure.step_trace import path_probabilities, trace_steps
    from hydrajax.report.drawing import draw_step, new_figure, png
    from hydrajax.text.tokenizer import decode_text, visible

    for name, needed in (("draft", options.draft_of(args)), ("prompt", args.prompt)):
        if needed is None:
            raise HydrajaxError(f"--{name}: is needed with --base, to draw a step")
    spec, wanted = options.spec_from(args), args.step or 1
    with WholeFile(args.picture, "--picture") if args.picture else nullcontext() as file:
        if args.picture:
            new_figure(1, 1)  # refuses where matplotlib is missing
        model = options.load_from(args)
        executor = make_executor(model, model.spec(spec, tree=tree))
        ids = model.prompt_ids(args.prompt, "prompt")
        number = 0
        with Console(stderr=True).status("decoding"):
            for step in trace_steps(executor, ids, most=wanted, seed=args.seed):
                number = step.number
            if number < wanted:
                raise HydrajaxError(f"--step: the text ends after {number} steps, found {wanted}")
            likely = path_probabilities(executor, step)
        shares = [""] * step.tree.size if likely is None else ["", *map(_percent, likely[1:])]
        words = [visible(model.tokenizer, token) for token in step.tokens]
        before = decode_text(model.tokenizer, step.before)
        size, count = step.tree.size, len(step.path)
        following = "the text ends here"
        if step.bonus_token is not None:
            following = f"the base goes on with {visible(model.tokenizer, step.bonus_token)}"
        note = f"One pass of the base over {size} nodes gives {count} token{'s' * (count > 1)}; {following}."

        def label(node: int) -> Text:
            kept = node in step.path
            word = Text(words[node], style=KEPT if kept else "")
            word.append(f"  {shares[node]}" if shares[node] else "", style="dim")
            return word.append(f" {TICK}" if kept else "", style=KEPT)

        console = _console()
        console.print(Text(f"step {wanted}, after {before[-60:]!r}"))
        drawing = Tree(label(0).append("  the base's own choice", style="dim"))
        _grow(drawing, step.tree, label, None if args.all or size <= FOLD_FROM else step.path)
        console.print(drawing)
        print(note)
        if likely is not None:
            print("percent: how likely the draft held the whole path down to a token")
        if file is not None:
            labels = [f"{word} {share}".rstrip() for word, share in zip(words, shares, strict=True)]
            file.write_bytes(png(draw_step(step.tree, labels, step.path, before, note)))


def _grow(drawing: Tree, tree: TreeTopology, label: Callable[[int], Text], path: Sequence[int] | None = None) -> None:
    """Hang the nodes below the root's drawing. path: the accepted nodes, to show but `FEW` others beside each."""
    branches = {0: drawing}
    for node in range(tree.size):
        if node not in branches:
            continue
        children = [int(child) for child in tree.children[node] if child > 0]
        shown = children
        if path is not None:
            rejected = [child for child in children if child not in path]
            few = rejected[:FEW] if node in path else []
            shown = [child for child in children if child in path or child in few]
        for child in shown:
            branches[child] = branches[node].add(label(child))
        if hidden := _below(tree, [child for child in children if child not in shown]):
            branches[node].add(Text(f"and {hidden} more", style="dim"))


def _below(tree: TreeTopology, nodes: Sequence[int]) -> int:
    """How many nodes there are in the branches that begin at these."""
    return int(tree.ancestor_mask[:, list(nodes)].any(axis=1).sum()) if nodes else 0


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}" if share >= 0.001 else "<0.1%"


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200)
