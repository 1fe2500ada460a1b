"""``hydrajax tree``: search trees that fit a drafter and this machine, and draw them."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from hydrajax.cli import options
from hydrajax.errors import HydrajaxError
from hydrajax.text.prompt import PROMPT_FORMATS, read_prompts
from hydrajax.trees import presets
from hydrajax.trees.dynamic import static

HELP = "search the candidate tree that is fastest here, or draw one"
HOW = ("simulated", "joint", "independent")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    text = "grow trees by expected acceptance, measure their speed here and write the fastest"
    _search_arguments(verbs.add_parser("search", help=text, description=text, allow_abbrev=False))
    text = "draw a tree"
    _show_arguments(verbs.add_parser("show", help=text, description=text, allow_abbrev=False))


def _search_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_arguments(parser, tree=False)
    group = parser.add_argument_group("search")
    group.add_argument("--prompts", metavar="FILE", required=True, help=f"the base continues them: {PROMPT_FORMATS}")
    group.add_argument("--limit", metavar="N", type=options.positive, default=100, help="prompts (default %(default)s)")
    group.add_argument(
        "--how", choices=HOW, default="simulated",
        help="what makes a path likely: simulated decoding (hydra section 4), whole paths counted at every place, or "
        "each head's accuracies multiplied (medusa 2.3.3); default %(default)s",
    )  # fmt: skip
    group.add_argument("--largest", metavar="N", type=options.positive, default=100, help="nodes (default %(default)s)")
    group.add_argument("--sizes", metavar="N,N,...", type=options.positives, help="sizes to measure (default: some)")
    group.add_argument("--measure", metavar="N", type=options.positive, default=8, help="prompts timed (default 8)")
    group.add_argument("--repeats", metavar="N", type=options.positive, default=5, help="rounds (default %(default)s)")
    target = group.add_mutually_exclusive_group(required=True)
    target.add_argument("--output", metavar="FILE.json", help="write the tree here, for --tree")
    target.add_argument(
        "--save", action="store_true", help="write it into the draft's directory, where generate looks for it"
    )
    group.add_argument(
        "--save-slower", action="store_true", help="with --save: also a tree that is slower than none on this device"
    )
    group.add_argument("--picture", metavar="FILE.png", help="draw the throughput over the size here")
    options.add_decoding_arguments(parser, max_new_tokens=64)
    options.add_rule_arguments(parser)


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tree", metavar="NAME|FILE.json|JSON", help=f"{', '.join(presets.names())}, a file or the choices themselves"
    )
    parser.add_argument("--picture", metavar="FILE.png", help="draw it here (needs matplotlib)")


def run(args: argparse.Namespace) -> None:
    {"search": _search, "show": _show}[args.verb](args)


def _search(args: argparse.Namespace) -> None:
    from hydrajax.files import WholeFile
    from hydrajax.measure.calibration import calibrate
    from hydrajax.measure.contest import measure_trees
    from hydrajax.measure.way import Way
    from hydrajax.report.drawing import new_figure, png
    from hydrajax.report.figures import draw
    from hydrajax.report.outputs import tree_search_result

    if options.draft_of(args) is None:
        raise HydrajaxError("--draft: a tree is searched for draft heads")
    rule = options.rule_from(args)
    sizes = [size for size in (args.sizes or SIZES) if size <= args.largest]
    if args.sizes and len(sizes) < len(args.sizes):
        raise HydrajaxError(f"--sizes: must be at most --largest {args.largest}, found {max(args.sizes)}")
    texts = read_prompts(args.prompts)[: args.limit]
    loaded = options.load_from(args)
    path = _destination(args, loaded.draft_directory)
    prompts = list(loaded.ids_of_prompts(texts))
    with ExitStack() as stack:  # an unwritable file is refused before anything is measured
        file = stack.enter_context(WholeFile(path, "--output" if args.output else "--save"))
        if args.picture:
            new_figure(1, 1)  # refuses where matplotlib is missing
            picture_file = stack.enter_context(WholeFile(args.picture, "--picture"))
        line = stack.enter_context(Console(stderr=True).status("calibrating"))
        way = Way.of(loaded, "searched", presets.root(), rule, max_new_tokens=args.max_new_tokens)
        found = calibrate(
            way,
            prompts,
            seed=args.seed,
            on_progress=lambda done, total: line.update(f"calibrating, {done} of {total} prompts"),
        )
        line.update("growing trees")
        proposals = _proposals(args, found)
        trees = {str(size): proposals.tree(size) for size in sizes if size <= proposals.largest}
        if not trees:
            most = proposals.largest
            raise HydrajaxError(f"--sizes: the draft was right so rarely that trees grow to {most} nodes at most here")
        rows = measure_trees(
            way,
            trees,
            prompts[: args.measure],
            batch_size=args.batch_size,
            repeats=args.repeats,
            seed=args.seed,
            on_status=line.update,
        )
        fastest = max(rows, key=lambda row: row.tokens_per_second)
        expected = [proposals.tokens_per_step[row.nodes - 1] for row in rows]
        line.stop()
        _print(rows, expected, fastest)
        if args.save and fastest.speedup < 1 and not args.save_slower:
            raise HydrajaxError(
                f"--save: not saved: the fastest tree, of {fastest.nodes} nodes, has {fastest.speedup:.2f} times the "
                "speed of none here; --save-slower saves it all the same"
            )
        content = _content(args, rule, proposals, rows, expected, fastest)
        file.write_text(json.dumps(content, indent=1) + "\n")
        if args.picture:
            picture_file.write_bytes(png(draw(tree_search_result(content))))
    print(f"the tree of {fastest.nodes} nodes is in {path}")


def _destination(args: argparse.Namespace, draft_directory: Path | None) -> Path:
    """Where the tree is written."""
    if args.output:
        return Path(args.output)
    if draft_directory is None:
        raise HydrajaxError(f"--save: the draft '{args.draft}' lies in no directory to save a tree in; use --output")
    return presets.searched_path(draft_directory, args.batch_size)


def _proposals(args: argparse.Namespace, found):
    """Trees of every size, grown from a calibration as ``--how`` says."""
    from hydrajax.trees import search

    if args.how == "simulated":
        return search.simulated(found.ranks, found.spans, args.largest)
    if args.how == "joint":
        return search.joint(found.at_every_step(), args.largest)
    return search.independent(search.accuracies(found.at_every_step()), args.largest)


def _content(args, rule, proposals, rows, expected, fastest) -> dict:
    """The tree file: ``choices`` as the released code writes them, and where they come from."""
    from hydrajax.measure.machine import machine

    measured = [row.as_dict() | {"expected_tokens_per_step": tau} for row, tau in zip(rows, expected, strict=True)]
    return {
        "choices": [list(path) for path in proposals.tree(fastest.nodes).choices],
        "provenance": {
            "arguments": options.recorded(args), "rule": str(rule), "machine": machine(), "measured": measured,
            "date": datetime.date.today().isoformat(),
            "grown": [list(path) for path in proposals.choices],
            "expected_tokens_per_step": list(proposals.tokens_per_step),
        },
    }  # fmt: skip


def _print(rows, expected, fastest) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("nodes", "τ expected", "τ measured", "tokens/s", "95% interval", "speed-up", "chance it is fastest"):
        table.add_column(name, justify="right")
    for row, tau in zip(rows, expected, strict=True):
        known = row.low is not None
        table.add_row(
            str(row.nodes),
            f"{tau:.2f}",
            f"{row.tokens_per_step:.2f}",
            f"{row.tokens_per_second:.0f}",
            f"{row.low:.0f} to {row.high:.0f}" if known else "",
            f"{row.speedup:.2f}x",
            f"{row.chance_best:.0%}" if known else "",
            style="bold" if row is fastest else None,
        )
    Console().print(table)


def _show(args: argparse.Namespace) -> None:
    tree = static(presets.by_name(args.tree), "drawing")
    drawing = Tree(f"root ({tree.size} nodes, depth {tree.depth})")
    branches = {(): drawing}
    for path in tree.choices:
        branches[path] = branches[path[:-1]].add(str(path[-1]))
    Console(width=None if sys.stdout.isatty() else 200).print(drawing)
    if args.picture:
        from hydrajax.report.drawing import draw_tree, save_png

        save_png(draw_tree(tree), Path(args.picture), "--picture")
