"""Check kernels and decoding on a GPU or a TPU in five minutes, without pytest.

    python tools/gpu/device_check.py --out device_check.json

Compares the device's kernels with NumPy, and tree decoding of the shipped model and its heads with autoregressive
decoding: in float32 and bfloat16, with and without the kernels and CUDA graphs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare machine has no installed hydrajax

import hydrajax
from hydrajax import assets
from hydrajax.api import make_autoregressive_fn, make_decode_fn
from hydrajax.decoding.state import Params
from hydrajax.ops import check, trace
from hydrajax.trees import presets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--drafts", default=",".join(assets.HEADS), help="shipped drafts (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("device_check.json"))
    args = parser.parse_args()

    found = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "cells": []}
    kernels = "TPU" if trace.on_tpu() else "GPU"
    found["kernels"] = check.disagreement(kernels, interpret=trace.on_cpu()) or "agree with NumPy"
    print(found["kernels"], flush=True)
    for dtype, own in itertools.product(["float32", "bfloat16"], [True, False]):
        here = trace.platform().replace(gpu_kernels=own, tpu_kernels=own, cuda_graphs=own)
        with trace.tracing(platform=here):
            for cell in _cells(args, dtype):
                found["cells"].append({"dtype": dtype, "own_kernels_and_graphs": own, **cell})
                args.out.write_text(json.dumps(found, indent=1))
                print(json.dumps(found["cells"][-1]), flush=True)
    # In bfloat16 two tokens can be equally likely, and rounding decides.
    exact = all(cell["equal_rows"] == cell["rows"] for cell in found["cells"] if cell["dtype"] == "float32")
    return 0 if exact and found["kernels"] == "agree with NumPy" else 1


def _cells(args: argparse.Namespace, dtype: str) -> Iterator[dict]:
    """Decode with each draft; yield the rows that equal decoding without one."""
    base = hydrajax.load(assets.base(), dtype=dtype)
    prompts = np.random.default_rng(0).integers(0, base.model.config.vocab_size, (args.prompts, 32), dtype=np.int32)
    want = make_autoregressive_fn(base.model, max_new_tokens=args.new_tokens)(Params(base.params.base, {}), prompts)
    for name in args.drafts.split(","):
        loaded = base.with_draft(assets.path(name))
        began = time.perf_counter()
        decode = make_decode_fn(loaded.model, loaded.drafter, presets.sparse(), max_new_tokens=args.new_tokens)
        out = decode(loaded.params, prompts)
        equal = (np.asarray(out.tokens) == np.asarray(want.tokens)).all(axis=1)
        cell = {"draft": name, "rows": len(equal), "equal_rows": int(equal.sum())}
        yield cell | {"tokens_per_step": out.tokens_per_step(), "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    sys.exit(main())
