"""`hydrajax convert`: heads in every format with their records and cards, merged adapters, int8 weights and caches."""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hydrajax
from helpers import released
from helpers.lora_files import write_lora
from helpers.outputs import write_lines
from hydrajax.bench.quantization import logit_effect
from hydrajax.formats.huggingface import load_llama
from hydrajax.models.kv_vectors import KV_CACHES
from hydrajax.ops import trace

WIDTH, VOCAB, HEADS = 32, 320, 2  # of the fixtures
FILES = {
    "hydra": {"hydra_lm_head.safetensors", "hydra_lm_head.pt"},
    "medusa": {"medusa_lm_head.safetensors", "medusa_lm_head.pt"},
    "vllm-medusa": {"model.safetensors"},
    "native": {"params"},
}
ALWAYS = {"README.md", "config.json"}


@pytest.fixture(scope="session")
def hydra(tmp_path_factory) -> Path:
    """Hydra heads in the released layout, with the copy of the base's embedding that those have."""
    heads = released.randomise(released.Hydra(HEADS, 1, VOCAB, torch.nn.Embedding(VOCAB, WIDTH))).bfloat16()
    config = released.hydra_config(HEADS, 1) | {"base_model_name_or_path": "lab/tiny"}
    return released.save(tmp_path_factory.mktemp("hydra"), heads.state_dict(), config)


@pytest.fixture
def export(program, base, tmp_path):
    """``export(draft, output, *flags, base=base) -> Path``: export heads to a directory of this name."""

    def run(draft: Path, output: str, *flags, base=base) -> Path:
        folder = tmp_path / output
        result = program("convert", "export", "--base", base, "--draft", draft, "--output", folder, *flags)
        assert result.err == ""
        names = sorted(path.name for path in folder.iterdir())
        assert result.out == f"{folder}: {', '.join(names)}\n"
        return folder

    return run


def config_in(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def card_in(folder: Path) -> tuple[dict, dict[str, str]]:
    """The model card's front matter and the rows of its table."""
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return yaml.safe_load(front), {name.strip(): value.strip() for name, value in rows}


def same_tensors(one: Path, other: Path, ignored: str = "(?!)") -> None:
    """Names, dtypes and bits."""
    left, right = load_file(one), load_file(other)
    left = {name: x for name, x in left.items() if not re.fullmatch(ignored, name)}
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


def test_medusa_heads_into_every_format_and_back(export, heads):
    """Tensors and records pass through every format, flags replace records, and an earlier export is replaced whole."""
    story = ("--data", "ShareGPT: 60k", "--recipe", "medusa.yaml, 2 epochs", "--tau", "2.41")
    at = export(heads, "first", "--format", "medusa", *story, "--base-name", "lab/tiny-7b")
    for output, format in (("second", "vllm-medusa"), ("third", "native"), ("second", "medusa")):
        at = export(at, output, "--format", format)
        assert {path.name for path in at.iterdir()} == FILES[format] | ALWAYS
        front, rows = card_in(at)
        assert front["base_model"] == rows["base"] == "lab/tiny-7b"
        assert (rows["data"], rows["recipe"]) == ("ShareGPT: 60k", "medusa.yaml, 2 epochs")
        assert rows["tokens_per_step (τ)"] == "2.41"
        assert config_in(at)["base_model_name_or_path"] == "lab/tiny-7b"
    same_tensors(heads / "medusa_lm_head.safetensors", at / "medusa_lm_head.safetensors")
    state = torch.load(at / "medusa_lm_head.pt", weights_only=True)
    assert all(torch.equal(state[name], x) for name, x in load_file(heads / "medusa_lm_head.safetensors").items())
    half = export(at, "half", "--dtype", "bfloat16", "--tau", "2.5", "--base-name", "lab/other")
    _, rows = card_in(half)
    assert (rows["tokens_per_step (τ)"], rows["data"], rows["base"]) == ("2.5", "ShareGPT: 60k", "lab/other")
    assert {x.dtype for x in load_file(half / "medusa_lm_head.safetensors").values()} == {torch.bfloat16}


def test_hydra_heads_into_every_format_and_back(export, hydra):
    """The dtype bfloat16 is kept, the copy of the embedding is dropped. The default is the official code's format."""
    there = export(hydra, "there", "--format", "native")
    front, rows = card_in(there)
    assert front["base_model"] == "lab/tiny"
    assert {rows[name] for name in ("data", "recipe", "tokens_per_step (τ)")} == {"not recorded"}
    back, first = export(there, "back"), export(hydra, "first", "--heads", 1)
    assert {path.name for path in back.iterdir()} == FILES["hydra"] | ALWAYS
    whole, again, one = (folder / "hydra_lm_head.safetensors" for folder in (hydra, back, first))
    same_tensors(whole, again, ignored="input_embed_fn.*")
    same_tensors(whole, one, ignored=r"input_embed_fn.*|hydra_(mlp|lm_head)\.[1-9]\..*")
    assert config_in(first)["hydra_num_heads"] == 1


def test_heads_without_a_base_or_with_records_of_wrong_types(export, heads, base, tmp_path):
    """The base's name is then the one on the command line."""
    odd = shutil.copytree(heads, tmp_path / "odd")
    (odd / "config.json").write_text(json.dumps({"medusa_num_heads": HEADS, "medusa_num_layers": 1}))
    front, rows = card_in(export(odd, "medusa"))
    assert (rows["base"], "base_model" in front) == (str(base), False)
    for record in ("text", {"story": "text"}, {"story": None, "base": None}, []):
        config = config_in(heads) | {"hydrajax": record, "base_model_name_or_path": 3}
        (odd / "config.json").write_text(json.dumps(config))
        assert card_in(export(odd, "again"))[1]["data"] == "not recorded"


def test_without_torch_there_is_no_pt(export, heads, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert {path.name for path in export(heads, "out").iterdir()} == ALWAYS | {"medusa_lm_head.safetensors"}


def test_an_adapter_merged_or_not(program, base, tmp_path):
    """tests/formats/test_peft.py compares with transformers."""
    lora = write_lora(tmp_path / "lora", AutoModelForCausalLM.from_pretrained(base), lora_alpha=9)
    merged, output = tmp_path / "merged", tmp_path / "out.jsonl"
    result = program("convert", "merge", "--base", base, "--adapter", lora, "--output", merged)
    assert result.err == ""
    assert result.out == f"{merged}: {', '.join(sorted(path.name for path in merged.iterdir()))}\n"

    def said(*flags) -> list[int]:
        common = ("--prompt", "a tree", "--draft", "lookup", "--tree", "chain-2", "--max-new-tokens", 12)
        program("generate", *common, "--output", output, *flags)
        return json.loads(output.read_text())["output_ids"]

    expected = said("--base", merged)
    assert said("--base", base, "--adapter", lora) == expected
    assert said("--base", base, "--adapter", lora, "--merge-adapter") == expected
    assert said("--base", base) != expected


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
def measure(program, base, tmp_path):
    """``measure(command)``: the output and the report of two prompts, and the prompts' ids."""

    def run(command: str) -> tuple[str, dict, list]:
        prompts, file = tmp_path / "prompts.jsonl", tmp_path / "effect.json"
        write_lines(prompts, [{"prompt": text} for text in TEXTS])
        result = program("convert", command, "--base", base, "--prompts", prompts, "--json", file)
        return result.out, json.loads(file.read_text()), list(map(hydrajax.load(base).tokenizer.encode, TEXTS))

    return run


def test_figures_of_int8_are_printed_and_written(measure, base):
    out, report, ids = measure("int8")
    assert (report["base"], report["dtype"], report["positions"]) == (str(base), "float32", sum(map(len, ids)))
    assert report["bytes"] == 4 * (FLOATS + OTHERS)
    assert report["bytes_int8"] == INT8_BYTES + 4 * OTHERS
    effect = dataclasses.asdict(logit_effect(load_llama(base), load_llama(base, quantize="int8"), ids))
    assert {name: report[name] for name in effect} == pytest.approx(effect, rel=1e-5)
    assert 0 < report["kl"] < 0.1
    assert 0.5 < report["agreement"] <= 1
    sizes, figures = out.splitlines()
    megabytes = [f"{report[name] / 1e6:.1f} MB" for name in ("bytes", "bytes_int8")]
    assert sizes == f"{base}: {megabytes[0]} in float32, {megabytes[1]} with int8 weights"
    assert f"{report['positions']} positions of 2 prompts" in figures
    for shown in (*(f"{report[name]:.3g}" for name in ("mean", "largest", "kl")), f"{report['agreement']:.1%}"):
        assert shown in figures


def test_types_of_the_cache_are_compared(measure, base):
    out, report, ids = measure("kv-cache")
    assert report["bytes_per_token"] == 2 * 2 * 8 * 4  # keys and values of 2 heads
    assert [report[name]["bytes_per_token"] for name in KV_CACHES] == [2 * 2 * 8 * 2, 2 * 2 * (8 + 4)]
    model, params = load_llama(base)
    for name, line in zip(KV_CACHES, out.splitlines()[1:], strict=True):
        effect = dataclasses.asdict(logit_effect((model, params), (model.clone(kv_cache=name), params), ids))
        assert {key: report[name][key] for key in effect} == pytest.approx(effect, rel=1e-5)
        assert 0 < effect["mean"] < effect["largest"] < 1
        assert line.startswith(f"{name}: {report[name]['bytes_per_token']} bytes per token; logits at ")
        assert f"at {effect['positions']} positions of 2 prompts: mean" in line


def test_limit_and_token_ids_without_a_tokenizer(program, wordless, tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text('{"prompt_ids": [1, 2, 3]}\n{"prompt_ids": [4, 5, 6]}\n{"prompt_ids": [999]}\n')
    result = program("convert", "int8", "--base", wordless, "--prompts", path, "--limit", 2)
    assert "6 positions of 2 prompts" in result.out
    assert list(tmp_path.iterdir()) == [path]
