"""Decode-step times of a published shape with random weights on one GPU or TPU, against the bandwidth floor.

    python tools/gpu/decode_bench.py --out results.jsonl            # 7B in bfloat16, as the time limit allows
    python tools/gpu/decode_bench.py --shape tiny --contexts 128 --nodes 8,1 --dtype float32
    python tools/gpu/decode_bench.py --drafts eagle,eagle3 --dynamic dynamic-60-7-10

For every batch and context, most important first: the autoregressive step, the verify step of the largest tree, whole
steps of the drafts, other sizes of tree, and the phases of the steps. Each measurement is written at once as a JSON
line, so a run cut short keeps its results. Random heads accept nothing, so a Hydra++ step's speed-up is computed for
3.70 tokens per step; a draft's time does not depend on its weights.

Aims on an H200: autoregressive at 85% of the measured copy bandwidth at batch 1, 64-node verify at most 1.10 times as
long, a whole Hydra++ step 2.9 times the speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare machine has no installed hydrajax

from draft_lm_heads import LM_HEADS, drafter_for
from json_lines import write_lines
from kernel_times import kernels_per_step

from hydrajax import ops, plugins
from hydrajax.bench.benchmark import TIMED_STEPS, autoregressive_bytes, first_nodes, room_for, step_timer
from hydrajax.bench.device_memory import copy_bandwidth, peak_memory
from hydrajax.bench.random_models import random_base, with_random_params
from hydrajax.bench.shapes import PRESETS
from hydrajax.compilation import use_compilation_cache
from hydrajax.decoding.executor import Executor, FusedExecutor
from hydrajax.decoding.program import Program
from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.formats.draft_registry import KINDS
from hydrajax.models.llama import Llama
from hydrajax.ops import trace
from hydrajax.trees import presets

DRAFTS = ("hydra++", "medusa")
TRAINED = [name for name, kind in KINDS.items() if not kind.about]
TAU = 3.70  # tokens per step of Hydra++ on a 7B with 63 choices, assumed by the aim above


def integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="7b", choices=sorted(PRESETS))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--quantize", choices=tuple(plugins.Group("weights")), help="low-bit weights of the base")
    parser.add_argument("--lm-head", choices=list(LM_HEADS), default="full", help="lm heads of the draft heads")
    parser.add_argument(
        "--drafts", type=lambda text: text.split(","), default=list(DRAFTS), help=f"any of {', '.join(TRAINED)}"
    )
    parser.add_argument("--dynamic", metavar="dynamic-N-D-K", help="also time the drafts with this dynamic tree")
    parser.add_argument("--batches", type=integers, default=[1])
    parser.add_argument("--contexts", type=integers, default=[2048, 512])
    parser.add_argument(
        "--nodes", type=integers, default=[64, 16, 1, 8, 32], help="sizes of trees (default %(default)s)"
    )
    parser.add_argument("--steps-only", action="store_true", help="leave out the phases of the steps")
    parser.add_argument(
        "--trace",
        type=int,
        default=0,
        metavar="N",
        help="also trace each program, and list its N longest kernels; needs HYDRAJAX_CUDA_GRAPHS=0",
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds; stop before the next measurement")
    parser.add_argument("--copy-megabytes", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("decode_bench.jsonl"))
    args = parser.parse_args()

    full = presets.sparse()
    try:  # invalid combinations fail before a model is made
        grown = presets.by_name(args.dynamic) if args.dynamic else None
        config = PRESETS[args.shape]
        for kind in args.drafts:
            if kind not in TRAINED:
                raise not_allowed("drafts", kind, TRAINED)
            drafter = drafter_for(Llama(config, jnp.dtype(args.dtype)), kind, args.lm_head)
            for tree in (full, *([grown] if grown else [])):
                Program(drafter, tree).check(config)
    except HydrajaxError as error:
        parser.error(error.as_flag(["--drafts", "--lm-head"]))
    if args.trace and ops.compiler_options():
        parser.error("--trace: got CUDA graphs, of which a trace shows one step: set HYDRAJAX_CUDA_GRAPHS=0")

    use_compilation_cache()
    began = time.perf_counter()
    bandwidth = copy_bandwidth(args.copy_megabytes)
    model, base = random_base(config, args.dtype, quantize=args.quantize)
    room = room_for(tree.depth for tree in [full, *([grown] if grown else [])])
    executors = {}
    for kind in args.drafts:
        drafter, params = with_random_params(model, base, drafter_for(model, kind, args.lm_head))
        executors[kind] = FusedExecutor(model, params, Program(drafter, full))
    header = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "shape": args.shape,
        "dtype": args.dtype,
        "quantize": args.quantize,
        "lm_head": args.lm_head,
        "dynamic": args.dynamic,
        "gpu_kernels": trace.has_triton(),
        "tpu_kernels": trace.has_mosaic(),
        "compiler_options": ops.compiler_options(),
        "copy_gigabytes_per_second": bandwidth / 1e9,
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("HYDRAJAX", "XLA"))},
    }
    print(json.dumps(header), flush=True)
    lines, measured = [header], []

    def measurements(batch: int, context: int):
        """Yield name, nodes and a function that compiles the timer, most important first."""

        def timer(executor: Executor):
            return step_timer(executor, batch, context, room)

        first = executors[args.drafts[0]]
        sweep = {tree.size: tree for tree in first_nodes(full, args.nodes).values()}
        largest = sweep[max(args.nodes)]
        yield "autoregressive", 1, timer(first.autoregressive()).step
        for nodes in sorted(sweep, key=lambda size: size != largest.size):
            yield "verify", nodes, timer(first.with_program(tree=sweep[nodes])).verify
            for kind, executor in executors.items():
                if nodes > 1:
                    yield f"step {kind}", nodes, timer(executor.with_program(tree=sweep[nodes])).step
        if grown:
            for kind, executor in executors.items():
                timed = timer(executor.with_program(tree=grown))
                yield f"step {kind} {args.dynamic}", grown.size, timed.step
                yield f"propose {kind} {args.dynamic}", grown.size, timed.propose
        if args.steps_only:
            return
        for kind, executor in executors.items():
            timed = timer(executor.with_program(tree=largest))
            yield f"propose {kind}", largest.size, timed.propose
            yield f"observe {kind}", largest.size, timed.observe
        yield "accept+commit", largest.size, timer(first.with_program(tree=largest)).accept_commit

    def times(context: int, batch: int):
        """Time all measurements of a context and batch, until the time limit."""
        baseline = None
        floor = autoregressive_bytes(model, base, batch, context + 1) / bandwidth * 1e3
        for name, nodes, compiled in measurements(batch, context):
            if time.perf_counter() - began > args.time_limit:
                print("time limit reached: the remaining cells are not measured")
                return
            compiling = time.perf_counter()
            timed = compiled()
            compiling = time.perf_counter() - compiling
            # Runs of the baseline alternate with its own, so that changes of the clock rate affect both.
            baseline = baseline or timed
            rounds = [(baseline(), timed()) for _ in range(args.repeats)]
            autoregressive, milliseconds = (statistics.median(column) for column in zip(*rounds, strict=True))
            line = {
                "batch": batch,
                "context": context,
                "what": name,
                "nodes": nodes,
                "milliseconds": milliseconds,
                "autoregressive_milliseconds": autoregressive,
                "over_autoregressive": milliseconds / autoregressive,
                "floor_milliseconds": floor,
                "floor_fraction": floor / milliseconds,
                "compile_seconds": compiling,
                "peak_memory_bytes": peak_memory(),
            }
            if name == "step hydra++":
                line[f"speedup_at_tau_{TAU:.2f}"] = TAU * autoregressive / milliseconds
            lines.append(line)
            if args.trace:
                measured.append((line, timed))
            write_lines(lines, args.out)
            print(
                f"B={batch} S={context} {name:26s} N={nodes:3d} {milliseconds:8.3f} ms "
                f"{line['over_autoregressive']:6.2f} x AR, {line['floor_fraction']:6.1%} of the bandwidth floor, "
                f"compiled in {compiling:.0f} s",
                flush=True,
            )

    for context, batch in itertools.product(args.contexts, args.batches):
        times(context, batch)
    for line, timed in measured:  # last: the profiler slows down what runs after it
        line |= kernels_per_step(timed.once, TIMED_STEPS, args.trace)
        print(line["what"], f"{line['kernel_milliseconds']:.3f} ms in {line['kernels_per_step']:.1f} kernels per step")
        write_lines(lines, args.out)
    write_lines(lines, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
