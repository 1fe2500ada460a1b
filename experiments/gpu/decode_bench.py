"""Decode-step times of a 7B shape in bf16 with random weights on one GPU, against the bandwidth floor.

    python experiments/gpu/decode_bench.py --out results.jsonl            # everything, as the time limit allows
    python experiments/gpu/decode_bench.py --shape tiny --contexts 128 --batches 1 --nodes 1,8 --dtype float32

For every batch and context: the autoregressive step, the verify step at 1..64 nodes, propose and observe of Medusa and
Hydra++ heads, and the whole Hydra++ step. One JSON line per cell as soon as it is measured, so that a run cut short
keeps what it has. The cells that matter most come first.

Aims: autoregressive at least 80% of the measured copy bandwidth at batch 1; 64-node verify at most 1.15 times it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare machine has no installed hydrajax

from hydrajax.measure.benchmark import autoregressive_bytes, first_nodes, room_for, step_timer
from hydrajax.measure.machine import copy_bandwidth, peak_memory
from hydrajax.measure.random_models import random_base, random_draft
from hydrajax.measure.timing import interleaved_ms
from hydrajax.measure.way import Way
from hydrajax.models.config import PRESETS
from hydrajax.trees import presets


def integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="7b", choices=sorted(PRESETS))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--batches", type=integers, default=[1, 2, 4, 8])
    parser.add_argument("--contexts", type=integers, default=[1024, 4096])
    parser.add_argument("--nodes", type=integers, default=[64, 16, 1, 8, 32])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds; stop before the next measurement")
    parser.add_argument("--copy-megabytes", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("decode_bench.jsonl"))
    args = parser.parse_args()

    began = time.perf_counter()
    device = jax.devices()[0]
    bandwidth = copy_bandwidth(args.copy_megabytes)
    model, base = random_base(PRESETS[args.shape], args.dtype)
    full = presets.sparse()
    room = room_for([full])
    ways = {kind: Way(kind, model, *random_draft(model, base, kind), full) for kind in ("hydra++", "medusa")}
    header = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "shape": args.shape,
        "dtype": args.dtype,
        "copy_gigabytes_per_second": bandwidth / 1e9,
    }
    print(json.dumps(header))
    lines = [header]

    def measurements(batch: int, context: int):
        """Name, nodes and what measures it, in order of interest."""

        def timer(way: Way):
            return step_timer(way, batch, context, room)

        hydra = ways["hydra++"]
        yield "autoregressive step", 1, timer(hydra.autoregressive()).step
        sweep = {tree.size: tree for tree in first_nodes(full, args.nodes).values()}
        largest = sweep[max(args.nodes)]
        for nodes in args.nodes:
            yield "verify", nodes, timer(hydra.with_tree(sweep[nodes], "verify")).verify
        for kind, way in ways.items():
            timed = timer(way.with_tree(largest, kind))
            yield f"propose {kind}", largest.size, timed.propose
            yield f"observe {kind}", largest.size, timed.observe
        timed = timer(hydra.with_tree(largest, "whole"))
        yield "accept+commit", largest.size, timed.accept_commit
        yield "whole step hydra++", largest.size, timed.step

    cells = sorted(itertools.product(args.contexts, args.batches), key=lambda cell: cell[0] * cell[1])
    for context, batch in cells:
        autoregressive = None
        floor_bytes = autoregressive_bytes(model, base, batch, context + 1)
        floor = floor_bytes / bandwidth * 1e3
        for name, nodes, measure in measurements(batch, context):
            if time.perf_counter() - began > args.time_limit:
                print("time limit reached; the remaining cells were not measured")
                return finish(lines, args.out)
            milliseconds = interleaved_ms({name: measure()}, args.repeats)[name]
            autoregressive = milliseconds if autoregressive is None else autoregressive
            line = {
                "batch": batch,
                "context": context,
                "what": name,
                "nodes": nodes,
                "milliseconds": milliseconds,
                "over_autoregressive": milliseconds / autoregressive,
                "floor_milliseconds": floor,
                "floor_fraction": floor / milliseconds,
                "peak_memory_bytes": peak_memory(),
            }
            lines.append(line)
            finish(lines, args.out)
            print(
                f"B={batch} S={context} {name:24s} N={nodes:3d} {milliseconds:8.3f} ms "
                f"{line['over_autoregressive']:6.2f} x AR, {line['floor_fraction']:6.1%} of the bandwidth floor",
                flush=True,
            )
    return finish(lines, args.out)


def finish(lines: list[dict], out: Path) -> int:
    """Write all lines so far under a temporary name, then rename."""
    temporary = out.with_name(out.name + ".partial")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    temporary.replace(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
