"""``hydrajax tree search``: grow static trees by expected acceptance, time them and dynamic ones, write the fastest."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from hydrajax.cli import options
from hydrajax.cli.screen import figure_table, wide_console
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.spec import DecodeSpec
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import title_of
from hydrajax.language_model import LanguageModel, make_executor
from hydrajax.locking import in_use
from hydrajax.text.prompt import PROMPT_FORMATS, read_prompts
from hydrajax.trees import DynamicTree, presets
from hydrajax.trees.tree_json import content_of

HELP = "grow trees by expected acceptance, measure their speed and that of dynamic ones here, and write the fastest"
HOW = ("simulated", "joint", "independent", "chains")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 100)
STATIC, DYNAMIC, BOTH = SHAPES = ("static", "dynamic", "both")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_arguments(parser, tree=False)
    group = parser.add_argument_group("search")
    group.add_argument("--prompts", metavar="FILE", required=True, help=f"the base continues them: {PROMPT_FORMATS}")
    group.add_argument("--limit", metavar="N", type=options.positive, default=100, help="prompts (default %(default)s)")
    group.add_argument(
        "--shapes", choices=SHAPES,
        help="trees that stay as they are, trees that are grown anew at every step (dynamic-N-D-K), or both (default: "
        "both where the draft and the rule can use dynamic ones)",
    )  # fmt: skip
    group.add_argument(
        "--how", choices=HOW, default="simulated",
        help="what makes a path of a static tree likely: simulated decoding (hydra section 4), whole paths counted at "
        "every place, or each head's accuracies multiplied (medusa 2.3.3); chains: of a draft model, one path and "
        "no branches (Leviathan et al. 3.1); default %(default)s",
    )  # fmt: skip
    group.add_argument("--largest", metavar="N", type=options.positive, default=100, help="nodes (default %(default)s)")
    group.add_argument(
        "--sizes", metavar="N,N,...", type=options.positives,
        help="sizes to measure (default: some, and of dynamic trees those near the fastest one so far)",
    )  # fmt: skip
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
    options.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from hydrajax.autotune.tree_search import Race, search
    from hydrajax.files import WholeFile
    from hydrajax.report.drawing import draw_sizes, new_figure, png

    if options.draft_of(args) is None:
        raise HydrajaxError("--draft: a tree is searched for draft heads")
    wanted = options.spec_from(args)
    sizes = [size for size in dict.fromkeys(args.sizes or SIZES) if size <= args.largest]
    if args.sizes and max(args.sizes) > args.largest:
        raise HydrajaxError(f"--sizes: must be at most --largest {args.largest}, found {max(args.sizes)}")
    texts = read_prompts(args.prompts)[: args.limit]
    model = options.load_from(args)
    spec = model.spec(wanted, tree=presets.root())
    if model.drafter.spec.window_nodes:
        raise HydrajaxError(
            f"--draft: what {title_of(model.drafter)} guesses depends on the steps before, so no tree is searched for "
            "it; compare its settings by 'hydrajax bench --draft lookahead --draft-settings 5-3-5,15-5-15'"
        )
    if args.save and model.drafter.spec.branch_nodes:
        raise HydrajaxError("--save: the tree would be taken for the draft without lookup, too; use --output")
    if args.how == "chains" and not model.drafter.spec.has_distribution:
        raise HydrajaxError(f"--how: chains are of draft models, found {title_of(model.drafter)}")
    grows = _grows(args, model, spec)
    if args.shapes == DYNAMIC and max(sizes) < 2:
        raise HydrajaxError("--sizes: a dynamic tree has at least 2 nodes")
    path = _destination(args, model.draft_directory)
    prompts = list(model.ids_of_prompts(texts))
    flag = "--output" if args.output else "--save"
    with ExitStack() as stack:  # an unwritable file, or one in use, is refused before anything is measured
        stack.enter_context(in_use(path, flag))
        file = stack.enter_context(WholeFile(path, flag))
        if args.picture:
            new_figure(1, 1)  # refuses where matplotlib is missing
            picture_file = stack.enter_context(WholeFile(args.picture, "--picture"))
        line = stack.enter_context(Console(stderr=True).status("calibrating"))
        executor = make_executor(model, spec)
        proposals = chain = None
        if args.shapes != DYNAMIC:
            proposals, chain = _proposals(args, executor, prompts, sizes, line.update)
        static = [] if proposals is None else [proposals.tree(size) for size in sizes if size <= proposals.largest]
        race = Race(
            executor, prompts[: args.measure], batch_size=args.batch_size, seed=args.seed, on_status=line.update
        )
        found = search(race, static, sizes, grows, args.repeats, all_sizes=args.sizes is not None)
        line.stop()
        content = _content(args, spec, proposals, found, chain)
        if chain is not None:
            print(chain)
        fastest = found.fastest
        _print(content["provenance"]["measured"], fastest.name)
        what = f"the tree of {fastest.nodes} nodes"
        if isinstance(tree := found.trees[fastest.name], DynamicTree):
            what = tree.name
        if args.save and fastest.speedup < 1 and not args.save_slower:
            raise HydrajaxError(
                f"--save: not saved: the fastest, {what}, has {fastest.speedup:.2f} times the speed of none here; "
                "--save-slower saves it all the same"
            )
        file.write_text(json.dumps(content, indent=1) + "\n")
        if args.picture:
            picture_file.write_bytes(png(draw_sizes(content["provenance"]["measured"])))
    print(f"{what} is in {path}")


def _grows(args: argparse.Namespace, model: LanguageModel, spec: DecodeSpec) -> Callable[[DynamicTree], bool] | None:
    """Whether a dynamic tree can be used; None where none is to be tried. Settles ``args.shapes`` where none is given.

    Raises `HydrajaxError` where dynamic trees are asked for and the draft or the rule can use none.
    """

    def check(tree: DynamicTree) -> None:
        spec.replace(tree=tree).check(model.config)

    def grows(tree: DynamicTree) -> bool:
        try:
            check(tree)
        except HydrajaxError:
            return False
        return True

    smallest = DynamicTree(2, 0, 1)
    if args.shapes is None:
        args.shapes = BOTH if grows(smallest) else STATIC
    if args.shapes == STATIC:
        return None
    try:
        check(smallest)
    except HydrajaxError as error:
        raise HydrajaxError(f"--shapes: found '{args.shapes}', but {str(error).removeprefix('tree: ')}") from None
    return grows


def _destination(args: argparse.Namespace, draft_directory: Path | None) -> Path:
    """Where the tree is written."""
    if args.output:
        return Path(args.output)
    if draft_directory is None:
        raise HydrajaxError(f"--save: the draft '{args.draft}' lies in no directory to save a tree in; use --output")
    return presets.searched_path(draft_directory, args.batch_size)


def _proposals(
    args: argparse.Namespace, executor: Executor, prompts, sizes: list[int], on_status: Callable[[str], None]
):
    """Static trees of every size, grown as ``--how`` says from what the draft knows of the base's own text.

    And what the closed form says of a draft model's chains; None of other drafts.
    """
    from hydrajax.measure.calibration import calibrate
    from hydrajax.measure.draft_cost import draft_cost
    from hydrajax.trees import search
    from hydrajax.trees.speculation import estimate

    found = calibrate(
        executor,
        prompts,
        seed=args.seed,
        on_progress=lambda done, total: on_status(f"calibrating, {done} of {total} prompts"),
    )
    chain, can = None, executor.spec.drafter.spec
    if can.has_distribution:
        on_status("timing a pass of the draft")
        context = max(map(len, prompts)) + args.max_new_tokens
        cost = draft_cost(executor, args.batch_size, context)
        chain = estimate(found.acceptance, cost, can.depth)
    on_status("growing trees")
    if args.how == "simulated":
        proposals = search.simulated(found.ranks, found.spans, args.largest)
    elif args.how == "chains":
        proposals = search.chains(found.acceptance, can.depth, args.largest)
    elif args.how == "joint":
        proposals = search.joint(found.at_every_step(), args.largest)
    else:
        proposals = search.independent(search.accuracies(found.at_every_step()), args.largest)
    if min(sizes) > proposals.largest:
        most = proposals.largest
        raise HydrajaxError(f"--sizes: the draft was right so rarely that trees grow to {most} nodes at most here")
    return proposals, chain


def _content(args: argparse.Namespace, spec: DecodeSpec, proposals, found, chain) -> dict[str, Any]:
    """The tree file: the fastest tree, and where it comes from."""
    from hydrajax.machine import machine

    def row_of(row) -> dict[str, Any]:
        static = not isinstance(found.trees[row.name], DynamicTree)
        expected = proposals.tokens_per_step[row.nodes - 1] if static else None
        return row.as_dict() | {"expected_tokens_per_step": expected}

    provenance = {
        "arguments": options.recorded(args), "rule": spec.shown_rule(), "machine": machine(),
        "measured": [row_of(row) for row in found.rows],
        "tried": [[row.as_dict() for row in rows] for rows in found.tried],
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    if proposals is not None:
        provenance["grown"] = [list(path) for path in proposals.choices]
        provenance["expected_tokens_per_step"] = list(proposals.tokens_per_step)
    if chain is not None:
        provenance["chain"] = chain.as_dict()
    return content_of(found.trees[found.fastest.name]) | {"provenance": provenance}


def _print(rows: list[dict[str, Any]], fastest: str) -> None:
    """A line for each tree; of static ones the nodes say which it is."""
    table = figure_table(
        *("tree", "nodes", "τ expected", "τ measured", "tokens/s", "95% interval", "speed-up", "chance it is fastest"),
        left="tree",
    )
    for row in rows:
        known, expected = row["low"] is not None, row["expected_tokens_per_step"]
        table.add_row(
            "static" if expected is not None else row["name"],
            str(row["nodes"]),
            "" if expected is None else f"{expected:.2f}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['low']:.0f} to {row['high']:.0f}" if known else "",
            f"{row['speedup']:.2f}x",
            f"{row['chance_best']:.0%}" if known else "",
            style="bold" if row["name"] == fastest else None,
        )
    wide_console().print(table)
