"""``hydrajax roofline``: predict a decode step's time on a device from its traced program (medusa appendix G)."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial

import jax.numpy as jnp
from rich.console import Console

from hydrajax import api
from hydrajax.cli import options
from hydrajax.cli.screen import figure_table, wide_console
from hydrajax.decoding.executor import Executor, FusedExecutor
from hydrajax.decoding.spec import DecodeSpec
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.drafters.drafter import Drafter
from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.formats.draft_registry import KINDS, title_of
from hydrajax.formats.huggingface import read_config
from hydrajax.machine import machine
from hydrajax.measure.benchmark import first_nodes
from hydrajax.measure.random_models import fresh, random_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import PRESETS, LlamaConfig
from hydrajax.roofline.chains import BestChain, best_chain
from hydrajax.roofline.comparison import Comparison, compare
from hydrajax.roofline.devices import DEVICES, Device
from hydrajax.roofline.medusa_tables import CANDIDATES, TABLES
from hydrajax.roofline.prediction import Prediction, Workload, milliseconds, predict
from hydrajax.trees import DynamicTree, presets
from hydrajax.trees.dynamic import CandidateTree

HELP = "predict a decode step's time on a device from operations and bytes, and compare on this one"

HERE = "here"
SIZES = (1, 4, 16, 64)  # nodes, where the tree has as many
VERBS = ("verify", "propose", "accept_commit", "observe")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", metavar="NAME", help=f"of the base: {', '.join(PRESETS)}")
    parser.add_argument("--base", metavar="DIR", help="or that of a model; only its config.json is read")
    parser.add_argument("--draft-kind", choices=list(KINDS), default="hydra++", help="default %(default)s")
    parser.add_argument("--draft", metavar="DIR", help="or a draft model; only its config.json is read")
    parser.add_argument(
        "--device", choices=[*DEVICES, HERE], default="H100", help="'here' measures this one (default %(default)s)"
    )
    parser.add_argument("--tree", metavar="NAME|FILE.json|JSON", help="default: the drafter's own")
    parser.add_argument(
        "--tree-sizes",
        metavar="N,N,...",
        type=options.positives,
        help=f"the tree's best N nodes (default {_listed(SIZES)} and the whole; a dynamic tree is taken whole)",
    )
    parser.add_argument("--batch-sizes", metavar="B,B,...", type=options.positives, default=[1], help="default 1")
    parser.add_argument(
        "--context", metavar="S,S,...", type=options.positives, default=[1024], help="tokens (default 1024)"
    )
    parser.add_argument("--dtype", choices=list(api.DTYPES), default="bfloat16", help="default %(default)s")
    parser.add_argument(
        "--tokens-per-step", metavar="T,T,...", type=_numbers, help="τ of each tree size, to predict speed-ups"
    )
    parser.add_argument(
        "--acceptance",
        metavar="A",
        type=float,
        help="of a draft model: the chance that a token of a chain is accepted (Leviathan's α, which tree search "
        "measures), to predict how long a chain should be",
    )
    parser.add_argument("--repeats", metavar="R", type=options.positive, default=5, help="of each measurement here")
    parser.add_argument("--operators", action="store_true", help="also each operator, of the first batch and last tree")
    parser.add_argument("--tables", action="store_true", help="the intensities of medusa's tables 6 to 8 beside ours")
    options.add_json_argument(parser)


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, found '{text}'") from None


def _listed(values) -> str:
    return ",".join(map(str, values))


def run(args: argparse.Namespace) -> None:
    if args.tables:
        print_tables()
        if not (args.shape or args.base):
            return
    compared = None
    with options.json_report(args.json) as write:
        config = _config(args)
        if max(args.context) > config.max_positions:
            most = config.max_positions
            raise HydrajaxError(f"--context: must be at most the model's {most}, found {max(args.context)}")
        dtype = jnp.dtype(api.DTYPES[args.dtype])
        if args.device != HERE and args.dtype != "bfloat16":
            device = args.device
            raise HydrajaxError(f"--dtype: found '{args.dtype}', the peaks of --device {device} are for bfloat16")
        drafter = _drafter(args, config, dtype)
        trees = _trees(args, drafter, config)
        taus = _tokens_per_step(args, trees)
        if args.device == HERE:
            with Console(stderr=True).status("measuring"):
                executors, grid = _executors(config, dtype, drafter, trees), (args.batch_sizes, args.context)
                compared = compare(executors, *grid, dtype.itemsize, taus, repeats=args.repeats)
            device, rows = compared.device, compared.predicted
        else:
            device = DEVICES[args.device]
            grid = (trees, args.batch_sizes, args.context)
            rows = list(predict(device, config, drafter, *grid, dtype.itemsize, taus))
        chains = [
            best_chain(device, config, drafter, args.acceptance, batch, context, dtype.itemsize)
            for context in args.context
            for batch in args.batch_sizes
            if args.acceptance is not None
        ]
        write(_report(args, device, rows, compared, chains))
    if args.json == "-":
        return
    _print(args, device, rows)
    if chains:
        _print_chains(chains)
    if compared:
        _print_comparison(compared)
    if args.operators:
        work = Workload(config, drafter, args.batch_sizes[0], args.context[0], dtype.itemsize)
        _print_operators(device, work, list(trees.values())[-1])


def _config(args: argparse.Namespace) -> LlamaConfig:
    if bool(args.shape) == bool(args.base):
        raise HydrajaxError("roofline: exactly one of --shape and --base is needed")
    if args.base:
        return read_config(args.base)
    if args.shape not in PRESETS:
        raise not_allowed("shape", args.shape, PRESETS)
    return PRESETS[args.shape]


def _drafter(args: argparse.Namespace, config: LlamaConfig, dtype) -> Drafter:
    if args.draft:
        drafter: Drafter = DraftModel(Llama(read_config(args.draft, "draft"), dtype), config.vocab_size)
        args.draft_kind = "model"
    else:
        drafter = KINDS[args.draft_kind].build(config, dtype)
    if args.acceptance is not None and not drafter.spec.has_distribution:
        title = title_of(drafter)
        raise HydrajaxError(f"--acceptance: is for draft models, --draft or --draft-kind model, found {title}")
    return drafter


def _trees(args: argparse.Namespace, drafter, config: LlamaConfig) -> dict[str, CandidateTree]:
    tree = presets.by_name(args.tree or drafter.spec.default_tree)
    DecodeSpec(drafter, tree).check(config)
    if isinstance(tree, DynamicTree) and not args.tree_sizes:
        return {tree.name: tree}
    return dict(first_nodes(tree, args.tree_sizes or [*(size for size in SIZES if size < tree.size), tree.size]))


def _tokens_per_step(args: argparse.Namespace, trees: dict[str, CandidateTree]) -> list[float]:
    taus = args.tokens_per_step or []
    if taus and len(taus) != len(trees):
        raise HydrajaxError(f"--tokens-per-step: one for each of {len(trees)} tree sizes is needed, found {len(taus)}")
    for tau, tree in zip(taus, trees.values(), strict=False):
        if not 1 <= tau <= tree.depth + 1:
            most = tree.depth + 1
            raise HydrajaxError(f"--tokens-per-step: with {tree.size} nodes from 1 to {most} are possible, found {tau}")
    return taus


def _executors(config: LlamaConfig, dtype, drafter: Drafter, trees: dict[str, CandidateTree]) -> dict[str, Executor]:
    """An executor for each tree, with random weights."""
    model, base = random_base(config, dtype)
    drafter, params = fresh(model, base, drafter)
    return {name: FusedExecutor(model, params, DecodeSpec(drafter, tree)) for name, tree in trees.items()}


def _report(
    args: argparse.Namespace,
    device: Device,
    rows: list[Prediction],
    compared: Comparison | None,
    chains: list[BestChain],
) -> dict:
    cells = [{"predicted": row.as_dict()} for row in rows]
    report = {"device": asdict(device), "arguments": options.recorded(args), "rows": cells}
    if chains:
        report["chains"] = [chain.as_dict() for chain in chains]
    if compared is None:
        return report
    for cell, row in zip(cells, compared.measured, strict=True):
        cell["measured"] = row.as_dict()
    return report | {"machine": machine(), "drift": compared.drift}


# --- on the terminal ------------------------------------------------------------------------------------------------


_table = partial(figure_table, left="operator")


def _print(args: argparse.Namespace, device: Device, rows: list[Prediction]) -> None:
    name = machine()["device"] if args.device == HERE else device.name
    size = f"{rows[0].draft_bytes / 1e9:.3g} GB"
    draft = f"a draft model of {size}" if args.draft_kind == "model" else f"{size} of {args.draft_kind} heads"
    print(f"{args.shape or args.base} with {draft}, {args.dtype}, on {name}: predicted ms per step")
    print(f"{device.flops / 1e12:.3g} TFLOP/s, {device.bandwidth / 1e9:.4g} GB/s")
    if device.weight_rates:
        for what, rates in (("weights", device.weight_rates), ("attention", device.attention_rates)):
            print(f"GFLOP/s by rows, {what}: " + ", ".join(f"{n}: {rate / 1e9:.3g}" for n, rate in rates))
    with_tau = rows[0].tokens_per_step is not None
    table = _table(
        *("batch", "context", "nodes", "AR step", "step", "verify", "propose", "observe", "prefill", "memory", "even"),
        *(("τ", "speed-up") if with_tau else ()),
    )
    for row in rows:
        times = (row.autoregressive_step, row.step, row.verify, row.propose, row.observe, row.prefill)
        cells = [str(row.batch), str(row.context), str(row.nodes), *(f"{time:.3g}" for time in times)]
        cells += [f"{row.memory_bound:.0%}", f"{row.break_even:.2f}"]
        table.add_row(*cells, *((f"{row.tokens_per_step:.2f}", f"{row.speedup:.2f}x") if with_tau else ()))
    wide_console().print(table)
    print("memory: share of the step's time in operators that wait for memory. even: cost ratio step / AR step, the")
    print("tokens_per_step (τ) above which the tree pays.")


def _print_chains(chains: list[BestChain]) -> None:
    """What a chain is worth by the closed form, and in this roofline."""
    table = _table("batch", "context", "c", "best K", "τ", "faster", "roofline's K", "faster in it")
    for chain in chains:
        cells = (f"{chain.draft_cost:.3f}", str(chain.length), f"{chain.tokens_per_step:.2f}")
        cells += (f"{chain.improvement:.2f}x", str(chain.roofline_length), f"{chain.roofline_speedup:.2f}x")
        table.add_row(str(chain.batch), str(chain.context), *cells)
    print(
        f"chains of which every token is accepted with chance {chains[0].acceptance:g} (Leviathan et al. 3.1 to 3.3):"
    )
    wide_console().print(table)
    print("c: a drafted token's time in steps without a draft. best K: where (1 - α^(K+1)) / ((1 - α)(cK + 1)) is")
    print("largest. To the roofline, the base's pass over K + 1 tokens costs more than one over a single token.")


def _print_comparison(compared: Comparison) -> None:
    """What was predicted beside what was measured, of the steps and of their verbs: these say why a step is off."""
    steps = _table("batch", "context", "nodes", *("AR step", "measured", "error", "step", "measured", "error"), "even")
    verbs = _table("batch", "context", "nodes", *VERBS)
    for predicted, found in zip(compared.predicted, compared.measured, strict=True):
        cell = [str(predicted.batch), str(predicted.context), str(predicted.nodes)]
        times = []
        for key in ("autoregressive_step", "step"):
            ours, theirs = getattr(predicted, key), getattr(found, key)
            times += [f"{ours:.3g}", f"{theirs:.3g}", f"{ours / theirs - 1:+.0%}"]
        steps.add_row(*cell, *times, f"{found.break_even:.2f}")
        verbs.add_row(*cell, *(f"{getattr(predicted, verb):.3g} ({getattr(found, verb):.3g})" for verb in VERBS))
    wide_console().print(steps)
    print("measured: median ms. error: of the prediction. even: as measured.")
    wide_console().print(verbs)
    print(
        "ms predicted (measured). Left out of the prediction is what is neither a matrix product nor traffic: the sort"
    )
    print("of a top-k (in propose), the commit, the start of each operator.")
    print(
        f"the device's measured rates changed by a factor of up to {compared.drift:.2f} meanwhile "
        "(1.00: a quiet machine)"
    )


def _print_operators(device: Device, work: Workload, tree: CandidateTree) -> None:
    parts = work.step(tree)
    phases = {"prefill": work.prefill(), "decode": work.autoregressive_step()}
    phases[f"tree decode, {tree.size} nodes"] = [operator for part in parts.values() for operator in part]
    for phase, operators in phases.items():
        print(f"{phase}: batch {work.batch}, context {work.context}")
        table = _table("operator", "times", "GFLOP each", "MB each", "FLOP/byte", "ms", "waits for")
        for operator in operators:
            figures = (operator.flops / 1e9, operator.bytes / 1e6, operator.intensity)
            bound = "memory" if device.memory_bound(operator) else "arithmetic"
            ms = f"{milliseconds(device, [operator]):.3g}"
            table.add_row(operator.name, str(operator.count), *(f"{figure:.4g}" for figure in figures), ms, bound)
        wide_console().print(table)


def print_tables() -> None:
    """Medusa's tables 6 to 8: the operational intensity as printed there and ours, rounded alike."""
    equal = total = 0
    for printed in TABLES:
        print(f"medusa table {printed.number}: {printed.what}, LLaMA-33B; FLOP/byte by candidate tokens")
        table = _table(printed.row_name, "", *map(str, CANDIDATES))
        for row, theirs in printed.printed.items():
            ours = [round(value, 2) for value in printed.ours(row)]
            table.add_row(str(row), "ours", *map(str, ours))
            table.add_row("", "printed", *map(str, theirs))
            equal += sum(a == b for a, b in zip(ours, theirs, strict=True))
            total += len(theirs)
        wide_console().print(table)
    print(f"{equal} of {total} equal to the printed digits")
