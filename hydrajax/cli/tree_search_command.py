"""``hydrajax tree search``: grow static trees by expected acceptance, time them and dynamic trees, save the fastest."""

import argparse
import datetime
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from hydrajax.bench.report.records import of_tree_search
from hydrajax.bench.report.tables import print_table
from hydrajax.cli import options
from hydrajax.cli.prompt_files import PROMPT_FORMATS, read_prompts
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.program import Program
from hydrajax.decoding.request import Request
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import title_of
from hydrajax.language_model import LanguageModel
from hydrajax.loaded_model import make_executor
from hydrajax.locking import in_use
from hydrajax.trees import DynamicTree, presets
from hydrajax.trees.tree_json import content_of

HELP = "grow trees by expected acceptance, measure static and dynamic trees on this device, and save the fastest"
HOW = ("simulated", "independent", "chains")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 100)
STATIC, DYNAMIC, BOTH = SHAPES = ("static", "dynamic", "both")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_arguments(parser, tree=False)
    group = parser.add_argument_group("search")
    options.add(group, "--prompts", required=True, help=f"calibrate on these prompts: {PROMPT_FORMATS}")
    options.add(group, "--limit", default=100)
    options.add(group, "--repeats")
    group.add_argument(
        "--shapes", choices=SHAPES,
        help="search static trees, dynamic trees (grown anew in every step), or both (default: both if the draft and "
        "the rule support dynamic trees)",
    )  # fmt: skip
    group.add_argument(
        "--how", choices=HOW, default="simulated",
        help="grow static trees by simulated decoding (Hydra, section 4), or by the product of the heads' accuracies "
        "(independent; Medusa, section 2.3.3); or try only chains, for a draft model (Leviathan et al., section 3.1) "
        "(default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--largest", metavar="N", type=options.positive, default=100, help="grow up to N nodes (default 100)"
    )
    group.add_argument(
        "--sizes", metavar="N,N,...", type=options.positives,
        help="measure trees of these sizes (default: 14 static sizes, and dynamic sizes near the fastest so far)",
    )  # fmt: skip
    group.add_argument("--measure", metavar="N", type=options.positive, default=8, help="time N prompts (default 8)")
    target = group.add_mutually_exclusive_group(required=True)
    target.add_argument("--output", metavar="FILE.json", help="write the tree to this file, for --tree")
    target.add_argument("--save", action="store_true", help="save the tree with the draft, where generate finds it")
    text = "save the tree even if it is slower than decoding without a draft"
    group.add_argument("--save-slower", action="store_true", help=text)
    group.add_argument("--picture", metavar="FILE.png", help="plot throughput over tree size to this file")
    options.add_decoding_arguments(parser, max_new_tokens=64)
    options.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from hydrajax.bench.contests.tree_search import races, search
    from hydrajax.bench.report.drawing import draw_sizes, new_figure, png
    from hydrajax.files import WholeFile

    if options.draft_of(args) is None:
        raise HydrajaxError("--draft: is required, as the tree is searched for a draft")
    sizes = [size for size in dict.fromkeys(args.sizes or SIZES) if size <= args.largest]
    if args.sizes and max(args.sizes) > args.largest:
        raise HydrajaxError(f"--sizes: got {max(args.sizes)}, expected at most --largest {args.largest}")
    texts = read_prompts(args.prompts)[: args.limit]
    model = options.load_from(args)
    request = options.request_from(args)
    program = model.program(request, tree=presets.root())
    if model.drafter.spec.window_nodes:
        raise HydrajaxError(
            f"--draft: {title_of(model.drafter)} cannot be calibrated, as its guesses depend on earlier steps; compare "
            "its settings with 'hydrajax bench --draft lookahead-5-3-5' and 'lookahead-15-5-15'"
        )
    if args.save and model.drafter.spec.branch_nodes:
        raise HydrajaxError("--save: would also set the tree of the draft without lookup; use --output")
    if args.how == "chains" and not model.drafter.spec.has_distribution:
        raise HydrajaxError(f"--how: got 'chains', which needs a draft model; the draft is {title_of(model.drafter)}")
    grows = _grows(args, model, program)
    if args.shapes == DYNAMIC and max(sizes) < 2:
        raise HydrajaxError(f"--sizes: got {max(sizes)}, expected at least 2 nodes for dynamic trees")
    path = _destination(args, model)
    prompts = list(model.ids_of_prompts(texts))
    flag = "--output" if args.output else "--save"
    with ExitStack() as stack:  # report a file that cannot be written before measuring
        stack.enter_context(in_use(path, flag))
        file = stack.enter_context(WholeFile(path, flag))
        if args.picture:
            new_figure(1, 1)  # raises without matplotlib
            picture_file = stack.enter_context(WholeFile(args.picture, "--picture"))
        line = stack.enter_context(Console(stderr=True).status("calibrating"))
        executor = make_executor(model, program, request)
        proposals = chain = None
        if args.shapes != DYNAMIC:
            proposals, chain = _proposals(args, executor, prompts, sizes, line.update)
        static = [] if proposals is None else [proposals.tree(size) for size in sizes if size <= proposals.largest]
        race = races(executor, prompts[: args.measure], line.update, batch_size=args.batch_size, seed=args.seed)
        one_pass = executor.program.drafter.spec.one_pass
        found = search(race, static, sizes, grows, args.repeats, all_sizes=args.sizes is not None, one_pass=one_pass)
        line.stop()
        content = _content(args, request, proposals, found, chain)
        if chain is not None:
            print(chain)
        fastest = found.fastest
        _print(content["provenance"]["measured"], fastest.name)
        tree = found.trees[fastest.name]
        title = tree.name if isinstance(tree, DynamicTree) else f"the tree of {fastest.nodes} nodes"
        if args.save and fastest.speedup < 1 and not args.save_slower:
            raise HydrajaxError(
                f"--save: not saved: the fastest tree, {title}, has {fastest.speedup:.2f} times the speed without a "
                "draft here; --save-slower saves it anyway"
            )
        file.write_json(content)
        if args.picture:
            picture_file.write_bytes(png(draw_sizes(content["provenance"]["measured"])))
    print(f"saved {title} to {path}")


def _grows(args: argparse.Namespace, model: LanguageModel, program: Program) -> Callable[[DynamicTree], bool] | None:
    """Return the test for supported dynamic trees, None for static trees only; set the default of ``args.shapes``.

    Raises `HydrajaxError` if dynamic trees are requested and the draft or the rule does not support them.
    """

    def problem(tree: DynamicTree) -> str:
        try:
            program.replace(tree=tree).check(model.config)
        except HydrajaxError as error:
            return str(error)
        return ""

    unsupported = problem(DynamicTree(2, 0, 1))
    if args.shapes is None:
        args.shapes = STATIC if unsupported else BOTH
    if args.shapes == STATIC:
        return None
    if unsupported:
        raise HydrajaxError(f"--shapes: got '{args.shapes}', but {unsupported.removeprefix('tree: ')}")
    return lambda tree: not problem(tree)


def _destination(args: argparse.Namespace, model: LanguageModel) -> Path:
    if args.output:
        return Path(args.output)
    if model.draft_directory is None:
        raise HydrajaxError(f"--save: got the draft '{args.draft}', which has no directory to save to; use --output")
    weights = presets.searched_weights(model.model.quantize)
    return presets.searched_path(model.draft_directory, args.batch_size, weights)


def _proposals(
    args: argparse.Namespace, executor: Executor, prompts, sizes: list[int], on_status: Callable[[str], None]
):
    """Return static trees of every size, grown by the method ``--how`` from the draft's ranks on the base's own text.

    And the predicted best chain of a draft model, None for other drafts.
    """
    from hydrajax.bench.benchmark import draft_cost
    from hydrajax.bench.calibration import calibrate
    from hydrajax.bench.trees import search
    from hydrajax.bench.trees.speculation import estimate

    found = calibrate(
        executor,
        prompts,
        seed=args.seed,
        on_progress=lambda done, total: on_status(f"calibrating, {done} of {total} prompts"),
    )
    chain, can = None, executor.program.drafter.spec
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
    else:
        proposals = search.independent(search.accuracies(found.at_every_step()), args.largest)
    if min(sizes) > proposals.largest:
        most = proposals.largest
        raise HydrajaxError(
            f"--sizes: got {min(sizes)}, expected at most {most}: the draft is right too rarely for larger trees"
        )
    return proposals, chain


def _content(args: argparse.Namespace, request: Request, proposals, found, chain) -> dict[str, Any]:
    from hydrajax.machine import machine

    def row_of(row) -> dict[str, Any]:
        static = not isinstance(found.trees[row.name], DynamicTree)
        expected = proposals.tokens_per_step[row.nodes - 1] if static else None
        return asdict(row) | {"expected_tokens_per_step": expected}

    provenance = {
        "arguments": options.recorded(args), "rule": request.shown_rule(), "machine": machine(),
        "measured": [row_of(row) for row in found.rows],
        "tried": [[asdict(row) for row in rows] for rows in found.tried],
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    if proposals is not None:
        provenance["grown"] = [list(path) for path in proposals.choices]
        provenance["expected_tokens_per_step"] = list(proposals.tokens_per_step)
    if chain is not None:
        provenance["chain"] = asdict(chain)
    records = of_tree_search(provenance)
    return content_of(found.trees[found.fastest.name]) | {"provenance": provenance} | records


def _print(rows: list[dict[str, Any]], fastest: str) -> None:
    figures = ("τ expected", "τ measured", "tokens/s", "95% interval", "speed-up", "chance it is fastest")

    def cells(row):
        known, expected = row["low"] is not None, row["expected_tokens_per_step"]
        return (
            "static" if expected is not None else row["name"],
            row["nodes"],
            None if expected is None else f"{expected:.2f}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['low']:.0f} to {row['high']:.0f}" if known else None,
            f"{row['speedup']:.2f}x",
            f"{row['chance_best']:.0%}" if known else None,
        )

    bold = [row["name"] for row in rows].index(fastest)
    print_table(("tree", "nodes", *figures), map(cells, rows), left=("tree",), bold=bold)
