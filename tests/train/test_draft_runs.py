"""Runs of drafts from settings to text: interrupted, resumed, exported, loaded, trained further."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest

from helpers.runs import heads_file, without_clock
from hydrajax import load
from hydrajax.formats.huggingface import read_config
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import run_base
from hydrajax.train import train_loop
from hydrajax.train.data import dataset
from hydrajax.train.losses import Objective, draft_loss
from hydrajax.train.run_config import config_from, draft_of
from hydrajax.train.tasks.from_config import tokenizer_of
from hydrajax.train.tasks.heads_task import make_drafter

EAGLE_1 = {"reconstruction_weight": 1.0, "teacher_weight": 0.1, "feature_noise": 0.1}
KINDS = {
    "eagle": {"draft": {"heads": "eagle"}, "objective": EAGLE_1},
    "eagle3": {"draft": {"heads": "eagle3", "vocabulary": 120, "ttt_length": 2}, "objective": {"head_decay": 0.8}},
    "mtp": {"draft": {"heads": "mtp", "ttt_length": 2}, "objective": {"head_decay": 0.8}},
    "dspark": {
        "draft": {"heads": "dspark", "block_size": 4, "markov_rank": 4, "num_anchors": 6, "vocabulary": 150},
        "objective": {"lm_weight": 0.1, "teacher_weight": 0.0, "distance_weight": 0.9, "confidence_weight": 1.0},
        "tree": "chain-4",
    },
    "dflash": {"draft": {"heads": "dflash", "block_size": 4, "num_anchors": 6}, "tree": "chain-3"},
}
OF_ONE_PASS = ("dspark", "dflash")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_stopped_run_ends_bitwise_where_another_ends_and_its_draft_decodes(
    kind, base, settings, program, config_file, tmp_path, monkeypatch
):
    data = settings["data"] | {"rows": "pack"}
    settings = settings | KINDS[kind] | {"data": data, "steps": 6, "checkpoint_every": 2, "eval_every": 3}
    config = config_file(**settings)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert program("--config", config, f"output={whole}").code == 0
    asked = iter([False] * 3 + [True])
    with monkeypatch.context() as patch:
        patch.setattr(train_loop.Interrupts, "agreed", lambda self, meeting: next(asked))
        assert "stopped at step 4 of 6" in program("--config", config, f"output={parts}").out
    assert "resumed at step 4 of 6" in program("--config", config, f"output={parts}").out
    assert without_clock(parts) == without_clock(whole)
    if kind != "dspark":  # the native format's file names differ between runs
        assert heads_file(parts).read_bytes() == heads_file(whole).read_bytes()

    m = load(base, whole / "heads")
    if kind not in OF_ONE_PASS:
        expected = make_drafter(draft_of(**settings["draft"]), m.model.config, "float32", counts_of(settings))
        # The released format does not hold this setting.
        assert dataclasses.replace(m.drafter, ttt_length=expected.ttt_length) == expected
    prompts = ["the bird on the tree", "a stone"]
    drafted = m.generate(prompts, tree="best-8" if kind in OF_ONE_PASS else "dynamic-8-2-4", max_new_tokens=16)
    assert [out.text for out in drafted] == [out.text for out in load(base).generate(prompts, max_new_tokens=16)]

    goes_on = program("--config", config, f"output={tmp_path / 'more'}", f"draft.init={whole / 'heads'}", "steps=1")
    assert goes_on.code == 0, goes_on.err
    if kind in OF_ONE_PASS:
        return
    other = "eagle3" if kind == "eagle" else "eagle"
    draft = f"draft={{heads: {other}, init: {whole / 'heads'}}}"
    refused = program("--config", config, f"output={tmp_path / 'other'}", draft)
    assert (refused.code, "by the settings" in refused.err) == (2, True)


def counts_of(settings: dict) -> np.ndarray:
    """Target counts equal those counted one by one, and the vocabulary has the most frequent ids."""
    config = config_from({"output": "unused"} | settings)
    rows = dataset.build(config.data, tokenizer_of(config), config.seed, lambda text: None).train
    counts = Counter(rows.labels.ravel().tolist())
    return np.array([counts[token] for token in range(300)])


def test_the_vocabulary_is_of_the_most_frequent_targets(settings, base):
    counts = counts_of(settings)
    shape = read_config(base, "model")
    for draft in (draft_of(heads="eagle3", vocabulary=50), draft_of(heads="medusa", vocabulary=50)):
        known = make_drafter(draft, shape, "float32", counts).vocabulary.tokens
        others = np.setdiff1d(np.arange(300), known)
        assert (len(known), (np.diff(known) > 0).all()) == (50, True)
        assert counts[known].min() >= counts[others].max()


@pytest.mark.slow
def test_every_parameter_learns(tiny_model):
    """The gradient of every parameter is finite and not zero."""
    model, base_params = tiny_model
    base = BoundBase(model, base_params)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 12), dtype=np.int32)
    for draft in (draft_of(heads="eagle", ttt_length=2), draft_of(heads="eagle3", vocabulary=40, ttt_length=2)):
        drafter = make_drafter(draft, model.config, "float32")

        def loss(params, drafter=drafter):
            out = run_base(model, base_params, tokens, drafter.spec.aux_hidden_layers)
            batch = {"tokens": tokens, "labels": tokens}
            objective = Objective(reconstruction_weight=1.0)
            return draft_loss(objective, drafter, params, out.aux_hidden_states, out.hidden, batch, base)[0]

        slopes = jax.jit(jax.grad(loss))(drafter.init(jax.random.key(1), base))
        for path, slope in jax.tree.leaves_with_path(slopes):
            assert np.isfinite(slope).all(), path
            assert np.abs(slope).max() > 0, path
