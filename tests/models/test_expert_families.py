"""Mixtral, Qwen, OLMoE and GLM mixtures of experts, compared with transformers on random small models (float32).

`helpers.expert_models` draws the settings.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from helpers.dense_models import N_TOKENS, QUICK, VOCAB, random_pair, random_pairs
from helpers.expert_models import EXPERT_EXAMPLES, EXPERT_FAMILIES
from helpers.released import refusal
from helpers.with_transformers import assert_equal_logits, generated, greedy_ids, prompts_of
from hydrajax import plugins
from hydrajax.formats.draft_registry import KINDS
from hydrajax.formats.export_base import export_llama
from hydrajax.formats.huggingface import load_llama
from hydrajax.formats.peft import linear_layers
from hydrajax.models.adapter import Adapter, check_adapter
from hydrajax.models.packed_forward import run_base

BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Return ``pairs(family)``: the model of `EXPERT_EXAMPLES` in both packages."""
    return random_pairs(tmp_path_factory, EXPERT_EXAMPLES)


@pytest.mark.parametrize("family", EXPERT_EXAMPLES)
def test_logits_of_a_text_and_of_a_tree(pairs, family):
    assert_equal_logits(pairs(family), single=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_logits_with_any_settings(tmp_path_factory, family):
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(EXPERT_FAMILIES[family], st.integers(0, 3))
    def drawn(fields, seed):
        folder = tmp_path_factory.mktemp(family)
        pair = random_pair(folder, family, fields, seed)
        assert_equal_logits(pair, single=True)
        export_llama(folder / "copy", pair.model, pair.params, dtype=None)
        assert load_llama(folder / "copy")[0].config == pair.model.config

    drawn()


@pytest.mark.parametrize("family", EXPERT_EXAMPLES)
def test_an_export_has_the_numbers_of_the_file(tmp_path, pairs, family):
    """In bfloat16, in which the bias that chooses stays float32."""
    pair = random_pair(tmp_path / "base", family, EXPERT_EXAMPLES[family], dtype=torch.bfloat16)
    model, params = load_llama(pair.folder, jnp.bfloat16)
    export_llama(tmp_path / "copy", model, params, dtype=None)
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (pair.folder, tmp_path / "copy"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype == (torch.float32 if name.endswith(BIAS) else torch.bfloat16)
        assert torch.equal(tensor, ours[name]), name
    assert load_llama(tmp_path / "copy")[0].config == pair.model.config == pairs(family).model.config
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["model_type"] == family


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "glm4_moe"])
def test_experts_in_one_tensor(tmp_path, pairs, family):
    fused = random_pair(tmp_path, family, EXPERT_EXAMPLES[family], fused=True)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    for one, other in zip(jax.tree.leaves(fused.params), jax.tree.leaves(pairs(family).params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_layer_that_predicts_several_tokens_is_left_out(tmp_path, pairs):
    pair = random_pair(tmp_path, "glm4_moe", EXPERT_EXAMPLES["glm4_moe"])
    tensors = load_file(tmp_path / "model.safetensors")
    more = {"model.layers.3.eh_proj.weight": torch.ones(32, 64), "model.layers.3.mlp.gate.weight": torch.ones(8, 32)}
    save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 1}))
    for one, other in zip(jax.tree.leaves(load_llama(tmp_path)[1]), jax.tree.leaves(pair.params), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow  # above, the logits of a tree
@pytest.mark.parametrize(("family", "kind"), [("qwen3_moe", "hydra"), ("glm4_moe", "lookup")])
def test_trees_give_transformers_greedy_ids(pairs, family, kind):
    prompts = prompts_of(3)
    expected = greedy_ids(pairs(family), prompts)
    assert len({token for ids in expected for token in ids}) > 3  # not one token repeated
    assert generated(pairs(family), prompts, kind) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPERT_EXAMPLES)
def test_fifty_prompts_with_and_without_drafts(pairs, family):
    prompts = prompts_of(50)
    expected = greedy_ids(pairs(family), prompts)
    for kind in ("none", "lookup", "hydra", "eagle3", "dflash"):
        assert generated(pairs(family), prompts, kind) == expected, kind


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe"])
def test_every_kind_of_draft(pairs, family):
    prompts = prompts_of(3)
    expected = greedy_ids(pairs(family), prompts)
    for kind in KINDS:
        assert generated(pairs(family), prompts, kind) == expected, kind


def likeness_of(pair, quantize: str) -> float:
    """Return the correlation of logits of quantised weights with transformers'."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, N_TOKENS)).astype(np.int32)
    model, params = load_llama(pair.folder, quantize=quantize)

    @jax.jit
    def run(params):
        return model.apply({"params": params}, run_base(model, params, tokens).hidden, method="logits")

    return np.corrcoef(np.ravel(run(params)), np.ravel(pair.logits(tokens)))[0, 1]


def test_eight_bits(pairs):
    """Quantised weights give nearly the logits, and the bound is not that of other weights."""
    assert 0.98 < likeness_of(pairs("qwen2_moe"), "int8") < 1 - 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("quantize", sorted(set(plugins.Group("weights")) - {"fp8"}))  # which no CPU has
@pytest.mark.parametrize("family", EXPERT_EXAMPLES)
def test_few_bits(pairs, family, quantize):
    assert (0.98 if quantize == "int8" else 0.5) < likeness_of(pairs(family), quantize) < 1 - 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPERT_EXAMPLES)
def test_gradients_reach_every_weight(pairs, family):
    """Also with recomputed layers; the two gradients agree."""
    pair = pairs(family)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 20)).astype(np.int32)

    def loss(params, model):
        hidden = run_base(model, params, tokens).hidden
        logits = model.apply({"params": params}, hidden, method="logits")
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1))

    plain, again = (
        jax.jit(jax.grad(lambda p, m=m: loss(p, m)), compiler_options=QUICK)(pair.params)
        for m in (pair.model, pair.model.clone(remat=True))
    )
    for (path, leaf), other in zip(jax.tree.leaves_with_path(plain), jax.tree.leaves(again), strict=True):
        chooses = path[-1].key == "choice_bias"  # has no gradient
        assert chooses == (np.abs(leaf).max() == 0), path
        np.testing.assert_allclose(leaf, other, atol=1e-4, err_msg=str(path))


def test_an_adapter_of_attention_alone(pairs):
    config = pairs("qwen3_moe").model.config
    check_adapter(Adapter(targets=("q_proj", "o_proj", "lm_head")), config)
    refusal(lambda: check_adapter(Adapter(), config), "adapter.targets", "gate_proj, up_proj, down_proj", "experts")
    assert {name.rpartition(".")[2] for name in linear_layers(config)} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "lm_head",
    }  # fmt: skip


@pytest.mark.slow
def test_sharded_over_eight_devices(pairs, tmp_path, on_eight_devices):
    folders = [str(pairs(family).folder) for family in EXPERT_EXAMPLES]
    found = on_eight_devices(tmp_path, "families_on_a_mesh", *folders, flags="--xla_backend_optimization_level=0")
    del found["devices"]
    assert len(found) == 3 * len(EXPERT_EXAMPLES)
    for name, (single, divided) in found.items():
        assert single == divided, name
