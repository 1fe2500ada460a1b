"""Losses of drafts of one pass against the official code; their ranks and FLOPs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.draft_heads import random_params
from helpers.golden_drafts import loaded_draft
from helpers.loss_examples import check_ranks
from helpers.recordings import as_recorded, need
from helpers.refusals import assert_refused
from hydrajax.drafters.block import BlockSettings
from hydrajax.drafters.dflash import DFlash
from hydrajax.drafters.dspark import DSpark, DSparkSettings
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.formats.block_parts import block_layout
from hydrajax.models.base_model import BoundBase
from hydrajax.models.layout import write
from hydrajax.models.packed_forward import run_base
from hydrajax.train.block_loss import Anchors, block_loss, block_targets, block_totals, draw_anchors
from hydrajax.train.flops import drafter_forward_flops
from hydrajax.train.losses import IGNORED, Objective
from hydrajax.train.tasks.heads_task import make_loss

DECAY = float(np.exp(-1 / 4))
CE = Objective(lm_weight=1.0, teacher_weight=0.0, head_decay=DECAY, chunk_tokens=40)
DSPARK = Objective(
    lm_weight=0.1, teacher_weight=0.0, distance_weight=0.9, confidence_weight=1.0, head_decay=DECAY, chunk_tokens=40
)
CASES = {"dflash": (CE, "loss"), "dspark": (DSPARK, "dspark_loss"), "dsdflash": (CE, "ce_only_loss")}


def recorded_batch(folder, which: str):
    record = np.load(need(folder / "losses.npz"))
    tokens = np.load(folder / "teacher_forced.npz")["input_ids"].astype(np.int32)
    labels = np.where(record[f"{which}_loss_mask"] > 0, tokens, IGNORED).astype(np.int32)
    anchors = Anchors(record[f"{which}_anchors"].astype(np.int32), record[f"{which}_keep"].astype(bool))
    return record, {"tokens": tokens, "labels": labels}, anchors


def loss_of(m, objective, batch, anchors, params=None, **settings):
    out = run_base(m.model, m.params.base, batch["tokens"], m.drafter.spec.aux_hidden_layers, batch.get("segments"))
    base, params = BoundBase(m.model, m.params.base), m.params.draft if params is None else params
    inputs = out.aux_hidden_states, out.hidden, batch, anchors, base
    return block_loss(objective, m.drafter, params, *inputs, **settings)


@pytest.mark.quick("masked-dflash", "masked-dspark")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", ["all", "masked"])
def test_losses_and_gradients_are_the_official_ones(parallel, name, which):
    objective, field = CASES[name]
    need(parallel / f"{name}_a" / "losses.npz")
    m, folder = loaded_draft(parallel, f"{name}_a"), parallel / f"{name}_a"
    record, batch, anchors = recorded_batch(folder, which)
    run = jax.value_and_grad(functools.partial(loss_of, m, objective, batch, anchors), has_aux=True)
    (loss, parts), gradient = jax.jit(run)(m.params.draft)
    assert float(loss) == pytest.approx(float(record[f"{which}_{field}"]), abs=1e-5)
    assert all(np.isfinite(x).all() for x in parts.values())
    if name != "dflash":
        targets = block_targets(batch, anchors, m.drafter, DECAY)
        np.testing.assert_array_equal(targets.weights > 0, record[f"{which}_eval_mask"].astype(bool))
        kept = np.asarray(targets.weights) > 0
        np.testing.assert_array_equal(np.asarray(targets.tokens)[kept], record[f"{which}_target_ids"][kept])
    if which == "masked":
        ours = write(block_layout(m.drafter), gradient)
        expected = load_file(folder / "loss_grads.safetensors")
        assert expected.keys() <= ours.keys()
        for key, values in expected.items():
            np.testing.assert_allclose(as_recorded(ours[key], values), values, atol=2e-5, rtol=1e-4, err_msg=key)


def test_micro_batches_add_up(parallel):
    """The loss of a batch is the sum of its rows' losses with the batch's divisors."""
    m = loaded_draft(parallel, "dspark_a")
    _, batch, anchors = recorded_batch(parallel / "dspark_a", "masked")
    run = jax.jit(lambda batch, anchors, totals: loss_of(m, DSPARK, batch, anchors, totals=totals))
    totals = block_totals(block_targets(batch, anchors, m.drafter, DECAY), m.drafter.depth)
    loss, parts = run(batch, anchors, totals)
    rows = []
    for i in range(2):  # one row after the other in the program of both
        alone = np.arange(2)[:, None] == i
        labels = np.where(alone, batch["labels"], IGNORED)
        rows.append(run(batch | {"labels": labels}, anchors._replace(keep=anchors.keep & alone), totals))
    assert float(loss) == pytest.approx(sum(float(x[0]) for x in rows), abs=1e-6)
    for name, value in parts.items():
        np.testing.assert_allclose(value, sum(x[1][name] for x in rows), atol=1e-5)


def test_anchors_are_targets_followed_by_targets_of_their_document():
    labels = jnp.array([[IGNORED, 5, 6, IGNORED, 7, 8, 9, 3, IGNORED, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9, IGNORED]])
    segments = jnp.array([[1] * 6 + [2] * 4, [1, 1, 1, 2, 2, 2, 2, 0, 0, 0]])
    allowed = [{1, 4}, {1, 4, 5}]
    draw = jax.jit(draw_anchors, static_argnums=3)
    seen = [set(), set()]
    for seed in range(30):
        drawn = draw(jax.random.key(seed), labels, segments, 2)
        for row in range(2):
            places = np.asarray(drawn.positions[row])[np.asarray(drawn.keep[row])]
            assert len(set(places.tolist())) == len(places) == min(2, len(allowed[row]))
            seen[row] |= set(places.tolist())
    assert seen == allowed
    drawn = [draw(jax.random.key(seed), labels, segments, 4) for seed in range(8)]
    assert all(one.keep.tolist() == [[True, True, False, False], [True, True, True, False]] for one in drawn)
    assert {tuple(np.asarray(one.positions[0, :2]).tolist()) for one in drawn} == {(1, 4), (4, 1)}


def test_blocks_of_a_packed_row_read_their_own_document(parallel):
    """Two documents in one row give the loss that they have in rows of their own."""
    m = loaded_draft(parallel, "dflash_a")
    tokens = np.load(parallel / "dflash_a" / "teacher_forced.npz")["input_ids"].astype(np.int32)
    packed = {"tokens": tokens.reshape(1, -1), "segments": np.repeat([1, 2], 32)[None].astype(np.int32)}
    anchors = np.array([[3, 17], [5, 29]], np.int32)
    kept = np.ones((2, 2), bool)

    @jax.jit
    def loss(batch, anchors):
        return loss_of(m, CE, batch | {"labels": batch["tokens"]}, anchors)[0]

    alone = loss({"tokens": tokens}, Anchors(anchors, kept))
    together = loss(packed, Anchors((anchors + np.array([[0], [32]], np.int32)).reshape(1, -1), kept.reshape(1, -1)))
    assert float(together) == pytest.approx(float(alone), abs=1e-5)


def test_terms_that_these_drafts_lack_are_refused(parallel):
    for name, drafts in (("reconstruction_weight", "dflash_a"), ("confidence_weight", "dsdflash_a")):
        m = loaded_draft(parallel, drafts)
        message = f"objective.{name}: got 1.0, expected 0"
        assert_refused(make_loss, (m.model, m.drafter, Objective(**{name: 1.0}), message))


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
    check_ranks(ranks[..., :10], np.moveaxis(logits, 2, 0), tokens)


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
