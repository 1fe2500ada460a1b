"""LoRA directories: separate and merged logits, unsupported settings, and adapters written and read back.

The reference is transformers with W + s B A computed by torch (`lora_files`).
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from helpers.family_pairs import EXAMPLES
from helpers.lora_files import LAYERS, apply_lora, linear_layers, write_lora
from helpers.released import refusal
from helpers.rounded import with_int8
from hydrajax.formats.export_base import export_merged
from hydrajax.formats.fingerprint import check_fingerprint, fingerprint
from hydrajax.formats.huggingface import load_llama, read_config
from hydrajax.formats.peft import load_adapter, save_adapter
from hydrajax.models.adapter import TARGETS, Adapter, split_adapter, with_adapter
from hydrajax.models.base_model import BoundBase
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama
from hydrajax.models.packed_forward import run_base
from hydrajax.ops import trace

TOKENS = np.random.default_rng(4).integers(0, 96, (2, 9)).astype(np.int32)
RANKS = {"layers.1.self_attn.q_proj": 5, "^model.layers.1.self_attn.o_proj": 5}  # by the end of a name, or all of it
FAMILIES = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    **{kind: {"model_type": kind, "pad_token_id": 0} for kind in ("gemma2", "gemma3_text", "olmo3", "granite", "phi3")},
    "qwen3_5_text": {"model_type": "qwen3_5_text"}
    | EXAMPLES["qwen3_5_text"]
    | {"layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": False},
}
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")  # of Phi 3


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params):
    hidden = run_base(model, params, jnp.asarray(TOKENS)).hidden
    return BoundBase(model, params).logits(hidden)


def expected_logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()


def open_model(directory: Path):
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()


@pytest.fixture
def lora(tiny_checkpoint, tmp_path):
    """``lora(**settings) -> Path``: a LoRA of the tiny checkpoint, as `write_lora` makes it."""
    return lambda **settings: write_lora(tmp_path / "lora", open_model(tiny_checkpoint), **settings)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick("qwen3", "tied", "qwen3_5_text")
def test_every_family_equals_transformers(llama_checkpoint, tmp_path, family):
    """Separate from the base and merged, with all linear layers except a tied lm head adapted."""
    base = llama_checkpoint(**FAMILIES[family])
    targets = LAYERS if family == "tied" or family.startswith("gemma") else TARGETS
    targets = (*FUSED, "lm_head") if family == "phi3" else targets
    folder = write_lora(tmp_path / "lora", open_model(base), targets)
    expected = expected_logits(apply_lora(open_model(base), folder))
    assert np.abs(expected - expected_logits(open_model(base))).max() > 1
    for merge in (False, True):
        model, params = load_llama(base, adapter=folder, merge=merge)
        assert (model.adapter is None) == merge
        np.testing.assert_allclose(logits_of(model, params), expected, rtol=2e-4, atol=2e-4)


PATTERNS = {
    "some targets": {"targets": ["q_proj", "v_proj"]},
    "rslora": {"targets": ["down_proj", "k_proj"], "use_rslora": True},
    "ranks": {"targets": ["q_proj", "o_proj"], "ranks": {"layers.1": 5}, "rank_pattern": RANKS},
    "alphas": {"targets": ["up_proj", "v_proj"], "alpha_pattern": {"up_proj": 1}},
    "expression": {"targets": ["q_proj"], "target_modules": r".*\.q_proj"},
    "some layers": {"targets": ["v_proj"], "layers_to_transform": [1]},
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.quick("rslora", "ranks", "expression", "some layers")
def test_patterns_and_targets(tiny_checkpoint, lora, name):
    folder = lora(**PATTERNS[name])
    if name == "some layers":
        tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
        kept = {key: x for key, x in tensors.items() if ".layers.1." in key}
        safetensors.torch.save_file(kept, folder / "adapter_model.safetensors")
    expected = expected_logits(apply_lora(open_model(tiny_checkpoint), folder))
    model, params = load_llama(tiny_checkpoint, adapter=folder)
    np.testing.assert_allclose(logits_of(model, params), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kernels", [False, True])
def test_with_an_int8_base(tiny_checkpoint, lora, monkeypatch, kernels):
    """As QLoRA: the frozen weights are rounded to int8 and the adapter is not; merged, the sum is rounded.

    Our CPU kernels round the base's inputs too. Where one lies between two steps, a last bit decides, and the positions
    after it differ by more.
    """
    if kernels and not trace.has_few_bits():
        pytest.skip("the CPU kernels were not built")
    monkeypatch.setattr(trace, "has_few_bits", lambda: kernels)
    folder = lora(targets=list(TARGETS))

    def layers(model):
        return linear_layers(model, TARGETS).values()

    def with_added(model):
        """Add the adapter's product with inputs that are not rounded."""
        for layer, adapted in zip(layers(model), layers(apply_lora(open_model(tiny_checkpoint), folder)), strict=True):
            delta, inputs = (adapted.weight - layer.weight).detach(), []
            layer.register_forward_pre_hook(lambda layer, x, inputs=inputs: inputs.append(x[0]))
            layer.register_forward_hook(lambda layer, x, out, inputs=inputs, delta=delta: out + inputs.pop() @ delta.T)
        return model

    for merge in (False, True):
        base = open_model(tiny_checkpoint)
        changed = apply_lora(base, folder) if merge else with_added(base)
        expected = expected_logits(with_int8(changed, layers(changed)))
        model, params = load_llama(tiny_checkpoint, adapter=folder, quantize="int8", merge=merge)
        assert params["layers_0"]["qkv"].values.dtype == jnp.int8
        found = logits_of(model, params)
        if kernels:
            difference = np.abs(found - expected)
            assert np.quantile(difference, 0.7) < 1e-3
            assert difference.max() < 0.1
        else:
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_written_and_read_back_bit_for_bit(tiny_checkpoint, lora, tmp_path):
    config = read_config(tiny_checkpoint)
    folder = lora(targets=["k_proj", "up_proj", "lm_head"])
    read = load_adapter(folder, config)
    save_adapter(tmp_path / "again", read.adapter, read.params, config, "some/base")
    theirs, ours = (
        safetensors.torch.load_file(path / "adapter_model.safetensors") for path in (folder, tmp_path / "again")
    )
    assert ours.keys() == theirs.keys() - {"base_model.model.lm_head.base_layer.weight"}  # which the base has
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    torch.save(ours, tmp_path / "again" / "adapter_model.bin")
    for _ in range(2):  # of safetensors and of torch
        again = load_adapter(tmp_path / "again", config)
        assert (again.adapter, again.sha256) == (read.adapter, read.sha256)
        (tmp_path / "again" / "adapter_model.safetensors").unlink(missing_ok=True)
    written = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "some/base"
    assert (written["r"], written["lora_alpha"], written["target_modules"]) == (3, 6, ["k_proj", "up_proj", "lm_head"])


GRANITE4 = {
    "model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "tie_word_embeddings": False,
    "num_local_experts": 0, "shared_intermediate_size": 48, "mamba_n_heads": 4, "mamba_d_state": 8,
}  # fmt: skip
NEMOTRON = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "M*-", "tie_word_embeddings": False, "mamba_num_heads": 4,
    "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "head_dim": 8, "num_hidden_layers": 3,
}  # fmt: skip
LFM2 = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        pytest.param(FAMILIES["phi3"], TARGETS, marks=pytest.mark.slow),
        (FAMILIES["phi3"], ("k_proj", "o_proj", "up_proj")),
        (FAMILIES["qwen3_5_text"], TARGETS),
        (LFM2, TARGETS),
        (GRANITE4, TARGETS),
        (NEMOTRON, ("k_proj", "o_proj", "up_proj", "down_proj", "lm_head")),
    ],
    ids=["phi3, all", "phi3, some", "qwen 3.5", "lfm2", "granite 4", "nemotron"],
)
def test_an_adapter_is_written_with_the_names_of_the_family(llama_checkpoint, tmp_path, family, targets):
    """Each part has an A of its own here, and one A of higher rank serves all parts in Phi 3's files."""
    base = llama_checkpoint(**family)
    adapter, random = Adapter(rank=2, alpha=3.0, targets=targets), np.random.default_rng(0)
    model = Llama(read_config(base), adapter=adapter)
    added = split_adapter(jax.eval_shape(lambda: init_base(model, jax.random.key(0))))[1]
    added = jax.tree.map(lambda x: 0.2 * random.standard_normal(x.shape).astype(np.float32), added)
    save_adapter(tmp_path / "lora", adapter, added, model.config)
    ends = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["target_modules"]
    names = [name for name, _ in open_model(base).named_modules() if f".{name}".endswith(tuple(f".{x}" for x in ends))]
    tensors = safetensors.torch.load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert {f"base_model.model.{name}.lora_{letter}.weight" for name in names for letter in "AB"} == tensors.keys()
    expected = expected_logits(apply_lora(open_model(base), tmp_path / "lora"))
    assert np.abs(expected - expected_logits(open_model(base))).max() > 0.1
    ours = logits_of(model, with_adapter(load_llama(base)[1], added))
    np.testing.assert_allclose(ours, expected, rtol=2e-4, atol=2e-4)
    for merge in (False, True):
        again, params = load_llama(base, adapter=tmp_path / "lora", merge=merge)
        np.testing.assert_allclose(logits_of(again, params), expected, rtol=2e-4, atol=2e-4)


def test_merged_model_loads_in_transformers(tiny_checkpoint, lora, tmp_path):
    folder = lora(targets=list(TARGETS))
    export_merged(tmp_path / "merged", tiny_checkpoint, folder)
    expected = apply_lora(open_model(tiny_checkpoint), folder)
    found = open_model(tmp_path / "merged").state_dict()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)


def test_a_merged_model_is_the_base_with_the_adapter(tiny_checkpoint, lora, tmp_path):
    """Heads that record one load on the other, and neither on the base alone nor with another adapter."""
    folder = lora()
    export_merged(tmp_path / "merged", tiny_checkpoint, folder)
    both = fingerprint(tiny_checkpoint, adapter=folder)
    assert fingerprint(tmp_path / "merged") == both
    alone = fingerprint(tiny_checkpoint)
    assert alone == {name: both[name] for name in ("shapes", "sha256")}
    check_fingerprint(both, "it", tmp_path / "merged", "draft")
    check_fingerprint(both, "it", tiny_checkpoint, "draft", folder)
    other = write_lora(tmp_path / "other", open_model(tiny_checkpoint), ["q_proj"])
    for call, reason in (
        (lambda: check_fingerprint(both, "it", tiny_checkpoint, "draft"), "they were trained with an adapter of"),
        (lambda: check_fingerprint(alone, "it", tmp_path / "merged", "draft"), "without an adapter"),
        (lambda: check_fingerprint(both, "it", tiny_checkpoint, "draft", other), "with another adapter"),
    ):
        assert refusal(call, reason).endswith("'force' loads them")


REFUSED = [  # changes of adapter_config.json, the message
    ({"peft_type": "IA3"}, "peft_type: got 'IA3', expected 'LORA'"),
    ({"use_dora": True}, "use_dora: got True, expected False"),
    ({"bias": "all"}, "bias: got 'all', expected 'none'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save: got ['lm_head'], expected []"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: got 'pissa_niter_4', expected"),
    ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules: got 'embed_tokens', expected linear"),
    ({"target_modules": 3}, "target_modules: got 3, expected names of linear layers"),
    ({"r": 0}, "r: got 0, expected a positive integer"),
    ({"rank_pattern": {"down_proj": 4}}, "lora_A.weight: got shape [3, 88], expected [4, 88]"),
    ({"lora_alpha": "x"}, "lora_alpha: got 'x', expected a positive number"),
    ({"rank_pattern": {"(a|b)*": 2}}, "rank_pattern: got '(a|b)*', expected names of layers"),
    ({"alpha_pattern": 3}, "alpha_pattern: got 3, expected an object"),
    ({"lora_dropout": 2}, "lora_dropout: got 2, expected a number from 0 up and below 1"),
]
LAYER_1, UP = "base_model.model.model.layers.1.self_attn.q_proj", "base_model.model.model.layers.0.mlp.up_proj"
FOREIGN = "base_model.model.model.embed_tokens.lora_embedding_A"
DAMAGED = [  # a tensor, what stands for it, the message
    (f"{LAYER_1}.lora_B.weight", None, f"missing tensor '{LAYER_1}.lora_B.weight'"),
    (f"{UP}.lora_A.weight", torch.zeros(3, 31), f"{UP}.lora_A.weight: got shape [3, 31], expected [3, 32]"),
    (FOREIGN, torch.zeros(3, 96), f"unexpected tensor '{FOREIGN}'"),
]


def test_refusals_name_what_is_wrong(tiny_checkpoint, llama_checkpoint, lora, tmp_path):
    config = read_config(tiny_checkpoint)
    for changes, message in REFUSED:
        folder = lora(**changes)
        refusal(lambda folder=folder: load_adapter(folder, config), "adapter: ", message)
    folder = lora()
    path = folder / "adapter_model.safetensors"
    whole = safetensors.torch.load_file(path)
    for name, tensor, message in DAMAGED:
        changed = {key: x for key, x in (whole | {name: tensor}).items() if x is not None}
        safetensors.torch.save_file(changed, path)
        refusal(lambda folder=folder: load_adapter(folder, config), "adapter: ", message)
    path.unlink()
    neither = "neither adapter_model.safetensors nor adapter_model.bin"
    refusal(lambda: load_adapter(folder, config), "adapter: ", neither)
    (tmp_path / "empty").mkdir()
    refusal(lambda: load_adapter(tmp_path / "empty", config), "adapter: ", "no such file")
    hybrid = llama_checkpoint(**LFM2)
    for target, name in (("out_proj", "model.layers.0.conv.out_proj"), ("in_proj", "model.layers.0.conv.in_proj")):
        folder = write_lora(tmp_path / "hybrid", open_model(hybrid), [target])
        refusal(
            lambda folder=folder: load_adapter(folder, read_config(hybrid)), f"got '{name}', expected layers of att"
        )
    tied = read_config(llama_checkpoint(tie_word_embeddings=True))
    refusal(lambda: load_adapter(lora(targets=["lm_head"]), tied), "adapter: ", "this base has a tied lm head")
