"""Time a layer's products on one GPU, by type of the weights and number of rows, against the memory's bandwidth.

    python tools/gpu/product_bench.py --out products.jsonl                     # the products of a 7B's layer
    python tools/gpu/product_bench.py --types int4 --tiles 64x8x4x3,128x8x4x3  # other tiles of the kernel for 4 bits

Each program multiplies with several weights in turn, which are together larger than the device's cache. Tiles are
columns x groups x warps x stages of `hydrajax.models.kernels.few_bits_gpu`. Programs are compiled first, in threads.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare machine has no installed hydrajax

from hydrajax.measure.device_memory import copy_bandwidth, nbytes
from hydrajax.measure.timing import median_ms
from hydrajax.models.kernels import few_bits_gpu
from hydrajax.models.low_bit_types import QUANTIZED, quantized_type
from hydrajax.models.products import matmul

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default="bfloat16,int8,int4,fp8", help="default %(default)s")
    parser.add_argument("--rows", default="1,64", help="default %(default)s")
    parser.add_argument("--products", default=",".join(SHAPES), help="default %(default)s")
    parser.add_argument("--tiles", help="COLUMNSxGROUPSxWARPSxSTAGES, several with commas (default: the kernel's)")
    parser.add_argument("--megabytes", type=int, default=256, help="of the weights of a program (default %(default)s)")
    parser.add_argument("--turns", type=int, default=20, help="of a program's loop (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("product_bench.jsonl"))
    args = parser.parse_args()
    types, products = args.types.split(","), args.products.split(",")
    if unknown := {*types} - {"bfloat16", *QUANTIZED} or {*products} - {*SHAPES}:
        parser.error(f"got {', '.join(sorted(unknown))}, expected types and products of the help")

    bandwidth = copy_bandwidth()
    lines = [{"device": jax.devices()[0].device_kind, "jax": jax.__version__}]
    lines[0]["copy_gigabytes_per_second"] = bandwidth / 1e9
    began = time.perf_counter()
    with ThreadPoolExecutor() as threads:
        compiling = []
        for kind in types:
            for name in products:
                weights = weights_of(kind, *SHAPES[name], args.megabytes * 2**20)
                for rows in map(int, args.rows.split(",")):
                    x = jax.random.normal(jax.random.key(1), (rows, SHAPES[name][0]), jnp.bfloat16)
                    for tiles in args.tiles.split(",") if args.tiles and kind.startswith("int4") else [None]:
                        if tiles:
                            given = few_bits_gpu.Tiles(*map(int, tiles.split("x")))
                            few_bits_gpu.TILES = dict.fromkeys(few_bits_gpu.TILES, given)
                        lowered = jax.jit(functools.partial(in_turn, turns=args.turns)).lower(x, weights)  # traced anew
                        cell = {"type": kind, "product": name, "rows": rows, "tiles": tiles}
                        compiling.append((cell, threads.submit(lowered.compile), x, weights))
        for *_, program, _, _ in compiling:
            program.exception()
    print(f"{len(compiling)} programs compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for cell, program, x, weights in compiling:
        if error := program.exception():
            cell["error"] = str(error).partition("\n")[0][:200]
        else:
            run = program.result()
            micros = (
                1e3 * median_ms(lambda run=run, x=x, weights=weights: run(x, weights), 5) / (args.turns * len(weights))
            )
            floor = 1e6 * nbytes(weights[0]) / bandwidth
            cell |= {"microseconds": micros, "bytes": nbytes(weights[0]), "bandwidth_share": floor / micros}
        lines.append(cell)
        print(json.dumps(cell), flush=True)
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
