"""``hydrajax bench``: what a decode step costs on this device, and whether the tree pays."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

import numpy as np
from rich.console import Console

from hydrajax import api
from hydrajax.cli import options
from hydrajax.cli.screen import figure_table, wide_console
from hydrajax.decoding.executor import Executor, FusedExecutor
from hydrajax.decoding.spec import DecodeSpec
from hydrajax.decoding.state import Params
from hydrajax.drafters.drafter import Drafter
from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.formats.draft_registry import KINDS, without_weights
from hydrajax.language_model import LanguageModel, make_executor
from hydrajax.machine import machine
from hydrajax.measure.benchmark import BenchmarkRow, first_nodes, run_benchmark
from hydrajax.measure.random_models import random_draft, random_model
from hydrajax.measure.split import split_contest
from hydrajax.models.base_model import BaseModel
from hydrajax.models.llama_config import PRESETS
from hydrajax.ssd.fan_out import DEFAULT_BUDGET
from hydrajax.text.prompt import PROMPT_FORMATS
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree

HELP = "time a decode step and its phases, autoregressive against tree decoding"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_arguments(parser, base_required=False, apart=True)
    options.add_sampling_arguments(parser)
    parser.add_argument(
        "--random",
        metavar="SHAPE",
        help=f"random weights instead of --base: {', '.join(PRESETS)}; in float32 unless --dtype says otherwise",
    )
    parser.add_argument(
        "--random-draft",
        metavar="KIND",
        help=f"fresh heads instead of --draft: {', '.join(KINDS)} (with --random the default is hydra++)",
    )
    parser.add_argument(
        "--draft-settings",
        metavar="W-N-G,W-N-G,...",
        type=lambda text: text.split(","),
        help="sweep: the numbers after the name of a draft that has some, such as lookahead",
    )
    parser.add_argument(
        "--tree-sizes", metavar="N,N,...", type=options.positives, help="sweep: the tree's best N nodes"
    )
    parser.add_argument(
        "--fan-outs",
        metavar="F,F,...",
        type=options.positives,
        help="sweep, with --draft-devices: for how many outcomes of a verification the draft prepares (default 12)",
    )
    parser.add_argument(
        "--batch-sizes", metavar="B,B,...", type=options.positives, default=[1], help="sweep (default 1)"
    )
    parser.add_argument("--context", metavar="S", type=options.positive, default=512, help="default %(default)s")
    parser.add_argument(
        "--prompts", metavar="FILE", help=f"to generate for, to measure tokens per second: {PROMPT_FORMATS}"
    )
    parser.add_argument("--max-new-tokens", metavar="N", type=options.positive, default=128)
    parser.add_argument("--repeats", metavar="R", type=options.positive, default=5, help="median of (default 5)")
    parser.add_argument("--seed", metavar="S", type=options.seed, default=0)
    options.add_json_argument(parser)


def run(args: argparse.Namespace) -> None:
    if args.draft_devices:
        return run_split(args)
    if args.fan_outs:
        raise HydrajaxError("--fan-outs: goes with --draft-devices")
    with options.json_report(args.json) as write:
        executors, texts = _executors(args)
        rows: list[BenchmarkRow] = []
        total = len(args.batch_sizes) * len(executors)
        with Console(stderr=True).status("") as line:
            line.update(f"measuring 1 of {total}")
            for row in run_benchmark(executors, args.batch_sizes, args.context, prompts=texts, repeats=args.repeats):
                rows.append(row)
                line.update(f"measuring {min(len(rows) + 1, total)} of {total}")
        arguments = options.recorded(args)
        write({"machine": machine(), "arguments": arguments, "rows": [row.as_dict() for row in rows]})
    if args.json != "-":
        _print(rows, args, texts)


def run_split(args: argparse.Namespace) -> None:
    """Base and draft model on devices of their own: what is prepared ahead against the same pair in turn."""
    if args.draft_settings or args.tree_sizes or args.random or args.random_draft:
        raise HydrajaxError("--draft-devices: goes with --base and --draft, and without the other sweeps of drafts")
    with options.json_report(args.json) as write:
        model = options.load_from(args)
        texts = _texts(args, model)
        if not texts:
            raise HydrajaxError("--prompts: are needed with --draft-devices, as the base has no tokenizer")
        name = args.tree or model.drafter.spec.default_tree
        executor = make_executor(model, model.spec(options.spec_from(args), tree=name, eos_ids=()))
        table = figure_table("batch", "way", "τ", "tok/s", "speed-up", "hits", "ready", "equal", left="way")
        report = []
        for batch_size in args.batch_sizes:
            fan_outs = args.fan_outs or [DEFAULT_BUDGET]
            for row in split_contest(executor, fan_outs, texts, batch_size=batch_size, repeats=args.repeats):
                report.append({"batch": batch_size} | row.as_dict())
                found = row.measured
                cells = [str(batch_size), found.name, f"{found.tokens_per_step:.2f}", f"{found.tokens_per_second:.0f}"]
                rates = ("" if rate is None else f"{rate:.0%}" for rate in (row.hit_rate, row.ready_rate))
                equal = {True: "yes", False: "NO", None: ""}[found.equal]
                table.add_row(*cells, f"{found.speedup:.2f}x", *rates, equal)
        write({"machine": machine(), "arguments": options.recorded(args), "rows": report})
    if args.json != "-":
        print(f"{args.base} and {args.draft}, {name}, {args.dtype}; the draft on the last {args.draft_devices} devices")
        wide_console().print(table)
        print(
            "hits: rows whose next draft was ready. ready: rounds in which that was so for every row, so nobody waited"
        )


def _executors(args: argparse.Namespace) -> tuple[dict[str, Executor], list[np.ndarray]]:
    """What is measured, by name, and token ids of prompts (none for random weights, which write no text)."""
    spec = options.spec_from(args)
    if args.draft_settings:
        return _settings(args, spec)
    executor, texts = _executor(args, spec)
    tree = executor.spec.tree
    trees: Mapping[str, CandidateTree]
    trees = (
        first_nodes(tree, args.tree_sizes)
        if args.tree_sizes
        else {args.tree or executor.spec.drafter.spec.default_tree: tree}
    )
    return {name: executor.with_spec(tree=tree) for name, tree in trees.items()}, texts


def _settings(args: argparse.Namespace, spec: DecodeSpec) -> tuple[dict[str, Executor], list[np.ndarray]]:
    """An executor for each of ``--draft-settings``, with the tree that belongs to it, and token ids of prompts."""
    if not args.base or args.random_draft or args.tree or args.tree_sizes:
        raise HydrajaxError("--draft-settings: goes with --base and --draft, and without --tree and --tree-sizes")
    names = [f"{args.draft}-{numbers}" for numbers in args.draft_settings]
    for name in names:  # before gigabytes are read
        if without_weights(name) is None:
            raise HydrajaxError(f"--draft-settings: there is no draft '{name}'; such as lookahead-15-5-15 has settings")
    model = options.load_from(args, draft=None)
    drafted = {name: model.with_draft(name) for name in names}
    return {name: make_executor(each, each.spec(spec)) for name, each in drafted.items()}, _texts(args, model)


def _texts(args: argparse.Namespace, model: LanguageModel) -> list[np.ndarray]:
    """Token ids of the prompts; none where no text can be made."""
    return [] if model.tokenizer is None and not args.prompts else options.prompts_from(args.prompts, model)


def _executor(args: argparse.Namespace, spec: DecodeSpec) -> tuple[Executor, list[np.ndarray]]:
    """The model and draft of the arguments with the tree that is named or the drafter's own, and the prompts."""
    if bool(args.random) == bool(args.base):
        raise HydrajaxError("bench: exactly one of --base and --random is needed")
    for flag, value, allowed in (("random", args.random, PRESETS), ("random_draft", args.random_draft, KINDS)):
        if value and value not in allowed:
            raise not_allowed(flag, value, allowed)
    draft = options.draft_of(args)
    if draft and (args.random or args.random_draft):
        raise HydrajaxError("bench: --draft goes with --base and without --random-draft")
    if args.random and args.adapter:
        raise HydrajaxError("bench: --adapter goes with --base")
    if args.random:
        if args.dtype == api.AUTO:  # no checkpoint has a dtype of its own here
            args.dtype = "float32"
        kind, dtype = args.random_draft or "hydra++", api.DTYPES[args.dtype]
        return _with_own_tree(args, *random_model(args.random, kind, dtype, args.seed), spec), []
    model = options.load_from(args)
    if args.random_draft:
        drafter, params = random_draft(model.model, model.params.base, args.random_draft, args.seed)
        return _with_own_tree(args, model.model, drafter, params, spec), []
    tree = args.tree or model.drafter.spec.default_tree
    return make_executor(model, model.spec(spec, tree=tree, eos_ids=())), _texts(args, model)


def _with_own_tree(
    args: argparse.Namespace, model: BaseModel, drafter: Drafter, params: Params, spec: DecodeSpec
) -> Executor:
    tree = presets.by_name(args.tree or drafter.spec.default_tree)
    return FusedExecutor(model, params, spec.replace(drafter=drafter, tree=tree))


def _print(rows: list[BenchmarkRow], args: argparse.Namespace, texts) -> None:
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
