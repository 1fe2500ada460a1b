"""The model card of an export: recorded and missing facts, and names that could break its table."""

import dataclasses
import re
from pathlib import Path

import jax.numpy as jnp
import yaml

from helpers.draft_heads import VOCAB, WIDTH, config_in, heads_of, random_params
from hydrajax.drafters.eagle3 import Eagle3
from hydrajax.drafters.vocabulary import Vocabulary
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
    if kind == "eagle":
        eagle = Eagle3.for_base(tiny_model[0].config.replace(n_layers=8), jnp.float32)
        drafter = dataclasses.replace(eagle, vocabulary=Vocabulary(range(1, VOCAB, 2)))
    else:
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


READERS = {  # the kind of heads, and words about who reads its format
    "hydra": ("hydra", "official Hydra code"),
    "medusa": ("medusa", "text-generation-inference"),
    "vllm-medusa": ("medusa", '"num_speculative_tokens": 3'),
    "native": ("medusa", "hydrajax convert export"),
    "eagle-3": ("eagle", "SGLang"),
    "speculators": ("eagle", "vLLM"),
}


def test_card_of_every_format(tiny_model, tmp_path):
    for format, (kind, piece) in READERS.items():
        _, text, rows = card(tiny_model, tmp_path, kind, format)
        assert rows["format"] == format
        assert piece in text.split("Read by:")[1]
        assert "hydrajax generate --base BASE --draft THIS" in text
    assert rows["draft vocabulary"] == "30"
    assert "EAGLE-3 heads" in text


def test_names_of_bases(tiny_model, tmp_path):
    """The Hub would refuse a path as base_model, or link it to another model; a revision is no part of it."""
    for name in ("lab/tiny", "meta-llama/Llama-2-7b-hf", "Qwen/Qwen2.5-0.5B", "a/b"):
        assert card(tiny_model, tmp_path, base_name=name)[0]["base_model"] == name
    paths = (
        "", "vicuna", "/models/vicuna", "/vicuna", "./vicuna", "../vicuna", "a/b/c", "~/vicuna", "lab/",
        "lab/my tiny",
    )  # fmt: skip
    for name in (*paths, "lab/tiny@v1.5"):
        front, _, rows = card(tiny_model, tmp_path, base_name=name)
        assert "base_model" not in front
        assert rows["base"] == (name or "not recorded")


def test_card_with_any_text_is_still_a_table(tiny_model, tmp_path):
    for text in ("chat | code", "two\nlines", "with: a colon # and a hash", '"quoted" ünïcödé', "---"):
        story = {"data": text, "recipe": text, "tokens_per_step": text}
        _, _, rows = card(tiny_model, tmp_path, base_name=text, story=story)
        for name in ("base", "data", "recipe", "tokens_per_step (τ)"):
            assert rows[name].replace("\\|", "|").split() == text.split()
        assert rows["format"] == "medusa"
