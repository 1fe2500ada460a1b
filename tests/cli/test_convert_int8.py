"""`hydrajax convert int8` and `kv-cache`: what they print and write, and their refusals."""

from __future__ import annotations

import dataclasses
import json

import pytest
from transformers import AutoTokenizer

from hydrajax.bench.quantization import logit_effect
from hydrajax.formats.huggingface import load_llama
from hydrajax.models.kv_vectors import KV_CACHES
from hydrajax.ops import trace

# The base of conftest.py: 320 tokens, width 32, one layer, 4 heads and 2 key-value heads of 8 features, MLP of 88.
KERNELS = [(32, 32 + 16 + 16), (32, 32), (32, 2 * 88), (88, 32), (32, 320)]
FLOATS = sum(inputs * outputs for inputs, outputs in KERNELS)
OTHERS = 320 * 32 + 3 * 32
if trace.has_few_bits():  # tiles of 64 outputs and 32 inputs, with a float16 scale for each output
    INT8_BYTES = sum(-(-outputs // 64) * -(-inputs // 32) * 64 * (32 + 2) for inputs, outputs in KERNELS)
else:
    INT8_BYTES = sum(inputs * outputs + 4 * outputs for inputs, outputs in KERNELS)
TEXTS = ["the tree", "the draft of the base"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path


def test_figures_are_printed_and_written(program, base, prompts, tmp_path):
    result = program("convert", "int8", "--base", base, "--prompts", prompts, "--json", tmp_path / "effect.json")
    assert result.code == 0, result
    report = json.loads((tmp_path / "effect.json").read_text())
    assert report["base"] == str(base)
    assert report["dtype"] == "float32"
    assert report["bytes"] == 4 * (FLOATS + OTHERS)
    assert report["bytes_int8"] == INT8_BYTES + 4 * OTHERS

    ids = [AutoTokenizer.from_pretrained(base).encode(text) for text in TEXTS]
    assert report["positions"] == sum(map(len, ids))
    effect = logit_effect(load_llama(base), load_llama(base, quantize="int8"), ids)
    for name, value in dataclasses.asdict(effect).items():
        assert report[name] == pytest.approx(value, rel=1e-5), name
    assert 0 < report["mean"] < report["largest"]
    assert 0 < report["kl"] < 0.1
    assert 0.5 < report["agreement"] <= 1

    sizes, figures = result.out.splitlines()
    megabytes = [f"{report[name] / 1e6:.1f} MB" for name in ("bytes", "bytes_int8")]
    assert sizes == f"{base}: {megabytes[0]} in float32, {megabytes[1]} with int8 weights"
    assert f"{report['positions']} positions of 2 prompts" in figures
    for name in ("mean", "largest", "kl"):
        assert f"{report[name]:.3g}" in figures
    assert f"{report['agreement']:.1%}" in figures


def test_types_of_the_cache_are_compared(program, base, prompts, tmp_path):
    result = program("convert", "kv-cache", "--base", base, "--prompts", prompts, "--json", tmp_path / "effect.json")
    assert result.code == 0, result
    report = json.loads((tmp_path / "effect.json").read_text())
    assert report["bytes_per_token"] == 2 * 2 * 8 * 4  # keys and values of 2 heads
    assert [report[name]["bytes_per_token"] for name in KV_CACHES] == [2 * 2 * 8 * 2, 2 * 2 * (8 + 4)]
    model, params = load_llama(base)
    ids = [AutoTokenizer.from_pretrained(base).encode(text) for text in TEXTS]
    for name, line in zip(KV_CACHES, result.out.splitlines()[1:], strict=True):
        effect = dataclasses.asdict(logit_effect((model, params), (model.clone(kv_cache=name), params), ids))
        assert {key: report[name][key] for key in effect} == pytest.approx(effect, rel=1e-5)
        assert 0 < effect["mean"] < effect["largest"] < 1
        assert line.startswith(f"{name}: {report[name]['bytes_per_token']} bytes per token; logits at ")
        assert f"at {effect['positions']} positions of 2 prompts: mean" in line


def test_limit_and_token_ids_without_a_tokenizer(program, wordless, tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text('{"prompt_ids": [1, 2, 3]}\n{"prompt_ids": [4, 5, 6]}\n{"prompt_ids": [999]}\n')
    result = program("convert", "int8", "--base", wordless, "--prompts", path, "--limit", 2)
    assert result.code == 0, result
    assert "6 positions of 2 prompts" in result.out
    assert list(tmp_path.iterdir()) == [path]
