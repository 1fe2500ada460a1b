"""Decode with a draft model on one device, and on a mesh with the draft replicated and sharded.

Arguments: the folder for ``answer.json``, the base, the draft.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

import hydrajax
from hydrajax.sharding import Placement, make_mesh


def main(folder: Path, base: str, draft: str) -> None:
    found = {"devices": jax.device_count()}
    prompt, lengths = np.array([[5, 17, 60, 2, 33], [90, 1, 4, 0, 0]], np.int32), np.array([5, 3], np.int32)
    for name, mesh, shard in [("single", None, False), ("replicated", (2, 4), False), ("sharded", (2, 4), True)]:
        m = hydrajax.load(base, draft, placement=Placement(mesh and make_mesh(*mesh), shard_draft=shard))
        found[name] = {"qkv": m.params.draft["layers_0"]["qkv"].addressable_shards[0].data.shape}
        for rule, tree in (("greedy", "cartesian-3x2"), ("greedy", "dynamic-8-2-3"), ("rejection", "chain-3")):
            decode = hydrajax.make_decode_fn(m.model, m.drafter, tree, rule, max_new_tokens=16)
            out = decode(m.params, prompt, lengths, rng=jax.random.key(3))
            found[name][rule + tree] = [out.tokens.tolist(), out.accept_lengths.tolist()]
    (folder / "answer.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
