"""Sharding over eight CPU devices: every weight where its rule puts it, and the ids of the single-device run.

XLA fixes the number of CPU devices when it starts, so the work runs in one subprocess and the tests read its findings.
"""

import json

import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from helpers.refusals import assert_refused
from helpers.released import Hydra, hydra_config, randomise, save
from hydrajax.sharding import AXES, make_mesh, sharding

BASE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
WIDTH, VOCAB, N_HEADS, N_KV_HEADS, HEAD_DIM, MLP = 32, 96, 8, 4, 8, 88
MAX_NEW = 20
PROMPTS = [[5, 17, 60, 2, 33], [90, 1, 4, 4, 71, 8, 12, 50, 29]]
TREE = [[rank] for rank in range(24)] + [[rank, 0] for rank in range(12)]  # wide: random heads guess badly

QUICKLY = "--xla_backend_optimization_level=0"  # compiles faster
MESHES = {"single": None, "mesh": {"data": 2, "model": 4}}


@pytest.fixture(scope="module")
def found(llama_checkpoint, tmp_path_factory, on_eight_devices) -> dict:
    folder = tmp_path_factory.mktemp("sharding")
    base = llama_checkpoint(**BASE)
    heads = randomise(Hydra(2, 1, VOCAB, embed=None))
    save(folder, heads.state_dict(), hydra_config(2, 1))
    settings = {"prompts": PROMPTS, "tree": TREE, "max_new": MAX_NEW, "meshes": MESHES}
    (folder / "settings.json").write_text(json.dumps(settings))
    return on_eight_devices(folder, "decode_on_meshes", base, flags=QUICKLY)


def test_parameters_are_sharded(found):
    """The matrices are split in 4 along the axis their rule names (columns, then rows: two all-reduces per layer)."""
    expected = {"embedding": [VOCAB // 4, WIDTH], "lm_head": [WIDTH, VOCAB // 4], "norm/scale": [WIDTH]}
    for i in range(2):
        expected |= {
            f"layers_{i}/qkv": [WIDTH, N_KV_HEADS // 4, N_HEADS // N_KV_HEADS + 2, HEAD_DIM],
            f"layers_{i}/out": [N_HEADS * HEAD_DIM // 4, WIDTH],
            f"layers_{i}/gate_up": [WIDTH, 2, MLP // 4],
            f"layers_{i}/down": [MLP // 4, WIDTH],
            f"layers_{i}/attention_norm/scale": [WIDTH],
            f"layers_{i}/mlp_norm/scale": [WIDTH],
        }
    leaves = found["mesh"]["base"]
    assert leaves.keys() == expected.keys()
    for name, shard in expected.items():
        leaf = leaves[name]
        assert leaf["shards"] == [shard] * 8, name
        # Different devices hold different quarters; the data axis repeats them.
        assert leaf["distinct"] == (1 if leaf["shape"] == shard else 4), name


def test_draft_heads_are_sharded(found):
    """Blocks over their outputs and lm heads over the vocabulary."""
    leaves, quarter = found["mesh"]["draft"], WIDTH // 4
    block = {"bias": [2, quarter], "shared_kernel": [2 * WIDTH, 2, quarter]}
    expected = {f"head_{k}/conditioned/{name}": shape for k in range(2) for name, shape in block.items()}
    expected["head_1/conditioned/path_kernel"] = [WIDTH, 2, quarter]
    for k in range(2):
        expected |= {f"head_{k}/lm_bias": [VOCAB // 4], f"head_{k}/lm_kernel": [WIDTH, VOCAB // 4]}
    assert leaves.keys() == expected.keys()
    for name, shard in expected.items():
        assert leaves[name]["shards"] == [shard] * 8, name
        assert leaves[name]["distinct"] == 4, name


def test_sharded_run_equals_single_device(found):
    """The parameters put together again are the file's, and tree decoding gives the same ids and accepted lengths."""
    assert found["single"]["base"]["embedding"]["shards"] == [[VOCAB, WIDTH]]
    assert found["mesh"]["values_equal"]
    tokens = np.array(found["single"]["tokens"])
    assert tokens.shape == (len(PROMPTS), MAX_NEW)
    assert len(np.unique(tokens)) > 5  # not one token repeated, which any error could give too
    np.testing.assert_array_equal(found["mesh"]["tokens"], tokens)
    assert max(map(max, found["single"]["emitted"])) > 1
    assert found["mesh"]["emitted"] == found["single"]["emitted"]


def test_an_executor_divides_the_sequences_over_the_data_axis(found):
    """And key-value heads over the model axis."""
    batch, kv_heads, slots, head_dim = found["single"]["keys"]["shape"]
    keys = found["mesh"]["keys"]
    assert keys["shards"] == [[batch // 2, kv_heads // 4, slots, head_dim]] * 8
    assert keys["distinct"] == 8
    assert found["mesh"]["empty_keys"] == keys


@pytest.mark.slow
def test_every_draft_and_rule_on_a_mesh(llama_checkpoint, tmp_path, on_eight_devices):
    """The tokens of one device, for batches that the data axis divides and that it does not, also with prefill in
    chunks.
    """
    base = llama_checkpoint(**BASE)
    found = on_eight_devices(tmp_path, "same_on_a_mesh", "drafts", base, flags=QUICKLY)
    del found["devices"]
    assert len(found) > 20
    for name, (single, divided) in found.items():
        assert single == divided, name


@pytest.mark.slow
def test_a_draft_model_is_replicated_or_sharded_like_the_base(llama_checkpoint, tmp_path, on_eight_devices):
    """The same ids and accepted lengths as on one device. The draft is nearly the base: one layer less."""
    base = llama_checkpoint(**BASE)
    draft = llama_checkpoint(**BASE, num_hidden_layers=1)
    found = on_eight_devices(tmp_path, "same_on_a_mesh", "draft_model", base, draft, flags=QUICKLY)
    per_head = [N_HEADS // N_KV_HEADS + 2, HEAD_DIM]
    shapes = {name: found[name].pop("qkv") for name in ("single", "replicated", "sharded")}
    assert shapes["single"] == shapes["replicated"] == [WIDTH, N_KV_HEADS, *per_head]
    assert shapes["sharded"] == [WIDTH, 1, *per_head]
    assert found["replicated"] == found["sharded"] == found["single"]
    assert found["single"]["vmap"] == found["single"]["steps"] == found["single"]["shard_map"]
    assert any(max(map(max, lengths)) > 0 for _, lengths in found["single"].values())


def test_refused_meshes(found):
    assert found["undivided"] == "mesh: got model=3, expected a divisor of the base's 8 heads: 1, 2, 4, 8"
    assert found["refusal"] == "mesh: got data=3 x model=4, expected 1 to 8 devices"
    assert_refused(lambda: make_mesh(model=1000), ("mesh: got data=1 x model=1000, expected 1 to",))
    for sizes in [{"data": 0}, {"model": 0}, {"model": -1}, {"data": -1, "model": -1}]:
        assert_refused(lambda sizes=sizes: make_mesh(**sizes), ("mesh: got data=",))


def test_an_axis_is_split_where_it_divides():
    for shape, axes, model, expected in [
        ((64, 16), ("vocab", "width"), 8, ("model", None)),
        ((16, 8, 3, 4), ("width", "kv_heads", None, None), 8, (None, "model", None, None)),
        ((16, 2, 32), ("width", None, "mlp"), 4, (None, None, "model")),
        # LLaMA 33B has 52 heads: on 8 devices their kernel is split over the width, which 8 divides.
        ((6656, 52, 3, 128), ("width", "kv_heads", None, None), 8, ("model", None, None, None)),
        ((6656, 52, 3, 128), ("width", "kv_heads", None, None), 4, (None, "model", None, None)),
        ((18, 52), ("width", "kv_heads"), 8, (None, None)),  # nothing to split: a copy on each
        ((16,), ("width",), 8, (None,)),  # a norm's scale is too small to be worth it
        ((16,), None, 8, ()),
    ]:
        mesh = AbstractMesh((2, model), **AXES)
        assert sharding(mesh, shape, axes).spec == PartitionSpec(*expected)


@pytest.mark.slow
def test_parameters_of_another_programs_mesh_stay_where_they_are(tmp_path, on_eight_devices):
    """On tunix' axes fsdp and tp, what our layout keeps is not copied, and no weight is gathered for a whole loop."""
    found = on_eight_devices(tmp_path, "foreign_mesh")
    assert found["equal"] == [True] * 3
    assert found["mesh"] == {"data": 4, "model": 2}
    assert found["share"] < 1.01 / 8
    assert found["shared"] == [True] * 2
    assert found["gathered"] == 0
