"""Measure the host memory that loading a base takes in addition to the device copy.

    python experiments/load_memory.py --output experiments/results/load_memory.json

Writes a checkpoint of random weights (default: 2 GB of float32 in four shards), loads it in a new process and samples
that process's resident memory. On a CPU the device copy is host memory too and is subtracted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from rich.progress import Progress
from safetensors.numpy import save_file

from hydrajax.families.family_layout import base_layout
from hydrajax.families.family_registry import from_llama_config
from hydrajax.files import WholeFile
from hydrajax.models.layout import shapes
from hydrajax.models.llama_config import LlamaConfig

MAX_SHARDS = 1.3  # allowed host memory above the device copy, in largest shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="float32 weights to write (default %(default)s)")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument(
        "--devices", type=int, default=8, help="simulated CPU devices of the sharded case (default %(default)s)"
    )
    parser.add_argument("--directory", type=Path, help="directory of the checkpoint (default: a temporary one)")
    parser.add_argument("--load", help=argparse.SUPPRESS)  # settings of the measuring process
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    if args.load:
        measure(args.directory, json.loads(args.load))
        return
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        directory = Path(folder)
        sizes = write_checkpoint(directory, args.gigabytes, args.shards)
        report = {"checkpoint_bytes": sum(sizes), "largest_shard_bytes": max(sizes), "cases": []}
        cases = ({}, {"dtype": "bfloat16"}, {"quantize": "int8"}, {"model": args.devices})
        for case in cases:
            command = [sys.executable, __file__, "--directory", str(directory), "--load", json.dumps(case)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found = case | json.loads(done.stdout.splitlines()[-1])
            extra = found["peak_bytes"] - found["before_bytes"] - found["device_bytes"]
            found["beside_device_copy_in_largest_shards"] = round(extra / max(sizes), 3)
            report["cases"].append(found)
            print(case or "float32", found["beside_device_copy_in_largest_shards"], "largest shards,", end=" ")
            print(f"{found['seconds']:.1f} s", "ok" if extra < MAX_SHARDS * max(sizes) else "ABOVE THE LIMIT")
    if args.output:
        with WholeFile(args.output, "--output") as file:
            file.write_text(json.dumps(report, indent=1) + "\n")


def write_checkpoint(directory: Path, gigabytes: float, n_shards: int) -> list[int]:
    """Write a random LLaMA of width 2048 with enough layers for this size. Return the bytes of each shard."""
    shape = LlamaConfig(32_000, 2048, 5632, 1, 16, 16, 128)
    one, two = (sum(map(np.prod, shapes(base_layout(shape.replace(n_layers=n))).values())) for n in (1, 2))
    n_layers = max(1, round(1 + (gigabytes * 1e9 / 4 - one) / (two - one)))
    config = shape.replace(n_layers=int(n_layers))
    (directory / "config.json").write_text(json.dumps(from_llama_config(config, "load_memory")))
    tensors = shapes(base_layout(config))
    total = 4 * sum(int(np.prod(size)) for size in tensors.values())
    weight_map, shard, sizes, random = {}, {}, [], np.random.default_rng(0)

    def flush():
        name = f"model-{len(sizes) + 1:05}.safetensors"
        weight_map.update(dict.fromkeys(shard, name))
        save_file(shard, directory / name)
        sizes.append((directory / name).stat().st_size)
        shard.clear()

    for name, size in tensors.items():
        shard[name] = random.standard_normal(size, dtype=np.float32) * np.float32(0.02)
        if sum(x.nbytes for x in shard.values()) > total / n_shards:
            flush()
    flush()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sizes


def measure(directory: Path, case: dict) -> None:
    """Load the checkpoint in this process and print memory and time as JSON."""
    import jax

    if case.get("model"):
        jax.config.update("jax_num_cpu_devices", case["model"])
    import hydrajax
    from hydrajax.sharding import make_mesh

    mesh = make_mesh(1, case["model"]) if case.get("model") else None
    jax.block_until_ready(jax.numpy.ones((64, 64)) @ jax.numpy.ones((64, 64)))  # the backend's own memory
    before, peak, stop = resident(), [0], threading.Event()

    def sample():
        while not stop.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.002)

    thread = threading.Thread(target=sample)
    thread.start()
    began = time.perf_counter()
    with Progress(console=None) as bar:
        task = bar.add_task("loading", total=None)
        loaded = hydrajax.load(
            directory,
            dtype=case.get("dtype", "float32"),
            quantize=case.get("quantize"),
            placement=mesh,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        jax.block_until_ready(loaded.params)
    seconds = time.perf_counter() - began
    stop.set()
    thread.join()
    device = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
    print()
    print(json.dumps({"before_bytes": before, "peak_bytes": peak[0], "device_bytes": device, "seconds": seconds}))


def resident() -> int:
    """Return the resident bytes of this process, mapped files included (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    main()
