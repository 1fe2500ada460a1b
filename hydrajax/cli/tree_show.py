"""``hydrajax tree show``: draw a tree, or with a model one of its steps: candidates and accepted path."""

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

HELP = "draw a tree, or with --base, --draft and --prompt the candidates and the accepted path of one step"
ACCEPTED = "bold green"
TICK = "✓"  # for output without colours
FOLD_ABOVE = 24  # nodes; larger trees are shown without most rejected nodes
MOST_REJECTED = 3  # rejected children shown per accepted node, in a larger tree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tree", metavar="NAME|FILE.json|JSON", help=f"draw this tree: {', '.join(presets.names())}, a file, or choices"
    )
    parser.add_argument("--picture", metavar="FILE.png", help="also draw it to this file (needs matplotlib)")
    options.add_model_arguments(parser, base_required=False, tree=False)
    group = parser.add_argument_group("step")
    group.add_argument("--prompt", metavar="TEXT", help="continue this text")
    group.add_argument("--step", metavar="N", type=options.positive, help="draw the N-th step (default 1)")
    text = f"draw every node (default: trees above {FOLD_ABOVE} nodes without most rejected nodes)"
    group.add_argument("--all", action="store_true", help=text)
    options.add(group, "--seed")
    options.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> None:
    tree = presets.by_name(args.tree)
    if args.base is not None:
        _show_step(args, tree)
        return
    for name in ("draft", "prompt", "step"):
        if getattr(args, name) is not None:
            raise HydrajaxError(f"--{name}: requires --base, as only a model has steps to draw")
    tree = static(tree, "a drawing without --base, --draft and --prompt")
    drawing = Tree(f"root ({tree.size} nodes, depth {tree.depth})")
    _grow(drawing, tree, lambda node: Text(str(tree.choices[node - 1][-1])))
    _console().print(drawing)
    if args.picture:
        from hydrajax.bench.report.drawing import draw_tree, save_png

        save_png(draw_tree(tree), Path(args.picture), "--picture")


def _show_step(args: argparse.Namespace, tree: CandidateTree) -> None:
    from hydrajax.bench.report.drawing import draw_step, new_figure, png
    from hydrajax.bench.step_trace import path_probabilities, trace_steps
    from hydrajax.files import WholeFile
    from hydrajax.loaded_model import make_executor
    from hydrajax.text.continuation import visible
    from hydrajax.text.tokenizer import decode_text

    for name, needed in (("draft", options.draft_of(args)), ("prompt", args.prompt)):
        if needed is None:
            raise HydrajaxError(f"--{name}: is required with --base, to draw a step")
    request, chosen = options.request_from(args), args.step or 1
    with WholeFile(args.picture, "--picture") if args.picture else nullcontext() as file:
        if args.picture:
            new_figure(1, 1)  # raises without matplotlib
        model = options.load_from(args)
        executor = make_executor(model, model.program(request, tree=tree), request)
        ids = model.prompt_ids(args.prompt, "prompt")
        number = 0
        with Console(stderr=True).status("decoding"):
            for step in trace_steps(executor, ids, most=chosen, seed=args.seed):
                number = step.number
            if number < chosen:
                raise HydrajaxError(f"--step: got {chosen}, expected at most {number}, where the text ends")
            likely = path_probabilities(executor, step)
        shares = [""] * step.tree.size if likely is None else ["", *map(_percent, likely[1:])]
        words = [visible(model.tokenizer, token) for token in step.tokens]
        before = decode_text(model.tokenizer, step.before)
        size, count = step.tree.size, len(step.path)
        following = "the text ends here"
        if step.bonus_token is not None:
            following = f"the bonus token is {visible(model.tokenizer, step.bonus_token)}"
        note = f"One pass of the base over {size} nodes emits {count} token{'s' * (count > 1)}; {following}."

        def label(node: int) -> Text:
            accepted = node in step.path
            word = Text(words[node], style=ACCEPTED if accepted else "")
            word.append(f"  {shares[node]}" if shares[node] else "", style="dim")
            return word.append(f" {TICK}" if accepted else "", style=ACCEPTED)

        console = _console()
        console.print(Text(f"step {chosen}, after {before[-60:]!r}"))
        drawing = Tree(label(0).append("  root, chosen by the base", style="dim"))
        _grow(drawing, step.tree, label, None if args.all or size <= FOLD_ABOVE else step.path)
        console.print(drawing)
        print(note)
        if likely is not None:
            print("percent: the draft's probability of the path from the root to the token")
        if file is not None:
            labels = [f"{word} {share}".rstrip() for word, share in zip(words, shares, strict=True)]
            file.write_bytes(png(draw_step(step.tree, labels, step.path, before, note)))


def _grow(drawing: Tree, tree: TreeTopology, label: Callable[[int], Text], path: Sequence[int] | None = None) -> None:
    """Add the nodes to the root's drawing. path: accepted nodes, to show at most `MOST_REJECTED` others with each."""
    branches = {0: drawing}
    for node in range(tree.size):
        if node not in branches:
            continue
        children = [int(child) for child in tree.children[node] if child > 0]
        shown = children
        if path is not None:
            rejected = [child for child in children if child not in path]
            rejected = rejected[:MOST_REJECTED] if node in path else []
            shown = [child for child in children if child in path or child in rejected]
        for child in shown:
            branches[child] = branches[node].add(label(child))
        if folded := [child for child in children if child not in shown]:
            hidden = tree.ancestor_mask[:, folded].any(axis=1).sum()  # with the nodes below them
            branches[node].add(Text(f"and {hidden} more", style="dim"))


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}" if share >= 0.001 else "<0.1%"


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200)
