"""The model card of an export: recorded and missing facts, and names that could break its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from helpers.draft_heads import VOCAB, WIDTH, config_in, heads_of, random_params
from hydrajax.formats.export import export_heads


def card_of(folder: Path) -> tuple[dict, str, dict[str, str]]:
    """The front matter, the text after it, and the rows of its table."""
    whole = (folder / "README.md").read_text()
    assert whole.startswith("---\n")
    front, text = whole.removeprefix("---\n").split("\n---\n", 1)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]
    assert all(len(row) == 2 for row in cells), rows
    return yaml.safe_load(front), text, {name.strip(): value.strip() for name, value in cells}


def card(tiny_model, folder: Path, kind: str = "medusa", format: str | None = None, **more):
    drafter = heads_of(kind, tiny_model[0].config, n_layers=1 + kind.startswith("hydra"))
    export_heads(folder / "heads", drafter, random_params(drafter, tiny_model), format=format, **more)
    return card_of(folder / "heads")


def test_card_of_recorded_facts(tiny_model, tmp_path):
    story = {"data": "ShareGPT, 60k conversations", "recipe": "configs/medusa.yaml, 2 epochs", "tokens_per_step": 2.41}
    front, text, rows = card(tiny_model, tmp_path, base_name="lab/tiny-7b", story=story)
    assert front["base_model"] == "lab/tiny-7b"
    assert front["library_name"] == "hydrajax"
    assert "medusa" in front["tags"]
    assert rows["base"] == "lab/tiny-7b"
    assert rows["data"] == story["data"]
    assert rows["recipe"] == story["recipe"]
    assert rows["tokens_per_step (τ)"] == "2.41"
    assert rows["width, vocabulary"] == f"{WIDTH}, {VOCAB}"
    assert "not recorded" not in text
    assert "# Medusa heads for lab/tiny-7b" in text
    assert config_in(tmp_path / "heads")["hydrajax"]["story"] == story


def test_card_of_missing_facts(tiny_model, tmp_path):
    front, text, rows = card(tiny_model, tmp_path, "hydra++")
    assert "base_model" not in front
    assert "hydra" in front["tags"]
    for name in ("base", "data", "recipe", "tokens_per_step (τ)"):
        assert rows[name] == "not recorded"
    assert "Hydra heads with a prefix layer" in text


@pytest.mark.parametrize(
    ("format", "piece"),
    [
        ("hydra", "official Hydra code"),
        ("medusa", "text-generation-inference"),
        ("vllm-medusa", '"num_speculative_tokens": 3'),
        ("native", "hydrajax convert export"),
    ],
)
def test_card_of_every_format(tiny_model, tmp_path, format, piece):
    _, text, rows = card(tiny_model, tmp_path, "hydra" if format == "hydra" else "medusa", format)
    assert rows["format"] == format
    assert piece in text
    assert "hydrajax generate --base BASE --draft THIS" in text


@pytest.mark.parametrize("name", ["lab/tiny", "meta-llama/Llama-2-7b-hf", "Qwen/Qwen2.5-0.5B", "a/b"])
def test_base_with_a_name_on_the_hub(tiny_model, tmp_path, name):
    assert card(tiny_model, tmp_path, base_name=name)[0]["base_model"] == name


@pytest.mark.parametrize(
    "name",
    ["", "vicuna", "/models/vicuna", "/vicuna", "./vicuna", "../vicuna", "a/b/c", "~/vicuna", "lab/", "lab/my tiny"],
)
def test_base_without_a_name_on_the_hub(tiny_model, tmp_path, name):
    """The Hub would refuse a path as base_model, or link it to another model."""
    front, _, rows = card(tiny_model, tmp_path, base_name=name)
    assert "base_model" not in front
    assert rows["base"] == (name or "not recorded")


def test_base_named_with_a_revision(tiny_model, tmp_path):
    """The Hub's base_model is a repository without a revision."""
    front, _, rows = card(tiny_model, tmp_path, base_name="lab/tiny@v1.5")
    assert front.get("base_model") in (None, "lab/tiny")
    assert rows["base"] == "lab/tiny@v1.5"


@pytest.mark.parametrize("text", ["chat | code", "two\nlines", "with: a colon # and a hash", '"quoted" ünïcödé', "---"])
def test_card_with_any_text_is_still_a_table(tiny_model, tmp_path, text):
    story = {"data": text, "recipe": text, "tokens_per_step": text}
    _, _, rows = card(tiny_model, tmp_path, base_name=text, story=story)
    for name in ("base", "data", "recipe", "tokens_per_step (τ)"):
        assert rows[name].replace("\\|", "|").split() == text.split()
    assert rows["format"] == "medusa"
