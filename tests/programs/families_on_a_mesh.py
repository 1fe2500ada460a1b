"""Decode with models of several families on one device and on a mesh.

Arguments: the folder for ``answer.json``, the bases. The answer has the tokens of both by base and draft.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

import hydrajax
from hydrajax.bench.random_models import random_draft
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.sharding import make_mesh

PROMPTS = np.array([[5, 17, 60, 2, 33], [9, 1, 4, 0, 0], [8, 12, 50, 29, 8], [3, 3, 3, 3, 0]], np.int32)
LENGTHS = np.array([5, 3, 5, 4], np.int32)
DRAFTS = {"none": "root", "hydra": "chain-3", "eagle3": "dynamic-6-1-3"}


def main(folder: Path, *bases: str) -> None:
    found = {"devices": jax.device_count()}
    for base in bases:
        one, several = hydrajax.load(base), hydrajax.load(base, placement=make_mesh(data=2, model=4))
        for kind, tree in DRAFTS.items():
            drafter, params = random_draft(one.model, one.params.base, kind)
            tokens = []
            for m in (one, several):
                own = params._replace(base=m.params.base, draft=jax.device_get(params.draft))
                program = m.program(drafter=drafter, tree=tree, max_new_tokens=12, eos_ids=())
                out = FusedExecutor(m.model, own, program, mesh=m.placement.base).decode(PROMPTS, LENGTHS)
                tokens.append(out.tokens[:, :12].tolist())
            found[f"{Path(base).name}, {kind}"] = tokens
    (folder / "answer.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
