"""gpt-oss with experts in MXFP4: transformers' numbers, bit by bit, widened or as the CPU's kernels store them."""

import json

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helpers.family_pairs import EXAMPLES, TOLERANCE, logits_of, random_pair
from helpers.refusals import refusal
from hydrajax.formats.checkpoint import Checkpoint
from hydrajax.formats.huggingface import load_llama
from hydrajax.formats.tensors import SafetensorFiles
from hydrajax.lowbit.files.mxfp4 import Mxfp4Files
from hydrajax.lowbit.mxfp4 import Mxfp4Tiles, codes_of
from hydrajax.ops import trace

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "layer_types": None}
SIZES = {"gate_up_proj": (192, 2), "down_proj": (64, 3)}  # outputs, groups of inputs


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random base whose file has its experts in MXFP4; transformers' model has the numbers that it unpacks."""
    pair = random_pair(tmp_path_factory.mktemp("mxfp4"), "gpt_oss", EXAMPLES["gpt_oss"] | WIDE)
    path, random = pair.folder / "model.safetensors", torch.Generator().manual_seed(3)
    tensors = load_file(path)
    for i, layer in enumerate(pair.theirs.model.layers):
        for part, (outputs, groups) in SIZES.items():
            name = f"model.layers.{i}.mlp.experts.{part}"
            blocks = torch.randint(0, 256, (8, outputs, groups, 16), dtype=torch.uint8, generator=random)
            scales = torch.randint(121, 126, (8, outputs, groups), dtype=torch.uint8, generator=random)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            with torch.no_grad():
                getattr(layer.mlp.experts, part).copy_(convert_moe_packed_tensors(blocks, scales))
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((pair.folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (pair.folder / "config.json").write_text(json.dumps(config))
    return pair


def experts_of(pair) -> list[dict[str, np.ndarray]]:
    """Return transformers' kernels of each layer in our order."""
    found = []
    for layer in pair.theirs.model.layers:
        gate_up, down = (getattr(layer.mlp.experts, part).detach().numpy() for part in SIZES)
        found.append({"gate_up": np.stack([gate_up[..., ::2], gate_up[..., 1::2]], axis=2), "down": down})
    return found


def test_widened_experts_have_transformers_bits(pair):
    """Of every code with many exponents; in a base, its logits."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(2).reshape(1, 32, 16)[:, :, None]
    scales = torch.arange(2, 34, dtype=torch.uint8).mul(7).reshape(1, 32, 1)
    tensors = {"x_blocks": codes, "x_scales": scales}
    save_file(tensors, pair.folder.parent / "one.safetensors")
    files = Mxfp4Files(SafetensorFiles([pair.folder.parent / "one.safetensors"], "base"), "base")
    expected = convert_moe_packed_tensors(codes, scales).view(torch.int16).numpy()
    np.testing.assert_array_equal(files.read("x").view(np.int16), expected)
    model, params = load_llama(pair.folder)
    assert model.quantize is None
    for i, expected in enumerate(experts_of(pair)):
        for name, kernel in expected.items():
            np.testing.assert_array_equal(params[f"layers_{i}"]["experts"][name], kernel)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 44)).astype(np.int32)
    np.testing.assert_allclose(logits_of(model, params), pair.logits(tokens), atol=TOLERANCE)


@pytest.mark.skipif(not trace.has_few_bits(), reason="the CPU kernels were not built, or several devices")
def test_a_cpu_keeps_the_codes(pair):
    """4.25 bits each, by the default type; x is rounded to 8 bits. Rounding widened weights again changes none."""
    assert Checkpoint(pair.folder).weight_type == "mxfp4"
    model, params = load_llama(pair.folder, quantize="auto")
    for i, expected in enumerate(experts_of(pair)):
        layer = params[f"layers_{i}"]
        assert isinstance(layer["qkv"], jax.Array)
        for name, kernels in expected.items():
            stored = layer["experts"][name]
            assert sum(x.nbytes for x in stored.arrays().values()) * 8 == 4.25 * kernels.size
            for e in range(len(kernels)):
                one = jax.tree.map(lambda a, e=e: a[e], stored)
                bits = np.asarray(one.dequantized()).view(np.int32)
                np.testing.assert_array_equal(bits, kernels[e].view(np.int32))
            np.testing.assert_array_equal(Mxfp4Tiles.of(kernels[1]).dequantized(), kernels[1])
    tokens = np.random.default_rng(0).integers(0, 61, (2, 44)).astype(np.int32)
    likeness = np.corrcoef(np.ravel(logits_of(model, params)), np.ravel(pair.logits(tokens)))[0, 1]
    assert 0.99 < likeness < 1 - 1e-9


def test_rounding_takes_the_nearest_number_and_of_two_the_even_code():
    row = np.float32([6, 5, 5.1, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, 0.26, -0.1, -5, -2.5, 7.9])
    codes, exponents = codes_of(np.pad(row, (0, 32 - len(row)))[None, :, None])
    assert codes[0, : len(row), 0].tolist() == [7, 6, 7, 6, 4, 4, 2, 2, 0, 1, 8, 14, 12, 7]
    assert exponents.tolist() == [[127]]


def test_damaged_files(pair, tmp_path):
    def refused(change, *pieces, quantize=None):
        tensors = load_file(pair.folder / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_text((pair.folder / "config.json").read_text())
        refusal(lambda: load_llama(tmp_path, quantize=quantize), *pieces)

    name = "model.layers.1.mlp.experts.down_proj"
    refused(lambda t: t.pop(f"{name}_scales"), "missing tensor", f"{name}_scales")
    refused(lambda t: t.pop(f"{name}_blocks"), "missing tensor", f"'{name}'")
    for quantize in (None, "mxfp4"):
        refused(lambda t: t[f"{name}_scales"].fill_(255), f"{name}_scales", "255", "0 to 254", quantize=quantize)
    refused(
        lambda t: t.update({f"{name}_scales": t[f"{name}_scales"][:, :, :2].clone()}), f"{name}_scales", "[8, 64, 3]"
    )
    refused(lambda t: t.update({f"{name}_blocks": t[f"{name}_blocks"].float()}), f"{name}_blocks", "float32", "U8")
