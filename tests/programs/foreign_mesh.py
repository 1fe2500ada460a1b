"""Decode with parameters on a mesh of tunix (fsdp, tp), and describe where they lie. Argument: the folder."""

from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import hydrajax
from helpers.programs import answer
from hydrajax.bench.random_models import random_base
from hydrajax.decoding.state import Params
from hydrajax.drafters.none import NoDrafter
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.refilled_batch import inputs_of

CONFIG = LlamaConfig(1024, 128, 256, n_layers=3, n_heads=8, n_kv_heads=4, head_dim=16, max_positions=64)
# As `tunix.models.qwen2.model.ShardingConfig` has them; scales of norms are sharded too.
SPECS = {
    **dict.fromkeys(
        ("q_proj.w", "k_proj.w", "v_proj.w", "lm_head.w", "up_proj.kernel", "gate_proj.kernel"), ("fsdp", "tp")
    ),
    **dict.fromkeys(("input_embedding", "down_proj.kernel"), ("tp", "fsdp")),
    "o_proj.w": ("tp", None, "fsdp"),
}
PROMPTS = [[1 + row, 2, 3, 4 + row] for row in range(4)]


def sharded(arrays: dict, mesh) -> dict:
    def home(name):
        return next((spec for end, spec in SPECS.items() if name.endswith(end)), ("tp",))

    return {name: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*home(name)))) for name, x in arrays.items()}


def gathered_before_the_loop(m) -> int:
    """Return the number of all-gathers outside loops in the compiled program of a burst of steps."""
    executor = m.executor(m.program(tree="chain-2", max_new_tokens=8))
    given = inputs_of(executor, [np.array(prompt) for prompt in PROMPTS], [executor.request] * len(PROMPTS))
    state = executor._prefill.lower(executor.params, *executor._placed(given), slots=None).out_info
    stopped = np.zeros(len(PROMPTS), bool)
    burst = executor._advance.lower(executor.params, state, stopped, np.int32(0), np.bool_(False))
    return burst.compile().as_text().rpartition("\nENTRY")[2].count(" all-gather(")


def texts_of(m, **settings) -> list[list[int]]:
    found = m.generate(PROMPTS, max_new_tokens=8, batch_size=len(PROMPTS), **settings)
    return [one.output_ids for one in found]


def first_buffer(array: jax.Array) -> int:
    return array.addressable_shards[0].data.unsafe_buffer_pointer()


def main(folder: Path) -> dict:
    model, base = random_base(CONFIG)
    alone = hydrajax.LanguageModel(model, NoDrafter(), Params(base, {}))
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    theirs = sharded(hydrajax.to_params(alone, "tunix"), mesh)
    m = hydrajax.from_params(CONFIG, theirs, "tunix", draft="lookup")
    before = texts_of(m, tree="chain-2")
    m.update_params({name: -x for name, x in theirs.items()})
    other = texts_of(m, tree="chain-2")
    m.update_params(theirs)
    ours = m.params.base
    leaves = jax.tree.leaves(ours)
    return {
        "equal": [before == texts_of(alone), before == texts_of(m, tree="chain-2"), before != other],
        "mesh": dict(m.placement.base.shape),
        "share": sum(x.addressable_shards[0].data.nbytes for x in leaves) / sum(x.nbytes for x in leaves),
        "shared": [
            first_buffer(ours["embedding"]) == first_buffer(theirs["embedder.input_embedding"]),
            first_buffer(ours["layers_1"]["down"]) == first_buffer(theirs["layers.1.mlp.down_proj.kernel"]),
        ],
        "gathered": gathered_before_the_loop(m),
    }


if __name__ == "__main__":
    answer(main)
