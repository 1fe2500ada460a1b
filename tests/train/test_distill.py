"""Prompts cut from documents, and their continuations by the base."""

from __future__ import annotations

import argparse
import functools
import json
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.cli import distill as command
from hydrajax.errors import HydrajaxError
from hydrajax.models.attention import causal_mask
from hydrajax.train import distill
from hydrajax.train.data.generations import read
from hydrajax.train.data.rows import all_targets


def documents():
    """Ids that say where they come from: document * 1000 + place."""
    return [all_targets(np.arange(length) + 1000 * i) for i, length in enumerate((5, 30, 12, 11))]


def test_prompts_are_stretches_of_long_enough_documents():
    prompts = distill.cut_prompts(documents(), 300, 12, seed=0)
    assert prompts.shape == (300, 12)
    assert prompts.dtype == np.int32
    assert (np.diff(prompts, axis=1) == 1).all()
    assert set((prompts[:, 0] // 1000).tolist()) == {1, 2}
    # 20 places, of which 19 in document 1: every place is as likely as another, the last one included.
    assert set(prompts[:, 0].tolist()) == {*range(1000, 1019), 2000}
    assert 1 <= (prompts[:, 0] == 2000).sum() <= 40


def test_prompts_depend_on_the_seed_alone():
    first, again, other = (distill.cut_prompts(documents(), 20, 12, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_no_document_is_long_enough():
    with pytest.raises(HydrajaxError, match="prompt_tokens: no document has 31 tokens"):
        distill.cut_prompts(documents(), 3, 31, seed=0)


def greedy(model, base, prompt: np.ndarray, new_tokens: int) -> list[int]:
    """The whole text through the base for every token; no cache, no loop of the package."""
    width = len(prompt) + new_tokens
    text = np.zeros((1, width), np.int32)
    text[0, : len(prompt)] = prompt
    for at in range(len(prompt), width):
        text[0, at] = np.argmax(logits(model, base, text)[0, at - 1])
    return text[0, len(prompt) :].tolist()


@functools.partial(jax.jit, static_argnums=0)
def logits(model, base, text):
    width = text.shape[1]
    hidden = model.apply({"params": base}, text, jnp.arange(width)[None], causal_mask(width)).hidden
    return model.apply({"params": base}, hidden, method="logits")


def test_temperature_zero_is_greedy_and_others_are_shared_out(tiny_model):
    model, base = tiny_model
    prompts = np.random.default_rng(0).integers(0, 61, (5, 6), dtype=np.int32)
    temperatures = np.array([0.0, 5.0, 0.0, 5.0, 0.0])
    made = [
        dict(distill.continuations(model, base, prompts, temperatures, 8, (), batch=2, seed=seed)) for seed in (0, 0, 1)
    ]
    assert made[0] == made[1]  # the same seed, the same text
    assert sorted(made[0]) == [0, 1, 2, 3, 4]
    for index, record in made[0].items():
        assert record["prompt_ids"] == prompts[index].tolist()
        assert record["temperature"] == temperatures[index]
        assert len(record["output_ids"]) == 8
        expected = greedy(model, base, prompts[index], 8)
        if temperatures[index] == 0:
            assert record["output_ids"] == made[2][index]["output_ids"] == expected
        else:
            assert record["output_ids"] != made[2][index]["output_ids"]
            assert record["output_ids"] != expected


def test_generation_ends_at_eos(tiny_model):
    model, base = tiny_model
    prompts = np.random.default_rng(0).integers(0, 61, (1, 6), dtype=np.int32)
    expected = greedy(model, base, prompts[0], 8)
    ((_, record),) = distill.continuations(model, base, prompts, np.zeros(1), 8, (expected[3],), batch=1, seed=0)
    assert record["output_ids"] == expected[: expected.index(expected[3]) + 1]


@pytest.mark.parametrize("text", ["", "a", "0,-1", "0.5,,1", "nan", "inf"])
def test_temperatures_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be numbers from 0 up"):
        command.temperatures(text)


def test_the_program_writes_what_training_reads(program, config_file, tmp_path):
    output = tmp_path / "out.jsonl"
    common = ("--config", config_file(), "--prompt-tokens", 8, "--new-tokens", 6, "--batch-size", 4)
    result = program(*common, "--count", 5, "--output", output, main=command.main)
    assert result.code == 0, result.err
    assert "5 continuations, " in result.out
    assert len(read([output])) == 5
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(record["temperature"] for record in records) == [0, 0, 0, 0.7, 0.7]
    assert all(len(record["prompt_ids"]) == 8 and 1 <= len(record["output_ids"]) <= 6 for record in records)


def test_refused_on_the_command_line(program, config_file, tmp_path):
    output = tmp_path / "out.jsonl"
    result = program("--config", config_file(), "--output", output, "--temperatures", "x", main=command.main)
    assert result.code == 2
    assert "--temperatures: must be numbers from 0 up with commas between, found 'x'" in result.err
    result = program("--config", config_file(), "--output", output, "--prompt-tokens", 99999, main=command.main)
    assert result.code == 2
    assert result.err.strip().endswith("--prompt-tokens: no document has 99999 tokens")
    assert not output.exists()


@pytest.mark.parametrize("module", ["hydrajax.train", "hydrajax.train.distill"])
def test_both_programs_start_as_modules(monkeypatch, capsys, module):
    monkeypatch.setattr(sys, "argv", ["program", "--no-such-flag"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert end.value.code == 2
    assert f"see python -m {module} --help" in capsys.readouterr().err
