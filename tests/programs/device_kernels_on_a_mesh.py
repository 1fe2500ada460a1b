"""Decode on a mesh and on one device with the kernels of GPUs and TPUs, interpreted on CPU devices.

Argument: the folder for ``answer.json``, which has the tokens of both by platform and draft.
"""

from pathlib import Path

import jax
import numpy as np
from jax.experimental import pallas as pl

from helpers.described_programs import CONFIG
from helpers.programs import answer
from hydrajax import ops
from hydrajax.api import make_decode_fn
from hydrajax.bench.random_models import random_base, random_draft
from hydrajax.drafters.trainable import abstract_draft
from hydrajax.models.init import abstract_base
from hydrajax.ops import trace
from hydrajax.sharding import make_mesh, tree_shardings

PLATFORMS = {"gpu": trace.Platform("gpu", 1, 9.0), "tpu": trace.Platform("tpu", 1)}
DRAFTS = {"lookup": "chain-3", "hydra++": "cartesian-3x2"}


def main(_: Path) -> dict:
    real = pl.pallas_call
    pl.pallas_call = lambda *args, **settings: real(*args, **settings | {"interpret": True})
    ops.compiler_options = lambda: None  # this CPU's compiler refuses those of a device
    random = np.random.default_rng(0)
    prompt, lengths = random.integers(0, 128, (2, 32)).astype(np.int32), np.array([32, 9], np.int32)
    model, base = random_base(CONFIG)
    mesh = make_mesh(data=2, model=2)
    found = {}
    for platform, described in PLATFORMS.items():
        for kind, tree in DRAFTS.items():
            drafter, params = random_draft(model, base, kind)
            boxed = {} if kind == "lookup" else abstract_draft(drafter, model)
            placed = type(params)(
                jax.device_put(base, tree_shardings(mesh, abstract_base(model))),
                jax.device_put(params.draft, tree_shardings(mesh, boxed)),
            )
            both = []
            for devices, given in ((1, params), (4, placed)):
                with trace.tracing(platform=described.replace(devices=devices)):
                    decode = make_decode_fn(model, drafter, tree, max_new_tokens=40)
                    out = decode(given, prompt, lengths)
                    both.append([out.tokens.tolist(), out.accept_lengths.tolist()])
            found[f"{platform}, {kind}"] = both
    return found


if __name__ == "__main__":
    answer(main)
