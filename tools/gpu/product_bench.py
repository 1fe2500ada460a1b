"""Time a layer's products on one GPU, by type of the weights and number of rows, against the memory's bandwidth.

    python tools/gpu/product_bench.py --out products.jsonl                         # the products of a 7B's layer
    python tools/gpu/product_bench.py --types int4 --tiles 8x64x8x4x3,8x128x8x4x3  # other tiles for 4 bits

Each program multiplies with several weights in turn, which are together larger than the device's cache. Tiles are
splits x columns x groups x warps x stages of `hydrajax.lowbit.kernels.few_bits_gpu.Tiles`. Programs are compiled first.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare machine has no installed hydrajax

from json_lines import write_lines

from hydrajax import plugins
from hydrajax.bench.device_memory import copy_bandwidth, nbytes
from hydrajax.bench.rounds import median_ms
from hydrajax.lowbit.kernels import few_bits_gpu
from hydrajax.models.weights import quantized_type
from hydrajax.ops import matmul

SHAPES = {"qkv": (4096, 12288), "out": (4096, 4096), "gate_up": (4096, 22016), "down": (11008, 4096)}  # of a 7B
SAMPLE = 64  # columns that are quantised, on the host; a weight repeats them


def weights_of(kind: str, depth: int, width: int, total: int):
    """Return random weights of this type, of ``total`` bytes together."""
    narrow = np.random.default_rng(0).normal(size=(depth, SAMPLE)).astype(np.float32) / depth**0.5
    sample = jnp.bfloat16(narrow) if kind == "bfloat16" else quantized_type(kind, "kernel").of(narrow)

    @jax.jit
    def one(number):  # other weights by other rotations of the sample's columns
        return jax.tree.map(lambda x: jnp.tile(jnp.roll(x, number, axis=-1), width // SAMPLE), sample)

    def shaped(weight):
        return dataclasses.replace(weight, shape_=(depth, width)) if hasattr(weight, "shape_") else weight

    first = shaped(one(0))
    return [first, *(shaped(one(number)) for number in range(1, max(2, -(-total // nbytes(first)))))]


def in_turn(x, weights, turns: int):
    """Multiply with all weights in turn, many times. The rows of a product depend on the product before it."""

    def product(weight, x):
        out = matmul(x, weight, x.dtype) if isinstance(weight, jax.Array) else weight.project(x, x.dtype)
        return x + 0.001 * out[:, :1]

    def turn(_, x):
        for weight in weights:
            x = product(weight, x)
        return x

    return jax.lax.fori_loop(0, turns, turn, x)


def programs(args: argparse.Namespace) -> Iterator[tuple[dict, jax.stages.Lowered, tuple]]:
    """Yield the description of each product, its program and the arguments."""
    for kind, name in itertools.product(args.types, args.products):
        weights = weights_of(kind, *SHAPES[name], args.megabytes * 2**20)
        for rows, tiles in itertools.product(args.rows, args.tiles if kind.startswith("int4") else [None]):
            if tiles:
                few_bits_gpu.TILES = dict.fromkeys(few_bits_gpu.TILES, few_bits_gpu.Tiles(*map(int, tiles.split("x"))))
            inputs = jax.random.normal(jax.random.key(1), (rows, SHAPES[name][0]), jnp.bfloat16), weights
            traced_anew = functools.partial(in_turn, turns=args.turns)
            cell = {"type": kind, "product": name, "rows": rows, "tiles": tiles}
            yield cell, jax.jit(traced_anew).lower(*inputs), inputs


def measured(program: jax.stages.Compiled, inputs: tuple, turns: int, bandwidth: float) -> dict[str, float]:
    weights = inputs[1]
    micros = 1e3 * median_ms(functools.partial(program, *inputs), 5) / (turns * len(weights))
    size = nbytes(weights[0])
    return {"microseconds": micros, "bytes": size, "bandwidth_share": 1e6 * size / bandwidth / micros}


def words(text: str) -> list[str]:
    return text.split(",")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", type=words, default=["bfloat16", "int8", "int4", "fp8"], help="default: %(default)s")
    parser.add_argument("--rows", type=lambda text: [int(word) for word in words(text)], default=[1, 64])
    parser.add_argument("--products", type=words, default=list(SHAPES), help="default: %(default)s")
    parser.add_argument("--tiles", type=words, default=[None], help="default: the kernel's own")
    parser.add_argument("--megabytes", type=int, default=256, help="of the weights of a program (default %(default)s)")
    parser.add_argument("--turns", type=int, default=20, help="of a program's loop (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("product_bench.jsonl"))
    args = parser.parse_args()
    if unknown := {*args.types} - {"bfloat16", *plugins.Group("weights")} or {*args.products} - {*SHAPES}:
        parser.error(f"got {', '.join(sorted(unknown))}, expected types and products of the help")

    bandwidth, began = copy_bandwidth(), time.perf_counter()
    lines = [{"device": jax.devices()[0].device_kind, "jax": jax.__version__}]
    lines[0]["copy_gigabytes_per_second"] = bandwidth / 1e9
    with ThreadPoolExecutor() as threads:  # waits for all
        compiled = [(cell, threads.submit(lowered.compile), inputs) for cell, lowered, inputs in programs(args)]
    print(f"{len(compiled)} programs compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for cell, program, inputs in compiled:
        if error := program.exception():
            cell["error"] = str(error).partition("\n")[0][:200]
        else:
            cell |= measured(program.result(), inputs, args.turns, bandwidth)
        lines.append(cell)
        print(json.dumps(cell), flush=True)
        write_lines(lines, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
