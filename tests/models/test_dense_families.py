"""Gemma, OLMo, Granite, SmolLM 3, Phi, YaRN and LongRoPE, compared with transformers on random small models (float32).

`helpers.dense_models` draws the settings.
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
from safetensors.torch import load_file

from helpers.dense_models import EXAMPLES, FAMILIES, N_TOKENS, QUICK, VOCAB, random_pair, random_pairs
from helpers.with_transformers import assert_equal_logits, generated, greedy_ids, prompts_of
from hydrajax import plugins
from hydrajax.bench.roofline.operators import flops
from hydrajax.bench.roofline.passes import abstract_params, forward
from hydrajax.bench.roofline.traced import trace
from hydrajax.formats.draft_registry import KINDS
from hydrajax.formats.export_base import export_llama
from hydrajax.formats.huggingface import load_llama
from hydrajax.models.attention import rope_frequencies, rope_table
from hydrajax.models.packed_forward import run_base


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
        assert_equal_logits(random_pair(tmp_path_factory.mktemp(family), family, fields, seed), single=True)

    drawn()


@pytest.mark.parametrize(
    ("family", "dtype"), [("gemma2", torch.bfloat16), *((family, torch.float32) for family in EXAMPLES)]
)
def test_an_export_has_the_numbers_of_the_file(tmp_path, family, dtype):
    pair = random_pair(tmp_path / "base", family, EXAMPLES[family], dtype=dtype)
    model, params = load_llama(pair.folder, jnp.bfloat16 if dtype == torch.bfloat16 else jnp.float32)
    export_llama(tmp_path / "copy", model, params, dtype=None)
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (pair.folder, tmp_path / "copy"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype == dtype
        assert torch.equal(tensor, ours[name]), name
    assert load_llama(tmp_path / "copy")[0].config == pair.model.config
    fields = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert fields["model_type"] == family


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


@pytest.mark.quick("gemma3_text-hydra++")
@pytest.mark.parametrize(("family", "kind"), [("gemma2", "medusa"), ("gemma3_text", "hydra++"), ("phi3", "lookup")])
def test_trees_give_transformers_greedy_ids(pairs, family, kind):
    prompts = prompts_of(3)
    expected = greedy_ids(pairs(family), prompts)
    assert len({token for ids in expected for token in ids}) > 3  # not one token repeated
    assert generated(pairs(family), prompts, kind) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", EXAMPLES)
def test_fifty_prompts_with_and_without_drafts(pairs, family):
    prompts = prompts_of(50)
    expected = greedy_ids(pairs(family), prompts)
    for kind in ("none", "lookup", "hydra", "eagle3", "dflash"):
        assert generated(pairs(family), prompts, kind) == expected, kind


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "granite", "phi3"])
def test_every_kind_of_draft(pairs, family):
    prompts = prompts_of(3)
    expected = greedy_ids(pairs(family), prompts)
    for kind in KINDS:
        assert generated(pairs(family), prompts, kind) == expected, kind


@pytest.mark.slow
@pytest.mark.parametrize("quantize", sorted(set(plugins.Group("weights")) - {"fp8"}))  # which no CPU has
@pytest.mark.parametrize("family", EXAMPLES)
def test_few_bits(pairs, family, quantize):
    """Quantised weights give nearly the logits, and the bound is not that of other weights."""
    pair = pairs(family)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, N_TOKENS)).astype(np.int32)
    model, params = load_llama(pair.folder, quantize=quantize)
    hidden = run_base(model, params, tokens).hidden
    ours = model.apply({"params": params}, hidden, method="logits")
    likeness = np.corrcoef(np.ravel(ours), np.ravel(pair.logits(tokens)))[0, 1]
    assert (0.99 if quantize == "int8" else 0.6) < likeness < 1 - 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("family", EXAMPLES)
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
        assert np.abs(leaf).max() > 0, path
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
    found = on_eight_devices(tmp_path, "families_on_a_mesh", *folders, flags="--xla_backend_optimization_level=0")
    del found["devices"]
    assert len(found) == 3 * len(EXAMPLES)
    for name, (single, divided) in found.items():
        assert single == divided, name
