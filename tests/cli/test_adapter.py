"""``--adapter`` and ``convert merge``: equal outputs either way, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.lora_files import apply_lora, write_lora


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    return write_lora(
        tmp_path_factory.mktemp("lora") / "lora", AutoModelForCausalLM.from_pretrained(base), lora_alpha=9
    )


@pytest.fixture
def said(program, tmp_path):
    """``said(*flags) -> [ids]``: what ``generate`` writes after one prompt, drafting by lookup."""

    def run(*flags) -> list[int]:
        output = tmp_path / "out.jsonl"
        flags = (*flags, "--draft", "lookup", "--tree", "chain-2", "--max-new-tokens", 12, "--output", output)
        result = program("generate", "--prompt", "a tree", *flags)
        assert result.code == 0, result.err
        return json.loads(output.read_text())["output_ids"]

    return run


def test_beside_the_base_or_merged_it_says_what_transformers_says(said, program, base, adapter, tokenizer, tmp_path):
    prompt = torch.tensor([tokenizer("a tree")["input_ids"]])
    with torch.no_grad():
        theirs = apply_lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
        expected = theirs.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :].tolist()
        without = AutoModelForCausalLM.from_pretrained(base).generate(prompt, max_new_tokens=12, do_sample=False)
    merged = tmp_path / "merged"
    result = program("convert", "merge", "--base", base, "--adapter", adapter, "--output", merged)
    assert (result.code, result.err) == (0, "")
    assert result.out == f"{merged}: {', '.join(sorted(path.name for path in merged.iterdir()))}\n"
    assert without[0, prompt.shape[1] :].tolist() != expected
    assert said("--base", merged) == expected
    assert said("--base", base, "--adapter", adapter) == expected
    assert said("--base", base, "--adapter", adapter, "--merge-adapter") == expected
