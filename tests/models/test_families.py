"""Models of every family, dense and with experts, compared with transformers on random small models (float32).

`helpers.family_settings` has the settings. test_golden.py compares a trained base.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import hydrajax
from helpers import gemma4_settings
from helpers.family_pairs import (
    BIAS,
    EXAMPLES,
    EXPERTS,
    FAMILIES,
    HYBRIDS,
    TOKENS,
    TOLERANCE,
    Pair,
    assert_equal_logits,
    exact_recurrences,
    logits_of,
    random_pair,
)
from helpers.family_settings import LINEAR, LLAMA3, VOCAB, WINDOW
from helpers.lab import QUICK
from helpers.refusals import refusal
from hydrajax import plugins
from hydrajax.bench.random_models import random_draft
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

ALIKE = {"qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "lfm2", "lfm2_moe"}  # the slow tests have them too
ALIKE |= {"exaone4", "seed_oss", "hunyuan_v1_dense", "deepseek_v2"}
# 16 features per head and theta 1e4 put one wavelength in each of llama3's three zones for an original context of 32:
# 6.3 (unchanged), 19.9 (interpolated) and 62.8 and up (scaled).
OTHERS = {
    "llama, MHA": {"num_key_value_heads": 4},
    "llama, MQA": {
        "num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "llama, llama3": {"head_dim": 16, "rope_parameters": LLAMA3 | {"rope_theta": 1e4}},
    "llama, linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2, window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0},
    "qwen3, wide heads": {"head_dim": 16},
    "granitemoehybrid, dense": {
        "num_local_experts": 0, "shared_intermediate_size": 40, "mamba_n_heads": 4, "mamba_d_state": 6,
        "layer_types": [LINEAR, "full_attention", LINEAR],
    },
    "granitemoehybrid, attention": {
        "num_local_experts": 0, "layer_types": ["full_attention"] * 3, "mamba_n_heads": 4,
    },
    "nemotron_h, dense": {
        "hybrid_override_pattern": "M-MM*-", "mamba_num_heads": 4, "mamba_head_dim": 12, "n_groups": 2, "head_dim": 8,
    },
    **gemma4_settings.OTHERS,
}  # fmt: skip
NEW = 12


def prompts_of(count: int) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(1, VOCAB, random.integers(3, 18)).tolist() for _ in range(count)]


def greedy_ids(pair, prompts: list[list[int]]) -> list[list[int]]:
    """Return transformers' continuations."""
    found, how = [], {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW}
    how["use_cache"] = not hasattr(pair.theirs.config, "time_step_limit")  # which limits no step after the prompt
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():  # transformers needs the mask because no padding id is set
            out = pair.theirs.generate(ids, attention_mask=torch.ones_like(ids), **how)
        found.append(out[0, len(prompt) :].tolist())
    return found


def generated(pair, prompts: list[list[int]], kind: str) -> list[list[int]]:
    """Return the tokens of tree decoding in batches of 3 with a new draft of this kind."""
    if kind in KINDS:
        drafter, params = random_draft(pair.model, pair.params, kind)
    else:
        m = hydrajax.load(pair.folder).with_draft(kind)
        drafter, params = m.drafter, m.params
    dynamic = drafter.spec.supports_dynamic_tree
    tree = "dynamic-6-2-3" if dynamic else f"chain-{min(drafter.spec.depth, 3)}" if drafter.spec.depth else "root"
    decode = hydrajax.make_decode_fn(pair.model, drafter, tree, max_new_tokens=NEW, eos_ids=())
    longest, found = max(map(len, prompts)), []
    for first in range(0, len(prompts), 3):
        rows = (prompts[first : first + 3] * 3)[:3]
        prompt = np.array([row + [0] * (longest - len(row)) for row in rows], np.int32)
        found += decode(params, prompt, np.array([len(row) for row in rows], np.int32)).tokens[:, :NEW].tolist()
    return found[: len(prompts)]


@pytest.fixture(scope="module", autouse=True)
def recurrences():
    with exact_recurrences():
        yield


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Return ``pairs(name)``: the model of `EXAMPLES` or `OTHERS` in both packages, made once."""

    def make(name: str) -> Pair:
        family = name.split(",")[0]
        return random_pair(tmp_path_factory.mktemp(family), family, (EXAMPLES | OTHERS)[name])

    return functools.cache(make)


@pytest.mark.parametrize("name", sorted(ALIKE))
def test_logits_of_a_text(pairs, name):
    np.testing.assert_allclose(logits_of(*pairs(name)[1:3]), pairs(name).logits(TOKENS), atol=TOLERANCE, rtol=0)


@pytest.mark.quick(*EXAMPLES.keys() - ALIKE, "llama, llama3", "mistral", "qwen2", "qwen3, wide heads")
@pytest.mark.parametrize("name", EXAMPLES | OTHERS)
def test_logits_of_a_text_and_of_a_tree(pairs, name):
    assert_equal_logits(pairs(name), single=name in OTHERS)


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


@pytest.mark.quick(*EXAMPLES.keys() - HYBRIDS, "qwen3_next", "olmo_hybrid", "lfm3", "nemotron_h")
@pytest.mark.parametrize("family", EXAMPLES)
def test_an_export_has_the_numbers_of_the_file(tmp_path, family):
    """In bfloat16 for some, in which the bias that chooses experts stays float32."""
    low = family in (*EXPERTS, "gemma2", "lfm2_moe")
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


LLAMAS = [name for name in OTHERS if name.startswith("llama")]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "olmo3", "gemma3_text", "lfm3", *LLAMAS])
def test_rope_frequencies(pairs, family):
    """Angular frequencies match to float32 rounding, because errors grow with the position."""
    pair = pairs(family)
    rope = pair.theirs.model.rotary_emb
    for i, kind in enumerate(pair.model.config.kinds):
        if kind.recurrent:
            continue
        name = "" if kind.sliding_window is None or family in ("qwen3", "phi3") else "sliding_attention_"
        name = "full_attention_" if name == "" and family in ("olmo3", "gemma3_text", "lfm3") else name
        config = pair.model.config.of_layer(i)
        np.testing.assert_allclose(rope_frequencies(config), getattr(rope, f"{name}inv_freq").numpy(), rtol=1e-6)
        factor = np.abs(rope_table(config, jnp.zeros((1, 1), jnp.int32))[0]).max()
        np.testing.assert_allclose(factor, getattr(rope, f"{name}attention_scaling"), rtol=1e-6)


@pytest.mark.quick("gemma3_text-hydra++", "mistral-none", "qwen3_next-hydra++", "deepseek_v3-hydra++")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gemma3_text", "hydra++"),
        ("mistral", "none"),
        pytest.param("qwen3_next", "hydra++", marks=pytest.mark.slow),
        ("olmo_hybrid", "lookup"),
        ("lfm3", "hydra++"),
        ("nemotron_h", "lookup"),
        ("deepseek_v3", "hydra++"),
        ("glm4_moe_lite", "lookup"),
        ("glm4_moe_lite", "mtp"),
    ],
)
def test_decoding_gives_transformers_greedy_ids(pairs, name, kind):
    """Prompts of several lengths, some longer than the window, in one batch."""
    pair, prompts = pairs(name), prompts_of(3)
    expected = greedy_ids(pair, prompts)
    assert len({token for ids in expected for token in ids}) > 3  # not one token repeated
    assert generated(pair, prompts, kind) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", EXAMPLES)
def test_fifty_prompts_with_and_without_drafts(pairs, family):
    prompts = prompts_of(50)
    expected = greedy_ids(pairs(family), prompts)
    for kind in ("none", "lookup", "hydra", "eagle3", "dflash"):
        assert generated(pairs(family), prompts, kind) == expected, kind
    if family in ("gemma3_text", "granite", "phi3", "qwen2_moe", "glm4_moe", "lfm3"):
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
        ours = logits_of(model, params)
        likeness = np.corrcoef(np.ravel(ours), np.ravel(pair.logits(TOKENS)))[0, 1]
        least = (0.97, 0.5) if pair.model.config.any_experts else (0.99, 0.6)
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


def test_an_adapter_of_attention_alone(pairs):
    config = pairs("qwen3_moe").model.config
    check_adapter(Adapter(targets=("q_proj", "o_proj", "lm_head")), config)
    refusal(lambda: check_adapter(Adapter(), config), "adapter.targets", "gate_proj, up_proj, down_proj", "experts")
    muse = pairs("muse_glimmer_text").model.config
    refusal(lambda: check_adapter(Adapter(), muse), "adapter.targets: got q_proj", "gates: remove it")
    latent = pairs("deepseek_v3").model.config
    refusal(lambda: check_adapter(Adapter(targets=("q_proj", "o_proj")), latent), "got q_proj, o_proj", "is latent")
    assert list(linear_layers(latent)) == ["lm_head"]
    layers = {name.rpartition(".")[2] for name in linear_layers(config)}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
