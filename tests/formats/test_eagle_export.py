"""EAGLE exports in every format: read back bit for bit, and loaded strictly by torch modules that give our logits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.draft_heads import VOCAB, WIDTH, config_in, identical, random_params
from helpers.released import refusal
from helpers.torch_eagle import Eagle1
from helpers.torch_eagle import Eagle3 as TorchEagle3
from hydrajax.drafters.draft_lm_head import Vocabulary
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3, default_aux_hidden_layers
from hydrajax.formats.export import export_heads
from hydrajax.formats.load import load_draft
from hydrajax.models.base_model import BoundBase
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.rope_scaling import RopeScaling

TOLERANCE = 1e-5  # relative to logits of magnitude 1 to 10
ODD = Vocabulary(range(1, VOCAB, 2))
BASE = LlamaConfig(VOCAB, WIDTH, 80, n_layers=8, n_heads=4, n_kv_heads=2, head_dim=8, max_positions=64)
MHA = BASE.replace(n_kv_heads=4, rope_theta=500.0, norm_eps=1e-5, mlp_width=48)
CASES = {
    "eagle": (MHA, {"fc_bias": True}),
    "eagle, no bias": (BASE, {"fc_bias": False, "depth": 5}),
    "eagle, scaled": (BASE.replace(rope_scaling=RopeScaling("linear", 4.0)), {}),
    "eagle, some tokens": (BASE, {"vocabulary": ODD}),
    "eagle3": (MHA, {}),
    "eagle3, some tokens": (BASE, {"vocabulary": ODD}),
    "eagle3, normed": (BASE, {"vocabulary": ODD, "norm_before_residual": True}),
    "eagle3, llama 3.1": (BASE.replace(rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32), tied_lm_head=True), {}),
}


@pytest.fixture(scope="module")
def small(tiny_model):
    """The tiny base; drafts need its embedding and lm head."""
    return BoundBase(*tiny_model)


def drafter_of(name: str, dtype=jnp.float32):
    config, settings = CASES[name]
    kind = Eagle3 if name.startswith("eagle3") else Eagle
    return dataclasses.replace(kind.for_base(config, dtype), **settings)


def with_random_bits(drafter, small, dtype) -> dict:
    """Random finite numbers of all sizes, including subnormal ones and negative zeros."""
    random = np.random.default_rng(2)

    def draw(leaf):
        bits = random.integers(0, 256, (*leaf.shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]
        with np.errstate(invalid="ignore"):
            return np.where(np.isfinite(bits), bits, np.array(-0.0, dtype)).astype(dtype)

    return jax.tree.map(draw, jax.eval_shape(lambda: drafter.init(jax.random.key(0), small)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, jnp.float32) for name in CASES),
        *(
            pytest.param(name, jnp.bfloat16, marks=pytest.mark.slow)
            for name in ("eagle", "eagle, no bias", "eagle3", "eagle3, some tokens")
        ),
    ],
)
@pytest.mark.quick("eagle3, llama 3.1-float32", "eagle, scaled-float32")
def test_a_chain_of_formats_keeps_every_bit_and_setting(small, tmp_path, name, dtype):
    """Except the depth, which only our own format stores."""
    drafter, base = drafter_of(name, dtype), CASES[name][0]
    params = with_random_bits(drafter, small, dtype)
    own = "eagle-3" if isinstance(drafter, Eagle3) else "eagle"
    found, kept = drafter, params
    own = None if "normed" in name else own  # which only speculators can express
    only_native = name == "eagle, some tokens"
    for step, format in enumerate(["native", None] if only_native else ["native", own, "speculators", None]):
        export_heads(tmp_path / str(step), found, kept, format=format, dtype=None)
        found, kept = load_draft(tmp_path / str(step), base, None)
        identical(params, kept)
        depth = drafter.spec.depth if step == 0 else type(drafter).depth
        assert found == dataclasses.replace(drafter, depth=depth)
    if only_native:
        return
    first, last = (load_file(tmp_path / step / "model.safetensors") for step in "13")
    assert first.keys() == last.keys()
    assert config_in(tmp_path / "1") == config_in(tmp_path / "3")


@pytest.mark.parametrize("name", ["eagle", "eagle3, some tokens"])
def test_another_dtype_is_the_one_that_is_asked_for(small, tmp_path, name):
    drafter, base = drafter_of(name), CASES[name][0]
    params = random_params(drafter, (small.model, small.params))
    export_heads(tmp_path, drafter, params, dtype=jnp.float16)
    assert config_in(tmp_path)["torch_dtype"] == "float16"
    found, kept = load_draft(tmp_path, base, None)
    assert found.dtype == jnp.float16
    identical(params, kept, jnp.float16)
    again, wide = load_draft(tmp_path, base, jnp.float32)
    assert again.dtype == jnp.float32
    identical(kept, wide, jnp.float32)


# --- what the official modules compute ------------------------------------------------------------------------


def official_module(drafter, format: str) -> torch.nn.Module:
    released, c = format != "speculators", drafter.config
    if isinstance(drafter, Eagle):
        return Eagle1(c, drafter.fc_bias, ("fc", "layers") if released else ("fusion_fc", "transformer"))
    known = None if drafter.vocabulary is None else len(drafter.vocabulary)
    variant = {"norm_before_residual": drafter.norm_before_residual}
    return TorchEagle3(c, len(drafter.spec.aux_hidden_layers), known, released, **variant)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        *(
            (name, format)
            for name in ("eagle", "eagle, no bias", "eagle, scaled")
            for format in ("eagle", "speculators")
        ),
        *((name, format) for name in ("eagle3", "eagle3, some tokens") for format in ("eagle-3", "speculators")),
        ("eagle3, normed", "speculators"),
    ],
)
@pytest.mark.quick("eagle-eagle", "eagle3, some tokens-eagle-3")
def test_official_modules_load_it_strictly_and_compute_our_logits(small, tmp_path, name, format):
    drafter = dataclasses.replace(drafter_of(name), depth=1)
    params = random_params(drafter, (small.model, small.params))
    export_heads(tmp_path, drafter, params, format=format, dtype=None)
    official = official_module(drafter, format)
    official.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)

    random = np.random.default_rng(5)
    tokens = random.integers(0, VOCAB, (2, 10))
    aux_hidden_states = random.standard_normal((2, 10, len(drafter.spec.aux_hidden_layers) * WIDTH)).astype(np.float32)
    following = np.asarray(small.params["embedding"])[np.roll(tokens, -1, axis=1)]
    with torch.no_grad():
        theirs = official(torch.tensor(following), torch.tensor(aux_hidden_states)).numpy()

    @jax.jit
    def logits_of(params):
        hidden = drafter.teacher_hidden(params, jnp.asarray(aux_hidden_states), jnp.asarray(tokens), small)
        return drafter.head_logits(params, 0, hidden[0], small)

    ours = logits_of(params)
    if isinstance(drafter, Eagle):
        theirs = theirs @ np.asarray(small.head_kernel())
    elif drafter.vocabulary is not None:  # d2t and t2d agree
        known = official.d2t.numpy() + np.arange(len(official.d2t))
        assert known.tolist() == np.flatnonzero(official.t2d).tolist() == ODD.tokens.tolist()
    assert 0.3 < theirs.std() < 10
    np.testing.assert_allclose(theirs, ours, atol=TOLERANCE, rtol=TOLERANCE)


# --- what is in config.json, and who needs it -----------------------------------------------------------------


def test_what_the_official_code_needs(small, tmp_path):
    """Fields without a default in eagle/model/{ea_model,configs,cnets,cnets1}.py."""
    for name in set(CASES) - {"eagle3, normed", "eagle, some tokens"}:
        drafter = drafter_of(name)
        export_heads(tmp_path / name, drafter, with_random_bits(drafter, small, np.float32), base_name="lab/base")
        config, c = config_in(tmp_path / name), drafter.config
        wanted = {
            "hidden_size": WIDTH,
            "intermediate_size": c.mlp_width,
            "num_attention_heads": 4,
            "num_key_value_heads": c.n_kv_heads,
            "num_hidden_layers": 1,
            "vocab_size": VOCAB,
            "rms_norm_eps": c.norm_eps,
            "rope_theta": c.rope_theta,
            "model_type": "llama",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "base_model_name_or_path": "lab/base",
        }
        if isinstance(drafter, Eagle):
            wanted |= {"bias": drafter.fc_bias, "architectures": ["LlamaForCausalLM"]}
        else:
            n_known = VOCAB if drafter.vocabulary is None else len(ODD)
            wanted |= {"draft_vocab_size": n_known, "architectures": ["LlamaForCausalLMEagle3"]}
        assert wanted.items() <= config.items()
        assert [path.name for path in (tmp_path / name).glob("*.[sp][at]*")] == ["model.safetensors"]
    assert config_in(tmp_path / "eagle, scaled")["rope_scaling"] == {"type": "linear", "factor": 4.0}


@pytest.mark.parametrize("name", ["eagle", "eagle3, some tokens"])
def test_what_vllm_and_speculators_need(small, tmp_path, name):
    """vllm/transformers_utils/configs/speculators, src/speculators/{config.py,models/eagle3/config.py}."""
    drafter = drafter_of(name)
    params = with_random_bits(drafter, small, np.float32)
    export_heads(tmp_path, drafter, params, format="speculators", base_name="lab/base")
    config = config_in(tmp_path)
    kind = "eagle" if name == "eagle" else "eagle3"
    assert config["speculators_model_type"] == kind
    found = config["speculators_config"]
    assert (found["algorithm"], found["verifier"]["name_or_path"]) == (kind, "lab/base")
    assert found["default_proposal_method"] in [method["proposal_type"] for method in found["proposal_methods"]]
    assert found["proposal_methods"][0]["speculative_tokens"] == 5
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"], layer["head_dim"]) == ("llama", 1, 8)
    if kind == "eagle":
        assert (config["fusion_bias"], config["layernorms"]) == (True, False)
        return
    assert config["norm_before_residual"] is False  # a missing one means true to vLLM
    assert config["draft_vocab_size"] == len(ODD)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # of 8 layers: 2, L // 2 and L - 3


def test_the_model_card_names_the_readers(small, tmp_path):
    for format, words in (("eagle-3", "SGLang"), ("speculators", "vLLM"), ("native", "convert export")):
        drafter = drafter_of("eagle3, some tokens")
        export_heads(tmp_path / format, drafter, with_random_bits(drafter, small, np.float32), format=format)
        card = (tmp_path / format / "README.md").read_text()
        assert words in card.split("Read by:")[1]
        assert f"| draft vocabulary | {len(ODD)} |" in card
        assert "EAGLE-3 heads" in card


# --- what an EAGLE-3 draft reads ------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [[1, 5], [4, 7, 9], [0, 2, 5, 11]])
def test_other_layers_are_written_by_speculators_alone(small, tmp_path, layers):
    """[4, 7, 9] is the default of 10 layers counted from the end, which is why the base's depth must be known."""
    base = BASE.replace(n_layers=12)
    drafter = Eagle3(base.plain_layer, tuple(12 - layer for layer in layers))
    params, record = with_random_bits(drafter, small, np.float32), {"shapes": {"n_layers": 12}, "sha256": "0"}
    export_heads(tmp_path / "heads", drafter, params, dtype=None, base_fingerprint=record)
    assert config_in(tmp_path / "heads")["eagle_aux_hidden_state_layer_ids"] == layers
    found, kept = load_draft(tmp_path / "heads", base, None)
    assert found == drafter
    identical(params, kept)
    pieces = ("expected one of speculators, native", f"layers {layers}", "2, L // 2 and L - 3")
    refused(tmp_path, drafter, "eagle-3", *pieces, base_fingerprint=record)


@pytest.mark.parametrize("n_layers", [*range(1, 12), 32])
def test_the_default_layers_need_no_recorded_depth(small, tmp_path, n_layers):
    base = BASE.replace(n_layers=n_layers)
    drafter = Eagle3(base.plain_layer, default_aux_hidden_layers(n_layers))
    export_heads(tmp_path, drafter, with_random_bits(drafter, small, np.float32), dtype=None)
    assert load_draft(tmp_path, base, None)[0] == drafter
    three = n_layers == 3 or n_layers >= 7
    assert ("speculators_config" in config_in(tmp_path)) == (not three)


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "drafter", "pieces"),
    [
        (
            "eagle",
            drafter_of("eagle3"),
            ("eagle for EAGLE-3 heads", "one of eagle-3, speculators, native"),
        ),
        ("eagle-3", drafter_of("eagle"), ("eagle-3 for EAGLE heads", "one of eagle, speculators, native")),
        (
            "eagle-3",
            drafter_of("eagle3, normed"),
            ("norm_before_residual: got True", "one of speculators, native"),
        ),
        ("hydra", drafter_of("eagle"), ("got hydra for EAGLE heads",)),
        ("medusa", drafter_of("eagle3"), ("got medusa for EAGLE-3 heads",)),
        ("eagle", drafter_of("eagle, some tokens"), ("vocabulary: got 30 tokens, expected all 61", "one of native")),
        ("speculators", drafter_of("eagle, some tokens"), ("vocabulary: got 30 tokens, expected all 61",)),
        ("eagle", Eagle(BASE.replace(n_layers=1, qkv_bias=True)), ("qkv_bias=True", "LLaMA's plain layer")),
        ("speculators", Eagle3(BASE.plain_layer, (9, 2)), ("aux_hidden_layers: got (9, 2)", "unknown depth")),
        ("speculators", Eagle3(BASE.plain_layer, (3, 5)), ("aux_hidden_layers: got (3, 5)", "unknown depth")),
    ],
)
def test_formats_that_cannot_express_it(tmp_path, format, drafter, pieces):
    refused(tmp_path, drafter, format, *pieces)


def refused(folder: Path, drafter, format, *pieces: str, **settings) -> None:
    """The export fails and leaves no files."""
    refusal(lambda: export_heads(folder / "refused", drafter, {}, format=format, **settings), "export", *pieces)
    assert not (folder / "refused").exists()


@pytest.fixture(scope="module")
def native(small, tmp_path_factory) -> Path:
    """Drafts in our own format."""
    drafter, folder = drafter_of("eagle3, some tokens"), tmp_path_factory.mktemp("native")
    export_heads(folder, drafter, with_random_bits(drafter, small, np.float32), format="native")
    return folder


@pytest.mark.parametrize(
    ("name", "value", "pieces"),
    [
        ("depth", 0, ("depth: got 0",)),
        ("depth", 10**9, ("depth: got 1000000000",)),
        ("ttt_length", 0, ("ttt_length: got 0",)),
        ("aux_hidden_layers", [9, 4, 3], ("aux_hidden_layers: got [9, 4, 3]", "has 8")),
        ("aux_hidden_layers", [-1, 4, 3], ("drafter",)),
        ("aux_hidden_layers", [6] * 9, ("aux_hidden_layers: got", "has 8")),
        ("aux_hidden_layers", [], ("drafter",)),
        ("aux_hidden_layers", 3, ("drafter",)),
        ("vocabulary", [1, VOCAB], ("another base", f"got token {VOCAB}")),
        ("vocabulary", [1.5], ("drafter",)),
        ("vocabulary", "all", ("drafter",)),
        ("config", 3, ("drafter",)),
        ("config", {"vocab_size": VOCAB}, ("drafter",)),
        ("config.vocab_size", VOCAB + 1, ("another base", f"vocabulary: got {VOCAB + 1}, expected {VOCAB}")),
        ("config.width", 64, ("another base", "width: got 64, expected 32")),
        ("config.mlp_width", 10**9, ("mlp_width 1000000000",)),
        ("config.head_dim", 10**9, ("heads of 1000000000",)),
        ("config.n_layers", 2, ("plain layer",)),
        ("config.qk_norm", True, ("plain layer",)),
        ("config.width", True, ("width of config: got True",)),
        ("config.rope_theta", "10", ("rope_theta of config: got '10'",)),
        ("config.rope_scaling", {"kind": "dynamic", "factor": 2.0}, ("rope scaling", "'dynamic'")),
        ("config.rope_scaling", 7, ("drafter",)),
        ("config.extra", 1, ("config: got unknown fields extra",)),
        ("unknown", 1, ("drafter",)),
    ],
)
def test_invalid_settings_and_those_of_another_base(native, tmp_path, name, value, pieces):
    config = config_in(native)  # the only file that is looked at before the settings
    at, *parts = config["drafter"]["settings"], *name.split(".")
    for part in parts[:-1]:
        at = at[part]
    at[parts[-1]] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    refusal(lambda: load_draft(tmp_path, BASE), "draft", *pieces)


def test_no_prefix_layer_before_an_eagle_draft(small, tmp_path):
    drafter = drafter_of("eagle")
    export_heads(tmp_path, drafter, with_random_bits(drafter, small, np.float32), format="native")
    config = config_in(tmp_path)
    config["drafter"]["prefix"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    refusal(lambda: load_draft(tmp_path, MHA), "draft", "prefix: got true, expected false: eagle has no prefix layer")
