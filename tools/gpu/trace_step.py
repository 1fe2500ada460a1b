"""Trace a decode step with JAX's profiler and list its kernels by time.

python tools/gpu/trace_step.py --shape 7b --draft hydra++ --out trace.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare machine has no installed hydrajax

from hydrajax.compilation import use_compilation_cache
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.decoding.spec import DecodeSpec
from hydrajax.measure.benchmark import TIMED_STEPS, first_nodes, step_timer
from hydrajax.measure.random_models import random_base, random_draft
from hydrajax.models.llama_config import PRESETS
from hydrajax.trees import presets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="7b", choices=sorted(PRESETS))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--draft", default="hydra++", help="kind of draft, or none (default %(default)s)")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("trace.json"))
    args = parser.parse_args()

    use_compilation_cache()
    model, base = random_base(PRESETS[args.shape], args.dtype)
    kind = "medusa" if args.draft == "none" else args.draft
    tree = next(iter(first_nodes(presets.sparse(), [args.nodes]).values()))
    drafter, params = random_draft(model, base, kind)
    executor = FusedExecutor(model, params, DecodeSpec(drafter, tree))
    executor = executor.autoregressive() if args.draft == "none" else executor
    timed = step_timer(executor, args.batch, args.context).step()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=False):
            milliseconds = timed.once()
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    rows, busy = kernels(events)
    found = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    found |= {name: getattr(args, name) for name in ("shape", "dtype", "draft", "nodes", "batch", "context")}
    found |= {"milliseconds_per_step": milliseconds, "busy_share": busy}
    found["kernels"] = [row | {"milliseconds_per_step": row["milliseconds"] / TIMED_STEPS} for row in rows]
    args.out.write_text(json.dumps(found, indent=1))
    print(
        f"{milliseconds:.3f} ms per step; the device was busy for {busy:.1%} of the time between first and last kernel"
    )
    for row in found["kernels"][:25]:
        print(f"{row['milliseconds_per_step']:9.4f} ms  {row['count'] / TIMED_STEPS:7.1f} times  {row['name'][:90]}")
    return 0


def kernels(events: list[dict]) -> tuple[list[dict], float]:
    """Return the kernels by name, longest first, and the device's busy share. On a CPU, the work of its threads."""
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    devices = {pid for pid, name in names.items() if "/device:" in name} or set(names)
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event.get("name") == "thread_name"
    }
    # A GPU has streams, and lines that sum them by module and by operation.
    ran = [
        event
        for event in events
        if event.get("ph") == "X"
        and event["pid"] in devices
        and (len(devices) == len(names) or threads.get((event["pid"], event["tid"]), "").startswith("Stream"))
    ]
    total, count = defaultdict(float), defaultdict(int)
    for event in ran:
        total[event["name"]] += event["dur"] / 1e3
        count[event["name"]] += 1
    rows = [{"name": name, "milliseconds": total[name], "count": count[name]} for name in total]
    end = busy = 0.0
    ran.sort(key=lambda event: event["ts"])
    for event in ran:
        stop = event["ts"] + event["dur"]
        busy += max(0.0, stop - max(end, event["ts"]))
        end = max(end, stop)
    span = end - ran[0]["ts"] if ran else 0.0
    return sorted(rows, key=lambda row: -row["milliseconds"]), busy / span if span else 0.0


if __name__ == "__main__":
    sys.exit(main())
