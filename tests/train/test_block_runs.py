"""Runs of drafts of one pass from settings to text: interrupted, resumed, exported, loaded, trained further."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.draft_heads import random_params
from helpers.runs import heads_file, without_clock
from hydrajax import load
from hydrajax.drafters.block import BlockSettings
from hydrajax.drafters.dflash import DFlash
from hydrajax.drafters.draft_lm_head import Vocabulary
from hydrajax.drafters.dspark import DSpark, DSparkSettings
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import run_base
from hydrajax.train import train_loop
from hydrajax.train.flops import drafter_forward_flops

DSPARK = {"heads": "dspark", "block_size": 4, "markov_rank": 4, "num_anchors": 6, "vocabulary": 150}
LOSS = {"lm_weight": 0.1, "teacher_weight": 0.0, "distance_weight": 0.9, "confidence_weight": 1.0, "head_decay": 0.78}
KINDS = {
    "dspark": {"draft": DSPARK, "objective": LOSS, "tree": "chain-4"},
    "dflash": {"draft": {"heads": "dflash", "block_size": 4, "num_anchors": 6}, "tree": "chain-3"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_a_stopped_run_ends_bitwise_where_another_ends_and_its_draft_decodes(
    kind, base, settings, program, config_file, tmp_path, monkeypatch
):
    settings = settings | KINDS[kind] | {"steps": 6, "checkpoint_every": 2, "eval_every": 3}
    settings["data"] = settings["data"] | {"rows": "pack"}
    config = config_file(**settings)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert program("--config", config, f"output={whole}").code == 0
    asked = iter([False] * 3 + [True])
    with monkeypatch.context() as patch:
        patch.setattr(train_loop.Interrupts, "agreed", lambda self, meeting: next(asked))
        assert "stopped at step 4 of 6" in program("--config", config, f"output={parts}").out
    assert "resumed at step 4 of 6" in program("--config", config, f"output={parts}").out
    assert without_clock(parts) == without_clock(whole)
    if kind == "dflash":  # the native format's file names differ between runs
        assert heads_file(parts).read_bytes() == heads_file(whole).read_bytes()

    m = load(base, whole / "heads")
    prompts = ["the bird on the tree", "a stone"]
    drafted = m.generate(prompts, tree="best-8", max_new_tokens=16)
    assert [out.text for out in drafted] == [out.text for out in load(base).generate(prompts, max_new_tokens=16)]
    goes_on = program("--config", config, f"output={tmp_path / 'more'}", f"draft.init={whole / 'heads'}", "steps=1")
    assert goes_on.code == 0, goes_on.err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["draft={heads: dflash, markov_rank: 3}"], "draft.markov_rank: has no effect with draft.heads dflash"),
        (["draft={heads: dflash, block_size: 1}"], "draft.block_size: got 1, expected at least 2"),
        (
            ["draft={heads: dflash}", "tree=chain-7", "objective.noise_alpha=1"],
            "objective.noise_alpha: got 1.0, expected",
        ),
        (
            ["draft={heads: hydra}", "objective.distance_weight=1"],
            "objective.distance_weight: got 1.0, expected 0 for Hydra",
        ),
        (["draft={heads: dflash}", "tree=best-8"], "tree: got best-8, expected a static tree"),
        (["task=joint", "draft={heads: dflash}"], "draft.heads: got dflash, expected heads of every position"),
    ],
)
def test_bad_settings_are_refused_in_one_line(program, config_file, tmp_path, overrides, message):
    result = program("--config", config_file(), *overrides)
    assert result.code == 2, result.out
    assert message in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize("kind", [pytest.param("dflash", marks=pytest.mark.slow), "dspark"])
def test_ranks_are_those_of_a_block_at_every_position(tiny_model, kind):
    model, base = tiny_model
    drafter = (
        DFlash.for_base(model.config, jnp.float32, BlockSettings(1, 4, (1,)))
        if kind == "dflash"
        else DSpark(model.config.plain_layer.replace(qk_norm=True), (1,), 60, 3, vocabulary=Vocabulary(range(0, 61, 2)))
    )
    params, bound = random_params(drafter, tiny_model), BoundBase(model, base)
    tokens = np.random.default_rng(2).integers(0, 61, (2, 11), dtype=np.int32)
    segments = np.array([[1] * 11, [1] * 6 + [2] * 5], np.int32)
    anchors = np.broadcast_to(np.arange(1, 11, dtype=np.int32), (2, 10))

    @jax.jit
    def run(params):
        aux = run_base(model, base, tokens, drafter.spec.aux_hidden_layers, segments).aux_hidden_states
        batch = {"tokens": tokens, "segments": segments}
        ranks = drafter.ranks(params, aux, batch, bound, chunk_tokens=8, depth=3)
        hidden = drafter.blocks(params, aux, tokens, anchors, bound, segments)
        before = jnp.zeros(hidden.shape[:-1], jnp.int32)  # no Markov head reads it
        return ranks, drafter.lm_head.over_all_tokens(drafter.block_logits(params, hidden, before, bound), 61)

    ranks, logits = map(np.asarray, run(params))
    for k, row, at in np.ndindex(3, 2, 10):
        if at + k + 2 < 11:
            order, token = np.argsort(-logits[row, at, k], kind="stable").tolist(), tokens[row, at + k + 2]
            known = np.isfinite(logits[row, at, k, token])
            assert ranks[k, row, at] == (order.index(token) if known else 61)


def test_flops_count_blocks(tiny_model):
    """Per token: context keys, and the rows of the blocks. The products of a block of one layer, by hand."""
    model, _ = tiny_model
    settings = DSparkSettings(1, 3, (0, 1), markov_rank=4, confidence_head=False, num_anchors=5)
    drafter = DSpark.for_base(model.config, jnp.float32, settings)
    c, length = drafter.config, 20
    attention = (c.n_heads + 2 * c.n_kv_heads) * c.head_dim
    context = 2 * length * c.width * (2 * c.width + attention)
    rows = 5 * 3
    layer = 2 * rows * c.width * (attention + c.n_heads * c.head_dim + 3 * c.mlp_width)
    scores = 4 * rows * (length + rows) * c.n_heads * c.head_dim
    heads = 2 * rows * c.vocab_size * (c.width + 4)
    found = drafter_forward_flops(drafter, model, length) * length
    assert found == pytest.approx(context + layer + scores + heads, rel=1e-6)
