"""Drafts of one pass against NumPy: sliding windows, batches, training in chunks, sampling's q, errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.draft_heads import random_params
from helpers.lab import quick_jit
from helpers.numpy_heads import after_layer, attention_inputs, rms_norm, to_float64
from helpers.refusals import refusal
from hydrajax.drafters import block
from hydrajax.drafters.block import BlockSettings, default_target_layers
from hydrajax.drafters.dflash import DFlash, JetSpec
from hydrajax.drafters.drafter import Draw
from hydrajax.drafters.dspark import DSpark, DSparkSettings
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import run_base
from hydrajax.trees import presets

SETTINGS = BlockSettings(n_layers=2, block_size=5, target_layers=(0, 1))
KINDS = {
    "dflash": (DFlash, SETTINGS, {}),
    "one layer": (DFlash, BlockSettings(n_layers=1, block_size=5, target_layers=(0,)), {}),
    "windows": (DFlash, SETTINGS, {"windows": (4, 0)}),
    "jetspec": (JetSpec, SETTINGS, {}),
    "some words": (DFlash, SETTINGS, {"vocabulary": Vocabulary(range(0, 61, 3))}),
    "dspark": (DSpark, DSparkSettings(2, 4, (0, 1), markov_rank=5, markov="rnn"), {"windows": (0, 3)}),
}


@pytest.fixture
def made(tiny_model):
    def make(kind: str):
        cls, settings, changes = KINDS[kind]
        model, base = tiny_model
        drafter = dataclasses.replace(cls.for_base(model.config, jnp.float32, settings), **changes)
        return model, base, drafter, random_params(drafter, tiny_model)

    return make


def block_hidden(drafter, params, features, ids, embedding):
    """Return the lm head's input at every slot of a block.

    Args:
        features: [S, n * D] of the text before the anchor, at positions 0 .. S - 1.
        ids: the anchor and the mask tokens.
        embedding: [V, D].
    """
    c, params, start = drafter.config, to_float64(params), len(features)
    fused = rms_norm(features @ params["fc"], params["hidden_norm"]["scale"], c.norm_eps)
    x, places = embedding[ids].astype(np.float64), range(start + len(ids))
    for i, window in enumerate(drafter.windows or (0,) * c.n_layers):
        layer = params[f"layers_{i}"]
        read = [*fused, *rms_norm(x, layer["attention_norm"]["scale"], c.norm_eps)]
        made = [attention_inputs(c, layer, row, place) for place, row in enumerate(read)]

        def seen(place, window=window, made=made):
            last = place if drafter.causal or window else places[-1]
            return made[max(place - window + 1, 0) if window else 0 : last + 1]

        x = np.array([after_layer(c, layer, row, made[place], seen(place)) for place, row in enumerate(x, start)])
    return rms_norm(x, params["norm"]["scale"], c.norm_eps)


def text(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 61, (rows, length), dtype=np.int32)


@pytest.mark.quick("windows", "jetspec", "some words", "dspark")  # DFlash: also in recordings
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_equal_numpy(made, kind):
    """Blocks in training, and the block that decoding drafts, at several lengths of text in one batch."""
    model, base, drafter, params = made(kind)
    tokens, anchors = text(2, 12), np.array([[3, 9], [1, 11]], np.int32)
    embedding = np.asarray(base["embedding"])
    lengths = anchors[:, 1]

    @quick_jit
    def run(base_params, params):
        base = BoundBase(model, base_params)
        aux = run_base(model, base_params, tokens, drafter.spec.aux_hidden_layers).aux_hidden_states
        state = drafter.begin(params, drafter.init_state(2, 24), aux, tokens, lengths, tokens[:, 0], base)
        root = jnp.take_along_axis(tokens, lengths[:, None], axis=1)[:, 0]
        drafted = drafter.slots(params, state, root, drafter.depth, base)
        return aux, drafter.blocks(params, aux, tokens, anchors, base), drafted

    aux, hidden, drafted = map(np.asarray, run(base, params))
    for row in range(2):
        for number, anchor in enumerate(anchors[row]):
            ids = [tokens[row, anchor], *[drafter.mask_token] * (drafter.block_size - 1)]
            expected = block_hidden(drafter, params, aux[row, :anchor].astype(np.float64), ids, embedding)
            expected = expected[drafter.first_slot :]
            np.testing.assert_allclose(hidden[row, number], expected, atol=2e-4, err_msg=f"{row}, {anchor}")
        np.testing.assert_allclose(drafted[row], expected, atol=2e-4)  # the last anchor is the root


def test_many_blocks_are_run_in_chunks(made, monkeypatch):
    """Hidden states and gradients are those of one pass. In float64, as float32's sums depend on their order."""
    model, base, drafter, params = made("one layer")
    tokens, anchors = text(2, 12), np.array([[3, 5, 7, 8, 9], [1, 2, 4, 6, 11]], np.int32)
    reads = drafter.spec.aux_hidden_layers
    with jax.enable_x64(True):
        model, drafter = (dataclasses.replace(each, dtype=jnp.dtype("float64")) for each in (model, drafter))
        base, params = jax.tree.map(lambda x: x.astype(jnp.float64), (base, params))
        bound = BoundBase(model, base)
        aux = quick_jit(lambda base: run_base(model, base, tokens, reads).aux_hidden_states)(base)

        def run(params):
            def total(params):
                hidden = drafter.blocks(params, aux, tokens, anchors, bound)
                return jnp.sum(jnp.sin(hidden)), hidden

            return jax.jit(jax.value_and_grad(total, has_aux=True))(params)

        (_, whole), slope = run(params)
        monkeypatch.setattr(block, "ROWS_AT_ONCE", 2 * drafter.block_size)
        (_, chunked), again = run(params)
    assert whole.dtype == jnp.float64
    np.testing.assert_allclose(chunked, whole, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), slope, again)


@pytest.mark.parametrize("kind", [pytest.param("dflash", marks=pytest.mark.slow), "dspark"])
def test_q_is_what_children_are_drawn_from(made, kind):
    """DFlash's q depends on the depth alone; DSpark's also on the parent, by the Markov head's correction."""
    model, base, drafter, params = made(kind)
    tokens, tree = text(1, 8), presets.cartesian([2, 2])

    @quick_jit
    def run(base_params, params):
        bound = BoundBase(model, base_params)
        aux = run_base(model, base_params, tokens, drafter.spec.aux_hidden_layers).aux_hidden_states
        state = drafter.begin(params, drafter.init_state(1, 24), aux, tokens, jnp.array([8]), tokens[:, 0], bound)
        keys = jax.random.split(jax.random.key(0), (1, 3))
        root = jnp.array([17], jnp.int32)
        proposal = drafter.propose(params, state, root, tree, bound, Draw(keys, jnp.array([1.3])))
        hidden = drafter.slots(params, state, root, 2, bound)
        paths = proposal.tokens[0][np.array([[0, 1], [0, 2]])]  # the root, then each of its children
        logits = drafter.block_logits(params, jnp.repeat(hidden, 2, axis=0), paths, bound)
        return proposal.log_q, logits / 1.3

    log_q, logits = map(np.asarray, run(base, params))
    np.testing.assert_allclose(log_q[0, 0], logits[0, 0], atol=1e-5)
    np.testing.assert_allclose(log_q[0, 1:], logits[:, 1], atol=1e-5)
    assert np.allclose(log_q[0, 1], log_q[0, 2]) == (kind == "dflash")


def test_default_layers_are_those_of_released_drafts():
    assert default_target_layers(36, 5) == (1, 9, 17, 25, 33)  # Qwen3-8B-DFlash
    assert default_target_layers(6, 1) == (3,)
    assert default_target_layers(2, 4) == (0, 1)


def test_errors(tiny_model):
    config = tiny_model[0].config

    def fresh(settings):
        return DFlash.for_base(config, jnp.float32, settings)

    for make, message in (
        (lambda: DFlash(config, (1,), 61), "mask_token: got 61, expected a token of the vocabulary of 61"),
        (lambda: DFlash(config, (1,), 0, 1), "block_size: got 1, expected at least 2"),
        (lambda: DFlash(config, (1,), 0, windows=(4,)), "windows: got [4], expected one for each layer"),
        (lambda: DSpark(config, (1,), 0, confidence=0.5), "draft_confidence: got 0.5, expected 0"),
        (lambda: DSpark(config, (1,), 0, confidence_head="markov"), "confidence_head: got 'markov', expected 'hidden'"),
        (lambda: DSparkSettings(markov="lstm"), "draft.markov: got 'lstm', expected vanilla, gated, rnn"),
        (lambda: fresh(BlockSettings(mask_token=61)), "draft.mask_token: got 61, expected"),
        (lambda: BlockSettings(target_layers=(2, 1)), "draft.target_layers: got"),
        (lambda: fresh(BlockSettings(target_layers=(2,))), "draft.target_layers: got 2"),
    ):
        refusal(make, message)
