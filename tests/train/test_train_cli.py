"""Runs of `python -m hydrajax.train`: drafts, the guard against NaN, data of others, and bases with a teacher."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from helpers.runs import heads_file, refused
from hydrajax import load
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.formats.export_base import export_llama
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.huggingface import read_config
from hydrajax.formats.load import load_draft
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.train.metrics import read_metrics


def train_lines(output) -> list[dict]:
    return [line for line in read_metrics(output / "metrics.jsonl") if line["kind"] == "train"]


def test_steps_that_are_not_finite_are_skipped_counted_and_end_the_run(program, config_file, settings, tmp_path):
    """The learning rate makes the weights infinite at the first step."""
    optimizer = {"lr": 1e38, "warmup_steps": 0, "clip_norm": None}
    config = config_file(optimizer=optimizer, max_bad_steps=3, steps=9, checkpoint_every=1)
    line = refused(program("--config", config))
    assert line.startswith("max_bad_steps: got 3 steps in a row, up to step 4, with a non-finite loss or gradient")
    assert "optimizer.lr" in line
    assert str(tmp_path / "run" / "checkpoints") in line
    found = train_lines(tmp_path / "run")
    assert [line["bad_steps"] for line in found] == [0, 1, 2]  # the fourth line is the message
    assert np.isfinite(found[0]["loss"])
    assert not all(np.isfinite([line["loss"], line["grad_norm"]]).all() for line in found[1:])


def test_heads_for_another_base_from_conversations(program, train, golden, config_file, settings, tmp_path):
    """Conversations in FastChat's format. The base has no chat template, so the configuration must name one."""
    turns = (
        ("human", "Which number follows {}?"),
        ("gpt", "{} precedes it."),
        ("human", "Write it."),
        ("gpt", "def {}():"),
    )
    records = [{"conversations": [{"from": who, "value": text.format(i)} for who, text in turns]} for i in range(60)]
    text = tmp_path / "conversations.json"
    text.write_text(json.dumps(records))
    base = golden / "base" / "mha"

    data = {"files": [str(text)], "template": "vicuna", "length": 64, "rows": "pack", "held_out": 0.1, "limit": 60}
    draft = {"heads": "hydra", "num_draft_heads": 2}
    config = config_file(model=str(base), data=data, draft=draft, steps=3)
    assert "template" in refused(program("--config", config, "data.template=auto"))
    train(config)
    found = train_lines(tmp_path / "run")
    assert len(found) == 3
    assert np.isfinite([line["loss"] for line in found]).all()
    drafter, _ = load_draft(tmp_path / "run" / "heads", read_config(base, "model"), jnp.float32)
    assert drafter.spec.depth == 2
    assert all(np.isfinite(tensor).all() for tensor in load_file(heads_file(tmp_path / "run")).values())


SMALL = {"vocab_size": 300, "width": 16, "mlp_width": 24, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 16}
SMALL |= {"max_positions": 64, "tied_lm_head": True}


@pytest.fixture
def config_of_base(config_file):
    """``config_of_base(**changes)``: a run of a small model from scratch."""

    def write(**changes):
        return config_file(**{"task": "base", "model": None, "draft": {}, "scratch": SMALL} | changes)

    return write


def evaluations(run) -> list[dict]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "eval"]


@pytest.mark.slow
def test_a_draft_model_learns_from_the_model_that_it_drafts_for(train, config_of_base, base, tmp_path):
    optimizer = {"name": "muon", "lr": 0.03, "warmup_steps": 0}
    train(config_of_base(teacher=str(base), steps=12, optimizer=optimizer))
    first, last = (evaluations(tmp_path / "run")[i] for i in (0, -1))
    assert 0 < last["kl"] < 0.8 * first["kl"]
    assert first["acceptance"] < last["acceptance"] < 1
    loaded = load(base, tmp_path / "run" / "base", dtype="float32")  # refused without the teacher's tokenizer
    assert isinstance(loaded.drafter, DraftModel)
    drafted = loaded.generate("the tree", max_new_tokens=12, tree="chain-2")
    prompt = torch.tensor([drafted.prompt_ids])
    with torch.no_grad():
        text = AutoModelForCausalLM.from_pretrained(base).generate(prompt, max_new_tokens=12, do_sample=False)
    assert list(drafted.output_ids) == text[0, prompt.shape[1] :].tolist()


@pytest.mark.slow
def test_a_model_that_goes_on_from_its_teacher_is_its_teacher(train, config_of_base, base, tmp_path):
    settings = {"model": str(base), "scratch": None, "teacher": str(base), "optimizer": {"lr": 1e-30}}
    train(config_of_base(**settings, dtype="float32", steps=1))
    first = evaluations(tmp_path / "run")[0]
    assert first["kl"] == pytest.approx(0, abs=1e-5)
    assert (first["acceptance"], first["agreement"]) == (pytest.approx(1, abs=1e-5), 1)
    before, after = (load(path, dtype="float32").params.base for path in (base, tmp_path / "run" / "base"))
    np.testing.assert_array_equal(after["embedding"], before["embedding"].astype(jnp.float16))
    assert fingerprint(tmp_path / "run" / "base")


def test_refused(program, config_of_base, base, tmp_path):
    other = tmp_path / "other"
    model = Llama(LlamaConfig(**SMALL | {"vocab_size": 320}))
    export_llama(other, model, jax.jit(lambda: init_base(model, jax.random.key(0)))(), dtype=jnp.float32)
    line = refused(program("--config", config_of_base(teacher=str(other)), f"data.tokenizer={base}"))
    assert line == "scratch.vocab_size: got 300 token ids, expected 320, those of the teacher"
    assert "no such directory" in refused(program("--config", config_of_base(teacher=str(tmp_path / "nowhere"))))
    line = refused(program("--config", config_of_base(), f"data.tokenizer={base}"))
    assert line == "scratch.vocab_size: got 300 token ids, expected 285, those of the tokenizer"
