"""MTP modules against their published formulas in torch: logits, chains, files and training.

The formulas are those of DeepSeek-V3 2.2 and of the checkpoints' own code (MiMo's, GLM-4.5's and Qwen3-Next's
layouts). The decoder layer with its attention and rotary embedding is transformers'.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from helpers.lab import quick_jit
from helpers.refusals import refusal
from hydrajax import load, make_decode_fn
from hydrajax.drafters.mtp import MTP
from hydrajax.formats.export import export_heads
from hydrajax.formats.load import load_draft
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import run_base
from hydrajax.models.rope_scaling import RopeScaling
from hydrajax.train.losses import Objective, draft_loss
from hydrajax.trees import presets

VOCAB, WIDTH, LAYERS = 61, 32, 2
SETTINGS = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-3,
    "rope_theta": 640.0, "tie_word_embeddings": False,
}  # fmt: skip
# By layout: the prefix, the names of the parts, which input comes first, and which hidden state is read.
LAYOUTS = {
    "mimo": (
        "model.mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        "hidden",
        "before the final norm",
    ),
    "nextn": (
        f"model.layers.{LAYERS}.",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        "embedding",
        "after the final norm",
    ),
    "qwen": (
        "mtp.",
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        "embedding",
        "after the final norm",
    ),
}
LAYOUTS["latent"] = LAYOUTS["nextn"]  # of DeepSeek V3
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "partial_rotary_factor": 0.5,
    "linear_conv_kernel_dim": 3,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16,
}  # fmt: skip

LATENT = {
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "kv_lora_rank": 12, "q_lora_rank": 20,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 10,
}  # fmt: skip


class Module:
    """A base with an MTP module.

    Attributes:
        base: transformers' model.
        tensors: the module's tensors by name in the file.
    """

    def __init__(self, layout: str):
        torch.manual_seed(0)
        self.layout = layout
        self.prefix, parts, self.first, self.reads = LAYOUTS[layout]
        self.is_hybrid = layout == "qwen"
        self.settings = SETTINGS | {"qwen": HYBRID, "latent": LATENT}.get(layout, {})
        names = (Qwen2Config, Qwen2ForCausalLM, Qwen2DecoderLayer)
        if self.is_hybrid:
            names = (Qwen3NextConfig, Qwen3NextForCausalLM, Qwen3NextDecoderLayer)
        if layout == "latent":
            names = (DeepseekV3Config, DeepseekV3ForCausalLM, DeepseekV3DecoderLayer)
        make_config, make_base, make_layer = names
        config = make_config(**self.settings, initializer_range=0.2, attn_implementation="eager")
        self.base = make_base(config).eval().requires_grad_(False)
        self.layer = make_layer(config, layer_idx=1).eval().requires_grad_(False)
        for named in (self.base, self.layer):
            for name, x in named.named_parameters():
                x.copy_(torch.randn_like(x) * 0.2 + (1.0 if "norm" in name else 0.0))
        self.weights = {name: 1 + 0.2 * torch.randn(WIDTH) for name in parts} | {
            parts[2]: 0.2 * torch.randn(WIDTH, 2 * WIDTH)
        }
        self.parts = parts
        own = {f"{name}.weight": x for name, x in self.weights.items()}
        own |= {f"{'layers.0.' if self.is_hybrid else ''}{name}": x for name, x in self.layer.state_dict().items()}
        self.tensors = {f"{self.prefix}{name}": x for name, x in own.items()}

    def save(self, directory: Path, **changes) -> Path:
        """Write the base's directory with the module; ``changes`` are tensors (None removes) of the module."""
        directory.mkdir()
        tensors = self.base.state_dict() | self.tensors
        for name, x in changes.items():
            tensors[f"{self.prefix}{name}"] = x
        tensors = {name: x.contiguous() for name, x in tensors.items() if x is not None}
        save_file(tensors, directory / "model.safetensors")
        kind = {"mimo": "mimo", "nextn": "qwen2", "qwen": "qwen3_next", "latent": "deepseek_v3"}[self.layout]
        more = {"model_type": kind, "num_nextn_predict_layers": 1, "use_sliding_window": False}
        more |= {"attention_bias": True} if kind == "mimo" else {}
        (directory / "config.json").write_text(json.dumps(self.settings | more))
        return directory

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """Return the base's hidden states that the module reads, ``[T, D]``."""
        seen = []
        hook = self.base.model.norm.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0], output]))
        self.base(torch.tensor([tokens]))
        hook.remove()
        return seen[0 if self.reads == "before the final norm" else 1][0]

    def outputs(self, hidden: torch.Tensor, following: list[int]) -> torch.Tensor:
        """Return h' at every position; ``following[i]`` is the token after position i."""
        first, second, projection, last = self.parts
        embedding = self.normed(self.base.model.embed_tokens(torch.tensor(following)), first)
        state = self.normed(hidden, second)
        both = [embedding, state] if self.first == "embedding" else [state, embedding]
        x = (torch.cat(both, dim=-1) @ self.weights[projection].T)[None]
        places = torch.arange(len(following))[None]
        hides = torch.full((len(following), len(following)), float("-inf")).triu(1)[None, None]
        turned = self.base.model.rotary_emb(x, places)
        out = self.layer(x, attention_mask=hides, position_ids=places, position_embeddings=turned)
        return self.normed((out[0] if isinstance(out, tuple) else out)[0], last)

    def normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = self.weights[name] + self.is_hybrid  # Qwen3-Next's norms multiply by 1 + scale
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + SETTINGS["rms_norm_eps"]) * scale

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs @ self.base.lm_head.weight.T

    def chain(self, tokens: list[int], guesses: list[int]) -> torch.Tensor:
        """Return logits ``[1 + guesses, V]`` for the tokens after ``tokens[-1]``, each after the guesses before it."""
        hidden, found = self.hidden(tokens[:-1]), []
        for k in range(len(guesses) + 1):
            following = tokens[1:] + guesses[:k]
            outputs = self.outputs(hidden, following)
            found.append(self.logits(outputs[-1]))
            hidden = torch.cat([hidden, outputs[-1:]])
        return torch.stack(found)

    def greedy_chain(self, tokens: list[int], n: int) -> list[int]:
        """Return n drafted tokens after ``tokens``."""
        guesses: list[int] = []
        for _ in range(n):
            guesses.append(int(self.chain(tokens, guesses)[-1].argmax()))
        return guesses


TEXT = [int(x) for x in np.random.default_rng(0).integers(0, VOCAB, 12)]


@pytest.fixture(scope="module", params=LAYOUTS)
def module(request) -> Module:
    return Module(request.param)


@pytest.fixture(scope="module")
def directory(module, tmp_path_factory):
    return module.save(tmp_path_factory.mktemp("mtp") / "base")


@pytest.fixture(scope="module")
def model(directory):
    return load(directory, "mtp")


def test_logits_and_chained_drafts_equal_the_published_formulas(module, model):
    drafter, text = dataclasses.replace(model.drafter, ttt_length=3), np.array([TEXT], np.int32)
    base = BoundBase(model.model, model.params.base)
    count, root = np.array([len(TEXT) - 1], np.int32), text[:, -1]

    @quick_jit
    def found(params):
        aux = run_base(model.model, base.params, text, drafter.spec.aux_hidden_layers).aux_hidden_states
        taught = drafter.teacher_hidden(params, aux, text, base)
        state = drafter.begin(params, drafter.init_state(1, 20), aux[:, :-1], text[:, :-1], count, root, base)
        drafted = drafter.propose(params, state, root, presets.chain(3), base)
        return [drafter.head_logits(params, k, taught[k], base)[0] for k in range(3)], drafted.tokens[0]

    logits, drafted = jax.device_get(found(model.params.draft))
    for at in (0, 3, 7):  # the text up to token at + 1, which position at reads; then two more tokens of the text
        expected = module.chain(TEXT[: at + 2], TEXT[at + 2 : at + 4])
        assert expected.abs().max() > 1
        for k in range(3):
            np.testing.assert_allclose(logits[k][at], expected[k], atol=1e-4)
    assert drafted.tolist() == [TEXT[-1], *module.greedy_chain(TEXT, 3)]


@pytest.mark.quick("mimo")
def test_exports(model, tmp_path):
    """That other formats are read back bit for bit is in tests/formats/test_conformance.py."""
    own = "nextn, qwen-mtp" if model.drafter.embedding_first else "mimo-mtp"
    own = "qwen-mtp" if model.drafter.config.attention_gate else own
    layer = model.config.of_layer(LAYERS - 1)
    scaling = RopeScaling("longrope", 4.0, short_factors=(1.0, 1.5, 2.0, 2.5), long_factors=(4.0, 4.0, 4.0, 4.0))
    scaled = dataclasses.replace(model.drafter, config=model.drafter.config.replace(rope_scaling=scaling))
    export_heads(tmp_path / "scaled", scaled, model.params.draft, format="native", dtype=None)
    found, params = load_draft(tmp_path / "scaled", layer.replace(rope_scaling=scaling), None)
    assert found == scaled
    jax.tree.map(np.testing.assert_array_equal, params, model.params.draft)
    refusal(
        lambda: export_heads(tmp_path / "other", model.drafter, model.params.draft, format="eagle"),
        f"expected one of {own}, native",
    )
    other = layer.replace(rope_scaling=scaling, qkv_bias=not layer.qkv_bias)
    refusal(lambda: load_draft(tmp_path / "scaled", other, None), "another qkv_bias")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return Module("qwen").save(tmp_path_factory.mktemp("hybrid") / "base")


def test_experts_of_a_module_in_one_tensor(hybrid, tmp_path):
    """Modules are published with one tensor for all experts, and with those of each expert."""
    tensors = load_file(hybrid / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        fused = tensors.pop(f"mtp.layers.0.mlp.experts.{name}")
        for i, expert in enumerate(fused):
            parts = (
                zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
                if name != "down_proj"
                else ((name, expert),)
            )
            own = f"mtp.layers.0.mlp.experts.{i}"
            tensors |= {f"{own}.{part}.weight": x.clone() for part, x in parts}
    shutil.copytree(hybrid, tmp_path / "base")
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    params = [load(folder, "mtp").params.draft for folder in (hybrid, tmp_path / "base")]
    jax.tree.map(np.testing.assert_array_equal, *params)


@pytest.mark.quick("nextn")
def test_a_short_training_lowers_the_loss(model):
    drafter, base = dataclasses.replace(model.drafter, ttt_length=2), BoundBase(model.model, model.params.base)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (4, 16), dtype=np.int32)
    optimizer, objective = optax.adam(3e-2), Objective(lm_weight=1.0, teacher_weight=0.0)

    @quick_jit
    def step(params, state):
        def loss(params):
            out = run_base(model.model, base.params, tokens, drafter.spec.aux_hidden_layers)
            batch = {"tokens": tokens, "labels": tokens}
            return draft_loss(objective, drafter, params, out.aux_hidden_states, out.hidden, batch, base)[0]

        value, slope = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(slope, state)
        learns = (leaf for path, leaf in jax.tree.leaves_with_path(slope) if path[-1].key != "choice_bias")
        smallest = jnp.array([jnp.abs(leaf).max() for leaf in learns]).min()
        return optax.apply_updates(params, updates), state, value, smallest

    params, state, values = model.params.draft, optimizer.init(model.params.draft), []
    for _ in range(12):
        params, state, value, smallest = step(params, state)
        assert smallest > 0  # every parameter learns
        values.append(float(value))
    assert values[-1] < 0.7 * values[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.quick("nextn")
def test_a_base_without_a_module(layout, tmp_path):
    module = Module(layout)
    module.save(tmp_path / "base", **dict.fromkeys(name.removeprefix(module.prefix) for name in module.tensors))
    message = f"draft: got 'mtp', but the base in {tmp_path / 'base'} has no MTP module (no tensors 'model.mtp_layers."
    refusal(lambda: load(tmp_path / "base", "mtp"), message)
    assert load(tmp_path / "base").config.n_layers == LAYERS


def test_modules_that_are_not_implemented(tmp_path):
    for number, (name, message) in enumerate(
        (
            ("self_attn.kv_a_proj_with_mqa.weight", "unexpected tensor 'model.layers.2.self_attn.kv_a_proj_with_mqa"),
            ("mlp.experts.0.gate_proj.weight", "the MTP module is a mixture of experts"),
            ("self_attn.sinks", "unexpected tensor 'model.layers.2.self_attn.sinks' of the MTP module"),
            ("eh_proj.bias", "unexpected tensor 'model.layers.2.eh_proj.bias'"),
            ("embed_tokens.weight", "width: got 2, expected 32"),
        )
    ):
        shape = (VOCAB, 2) if name == "embed_tokens.weight" else (2,)
        folder = Module("nextn").save(tmp_path / str(number), **{name: torch.zeros(shape)})
        refusal(lambda folder=folder: load(folder, "mtp"), message)
    load(folder)  # the base itself does not care


def test_copies_of_embedding_and_lm_head_are_not_read(tmp_path):
    module = Module("nextn")
    copies = {
        name: torch.full((VOCAB, 32), float("nan")) for name in ("embed_tokens.weight", "shared_head.head.weight")
    }
    module.save(tmp_path / "base", **copies)
    m = load(tmp_path / "base", "mtp")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(m.params.draft))


def test_a_fresh_module_is_like_the_bases_last_layer(model):
    drafter = MTP.for_base(model.config.replace(sliding_window=8, qk_norm=True), jnp.bfloat16)
    assert (drafter.config.n_layers, drafter.config.sliding_window, drafter.config.qk_norm) == (1, None, True)
    assert (drafter.embedding_first, drafter.before_final_norm) == (True, False)


@pytest.mark.slow
def test_a_latent_module_in_bfloat16(tmp_path):
    """The bias that chooses experts stays float32, also in exports. XLA compiles matmuls that a CPU cannot run."""
    m = load(Module("latent").save(tmp_path / "base"), "mtp", dtype="bfloat16")
    decode = make_decode_fn(m.model, m.drafter, "dynamic-6-2-3", max_new_tokens=6, eos_ids=())
    assert decode(m.params, np.array([TEXT], np.int32), np.array([len(TEXT)], np.int32)).tokens.shape[0] == 1
    for format in ("nextn", "native"):
        export_heads(tmp_path / format, m.drafter, m.params.draft, format=format)
        found = load_draft(tmp_path / format, m.config, "bfloat16")[1]
        jax.tree.map(np.testing.assert_array_equal, found, m.params.draft)
