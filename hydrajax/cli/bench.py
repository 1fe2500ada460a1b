"""``hydrajax bench``: what a decode step costs on this device, and whether the tree pays."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from hydrajax import api
from hydrajax.cli import options
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.measure import benchmark
from hydrajax.measure.random_models import DRAFTERS, random_draft, random_model
from hydrajax.models.config import PRESETS
from hydrajax.report.results import machine
from hydrajax.text import prompt as prompts
from hydrajax.trees import TreeTopology, presets

HELP = "time a decode step and its phases, autoregressive against tree decoding"

NARROWEST = 120  # columns; a narrower terminal or a pipe gets whole figures on wrapped lines, never cut ones
# For models that bring a tokenizer when no --prompts are given.
BUILT_IN_PROMPTS = (
    "def quicksort(items):\n",
    "class Stack:\n    def __init__(self):\n",
    "The three laws of motion say that",
    "Write a short letter to a friend about a walk by the sea.\n",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_arguments(parser, base_required=False)
    options.add_rule_arguments(parser)
    parser.add_argument("--random", metavar="SHAPE", help=f"random weights instead of --base: {', '.join(PRESETS)}")
    parser.add_argument(
        "--random-draft",
        metavar="KIND",
        help=f"fresh heads instead of --draft: {', '.join(DRAFTERS)} (with --random the default is hydra++)",
    )
    parser.add_argument(
        "--tree-sizes", metavar="N,N,...", type=options.positives, help="sweep: the tree's best N nodes"
    )
    parser.add_argument(
        "--batch-sizes", metavar="B,B,...", type=options.positives, default=[1], help="sweep (default 1)"
    )
    parser.add_argument("--context", metavar="S", type=options.positive, default=512, help="default %(default)s")
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="prompts to generate for, to measure tokens per second")
    parser.add_argument("--max-new-tokens", metavar="N", type=options.positive, default=128)
    parser.add_argument("--repeats", metavar="R", type=options.positive, default=5, help="median of (default 5)")
    parser.add_argument("--seed", metavar="S", type=options.seed, default=0)
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write JSON to FILE, or to standard output without FILE"
    )


def run(args: argparse.Namespace) -> None:
    with ExitStack() as stack:  # an unwritable file is refused before anything is measured
        file = stack.enter_context(WholeFile(args.json, "--json")) if args.json not in (None, "-") else None
        rule = options.rule_from(args)
        model, drafter, params, texts = _model(args)
        trees = _trees(args, drafter.depth, model.config.vocab_size)
        rows = _measure(args, rule, model, drafter, params, trees, texts)
        report = json.dumps({"machine": machine(), "arguments": plain(args), "rows": [row.as_dict() for row in rows]})
        if file is not None:
            file.write_text(report + "\n")
    if args.json == "-":
        print(report)
    else:
        _print(rows, args, texts)


def _measure(args: argparse.Namespace, rule, model, drafter, params, trees, texts) -> list[benchmark.BenchmarkRow]:
    """All cells, with the count of those done on stderr."""
    rows: list[benchmark.BenchmarkRow] = []
    total = len(args.batch_sizes) * len(trees)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    shown = {"console": Console(stderr=True), "transient": True, "disable": not sys.stderr.isatty()}
    with Progress(*columns, **shown) as progress:
        task = progress.add_task(f"measuring 1 of {total}", total=None)
        for row in benchmark.run_benchmark(
            model,
            drafter,
            params,
            trees,
            args.batch_sizes,
            args.context,
            rule=rule,
            prompts=texts,
            max_new_tokens=args.max_new_tokens,
            repeats=args.repeats,
        ):
            rows.append(row)
            progress.update(task, description=f"measuring {min(len(rows) + 1, total)} of {total}")
    return rows


def plain(args: argparse.Namespace) -> dict:
    return {key: value for key, value in vars(args).items() if isinstance(value, (str, int, float, list, type(None)))}


def _trees(args: argparse.Namespace, depth: int, vocab_size: int) -> dict[str, TreeTopology]:
    """The tree asked for, or subtrees of it, by name."""
    name = args.tree or presets.default_name(depth, vocab_size)
    tree = presets.by_name(name)
    return benchmark.first_nodes(tree, args.tree_sizes) if args.tree_sizes else {name: tree}


def _model(args: argparse.Namespace):
    """The model to measure and token ids of prompts (none for random weights: their text says nothing)."""
    if bool(args.random) == bool(args.base):
        raise HydrajaxError("bench: exactly one of --base and --random is needed")
    for flag, value, allowed in (("random", args.random, PRESETS), ("random-draft", args.random_draft, DRAFTERS)):
        if value and value not in allowed:
            raise HydrajaxError(f"--{flag}: found '{value}', allowed are {', '.join(allowed)}")
    draft = options.draft_of(args)
    if draft and (args.random or args.random_draft):
        raise HydrajaxError("bench: --draft goes with --base and without --random-draft")
    if args.random:
        model, drafter, params = random_model(
            args.random, args.random_draft or "hydra++", api.DTYPES[args.dtype], args.seed
        )
        return model, drafter, params, []
    loaded = options.load_from(args)
    if args.random_draft:
        drafter, params = random_draft(loaded.model, loaded.params.base, args.random_draft, args.seed)
        return loaded.model, drafter, params, []
    return loaded.model, loaded.drafter, loaded.params, _prompt_ids(args, loaded)


def _prompt_ids(args: argparse.Namespace, loaded: api.Loaded) -> list[np.ndarray]:
    if args.prompts:
        texts = prompts.read_prompts(args.prompts)
    elif loaded.tokenizer is not None:
        texts = list(BUILT_IN_PROMPTS)
    else:
        return []
    return [api.encode(loaded, text, f"prompt {row}") for row, text in enumerate(texts)]


def _print(rows: list[benchmark.BenchmarkRow], args: argparse.Namespace, texts) -> None:
    console = wide_console()
    info = machine()
    what = args.random or args.base
    print(f"{what}, {args.dtype}, context {args.context}, on {info['device']}, jax {info['jax']}; ms per step, median")
    phases = figure_table(
        *("batch", "tree", "nodes", "AR step", "step", "verify", "propose", "accept", "observe", "draft", "even"),
        left="tree",
    )
    for row in rows:
        times = (row.autoregressive_step, row.step, row.verify, row.propose, row.accept_commit, row.observe)
        cells = [str(row.batch), row.tree, str(row.nodes), *(f"{time:.3g}" for time in times)]
        phases.add_row(*cells, f"{row.draft_overhead:.0%}", f"{row.break_even:.2f}")
    console.print(phases)
    print("accept: with commit. draft: (propose + accept + observe) / verify. even: the tree pays when tokens_per_step")
    print("(τ) exceeds this, step / AR step.")
    if texts:
        rates = figure_table("batch", "tree", "nodes", "τ", "AR tok/s", "tok/s", "speed-up", "equal", left="tree")
        for row in rows:
            cells = [str(row.batch), row.tree, str(row.nodes), f"{row.tokens_per_step:.2f}"]
            cells += [f"{row.autoregressive_tokens_per_second:.0f}", f"{row.tokens_per_second:.0f}"]
            equal = {True: "yes", False: "NO", None: ""}[row.outputs_equal]
            rates.add_row(*cells, f"{row.speedup:.2f}x", equal)
        console.print(rates)
        print(f"generated {args.max_new_tokens} tokens for each of {len(texts)} prompts, both ways interleaved")
    last = rows[-1]
    peak = f"peak memory {last.peak_memory_bytes / 1e9:.2f} GB"
    print(f"last row: compile {last.compile_seconds:.1f} s, prefill {last.prefill:.3g} ms, {peak}")
    if last.autoregressive_bandwidth_fraction:
        print(
            f"an autoregressive step reads {last.autoregressive_bytes_per_step / 1e9:.2f} GB: "
            f"{last.autoregressive_bandwidth_fraction:.0%} of the measured copy bandwidth"
        )
    if not texts:
        print("no prompts: on random weights tokens_per_step says nothing, so no tokens per second", file=sys.stderr)


def wide_console() -> Console:
    console = Console()
    console.width = max(console.width, NARROWEST)
    return console


def figure_table(*columns: str, left: str) -> Table:
    """Whole figures, right-aligned but for one column of names."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in columns:
        found.add_column(column, justify="left" if column == left else "right", no_wrap=True)
    return found
