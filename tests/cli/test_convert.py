"""`hydrajax convert export`: heads in every format, their records and model cards."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

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
    folder = tmp_path_factory.mktemp("hydra")
    shapes = {"input_embed_fn.weight": (VOCAB, WIDTH)}
    for k in range(HEADS):
        for part in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{k}.0.{part}.weight"] = (WIDTH, (k + 2) * WIDTH)
            shapes[f"hydra_mlp.{k}.0.{part}.bias"] = (WIDTH,)
        shapes |= {f"hydra_lm_head.{k}.weight": (VOCAB, WIDTH), f"hydra_lm_head.{k}.bias": (VOCAB,)}
    random = torch.Generator().manual_seed(5)
    save_file(
        {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()},
        folder / "hydra_lm_head.safetensors",
    )
    config = {"hydra_num_heads": HEADS, "hydra_num_layers": 1, "hydra_head_arch": "mlp", "grounded_heads": True}
    (folder / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": "lab/tiny"}))
    return folder


@pytest.fixture
def export(program, base, tmp_path):
    """``export(draft, output, format, *flags) -> Path``: export heads of the tiny base to a directory of this name."""

    def run(draft: Path, output: str, format: str, *flags) -> Path:
        folder = tmp_path / output
        args = ("--base", base, "--draft", draft, "--output", folder, "--format", format)
        result = program("convert", "export", *args, *flags)
        assert (result.code, result.err) == (0, "")
        names = sorted(path.name for path in folder.iterdir())
        assert result.out == f"{folder}: {', '.join(names)}\n"
        return folder

    return run


@pytest.fixture
def refused(program):
    """``refused(pattern, *argv)``: `hydrajax convert` prints one line that matches, and returns 2."""

    def check(pattern: str, *argv) -> None:
        result = program("convert", *argv)
        assert result.code == 2, result
        assert result.out == ""
        assert re.fullmatch(r"hydrajax: [^\n]+\n", result.err), result.err
        assert re.search(pattern, result.err), result.err

    return check


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
    at = export(heads, "first", "medusa", *story, "--base-name", "lab/tiny-7b")
    for output, format in (("second", "vllm-medusa"), ("third", "native"), ("second", "medusa")):
        at = export(at, output, format)
        assert {path.name for path in at.iterdir()} == FILES[format] | ALWAYS
        front, rows = card_in(at)
        assert front["base_model"] == rows["base"] == "lab/tiny-7b"
        assert (rows["data"], rows["recipe"]) == ("ShareGPT: 60k", "medusa.yaml, 2 epochs")
        assert rows["tokens_per_step (τ)"] == "2.41"
        assert config_in(at)["base_model_name_or_path"] == "lab/tiny-7b"
    same_tensors(heads / "medusa_lm_head.safetensors", at / "medusa_lm_head.safetensors")
    state = torch.load(at / "medusa_lm_head.pt", weights_only=True)
    assert all(torch.equal(state[name], x) for name, x in load_file(heads / "medusa_lm_head.safetensors").items())
    half = export(at, "half", "medusa", "--dtype", "bfloat16", "--tau", "2.5", "--base-name", "lab/other")
    _, rows = card_in(half)
    assert (rows["tokens_per_step (τ)"], rows["data"], rows["base"]) == ("2.5", "ShareGPT: 60k", "lab/other")
    assert {x.dtype for x in load_file(half / "medusa_lm_head.safetensors").values()} == {torch.bfloat16}


def test_hydra_heads_into_every_format_and_back(export, program, base, hydra, tmp_path):
    """The dtype bfloat16 is kept, the copy of the embedding is dropped. The default is the official code's format."""
    there, back = export(hydra, "there", "native"), tmp_path / "back"
    result = program("convert", "export", "--base", base, "--draft", there, "--output", back)
    assert (result.code, result.err) == (0, "")
    assert {path.name for path in back.iterdir()} == FILES["hydra"] | ALWAYS
    first = export(hydra, "first", "hydra", "--heads", 1)
    whole, again, one = (folder / "hydra_lm_head.safetensors" for folder in (hydra, back, first))
    same_tensors(whole, again, ignored="input_embed_fn.*")
    same_tensors(whole, one, ignored=r"input_embed_fn.*|hydra_(mlp|lm_head)\.[1-9]\..*")
    assert config_in(first)["hydra_num_heads"] == 1


def test_heads_out_of_a_medusa_2_checkpoint(program, base, heads, tmp_path):
    """One directory is both the base and the draft."""
    whole = shutil.copytree(base, tmp_path / "whole")
    tensors = load_file(whole / "model.safetensors")
    theirs = load_file(heads / "medusa_lm_head.safetensors")
    tensors |= {f"medusa_head.{name}": x for name, x in theirs.items()}
    save_file(tensors, whole / "model.safetensors")
    args = ("--base", whole, "--draft", whole, "--format", "medusa", "--output", tmp_path / "heads")
    result = program("convert", "export", *args)
    assert (result.code, result.err) == (0, "")
    same_tensors(heads / "medusa_lm_head.safetensors", tmp_path / "heads" / "medusa_lm_head.safetensors")


def test_heads_without_records(export, hydra, heads, tmp_path, base):
    """The base's name is the one that the heads record, else the one on the command line."""
    front, rows = card_in(export(hydra, "hydra", "native"))
    assert front["base_model"] == "lab/tiny"
    assert {rows[name] for name in ("data", "recipe", "tokens_per_step (τ)")} == {"not recorded"}
    nameless = shutil.copytree(heads, tmp_path / "nameless")
    (nameless / "config.json").write_text(json.dumps({"medusa_num_heads": HEADS, "medusa_num_layers": 1}))
    front, rows = card_in(export(nameless, "medusa", "medusa"))
    assert rows["base"] == str(base)
    assert "base_model" not in front


def test_a_record_of_the_wrong_type_is_ignored(export, heads, tmp_path):
    odd = shutil.copytree(heads, tmp_path / "odd")
    for record in ("text", {"story": "text"}, {"story": None, "base": None}, []):
        config = config_in(heads) | {"hydrajax": record, "base_model_name_or_path": 3}
        (odd / "config.json").write_text(json.dumps(config))
        assert card_in(export(odd, "again", "medusa"))[1]["data"] == "not recorded"


def test_without_torch_there_is_no_pt(export, heads, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert {path.name for path in export(heads, "out", "medusa").iterdir()} == ALWAYS | {"medusa_lm_head.safetensors"}


def test_output_that_is_the_draft_itself(refused, base, heads, tmp_path, monkeypatch):
    """However it is written, an earlier export too, and nothing changes."""
    folder = shutil.copytree(heads, tmp_path / "heads")
    (tmp_path / "link").symlink_to(folder)
    config = config_in(folder) | {"hydrajax_export": ["config.json", "medusa_lm_head.safetensors"]}
    (folder / "config.json").write_text(json.dumps(config))
    before = contents(folder)
    monkeypatch.chdir(tmp_path)
    for output in (folder, f"{folder}/", "heads", "./heads/../heads", "link"):
        common = ("--base", base, "--draft", folder, "--format", "native", "--output", output)
        refused(r"--output: got '.*', the directory of the heads", "export", *common)
    assert contents(folder) == before
    assert {path.name for path in tmp_path.iterdir()} == {"heads", "link"}


def test_heads_of_another_base(refused, program, export, base, medusa, heads, llama_checkpoint, tmp_path):
    """Heads of another size never load; heads that record another fine-tune load only with --force."""
    rest = ("--format", "native", "--output", tmp_path / "out")
    common = ("export", "--base", base, *rest, "--draft")
    for force in ((), ("--force",)):
        refused(r"--draft: .*width: got 16, expected 32; the heads were made for", *common, medusa(width=16), *force)
    marked = export(heads, "marked", "medusa", "--base-name", "lab/tiny")
    tuned = shutil.copytree(base, tmp_path / "tuned")
    tensors = load_file(tuned / "model.safetensors")
    tensors["model.norm.weight"] *= 2
    save_file(tensors, tuned / "model.safetensors")
    common = ("export", "--base", tuned, *rest, "--draft", marked)
    refused(r"made for another base, lab/tiny: .*/tuned has the same shapes but other weights; 'force' loads", *common)
    assert not (tmp_path / "out").exists()

    result = program("convert", *common, "--force")
    assert (result.code, result.err) == (0, "")
    marks = [config_in(folder)["hydrajax"]["base"] for folder in (marked, tmp_path / "out")]
    assert marks[0]["sha256"] != marks[1]["sha256"]  # they now are the other base's
    assert marks[0]["shapes"] == marks[1]["shapes"]
