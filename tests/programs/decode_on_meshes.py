"""Decode with one base and its heads on several meshes; report the tokens and the sharding of every parameter.

Arguments: the folder of the heads, of ``settings.json`` and for ``answer.json``; the base.
"""

import json
from pathlib import Path

import jax
import numpy as np

import hydrajax
from helpers.leaves import by_path
from helpers.programs import answer
from hydrajax.decoding.inputs import settled_inputs
from hydrajax.decoding.prompt_batch import right_padded
from hydrajax.sharding import make_mesh


def describe(tree) -> dict:
    """Return the shape of each array, the shapes of its shards and the number of distinct shards."""
    return {
        name: {
            "shape": x.shape,
            "shards": [shard.data.shape for shard in x.addressable_shards],
            "distinct": len({str(shard.index) for shard in x.addressable_shards}),
        }
        for name, x in by_path(tree).items()
    }


def main(folder: Path, base: str) -> dict:
    settings = json.loads((folder / "settings.json").read_text())
    found, prompts = {}, settings["prompts"]
    prompt, lengths = right_padded(prompts, max(map(len, prompts)))
    tree = hydrajax.TreeTopology.from_choices(settings["tree"])

    plain = None
    for name, sizes in settings["meshes"].items():
        mesh = make_mesh(**sizes) if sizes else None
        m = hydrajax.load(base, folder, placement=mesh)
        plain = plain or m
        gathered = jax.tree.map(lambda a, b: bool(np.array_equal(np.asarray(a), np.asarray(b))), m.params, plain.params)
        executor = m.executor(m.program(tree=tree, max_new_tokens=settings["max_new"]))
        given = settled_inputs(m.program(), m.config, prompt, lengths)
        state = executor.prefill(*given)
        empty = executor.empty(len(prompts), state.target.cache.layers[0][0].shape[2], given.sampling)
        answers = list(hydrajax.generate(executor, prompts, batch_size=len(prompts)))
        found[name] = {
            "keys": describe({"keys": state.target.cache.layers[0][0]})["keys"],
            "empty_keys": describe({"keys": empty.target.cache.layers[0][0]})["keys"],
            "tokens": [answer.output_ids for answer in answers],
            "emitted": [answer.emitted_per_step for answer in answers],
            "base": describe(m.params.base),
            "draft": describe(m.params.draft),
            "values_equal": all(jax.tree.leaves(gathered)),
        }
    try:
        make_mesh(data=3, model=4)
    except hydrajax.HydrajaxError as error:
        found["refusal"] = str(error)
    try:
        hydrajax.load(base, folder, placement=make_mesh(model=3))
    except hydrajax.HydrajaxError as error:
        found["undivided"] = str(error)
    return found


if __name__ == "__main__":
    answer(main)
