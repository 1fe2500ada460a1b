"""`hydrajax demo --quick`: the whole way from text to the table, in seconds."""

from __future__ import annotations

import re

import pytest

from hydrajax.cli import demo
from hydrajax.train import corpus


@pytest.fixture(scope="module")
def corpus():
    """A small, regular library in place of the running Python's, so that the test does not depend on its version."""
    functions = "".join(f"def get_{n}(self):\n    return self.value_{n}\n\n\n" for n in range(120))
    return [corpus.SourceFile(f"module_{i}.py", functions) for i in range(10)]


def test_demo_trains_decodes_and_finds_equal_outputs(program, corpus, monkeypatch):
    monkeypatch.setattr(data, "standard_library", lambda max_chars, seed: corpus)
    result = program("demo", "--quick")
    assert result.code == 0, result.err
    rows = [line.split() for line in result.out.splitlines()]
    equal = [row for row in rows if row and row[0] in ("yes", "no")]
    per_prompt = len(demo.QUICK.trees) + 1  # Hydra with every tree, Medusa with one
    assert len(equal) == demo.QUICK.prompts * per_prompt
    assert all(row[0] == "yes" for row in equal)
    assert all(1 <= float(row[-3]) <= 3 for row in equal)  # tokens_per_step of two heads
    assert re.search(r"Here it (does with|never does)", result.out)
    assert "module_" in result.out
    costs = [row[-1] for row in rows if row and row[0] == "7"]  # the last column fits 80 columns: no figure is cut
    assert len(costs) == 1
    assert float(costs[0]) > 0


def test_own_prompt_is_continued(program, corpus, monkeypatch):
    monkeypatch.setattr(data, "standard_library", lambda max_chars, seed: corpus)
    result = program("demo", "--quick", "--prompt", "def get_7(self):")
    assert result.code == 0, result.err
    assert "your prompt" in result.out
    assert "def get_7(self):" in result.out


def test_a_bad_prompt_is_refused_before_training(program, corpus, monkeypatch):
    monkeypatch.setattr(data, "standard_library", lambda max_chars, seed: corpus)
    monkeypatch.setattr(demo, "train_base", lambda *_: pytest.fail("trained"))
    result = program("demo", "--quick", "--prompt", "")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "--prompt: is empty" in result.err


def test_different_outputs_end_with_exit_code_1(program, corpus, monkeypatch):
    monkeypatch.setattr(data, "standard_library", lambda max_chars, seed: corpus)
    monkeypatch.setattr(demo, "differs", lambda *_: True)
    with pytest.raises(SystemExit) as stopped:
        program("demo", "--quick")
    assert "differs from autoregressive decoding" in str(stopped.value.code)
