"""The commands with a small model as the draft, and what each refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = ("--prompt", "the tree")


@pytest.fixture(scope="module")
def draft(llama_checkpoint, tokenizer, tmp_path_factory) -> Path:
    """Of another family than the base, padded to fewer tokens, of which the tokenizer has 300."""
    settings = {"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 1}
    small = llama_checkpoint(vocab_size=304, max_position_embeddings=128, **settings)
    folder = shutil.copytree(small, tmp_path_factory.mktemp("draft") / "small")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the tree", "of the draft")))
    return path


@pytest.mark.slow
def test_generate_and_certify(program, base, draft):
    common = ("generate", "--base", base, *TEXT, "--max-new-tokens", 12)
    plain = program(*common, "--tree", "root")
    for flags in (("--tree", "chain-4"), ("--tree", "dynamic-8-2-3"), ("--tree", "chain-4", "--draft-confidence", 0.4)):
        done = program(*common, "--draft", draft, *flags)
        assert done.out == plain.out
    sure = ("--draft", draft, "--tree", "chain-2", "--max-new-tokens", 12, "--samples", 1024, "--limit", 2)
    done = program("certify", "--base", base, *sure, "--rule", "rejection", "--temperature", "0.8")


@pytest.mark.slow
def test_tree_search_of_chains(program, base, draft, prompts, tmp_path):
    path = tmp_path / "tree.json"
    flags = ("--prompts", prompts, "--how", "chains", "--shapes", "static", "--sizes", "2,3", "--largest", 3)
    flags += ("--repeats", 1, "--max-new-tokens", 8, "--output", path)
    done = program("tree", "search", "--base", base, "--draft", draft, *flags)
    origin = json.loads(path.read_text())["provenance"]
    alpha, cost = origin["chain"]["acceptance"], origin["chain"]["draft_cost"]
    assert [row["nodes"] for row in origin["measured"]] == [2, 3]
    expected = [row["expected_tokens_per_step"] for row in origin["measured"]]
    assert expected == pytest.approx([1 + alpha, 1 + alpha + alpha**2])
    assert all(row["equal"] for row in origin["measured"])
    assert f"α {alpha:.2f}, c {cost:.2f}: " in done.out


def test_mistakes_end_in_one_line(refused, base, draft, tmp_path):
    foreign = shutil.copytree(draft, tmp_path / "foreign")
    content = json.loads((foreign / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first = next(token for token, place in vocabulary.items() if place == 11)
    last = next(token for token, place in vocabulary.items() if place == 299)
    vocabulary[first], vocabulary[last] = 299, 11
    (foreign / "tokenizer.json").write_text(json.dumps(content))
    wordless = shutil.copytree(draft, tmp_path / "wordless")
    (wordless / "tokenizer.json").unlink()
    common = ("generate", "--base", base, *TEXT, "--draft")
    cases = {
        f"--draft: {foreign} has another tokenizer than the base: {first!r} has id 11 in the base and id 299 in the": (
            *common, foreign),
        f"--draft: {wordless}: vocab_size: got 304, expected the base's 320; ": (*common, wordless),
        "--tree: got a depth of 17, expected at most the 16 tokens": (*common, draft, "--tree", "chain-17"),
        "--draft-confidence: got 1.5, expected at least 0": (*common, draft, "--draft-confidence", "1.5"),
        "no draft heads of a supported format": (
            "convert", "export", "--base", base, "--draft", draft, "--format", "native", "--output", tmp_path / "out"),
    }  # fmt: skip
    for message, arguments in cases.items():
        refused(message, *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_draft_larger_than_the_base_is_warned_of_in_one_line(base, draft):
    """In a process of its own, as pytest takes warnings for itself."""
    command = [sys.executable, "-m", "hydrajax", "generate", "--base", draft, "--draft", base, *TEXT]
    done = subprocess.run(
        [*map(str, command), "--tree", "chain-2", "--max-new-tokens", "4"], capture_output=True, text=True, check=True
    )
    (line,) = [line for line in done.stderr.splitlines() if "parameters" in line]
    assert line.startswith(f"hydrajax: draft: {base} has ")
    assert ".py:" not in done.stderr
