"""Files of one family in several forms: as released, as transformers 5 keeps them, and next to other models' parts."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from helpers.family_pairs import EXAMPLES, MUSE_VISION, TOKENS, TOLERANCE, exact_recurrences, logits_of, random_pair
from helpers.family_settings import SHARED
from hydrajax.families.family_registry import TEXT_PARTS
from hydrajax.families.tensor_names import RELEASED
from hydrajax.formats.export_base import export_llama
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.huggingface import load_llama
from hydrajax.models.llama import Llama


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "glm4_moe", "lfm2_moe"])
def test_experts_in_one_tensor(tmp_path, family):
    apart, fused = (random_pair(tmp_path / str(one), family, EXAMPLES[family], fused=one) for one in (False, True))
    assert any(name.endswith(".experts.gate_up_proj") for name in load_file(fused.folder / "model.safetensors"))
    jax.tree.map(np.testing.assert_array_equal, fused.params, apart.params)


def test_a_layer_that_predicts_several_tokens_is_left_out(tmp_path):
    pair = random_pair(tmp_path, "glm4_moe", EXAMPLES["glm4_moe"])
    tensors = load_file(tmp_path / "model.safetensors")
    more = {"model.layers.3.eh_proj.weight": torch.ones(32, 64), "model.layers.3.mlp.gate.weight": torch.ones(8, 32)}
    save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 1}))
    jax.tree.map(np.testing.assert_array_equal, load_llama(tmp_path)[1], pair.params)


def test_the_released_names_of_olmo_hybrid(tmp_path):
    """Convolutions of queries, keys and values are tensors of their own, and norms have other names.

    transformers 5.24 writes them in three equal parts.
    """
    pair, file = random_pair(tmp_path, "olmo_hybrid", EXAMPLES["olmo_hybrid"]), tmp_path / "model.safetensors"
    pair.theirs.save_pretrained(tmp_path / "thirds")
    thirds = load_file(tmp_path / "thirds" / "model.safetensors")
    released = {}
    for name, x in load_file(file).items():
        if name.endswith("linear_attn.conv1d.weight"):
            parts = torch.split(x, [16, 16, 48])  # two keys of 8 features, four values of 12
            released |= {name.replace("conv1d", f"{p}_conv1d"): x.clone() for p, x in zip("qkv", parts, strict=True)}
        else:
            renamed = next((name.replace(*names) for names in RELEASED.items() if names[0] in name), name)
            released[renamed] = x
    assert released.keys() == thirds.keys()
    assert any(x.shape != thirds[name].shape for name, x in released.items())
    save_file(released, file, {"format": "pt"})
    for folder in (tmp_path / "thirds", tmp_path):
        model, params = load_llama(folder)
        jax.tree.map(np.testing.assert_array_equal, params, pair.params)
    assert fingerprint(tmp_path)["sha256"] == fingerprint(_exported(tmp_path / "copy", model, params))["sha256"]


def _exported(folder: Path, model: Llama, params: dict) -> Path:
    export_llama(folder, model, params, dtype=None)
    return folder


@pytest.mark.quick("qwen3_5", "lfm3_vl", "muse_glimmer", "gemma4")
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "lfm2_vl", "lfm3_vl", "muse_glimmer", "gemma4"])
def test_the_text_part_of_a_multimodal_checkpoint(tmp_path, kind):
    """In transformers' form, next to a vision tower and an MTP module; and the rotary embedding of pictures."""
    torch.manual_seed(0)
    text = SHARED | EXAMPLES[TEXT_PARTS[kind]]
    vision = {"hidden_size": 8, "intermediate_size": 8, "patch_size": 2}
    if kind.startswith("qwen"):
        text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        vision |= {"depth": 1, "num_heads": 1, "out_hidden_size": 32, "num_position_embeddings": 4}
    else:
        vision |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "num_patches": 4}
    more = {}
    if kind == "muse_glimmer":
        vision, more = MUSE_VISION, {"out_hidden_size": 16, "projector_hidden_size": 8}
    tied = text.pop("tie_word_embeddings", False)  # only the whole model's field counts
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=tied, **more)
    theirs = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter + 0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith(("model.visual.", "model.vision_tower.")) for name in tensors)
    save_file(tensors | {"mtp.fc.weight": torch.zeros(1)}, file, {"format": "pt"})
    with pytest.warns(match=f"^hydrajax: base: .*config.json: '{kind}' is multimodal; its text part alone is used$"):
        model, params = load_llama(tmp_path)
    with torch.no_grad(), exact_recurrences():
        expected = theirs(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits_of(model, params), expected, atol=TOLERANCE, rtol=0)
    again, copy = load_llama(_exported(tmp_path / "copy", model, params))
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, copy, params)
