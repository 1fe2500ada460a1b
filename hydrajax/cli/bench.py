"""``hydrajax bench``: time decode steps and decoding with and without a draft on this device."""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
from rich.console import Console

from hydrajax import api
from hydrajax.bench.benchmark import BenchmarkRow, first_nodes, run_benchmark
from hydrajax.bench.random_models import random_draft, random_model
from hydrajax.bench.report.records import of_bench
from hydrajax.bench.report.tables import cell, print_table
from hydrajax.bench.shapes import PRESETS
from hydrajax.bench.split_contest import split_contest
from hydrajax.cli import options
from hydrajax.cli.prompt_files import PROMPT_FORMATS
from hydrajax.decoding.executor import Executor, FusedExecutor
from hydrajax.decoding.program import Program
from hydrajax.decoding.request import Request
from hydrajax.decoding.state import Params
from hydrajax.drafters.drafter import Drafter
from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.formats.draft_registry import KINDS
from hydrajax.language_model import LanguageModel
from hydrajax.loaded_model import make_executor
from hydrajax.machine import machine
from hydrajax.models.base_model import BaseModel
from hydrajax.models.weights import WIDENED, described
from hydrajax.ssd.fan_out import DEFAULT_BUDGET
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_arguments(parser, base_required=False, apart=True)
    options.add_sampling_arguments(parser)
    parser.add_argument(
        "--random",
        metavar="SHAPE",
        help=f"use random weights of this shape instead of --base: {', '.join(PRESETS)} (--dtype default: float32)",
    )
    parser.add_argument(
        "--random-draft",
        metavar="KIND",
        help=f"use a random draft instead of --draft: {', '.join(KINDS)} (default with --random: hydra++)",
    )
    options.add(parser, "--tree-sizes", "--batch-sizes", "--repeats", "--seed", "--json")
    parser.add_argument(
        "--fan-outs", metavar="F,F,...", type=options.positives,
        help="with --draft-devices, sweep the number of verification outcomes that the draft prepares for (default 12)",
    )  # fmt: skip
    parser.add_argument("--context", metavar="S", type=options.positive, default=512, help="cache slots (default 512)")
    options.add(parser, "--prompts", help=f"prompts for measuring tokens per second: {PROMPT_FORMATS}")
    options.add(parser, "--max-new-tokens", type=options.positive, default=128)


def run(args: argparse.Namespace) -> None:
    if args.draft_devices:
        return run_split(args)
    if args.fan_outs:
        raise HydrajaxError("--fan-outs: requires --draft-devices")
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
        report = {"machine": machine(), "arguments": arguments, "rows": [asdict(row) for row in rows]}
        write(report | of_bench(report))
    if args.json != "-":
        _print(rows, args, texts)


def run_split(args: argparse.Namespace) -> None:
    """Compare drafting ahead on separate devices with the same pair in turn and in one program."""
    if args.tree_sizes or args.random or args.random_draft:
        raise HydrajaxError("--draft-devices: requires --base and --draft, without --tree-sizes")
    with options.json_report(args.json) as write:
        model = options.load_from(args)
        texts = _texts(args, model)
        if not texts:
            raise HydrajaxError("--prompts: required with --draft-devices for a base without a tokenizer")
        name = args.tree or model.drafter.spec.default_tree
        request = options.request_from(args)
        executor = make_executor(model, model.program(request, tree=name, eos_ids=()), request)
        report, cells = [], []
        for batch_size in args.batch_sizes:
            fan_outs = args.fan_outs or [DEFAULT_BUDGET]
            for row in split_contest(executor, fan_outs, texts, batch_size=batch_size, repeats=args.repeats):
                report.append({"batch": batch_size} | row.as_dict())
                found = row.measured
                rates = (None if rate is None else f"{rate:.0%}" for rate in (row.hit_rate, row.ready_rate))
                speed = (f"{found.tokens_per_step:.2f}", f"{found.tokens_per_second:.0f}", f"{found.speedup:.2f}x")
                cells.append([batch_size, found.name, *speed, *rates, found.equal])
        write({"machine": machine(), "arguments": options.recorded(args), "rows": report})
    if args.json != "-":
        print(f"{args.base} and {args.draft}, {name}, {args.dtype}; the draft on the last {args.draft_devices} devices")
        print_table(("batch", "way", "τ", "tok/s", "speed-up", "hits", "ready", "equal"), cells, left=["way"])
        print("hits: sequences whose next draft was ready. ready: rounds in which all sequences hit, without waiting.")


def _executors(args: argparse.Namespace) -> tuple[dict[str, Executor], list[np.ndarray]]:
    """Executors by tree name, and token ids of prompts; none for random weights."""
    request = options.request_from(args)
    executor, texts = _executor(args, request)
    tree = executor.program.tree
    trees: Mapping[str, CandidateTree] = {args.tree or executor.program.drafter.spec.default_tree: tree}
    if args.tree_sizes:
        trees = first_nodes(tree, args.tree_sizes)
    return {name: executor.with_program(tree=tree) for name, tree in trees.items()}, texts


def _texts(args: argparse.Namespace, model: LanguageModel) -> list[np.ndarray]:
    return [] if model.tokenizer is None and not args.prompts else options.prompts_from(args.prompts, model)


def _executor(args: argparse.Namespace, request: Request) -> tuple[Executor, list[np.ndarray]]:
    """An executor for the model, draft and tree of the arguments, and the prompts."""
    if bool(args.random) == bool(args.base):
        raise HydrajaxError("bench: exactly one of --base and --random is required")
    for flag, value, allowed in (("random", args.random, PRESETS), ("random_draft", args.random_draft, KINDS)):
        if value and value not in allowed:
            raise not_allowed(flag, value, allowed)
    draft = options.draft_of(args)
    if draft and (args.random or args.random_draft):
        raise HydrajaxError("--draft: requires --base, without --random-draft")
    for flag in ("adapter", "mesh"):
        if args.random and getattr(args, flag):
            raise HydrajaxError(f"--{flag}: requires --base")
    if args.random:
        if args.dtype == api.AUTO:  # there is no checkpoint to take it from
            args.dtype = "float32"
        kind, dtype = args.random_draft or "hydra++", api.DTYPES[args.dtype]
        quantize = None if args.quantize == WIDENED else args.quantize
        model, *drafted = random_model(args.random, kind, dtype, args.seed, quantize)
        model = model.clone(kv_cache=args.kv_cache) if args.kv_cache else model
        return _with_own_tree(args, model, *drafted, request), []
    model = options.load_from(args)
    if args.random_draft:
        drafter, params = random_draft(model.model, model.params.base, args.random_draft, args.seed)
        return _with_own_tree(args, model.model, drafter, params, request), []
    tree = args.tree or model.drafter.spec.default_tree
    program = model.program(request, tree=tree, eos_ids=())
    return make_executor(model, program, request), _texts(args, model)


def _with_own_tree(
    args: argparse.Namespace, model: BaseModel, drafter: Drafter, params: Params, request: Request
) -> Executor:
    program = Program(drafter, presets.by_name(args.tree or drafter.spec.default_tree)).serving(request)
    return FusedExecutor(model, params, program, request)


def _print(rows: list[BenchmarkRow], args: argparse.Namespace, texts) -> None:
    info, model = machine(), args.random or args.base
    numbers = described(args.dtype, args.quantize)
    print(f"{model}, {numbers}, context {args.context}, on {info['device']}, jax {info['jax']}; ms per step, median")
    times = ("autoregressive_step", "step", "verify", "propose", "accept_commit", "observe")
    cells = []
    for row in rows:
        shares = (f"{row.draft_overhead:.0%}", f"{row.break_even:.2f}")
        cells.append([row.batch, row.tree, row.nodes, *(getattr(row, name) for name in times), *shares])
    columns = ("AR step", "step", "verify", "propose", "accept", "observe", "draft", "even")
    print_table(("batch", "tree", "nodes", *columns), cells, left=["tree"])
    print("accept: commit included. draft: (propose + accept + observe) / verify. even: step / AR step; the tree is")
    print("faster if tokens_per_step (τ) is larger.")
    if texts:
        cells = []
        for row in rows:
            rates = (f"{rate:.0f}" for rate in (row.autoregressive_tokens_per_second, row.tokens_per_second))
            line = [row.batch, row.tree, row.nodes, f"{row.tokens_per_step:.2f}", *rates, f"{row.speedup:.2f}x"]
            cells.append([*line, row.outputs_equal])
        print_table(("batch", "tree", "nodes", "τ", "AR tok/s", "tok/s", "speed-up", "equal"), cells, left=["tree"])
        print(f"generated {args.max_new_tokens} tokens for each of {len(texts)} prompts, interleaved with the baseline")
    last = rows[-1]
    peak = f"peak memory {last.peak_memory_bytes / 1e9:.2f} GB"
    print(f"last row: compile {last.compile_seconds:.1f} s, prefill {cell(last.prefill)} ms, {peak}")
    if last.autoregressive_bandwidth_fraction:
        print(
            f"an autoregressive step reads {last.autoregressive_bytes_per_step / 1e9:.2f} GB: "
            f"{last.autoregressive_bandwidth_fraction:.0%} of the measured copy bandwidth"
        )
    if not texts:
        print("no prompts: tokens per step and per second are not measured", file=sys.stderr)
