"""Files of drafts of one pass: official ones written again, other layouts, and what is refused."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.draft_heads import identical
from helpers.released import refusal, save
from hydrajax.drafters.dflash import DFlash, JetSpec
from hydrajax.drafters.dspark import DSpark
from hydrajax.drafters.markov import MarkovHead
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.formats.export import export_heads
from hydrajax.formats.load import load_draft
from hydrajax.models.llama_config import LlamaConfig

BASE = LlamaConfig(61, 32, 80, n_layers=8, n_heads=4, n_kv_heads=2, head_dim=8, max_positions=64)
LAYERS = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "vocab_size": 61,
}  # fmt: skip
ONE = LAYERS | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 4,
    "num_target_layers": 8,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 5]},
}
MARKOV = {"markov_rank": 3, "markov_head_type": "rnn"}
MARKOV |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
DEEP = LAYERS | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 4,
    "num_target_layers": 8,
    "mask_token_id": 60,
    "target_layer_ids": [-1, 5],
} | MARKOV  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7}
SPECULATED = {"block_size": 4, "mask_token_id": 60, "aux_hidden_state_layer_ids": [2, 6]}
SPECULATORS = {"speculators_model_type": "dspark", "transformer_layer_config": LAYERS | WINDOWS, "draft_vocab_size": 20}
SPECULATORS |= SPECULATED | MARKOV | {"markov_head_type": "vanilla"}


def tensors(n_reads: int = 2, rank: int = 0, kind: str = "vanilla", words: int = 61) -> dict[str, torch.Tensor]:
    """The tensors of a released draft, by the names and shapes that its official code declares."""
    shapes = {"fc.weight": (32, 32 * n_reads), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    for i in range(2):
        at = f"layers.{i}."
        shapes |= {f"{at}input_layernorm.weight": (32,), f"{at}post_attention_layernorm.weight": (32,)}
        shapes |= {f"{at}self_attn.{x}_proj.weight": (rows, 32) for x, rows in zip("qkv", (32, 16, 16), strict=True)}
        shapes |= {f"{at}self_attn.o_proj.weight": (32, 32)} | {f"{at}self_attn.{x}_norm.weight": (8,) for x in "qk"}
        shapes |= {f"{at}mlp.{x}_proj.weight": (48, 32) for x in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (32, 48)}
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (61, rank), "markov_head.markov_w2.weight": (words, rank)}
        shapes |= {"confidence_head.proj.weight": (1, 32 + rank), "confidence_head.proj.bias": (1,)}
    if kind == "rnn":
        joint = "markov_head.joint_proj."
        shapes |= {f"{joint}weight": (3 * rank, 2 * rank + 32), f"{joint}bias": (3 * rank,)}
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


WORDS = {"d2t": 2 * torch.arange(20), "t2d": (torch.arange(61) % 3 == 0) & (torch.arange(61) < 60)}
COPIES = {"embed_tokens.weight": torch.ones(61, 32), "lm_head.weight": torch.ones(61, 32)}
ONES, DEEPS = tensors(), tensors(rank=3, kind="rnn")
PRUNED = tensors(rank=3, words=20) | WORDS | {"lm_head.weight": torch.ones(20, 32)}


def nested(**changes) -> dict:
    return ONE | {"dflash_config": ONE["dflash_config"] | changes}


SLIDING = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}
LAYOUTS = {  # config.json, tensors, and what of the drafter must follow
    "released": (ONE, ONES, DFlash, {"aux_hidden_layers": (6, 2), "mask_token": 60, "block_size": 4}),
    "nested block size": (nested(block_size=6), ONES, DFlash, {"block_size": 6}),
    "no layers named": (nested(target_layer_ids=None), ONES, DFlash, {"aux_hidden_layers": (6, 2)}),
    "the last layer": (nested(target_layer_ids=[1, 7]), ONES, DFlash, {"aux_hidden_layers": (6, 0)}),
    "no depth of the base": (ONE | {"num_target_layers": None}, ONES, DFlash, {}),
    "windows": (ONE | SLIDING, ONES, DFlash, {"windows": (0, 7)}),
    "JetSpec": (nested(causal_head=True), ONES, JetSpec, {"aux_hidden_layers": (6, 2)}),
    "causal by vLLM's name": (ONE | {"is_causal": True}, ONES, JetSpec, {}),
    "DeepSpec": (
        DEEP,
        DEEPS | COPIES,
        DSpark,
        {"aux_hidden_layers": (8, 2), "markov": MarkovHead(3, "rnn"), "confidence_head": "markov"},
    ),
    "DeepSpec's DFlash": (
        {name: value for name, value in DEEP.items() if "markov_head" not in name and "confidence" not in name}
        | {"markov_rank": 0},
        ONES | COPIES,
        DSpark,
        {"markov": None, "confidence_head": None},
    ),
    "speculators": (
        SPECULATORS,
        PRUNED,
        DSpark,
        {"aux_hidden_layers": (6, 2), "vocabulary": Vocabulary(range(0, 60, 3)), "windows": (7, 7)},
    ),
    "speculators' DFlash": (
        {"speculators_model_type": "dflash", "transformer_layer_config": LAYERS, "sample_from_anchor": False}
        | SPECULATED,
        ONES,
        DFlash,
        {"vocabulary": None, "windows": ()},
    ),
}


ONLY_READ = ["nested block size", "no layers named", "the last layer", "no depth of the base", "causal by vLLM's name"]
ONLY_READ += ["speculators", "speculators' DFlash"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_read_and_written_again(tmp_path, name):
    """An export has the file's tensors but the base's, and reads back as the same draft."""
    config, state, kind, facts = LAYOUTS[name]
    drafter, params = load_draft(save(tmp_path / "theirs", state, config), BASE, None)
    assert type(drafter) is kind
    assert {field: getattr(drafter, field) for field in facts} == facts
    assert (drafter.config.mlp_width, drafter.config.qk_norm, drafter.config.max_positions) == (48, True, 64)
    np.testing.assert_array_equal(params["fc"], state["fc.weight"].T)
    np.testing.assert_array_equal(params["layers_1"]["key_norm"]["scale"], state["layers.1.self_attn.k_norm.weight"])
    if name in ONLY_READ:
        return
    export_heads(tmp_path / "ours", drafter, params, dtype=None, base_fingerprint={"shapes": {"n_layers": 8}})
    again, read = load_draft(tmp_path / "ours", BASE, None)
    assert again == drafter
    identical(params, read)
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert written.keys() == state.keys() - COPIES.keys()
    assert all(torch.equal(written[key], state[key]) for key in written)


REFUSED = [
    ("released", {"num_target_layers": 36}, "num_target_layers: got 36, expected 8; the heads were made for another"),
    ("released", {"vocab_size": 60}, "vocabulary: got 60, expected 61"),
    ("released", {"block_size": 1}, "block_size: got 1, expected an integer of at least 2"),
    ("released", {"attention_bias": True}, "attention_bias: got True"),
    (
        "released",
        {"layer_types": ["full_attention"]},
        "layer_types: got ['full_attention'], expected full_attention or",
    ),
    ("released", nested(mask_token_id=61), "mask_token_id: got 61, expected a token of the base's vocabulary of 61"),
    ("released", nested(target_layer_ids=[1, 8]), "target_layer_ids: got [1, 8], expected numbers from 0 to 7"),
    ("released", nested(target_layer_ids=[]), "target_layer_ids: got [], expected numbers from 0 to 7"),
    ("released", nested(projector_type="domino"), "projector_type: got 'domino', expected 'dflash'"),
    ("released", nested(final_logit_softcapping=30), "final_logit_softcapping: got 30, expected no such field"),
    ("released", nested(output_multiplier=2), "output_multiplier: got 2, expected 1"),
    ("released", nested(attention_value_scale=0.5), "attention_value_scale: got 0.5, expected 1"),
    ("released", nested(pure_draft_prefix_len=1), "pure_draft_prefix_len: got 1, expected 0"),
    ("released", nested(use_swa=True), "use_swa: got True, expected False"),
    ("released", nested(shift_label=True), "shift_label: got True, expected False"),
    ("windows", {"is_causal": False}, "is_causal: got false, expected true with sliding windows"),
    (
        "released",
        {"architectures": ["DFlash2DraftModel"]},
        "architectures: got 'DFlash2DraftModel', expected the layers",
    ),
    ("released", {"quantization_config": {"quant_method": "awq"}}, "quantization_config: got 'awq', expected none"),
    ("released", {"layer_types": [["x"], ["y"]]}, "layer_types: got [['x'], ['y']], expected full_attention or"),
    ("released", {"block_size": 10**9}, "block_size: got 1000000000, expected at most 1024"),
    ("released", nested(target_layer_ids=[1, 3, 5]), "fc.weight: got shape [32, 64], expected [32, 96]"),
    ("DeepSpec", {"target_layer_ids": [0, 7]}, "target_layer_ids: got [0, 7], expected numbers from -1 to 6"),
    ("DeepSpec", {"markov_head_type": "lstm"}, "markov_head_type: got 'lstm', expected one of vanilla, gated, rnn"),
    ("DeepSpec", {"markov_rank": 0}, "confidence_head_with_markov: got true, expected false: no Markov head"),
    ("DeepSpec", {"markov_head_type": "vanilla"}, "unexpected tensors 'markov_head.joint_proj"),
    ("speculators", {"aux_hidden_state_layer_ids": [2, 8]}, "got [2, 8], expected numbers from 0 to 7"),
    ("speculators", {"sample_from_anchor": False}, "sample_from_anchor: got false, expected true for dspark"),
    ("speculators", {"sliding_window_non_causal": True}, "sliding_window_non_causal: got True"),
    ("speculators", {"transformer_layer_config": 3}, "transformer_layer_config: got 3, expected an object"),
]


@pytest.mark.parametrize("layout", sorted({layout for layout, _, _ in REFUSED}))
def test_what_does_not_fit_is_refused_by_its_name(tmp_path, layout):
    config, state, _, _ = LAYOUTS[layout]
    for changes, message in [row[1:] for row in REFUSED if row[0] == layout]:
        save(tmp_path, state, config | changes)
        refusal(lambda: load_draft(tmp_path, BASE), "draft", str(tmp_path), message)


def test_what_a_format_cannot_express_is_exported_in_our_own(tmp_path):
    """DeepSpec's code would read the last layer before its norm, and DFlash's has no number for the embedding."""
    deep = load_draft(save(tmp_path / "deep", DEEPS, DEEP), BASE, None)
    one = load_draft(save(tmp_path / "one", ONES, ONE), BASE, None)
    for name, (drafter, params), layers in (("deepspec", deep, (2, 0)), ("dflash", one, (8, 2))):
        drafter = dataclasses.replace(drafter, aux_hidden_layers=layers)
        export = partial(export_heads, drafter=drafter, params=params, base_fingerprint={"shapes": {"n_layers": 8}})
        refusal(lambda name=name, export=export: export(tmp_path / "x", format=name), "export: ", "target_layer_ids")
        export(tmp_path / name, dtype=None)
        assert load_draft(tmp_path / name, BASE, None)[0] == drafter
