"""Measure the host memory that loading a base takes in addition to the device copy, and the bytes that are read.

    python experiments/load_memory.py --output experiments/results/load_memory.json
    python experiments/load_memory.py --gigabytes 10 --stored bfloat16 --width 4096 --shards 5 --discard
        --cases bfloat16 model processes

Writes a checkpoint of random weights (default: 2 GB of float32 in four shards), loads each case in a new process and
samples that process's memory. On a CPU the device copy is host memory too and is subtracted. Private memory leaves out
the pages of mapped files, which the kernel can drop.

The files are dropped from the kernel's cache before each case, so ``disk_bytes`` is what is read for it, with what the
kernel reads ahead: it can read all columns where a device needs a few. The case ``processes`` starts two processes that
share a mesh; they load in turn, as each would on a host of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import Progress
from safetensors.numpy import save_file

from hydrajax import processes
from hydrajax.families.family_layout import base_layout
from hydrajax.families.family_registry import from_llama_config
from hydrajax.files import WholeFile
from hydrajax.formats.huggingface import load_llama
from hydrajax.models.layout import shapes
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.sharding import make_mesh, placer

MAX_SHARDS = 1.3  # allowed private memory above the device copy, in largest shards
CASES = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "model": {"model": True},
    "processes": {"model": True, "processes": 2},
}
VALUES = 1 << 24  # random numbers, which all tensors repeat
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # glibc returns arrays of this size when they are freed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="weights to write (default %(default)s)")
    parser.add_argument("--stored", choices=("float32", "bfloat16"), default="float32", help="dtype of the file")
    parser.add_argument("--width", type=int, default=2048, help="width of the model (default %(default)s)")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument(
        "--devices", type=int, default=8, help="simulated CPU devices of the sharded cases (default %(default)s)"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], help="cases to measure (default: all)")
    parser.add_argument(
        "--discard", action="store_true", help="drop each parameter once it is placed, to load more than fits in memory"
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
        config = config_of(args.width, args.gigabytes * 1e9 / jnp.dtype(args.stored).itemsize)
        sizes = write_checkpoint(directory, config, args.stored, args.shards)
        largest = max(int(np.prod(shape)) for shape in shapes(base_layout(config)).values())
        report = {"checkpoint_bytes": sum(sizes), "largest_shard_bytes": max(sizes), "stored": args.stored}
        report |= {"largest_tensor_numbers": largest, "discard": args.discard, "cases": []}
        for name in args.cases:
            case = CASES[name] | {"discard": args.discard}
            if case.pop("model", False):
                case |= {"model": args.devices, "dtype": args.stored}
            for found in in_processes(directory, case):
                private = found["private_peak_bytes"] - found["private_before_bytes"] - found["device_bytes"]
                mapped = found["peak_bytes"] - found["before_bytes"] - found["device_bytes"]
                found["beside_device_copy_in_largest_shards"] = round(private / max(sizes), 3)
                found["with_mapped_files_in_largest_shards"] = round(mapped / max(sizes), 3)
                report["cases"].append({"case": name} | found)
                print(
                    f"{name}: {private / 1e6:,.0f} MB in addition to the device copy, "
                    f"{private / max(sizes):.3f} largest shards"
                    f" ({mapped / max(sizes):.3f} with mapped files); {found['disk_bytes'] / 1e9:.2f} GB from disk; "
                    f"{found['seconds']:.1f} s",
                    "ok" if private < MAX_SHARDS * max(sizes) else "ABOVE THE LIMIT",
                )
    if args.output:
        with WholeFile(args.output, "--output") as file:
            file.write_json(report)


def config_of(width: int, numbers: float) -> LlamaConfig:
    """Return a LLaMA of this width with enough layers for this many parameters."""
    shape = LlamaConfig(32_000, width, width * 11 // 4, 1, width // 128, width // 128, 128)
    one, two = (sum(map(np.prod, shapes(base_layout(shape.replace(n_layers=n))).values())) for n in (1, 2))
    return shape.replace(n_layers=max(1, round(1 + (numbers - one) / (two - one))))


def write_checkpoint(directory: Path, config: LlamaConfig, stored: str, n_shards: int) -> list[int]:
    """Write random weights. Return the bytes of each shard."""
    (directory / "config.json").write_text(json.dumps(from_llama_config(config, "load_memory")))
    tensors = shapes(base_layout(config))
    values = (np.random.default_rng(0).standard_normal(VALUES, dtype=np.float32) * 0.02).astype(jnp.dtype(stored))
    total = values.itemsize * sum(int(np.prod(size)) for size in tensors.values())
    weight_map, shard, sizes = {}, {}, []

    def flush():
        name = f"model-{len(sizes) + 1:05}.safetensors"
        weight_map.update(dict.fromkeys(shard, name))
        save_file(shard, directory / name)
        sizes.append((directory / name).stat().st_size)
        shard.clear()

    for name, size in tensors.items():
        shard[name] = np.resize(values, size)
        if sum(x.nbytes for x in shard.values()) > total / n_shards:
            flush()
    flush()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sizes


def in_processes(directory: Path, case: dict) -> list[dict]:
    """Load the checkpoint in one new process or several, one after another. Return what each measured."""
    command = [sys.executable, __file__, "--directory", str(directory), "--load", json.dumps(case)]
    count = case.get("processes", 1)
    environments = [{}]
    if count > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            shared = {processes.ADDRESS: f"127.0.0.1:{free.getsockname()[1]}", processes.COUNT: str(count)}
        environments = [shared | {processes.INDEX: str(i)} for i in range(count)]
    running = [
        subprocess.Popen(
            command, env=os.environ | RETURNED | own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for own in environments
    ]
    found = []
    for process in running:
        drop_from_cache(directory)
        process.stdin.write("\n")  # it waits for its turn
        process.stdin.flush()
        line = next((line for line in process.stdout if line.startswith("{")), None)
        if line is None:
            sys.exit(f"load_memory: a measuring process failed: {case}")
        found.append(case | json.loads(line))
    for process in running:
        process.stdin.close()  # they end together
    if sum(process.wait() != 0 for process in running):
        sys.exit(f"load_memory: a measuring process failed: {case}")
    return found


def drop_from_cache(directory: Path, *more: Path) -> None:
    for path in (*directory.glob("*.safetensors"), *more):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # pages that are not written yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(directory: Path, case: dict) -> None:
    """Load the checkpoint in this process and print memory, bytes and time as JSON."""
    if case.get("model"):
        jax.config.update("jax_num_cpu_devices", case["model"] // case.get("processes", 1))
    processes.start()
    mesh = make_mesh(1, case["model"]) if case.get("model") else None
    jax.block_until_ready(jax.numpy.ones((64, 64)) @ jax.numpy.ones((64, 64)))  # the backend's own memory
    place, discarded = placer(mesh), np.zeros(0, np.float32)

    def place_and_discard(array, axes):
        jax.block_until_ready(place(array, axes))
        return discarded

    sys.stdin.readline()
    before, read, peaks, stop = resident(), bytes_from_disk(), [0, 0], threading.Event()

    def sample():
        while not stop.is_set():
            peaks[:] = map(max, peaks, resident())
            time.sleep(0.002)

    thread = threading.Thread(target=sample)
    thread.start()
    began = time.perf_counter()
    with Progress(console=None) as bar:
        task = bar.add_task("loading", total=None)
        params = load_llama(
            directory,
            case.get("dtype", "float32"),
            place_and_discard if case["discard"] else place,
            quantize=case.get("quantize"),
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )[1]
        jax.block_until_ready(params)
    seconds, disk = time.perf_counter() - began, bytes_from_disk() - read
    stop.set()
    thread.join()
    arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    held = sum(part.data.nbytes for leaf in arrays for part in leaf.addressable_shards)
    found = {"before_bytes": before[0], "peak_bytes": peaks[0], "private_before_bytes": before[1]}
    found |= {"private_peak_bytes": peaks[1], "device_bytes": held, "disk_bytes": disk, "seconds": seconds}
    print(f"\n{json.dumps(found)}", flush=True)
    sys.stdin.readline()  # until the others have loaded, which an ended process would stop


def resident() -> tuple[int, int]:
    """Return the resident bytes of this process (Linux): with the pages of mapped files, and without."""
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[1]) * 4096, (int(pages[1]) - int(pages[2])) * 4096


def bytes_from_disk() -> int:
    """Return the bytes that this process has caused to be read from disk (Linux)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


if __name__ == "__main__":
    main()
