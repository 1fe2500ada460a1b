"""Models of every family, dense and with experts, compared with transformers on random small models (float32).

`helpers.dense_models` and `helpers.expert_models` draw the settings.
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

from helpers import dense_models, expert_models
from helpers.dense_models import N_TOKENS, QUICK, VOCAB, random_pair, random_pairs
from helpers.refusals import refusal
from helpers.with_transformers import assert_equal_logits, generated, greedy_ids, prompts_of
from hydrajax import plugins
from hydrajax.bench.roofline.operators import flops
from hydrajax.bench.roofline.passes import abstract_params, forward
from hydrajax.bench.roofline.traced import trace
from hydrajax.formats.draft_registry import KINDS
from hydrajax.formats.export_base import export_llama
from hydrajax.formats.huggingface import load_llama
from hydrajax.formats.peft import linear_layers
from hydrajax.models.adapter import Adapter, check_adapter
from hydrajax.models.attention import rope_frequencies, rope_table
from hydrajax.models.packed_forward import run_base

FAMILIES = dense_models.FAMILIES | expert_models.EXPERT_FAMILIES
EXPERTS = expert_models.EXPERT_EXAMPLES
EXAMPLES = dense_models.EXAMPLES | EXPERTS
BIAS = "e_score_correction_bias"
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, N_TOKENS)).astype(np.int32)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Return ``pairs(family)``: the model of `EXAMPLES` in both packages."""
    return random_pairs(tmp_path_factory, EXAMPLES)


@pytest.mark.parametrize("family", EXAMPLES)
def test_logits_of_a_text_and_of_a_tree(pairs, family):
    assert_equal_logits(pairs(family), single=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_with_any_settings(tmp_path_factory, family):
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(FAMILIES[family], st.integers(0, 3))
    def drawn(fields, seed):
        folder = tmp_path_factory.mktemp(family)
        pair = random_pair(folder, family, fields, seed)
        assert_equal_logits(pair, single=True)
        export_llama(folder / "copy", pair.model, pair.params, dtype=None)
        assert load_llama(folder / "copy")[0].config == pair.model.config

    drawn()


@pytest.mark.parametrize("family", EXAMPLES)
def test_an_export_has_the_numbers_of_the_file(tmp_path, family):
    """In bfloat16 for some, in which the bias that chooses experts stays float32."""
    low = family in EXPERTS or family == "gemma2"
    dtype = torch.bfloat16 if low else torch.float32
    pair = random_pair(tmp_path / "base", family, EXAMPLES[family], dtype=dtype)
    model, params = load_llama(pair.folder, jnp.bfloat16 if low else jnp.float32)
    export_llama(tmp_path / "copy", model, params, dtype=None)
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (pair.folder, tmp_path / "copy"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype == (torch.float32 if name.endswith(BIAS) else dtype)
        assert torch.equal(tensor, ours[name]), name
    assert load_llama(tmp_path / "copy")[0].config == pair.model.config
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["model_type"] == family


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "olmo3", "gemma3_text"])
def test_rope_frequencies(pairs, family):
    """Angular frequencies match to float32 rounding, because errors grow with the position."""
    pair = pairs(family)
    rope = pair.theirs.model.rotary_emb
    for i, kind in enumerate(pair.model.config.kinds):
        name = "" if kind.sliding_window is None or family in ("qwen3", "phi3") else "sliding_attention_"
        name = "full_attention_" if name == "" and family in ("olmo3", "gemma3_text") else name
        config = pair.model.config.of_layer(i)
        np.testing.assert_allclose(rope_frequencies(config), getattr(rope, f"{name}inv_freq").numpy(), rtol=1e-6)
        factor = np.abs(rope_table(config, jnp.zeros((1, 1), jnp.int32))[0]).max()
        np.testing.assert_allclose(factor, getattr(rope, f"{name}attention_scaling"), rtol=1e-6)


def test_trees_give_transformers_greedy_ids(pairs):
    pair, prompts = pairs("gemma3_text"), prompts_of(3)
    expected = greedy_ids(pair, prompts)
    assert len({token for ids in expected for token in ids}) > 3  # not one token repeated
    assert generated(pair, prompts, "hydra++") == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", EXAMPLES)
def test_fifty_prompts_with_and_without_drafts(pairs, family):
    prompts = prompts_of(50)
    expected = greedy_ids(pairs(family), prompts)
    for kind in ("none", "lookup", "hydra", "eagle3", "dflash"):
        assert generated(pairs(family), prompts, kind) == expected, kind
    if family in ("gemma3_text", "granite", "phi3", "qwen2_moe", "glm4_moe"):
        for kind in KINDS:
            assert generated(pairs(family), prompts[:3], kind) == expected[:3], kind


@pytest.mark.quick("qwen2_moe")
@pytest.mark.parametrize("family", EXAMPLES)
def test_few_bits(pairs, family):
    """Quantised weights give nearly the logits, and the bound is not that of other weights."""
    pair = pairs(family)
    every = sorted(set(plugins.Group("weights")) - {"fp8"})  # which no CPU has
    for quantize in ("int8",) if family == "qwen2_moe" else every:
        model, params = load_llama(pair.folder, quantize=quantize)
        hidden = jax.jit(lambda params, model=model: run_base(model, params, TOKENS).hidden)(params)
        ours = model.apply({"params": params}, hidden, method="logits")
        likeness = np.corrcoef(np.ravel(ours), np.ravel(pair.logits(TOKENS)))[0, 1]
        least = (0.98, 0.5) if family in EXPERTS else (0.99, 0.6)
        assert least[quantize != "int8"] < likeness < 1 - 1e-9, quantize


@pytest.mark.slow
@pytest.mark.parametrize("family", EXAMPLES)
def test_gradients_reach_every_weight(pairs, family):
    """Also with recomputed layers; the two gradients agree."""
    pair, tokens = pairs(family), TOKENS[:, :20]

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


@pytest.mark.parametrize("family", ["gemma3_text", pytest.param("smollm3", marks=pytest.mark.slow)])
def test_the_roofline_counts_layers_of_every_kind(pairs, family):
    """The sum over kinds is the count of the whole model. 600 tokens: layers with a window cost less."""
    model = pairs(family).model
    tokens = jax.ShapeDtypeStruct((1, 600), jnp.int32)

    def run(params, tokens):
        hidden = run_base(model, params, tokens).hidden
        return model.apply({"params": params}, hidden, method="logits")

    whole = flops(trace(run, abstract_params(model), tokens)[0])
    assert flops(forward(model, 1, 600, 0)) == pytest.approx(whole, rel=1e-6)
    alike = model.clone(config=model.config.of_layer(1))
    assert abs(flops(forward(alike, 1, 600, 0)) - whole) > 0.02 * whole


@pytest.mark.slow
def test_sharded_over_eight_devices(pairs, tmp_path, on_eight_devices):
    folders = [str(pairs(family).folder) for family in EXAMPLES]
    found = on_eight_devices(
        tmp_path, "same_on_a_mesh", "families", *folders, flags="--xla_backend_optimization_level=0"
    )
    del found["devices"]
    assert len(found) == 3 * len(EXAMPLES)
    for name, (single, divided) in found.items():
        assert single == divided, name


# --- files of experts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "glm4_moe"])
def test_experts_in_one_tensor(tmp_path, pairs, family):
    fused = random_pair(tmp_path, family, EXAMPLES[family], fused=True)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    jax.tree.map(np.testing.assert_array_equal, fused.params, pairs(family).params)


def test_a_layer_that_predicts_several_tokens_is_left_out(tmp_path):
    pair = random_pair(tmp_path, "glm4_moe", EXAMPLES["glm4_moe"])
    tensors = load_file(tmp_path / "model.safetensors")
    more = {"model.layers.3.eh_proj.weight": torch.ones(32, 64), "model.layers.3.mlp.gate.weight": torch.ones(8, 32)}
    save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 1}))
    jax.tree.map(np.testing.assert_array_equal, load_llama(tmp_path)[1], pair.params)


def test_an_adapter_of_attention_alone(pairs):
    config = pairs("qwen3_moe").model.config
    check_adapter(Adapter(targets=("q_proj", "o_proj", "lm_head")), config)
    refusal(lambda: check_adapter(Adapter(), config), "adapter.targets", "gate_proj, up_proj, down_proj", "experts")
    layers = {name.rpartition(".")[2] for name in linear_layers(config)}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
