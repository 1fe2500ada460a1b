"""``hydrajax roofline``: predict decode step times from the traced program (medusa appendix G)."""

import argparse
import itertools
from dataclasses import asdict

import jax.numpy as jnp

from hydrajax.bench.benchmark import first_nodes
from hydrajax.bench.report.tables import cell, print_table
from hydrajax.bench.roofline.devices import DEVICES, Device
from hydrajax.bench.roofline.division import Division
from hydrajax.bench.roofline.prediction import Prediction, predict
from hydrajax.bench.shapes import SHAPES
from hydrajax.cli import options
from hydrajax.decoding.program import Program
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.drafters.drafter import Drafter
from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.formats.draft_registry import KINDS
from hydrajax.formats.hub import without_hub
from hydrajax.formats.huggingface import read_config
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.trees import DynamicTree, presets
from hydrajax.trees.dynamic import CandidateTree

SIZES = (1, 4, 16, 64)  # nodes, for trees of at least this size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", metavar="NAME", help=f"shape of the base: {', '.join(SHAPES)}")
    parser.add_argument("--base", metavar="DIR|FILE.gguf", help="read the shape from this model instead")
    parser.add_argument(
        "--draft-kind", choices=list(KINDS), default="hydra++", help="kind of draft (default %(default)s)"
    )
    parser.add_argument("--draft", metavar="DIR", help="use a draft model instead; only its config.json is read")
    parser.add_argument(
        "--device", choices=list(DEVICES), default="H100", help="device to predict for (default %(default)s)"
    )
    options.add(parser, "--mesh", "--batch-sizes", "--json")
    parser.add_argument("--quantize", choices=["int8"], help="store the base's weights in 8 bits")
    parser.add_argument("--tree", metavar="NAME|FILE.json|JSON", help="tree (default: the drafter's)")
    sizes = ",".join(map(str, SIZES))
    text = f"sweep subtrees of the tree's first N nodes (default {sizes} and the tree; the tree if it is dynamic)"
    options.add(parser, "--tree-sizes", help=text)
    parser.add_argument(
        "--context", metavar="S,S,...", type=options.positives, default=[1024], help="tokens of context (default 1024)"
    )


def run(args: argparse.Namespace) -> None:
    with options.json_report(args.json) as write:
        config = _config(args)
        if max(args.context) > config.max_positions:
            most = config.max_positions
            raise HydrajaxError(f"--context: got {max(args.context)}, expected at most the model's {most}")
        device, division = _device(args), Division(**args.mesh)
        division.check(config)
        drafter = _drafter(args, config)
        trees = trees_of(args, drafter, config)
        grid = (trees, args.batch_sizes, args.context)
        rows = list(predict(device, config, drafter, *grid, 2, quantize=args.quantize, division=division))
        cells = [{"predicted": asdict(row)} for row in rows]
        write({"device": asdict(device), "arguments": options.recorded(args), "rows": cells})
    if args.json != "-":
        _print(args, device, rows)


def _device(args: argparse.Namespace) -> Device:
    device = DEVICES[args.device]
    if args.mesh.get("model", 1) > 1 and device.link is None:
        raise HydrajaxError(f"mesh: the bandwidth between several {device.name} is unknown; leave --mesh out")
    return device


def _config(args: argparse.Namespace) -> LlamaConfig:
    if bool(args.shape) == bool(args.base):
        raise HydrajaxError("roofline: exactly one of --shape and --base is required")
    if args.base:
        return read_config(without_hub(args.base, "base"))
    if args.shape not in SHAPES:
        raise not_allowed("shape", args.shape, SHAPES)
    return SHAPES[args.shape]


def _drafter(args: argparse.Namespace, config: LlamaConfig) -> Drafter:
    if args.draft:
        args.draft_kind = "model"
        return DraftModel(Llama(read_config(args.draft, "draft"), jnp.dtype(jnp.bfloat16)), config.vocab_size)
    return KINDS[args.draft_kind].build(config, jnp.dtype(jnp.bfloat16))


def trees_of(args: argparse.Namespace, drafter, config: LlamaConfig) -> dict[str, CandidateTree]:
    program = Program(drafter, presets.by_name(args.tree or drafter.spec.default_tree))
    program.check(config)
    tree = program.tree
    if isinstance(tree, DynamicTree) and not args.tree_sizes:
        return {tree.name: tree}
    return dict(first_nodes(tree, args.tree_sizes or [*(size for size in SIZES if size < tree.size), tree.size]))


# --- on the terminal ------------------------------------------------------------------------------------------------


def _print(args: argparse.Namespace, device: Device, rows: list[Prediction]) -> None:
    name = device.name
    size = f"{rows[0].draft_bytes / 1e9:.3g} GB"
    draft = f"a draft model of {size}" if args.draft_kind == "model" else f"{size} of {args.draft_kind} heads"
    weights = "bfloat16" + (f" with {args.quantize} weights in the base" if args.quantize else "")
    sizes = Division(**args.mesh)
    count = sizes.data * sizes.model
    devices = f"{count} {name} ({sizes.data} x {sizes.model})" if count > 1 else name
    print(f"{args.shape or args.base} with {draft}, {weights}, on {devices}: predicted ms per step")
    print(f"{cell(device.flops / 1e12)} TFLOP/s, {device.bandwidth / 1e9:.4g} GB/s", end="")
    print(f", {device.link / 1e9:.4g} GB/s between devices" if sizes.model > 1 and device.link else "")
    cells = []
    for row in rows:
        times = (row.autoregressive_step, row.step, row.verify, row.propose, row.observe, row.prefill)
        exchange = [f"{cell(row.collective_time)} ({row.collectives})"] if sizes.model > 1 else []
        shares = (f"{row.memory_bound:.0%}", f"{row.break_even:.2f}")
        cells.append([row.batch, row.context, row.nodes, *times, *exchange, *shares])
    columns = ("AR step", "step", "verify", "propose", "observe", "prefill", *(["exchange"] if sizes.model > 1 else []))
    print_table(("batch", "context", "nodes", *columns, "memory", "even"), cells)
    print("memory: share of the step's time in memory-bound operators. even: step / AR step; the tree is faster if")
    print("tokens_per_step (τ) is larger.")
    if sizes.model > 1:
        latency = f"{1e6 * device.latency:g} us each"
        print(f"exchange: ms of the step's collectives (their number): {latency}, and a ring's bytes over the links;")
        print("nothing else runs meanwhile. A device multiplies with its part of the weights and with what is copied.")
    if device.memory is not None:
        _print_memory(device, rows)


def _print_memory(device: Device, rows: list[Prediction]) -> None:
    """Print what lies on a device, with the cache of the largest tree, and the trees that fit."""
    cells = []
    for (context, batch), found in itertools.groupby(rows, key=lambda row: (row.context, row.batch)):
        trees = list(found)
        last, fitting = trees[-1], [row.nodes for row in trees if row.fits]
        sizes = (last.base_memory, last.draft_memory, last.cache_memory, last.memory)
        fit = "all trees" if len(fitting) == len(trees) else f"{fitting[-1]} nodes" if fitting else "no"
        cells.append([batch, context, *(f"{size / 1e9:.2f}" for size in sizes), fit])
    print(f"GB on a device of {device.memory / 1e9:g} GB; activations, temporaries and the runtime take more:")
    print_table(("batch", "context", "base", "draft", "KV cache", "together", "fits"), cells)
