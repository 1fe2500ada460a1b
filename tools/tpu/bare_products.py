#!/usr/bin/env python
"""Compile the products of a base and nothing else for TPUs: what XLA's own kernels of plain matrices can reach.

    python tools/tpu/bare_products.py --chips v5e,v6e --rows 2,64

Prints the compiler's cycles of one turn of a loop over those of the bytes of all weights, as `compile_report.py` does
for whole steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TOOLS / "gpu"), str(TOOLS.parent)]

import described_tpu  # noqa: E402  first, as it sets what JAX reads at its import
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from compiled_tpu import cycles_of_loop  # noqa: E402

from hydrajax.bench.shapes import PRESETS  # noqa: E402
from hydrajax.models.llama_config import LlamaConfig  # noqa: E402

LAYERS = 2


def shapes(config: LlamaConfig) -> list[tuple[int, int]]:
    """Query, key and value; attention's output; gate and up; down: each layer's matrices."""
    heads = config.n_heads * config.head_dim
    qkv = heads + 2 * config.n_kv_heads * config.head_dim
    return [
        (config.width, qkv),
        (heads, config.width),
        (config.width, 2 * config.mlp_width),
        (config.mlp_width, config.width),
    ]


def turns(weights, x):
    """Multiply through all layers and the lm head, four times; every column of every product is used."""
    layers, lm_head = weights

    def turn(_, x):
        for qkv, out, gate_up, down in layers:
            attended = x @ qkv
            queries, others = attended[:, : len(out)], attended[:, len(out) :]
            x = x + (queries + jnp.sum(others, axis=1, keepdims=True)) @ out
            gate, up = jnp.split(x @ gate_up, 2, axis=1)
            x = x + (jax.nn.silu(gate) * up) @ down
        best = jnp.argmax((x @ lm_head).astype(jnp.float32), axis=1)
        return x + best[:, None].astype(x.dtype)

    return jax.lax.fori_loop(0, 4, turn, x)


def main(args: argparse.Namespace) -> None:
    config = PRESETS[args.shape]
    matrices = shapes(config)
    numbers = LAYERS * sum(rows * columns for rows, columns in matrices) + config.width * config.vocab_size
    for name in args.chips.split(","):
        chip, place = described_tpu.CHIPS[name], described_tpu.placed_on(name)
        floor = 2 * numbers / chip.device.bandwidth * chip.hertz
        for rows in map(int, args.rows.split(",")):
            layer = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in matrices)
            weights = [layer] * LAYERS, jax.ShapeDtypeStruct((config.width, config.vocab_size), jnp.bfloat16)
            x = jax.ShapeDtypeStruct((rows, config.width), jnp.bfloat16)
            hlo = jax.jit(turns).lower(*place(weights, x)).compile().as_text()
            cycles = cycles_of_loop(hlo)
            print(f"{name}, {rows} rows: {cycles / 1e6:.2f}M cycles, {cycles / floor:.2f} of the bytes", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b", choices=PRESETS, help="shape of the base (default %(default)s)")
    parser.add_argument("--chips", default="v5e", help="default %(default)s")
    parser.add_argument("--rows", default="2,64", help="default %(default)s")
    arguments = parser.parse_args()
    if unknown := set(arguments.chips.split(",")) - set(described_tpu.CHIPS):
        parser.error(f"--chips: got {min(unknown)}, expected some of {', '.join(described_tpu.CHIPS)}")
    main(arguments)
