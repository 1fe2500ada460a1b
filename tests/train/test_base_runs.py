"""Runs of ``task: base`` with a teacher or from the weights of a model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.runs import refused
from hydrajax import load
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.formats.export_base import export_llama
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.train.metrics import read_metrics

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


def test_a_draft_model_learns_from_the_model_that_it_drafts_for(program, config_of_base, base, tmp_path):
    optimizer = {"name": "muon", "lr": 0.03, "warmup_steps": 0}
    done = program("--config", config_of_base(teacher=str(base), steps=12, optimizer=optimizer))
    assert done.code == 0, done.err
    first, last = (evaluations(tmp_path / "run")[i] for i in (0, -1))
    assert 0 < last["kl"] < 0.8 * first["kl"]
    assert first["acceptance"] < last["acceptance"] < 1
    loaded = load(
        base, tmp_path / "run" / "base", dtype="float32"
    )  # has the teacher's tokenizer, else it would be refused
    assert isinstance(loaded.drafter, DraftModel)
    drafted = loaded.generate("the tree", max_new_tokens=12, tree="chain-2")
    prompt = torch.tensor([drafted.prompt_ids])
    with torch.no_grad():
        text = AutoModelForCausalLM.from_pretrained(base).generate(prompt, max_new_tokens=12, do_sample=False)
    assert list(drafted.output_ids) == text[0, prompt.shape[1] :].tolist()


@pytest.mark.slow
def test_a_model_that_goes_on_from_its_teacher_is_its_teacher(program, config_of_base, base, tmp_path):
    settings = {"model": str(base), "scratch": None, "teacher": str(base), "optimizer": {"lr": 1e-30}}
    done = program("--config", config_of_base(**settings, dtype="float32", steps=1))
    assert done.code == 0, done.err
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
