"""`hydrajax convert export`: heads in every format, their records and model cards; errors of `export` and `push`."""

from __future__ import annotations

import json
import os
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


# --- export ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["medusa", "vllm-medusa", "native"])
def test_medusa_heads_into_every_format_and_back(export, heads, format):
    there = export(heads, "there", format)
    assert {path.name for path in there.iterdir()} == FILES[format] | ALWAYS
    back = export(there, "back", "medusa")
    same_tensors(heads / "medusa_lm_head.safetensors", back / "medusa_lm_head.safetensors")
    state = torch.load(back / "medusa_lm_head.pt", weights_only=True)
    assert all(torch.equal(state[name], x) for name, x in load_file(heads / "medusa_lm_head.safetensors").items())


@pytest.mark.parametrize("format", ["hydra", "native"])
def test_hydra_heads_into_every_format_and_back(export, hydra, format):
    """The dtype bfloat16 is kept, the copy of the embedding is dropped."""
    there = export(hydra, "there", format)
    assert {path.name for path in there.iterdir()} == FILES[format] | ALWAYS
    back = export(there, "back", "hydra")
    files = [folder / "hydra_lm_head.safetensors" for folder in (hydra, back)]
    same_tensors(*files, ignored="input_embed_fn.*")


def test_the_first_heads(export, refused, base, hydra, tmp_path):
    files = [
        folder / "hydra_lm_head.safetensors" for folder in (hydra, export(hydra, "fewer", "hydra", "--heads", "1"))
    ]
    same_tensors(*files, ignored=r"input_embed_fn.*|hydra_(mlp|lm_head)\.[1-9]\..*")
    assert config_in(files[1].parent)["hydra_num_heads"] == 1
    too_many = ("--draft", hydra, "--output", tmp_path / "more", "--heads", str(HEADS + 1))
    refused(
        f"--heads: got {HEADS + 1}, but Hydra has {HEADS} heads to choose from", "export", "--base", base, *too_many
    )
    assert not (tmp_path / "more").exists()


def test_vllms_names(export, heads):
    found = load_file(export(heads, "vllm", "vllm-medusa") / "model.safetensors")
    for name, tensor in load_file(heads / "medusa_lm_head.safetensors").items():
        k, i, rest = name.split(".", 2)
        theirs = f"lm_heads.{k}.weight" if i == "1" else f"blocks.{k}.layers.0.{rest.removeprefix('linear.')}"
        assert torch.equal(found.pop(theirs), tensor)
    assert not found


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


@pytest.mark.parametrize("format", ["medusa", "vllm-medusa"])
def test_another_dtype(export, heads, format):
    found = export(heads, "half", format, "--dtype", "bfloat16")
    (file,) = found.glob("*.safetensors")
    assert {x.dtype for x in load_file(file).values()} == {torch.bfloat16}
    rounded = load_file(heads / "medusa_lm_head.safetensors")["1.1.weight"].bfloat16()
    assert any(x.shape == rounded.shape and torch.equal(x, rounded) for x in load_file(file).values())


def test_story_and_base_are_carried_along(export, heads):
    """Records pass through every format, and flags replace them."""
    story = ("--data", "ShareGPT: 60k", "--recipe", "medusa.yaml, 2 epochs", "--tau", "2.41")
    at = export(heads, "first", "medusa", *story, "--base-name", "lab/tiny-7b")
    for output, format in (("second", "vllm-medusa"), ("third", "native"), ("fourth", "medusa")):
        at = export(at, output, format)
        front, rows = card_in(at)
        assert front["base_model"] == rows["base"] == "lab/tiny-7b"
        assert (rows["data"], rows["recipe"]) == ("ShareGPT: 60k", "medusa.yaml, 2 epochs")
        assert rows["tokens_per_step (τ)"] == "2.41"
        assert config_in(at)["base_model_name_or_path"] == "lab/tiny-7b"
    _, rows = card_in(export(at, "fifth", "native", "--tau", "2.5", "--base-name", "lab/other"))
    assert (rows["tokens_per_step (τ)"], rows["data"], rows["base"]) == ("2.5", "ShareGPT: 60k", "lab/other")


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


@pytest.mark.parametrize("record", ["text", {"story": "text"}, {"story": None, "base": None}, []], ids=str)
def test_a_record_of_the_wrong_type_is_ignored(export, heads, tmp_path, record):
    odd = shutil.copytree(heads, tmp_path / "odd")
    (odd / "config.json").write_text(json.dumps(config_in(heads) | {"hydrajax": record, "base_model_name_or_path": 3}))
    assert card_in(export(odd, "again", "medusa"))[1]["data"] == "not recorded"


def test_an_earlier_export_is_replaced_whole(export, heads):
    export(heads, "out", "native")
    again = export(heads, "out", "vllm-medusa")
    assert {path.name for path in again.iterdir()} == FILES["vllm-medusa"] | ALWAYS
    assert [path.name for path in again.parent.iterdir()] == ["out"]


def test_without_torch_there_is_no_pt(export, heads, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert {path.name for path in export(heads, "out", "medusa").iterdir()} == ALWAYS | {"medusa_lm_head.safetensors"}


# --- what is refused ------------------------------------------------------------------------------------------


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


def test_output_that_is_the_base(refused, base, heads, tmp_path):
    """Also if the base is itself an export, as `export_llama` writes it, which an export could replace."""
    folder = shutil.copytree(base, tmp_path / "base")
    for mark in ({}, {"hydrajax_export": sorted(os.listdir(folder))}):
        (folder / "config.json").write_text(json.dumps(config_in(base) | mark))
        before = contents(folder)
        refused("", "export", "--base", folder, "--draft", heads, "--format", "medusa", "--output", folder)
        assert contents(folder) == before


@pytest.mark.parametrize("name", ["notes.txt", "params/notes.txt"])
def test_output_with_files_of_somebody_else(refused, export, base, heads, name):
    folder = export(heads, "out", "native")
    (folder / name).write_text("mine")
    before = contents(folder)
    common = ("export", "--base", base, "--draft", heads, "--output", folder)
    refused(
        r"export: .*/out holds other files than an earlier export, such as '.*\.txt'",
        *common,
        "--format",
        "medusa",
    )
    assert contents(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_output_that_cannot_be(refused, base, heads, tmp_path):
    (tmp_path / "file").write_text("mine")
    common = ("export", "--base", base, "--draft", heads, "--format", "native", "--output")
    refused(r"export: .*/file is a file", *common, tmp_path / "file")
    refused(r"export: cannot write .*/file/out: Not a directory", *common, tmp_path / "file" / "out")
    refused(r"cannot (write|use) .*: File name too long", *common, tmp_path / ("x" * 300))
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_a_format_it_is_the_one_of_the_official_code(program, base, hydra, tmp_path):
    folder = tmp_path / "out"
    result = program("convert", "export", "--base", base, "--draft", hydra, "--output", folder)
    assert (result.code, result.err) == (0, "")
    assert {path.name for path in folder.iterdir()} == FILES["hydra"] | ALWAYS


def test_formats(refused, base, heads, hydra, tmp_path):
    common = ("export", "--base", base, "--output", tmp_path / "out", "--draft")
    names = ".*".join(FILES)
    refused(rf"--format: invalid choice: 'x' \(choose from .*{names}.*see hydrajax", *common, heads, "--format", "x")
    can = "export: format: got hydra for Medusa heads, expected one of medusa, vllm-medusa, native; "
    refused(can, *common, heads, "--format", "hydra")
    for format in ("medusa", "vllm-medusa"):
        can = rf"export: format: got {format} for Hydra heads, expected one of hydra, native; "
        refused(can, *common, hydra, "--format", format)
    assert list(tmp_path.iterdir()) == []


def test_flags(refused, base, heads, tmp_path):
    common = ("export", "--base", base, "--draft", heads, "--format", "native")
    refused(r"required: --output", *common)
    common += ("--output", tmp_path / "out")
    refused(r"--dtype: invalid choice: 'int4'", *common, "--dtype", "int4")
    refused(r"unrecognized arguments: --form", "export", *common[1:], "--form", "medusa")
    refused(r"unrecognized arguments: more", *common, "more")
    assert list(tmp_path.iterdir()) == []


def test_missing_directories(refused, base, heads, tmp_path):
    rest = ("--format", "native", "--output", tmp_path / "out")
    nowhere, empty = tmp_path / "no" / "where", tmp_path / "empty"
    empty.mkdir()
    refused(r"--base: no such directory: .*/where", "export", "--base", nowhere, "--draft", heads, *rest)
    refused(r"--draft: no such directory: .*/where", "export", "--base", base, "--draft", nowhere, *rest)
    refused(r"--base: no such file: .*config\.json", "export", "--base", empty, "--draft", heads, *rest)
    refused(r"--draft: no such file: .*config\.json", "export", "--base", base, "--draft", empty, *rest)
    refused(r"--base: .*model_type", "export", "--base", heads, "--draft", heads, *rest)
    refused(r"--draft: .*no draft heads of a supported format", "export", "--base", base, "--draft", base, *rest)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_damaged_heads(refused, base, heads, tmp_path):
    """Also a tensor that holds no floats, although the heads' own dtype is wanted."""
    common = (
        "export",
        "--base",
        base,
        "--draft",
        tmp_path / "copy",
        "--format",
        "native",
        "--output",
        tmp_path / "out",
    )
    weights = shutil.copytree(heads, tmp_path / "copy") / "medusa_lm_head.safetensors"
    tensors, whole = load_file(weights), weights.read_bytes()
    weights.write_bytes(whole[:-100])
    refused(r"--draft: .*medusa_lm_head\.safetensors is damaged", *common)
    save_file(tensors | {"0.1.weight": tensors["0.1.weight"].to(torch.int64)}, weights)
    refused(r"--draft: .*0\.1\.weight: got dtype I64, expected", *common)
    assert not (tmp_path / "out").exists()


def test_heads_of_another_base(refused, program, export, base, medusa, heads, llama_checkpoint, tmp_path):
    """Heads of another size never load; heads that record another fine-tune load only with --force."""
    rest = ("--format", "native", "--output", tmp_path / "out")
    common = ("export", "--base", base, *rest, "--draft")
    for force in ((), ("--force",)):
        refused(
            r"--draft: .*width: got 16, expected 32; the heads were made for",
            *common,
            medusa(width=16),
            *force,
        )
        refused(
            r"vocabulary: got 300, expected 320; the heads were made",
            *common,
            medusa(vocab=300),
            *force,
        )
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


# --- push, and the command itself -----------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch):
    """Any connection fails the test."""
    import socket

    def connect(*_, **__):
        pytest.fail("went to the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.setenv("HF_TOKEN", "hf_none")


@pytest.mark.usefixtures("no_network")
def test_push_arguments(refused, heads, tmp_path):
    refused(r"push: no such directory: .*/nowhere", "push", tmp_path / "nowhere", "lab/heads")
    refused(r"push: .* has no config\.json", "push", tmp_path, "lab/heads")
    for name in ("heads", "a/b/c", "lab/heads@main", "lab/he ads", "", "/", "lab/", "https://host/lab/heads"):
        refused(r"push: repository: got '.*', expected a name such as 'org/name'", "push", heads, name)
    refused(r"required: ORG/NAME", "push", heads)
    refused(r"required: DIR, ORG/NAME", "push")
    refused(r"--message: expected one argument", "push", heads, "lab/heads", "--message")


def test_without_a_verb(refused):
    refused(r"required: VERB .*see hydrajax convert --help")
    refused(r"invalid choice: 'exprot' \(choose from .*export.*push.*int8", "exprot")
    refused(r"VERB", "--base", "x")
