"""Compare draft heads with their equations in NumPy, one vector at a time: no trees, no caches and no batches."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.draft_heads import forced_logits
from helpers.lab import quick_jit
from helpers.noise import draft_noise
from helpers.numpy_heads import in_numpy
from helpers.refusals import refusal
from helpers.tree_tools import random_tree
from hydrajax.amphista.heads import AmphistaHeads
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3, default_aux_hidden_layers
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.models.packed_forward import row_layout
from hydrajax.trees import presets
from hydrajax.trees.dynamic import DynamicTree

WIDTH, VOCAB = 32, 61  # of the `tiny_model` fixture
EVEN = Vocabulary(range(0, VOCAB, 2))
SMALL = LmHead(rank=7, vocabulary=EVEN)
LENGTHS = [(7, 3), (4, 1), (1, 4)]  # of two chunks of three texts


def amphista(config, **settings):
    return replace(AmphistaHeads.for_base(config, jnp.float32), **settings)


def eagle(kind, config, **settings):
    return replace(kind.for_base(config, jnp.float32), ttt_length=3, **settings)


HEADS = {  # of a base
    "medusa": lambda c: MedusaHeads(4, WIDTH, VOCAB),
    "medusa, 3 blocks": lambda c: MedusaHeads(4, WIDTH, VOCAB, n_layers=3, share_blocks=False),
    "medusa, shared block and bias": lambda c: MedusaHeads(4, WIDTH, VOCAB, n_layers=2, lm_head_bias=True),
    "medusa, prefix with a window": lambda c: MedusaHeads(3, WIDTH, VOCAB).with_prefix(c, 5),
    "hydra": lambda c: HydraHeads(4, WIDTH, VOCAB),
    "hydra, 3 shared layers": lambda c: HydraHeads(4, WIDTH, VOCAB, n_layers=3),
    "hydra, 3 layers": lambda c: HydraHeads(4, WIDTH, VOCAB, n_layers=3, share_blocks=False),
    "hydra++": lambda c: HydraHeads(3, WIDTH, VOCAB).with_prefix(c),
    "eagle": lambda c: eagle(Eagle, c),
    "eagle, some tokens": lambda c: eagle(Eagle, c, vocabulary=EVEN),
    "eagle3": lambda c: eagle(Eagle3, c, vocabulary=EVEN),
    "amphista": amphista,
    "amphista, alpha, narrow, small lm heads": lambda c: amphista(
        c, auto_embedding_layers=2, mlp_width=24, small_lm_head=SMALL
    ),
    "amphista, five heads, three stages, no positions": lambda c: amphista(
        c, num_draft_heads=5, adaptation_layers=3, position_encoding=False
    ),
    "amphista, one stage, no token, no auto-embedding": lambda c: amphista(
        c, num_draft_heads=3, n_layers=2, adaptation_layers=1, reads_token=False, auto_embedding_layers=0
    ),
    "amphista, the base's lm head": lambda c: amphista(c, adaptation_layers=0, small_lm_head=LmHead(True, shared=True)),
}


@pytest.fixture
def made(request, base):
    """Return a drafter, its parameters and its NumPy version."""
    drafter = HEADS[request.param](base.config)
    params = draft_noise(drafter, base, seed=11)
    return drafter, params, in_numpy(drafter, params, base)


def texts_of(drafter, base, seed: int = 0, length: int = 10):
    """Return random hidden states and tokens of three texts. Small logits, so that no tree degenerates to a chain."""
    random, width = np.random.default_rng(seed), len(drafter.spec.aux_hidden_layers) * base.config.width
    return 0.3 * random.normal(size=(3, length, width)).astype(np.float32), random.integers(
        VOCAB, size=(3, length + 1), dtype=np.int32
    )


def begun(drafter, params, base, hidden, tokens, lengths=LENGTHS):
    """Return the state after two chunks of ragged lengths with wrong padding, and the roots."""
    rows, width = np.arange(3), max(map(max, lengths))
    state, at = drafter.init_state(3, 24), np.zeros(3, int)
    for counts in np.array(lengths).T:
        places, counted = (at[:, None] + np.arange(width)) % hidden.shape[1], np.arange(width) < counts[:, None]
        fed = np.where(counted[..., None], hidden[rows[:, None], places], 9.0).astype(np.float32)
        text = np.where(counted, tokens[rows[:, None], places], 5).astype(np.int32)
        at = at + counts
        state = drafter.begin(params, state, fed, text, counts, tokens[rows, at], base)
    return state, tokens[rows, at]


@pytest.mark.quick(
    *("medusa", "medusa, 3 blocks", "medusa, shared block and bias", "medusa, prefix with a window", "hydra"),
    *("hydra, 3 shared layers", "hydra, 3 layers", "hydra++", "eagle, some tokens"),
    *("amphista", "amphista, alpha, narrow, small lm heads", "amphista, the base's lm head"),
)
@pytest.mark.parametrize("made", HEADS, indirect=True)
def test_guesses_equal_numpy(made, base):
    """Static and dynamic trees after two chunks have the best tokens after each path, and training has these logits."""
    drafter, params, plain = made
    hidden, tokens = texts_of(drafter, base)
    depth = min(drafter.spec.depth, 4)
    tree, grown_tree = random_tree(3, 18, depth, widest=5), DynamicTree(16, depth - 1, 4)

    @quick_jit
    def run(params):
        state, roots = begun(drafter, params, base, hidden, tokens)
        trees = [drafter.propose(params, state, roots, each, base) for each in (tree, grown_tree, presets.root())]
        return roots, trees, forced_logits(drafter, params, hidden, tokens[:, :10], base)

    roots, (static, grown, root), logits = jax.device_get(run(params))
    assert root.tokens[:, 0].tolist() == roots.tolist()  # as in calibration
    assert logits.shape == (drafter.spec.num_draft_heads, 3, 10, VOCAB)
    for row, length in enumerate(map(sum, LENGTHS)):
        text = hidden[row, :length].astype(np.float64), tokens[row, 1:length].tolist()
        plain.check_proposal(tree, text, int(roots[row]), static.tokens[row])
        assert plain.check_grown(text, grown.tokens[row], grown.tree.parents[row]) > 1
    for k in range(drafter.spec.num_draft_heads):  # along the true tokens
        for row, t in ((0, 0), (1, 3), (2, 8 - k)):
            text = hidden[row, : t + 1].astype(np.float64), tokens[row, 1 : t + 1].tolist()
            expected = plain.logits(k, text, tokens[row, t + 1 : t + 2 + k].tolist())
            np.testing.assert_allclose(logits[k, row, t], expected, atol=1e-3, rtol=1e-3)


@pytest.mark.quick("hydra++", "medusa, prefix with a window")
@pytest.mark.parametrize("made", ["hydra++", "medusa, prefix with a window", "eagle", "amphista"], indirect=True)
def test_packed_documents_are_independent(made, base):
    drafter, params, plain = made
    hidden, tokens = texts_of(drafter, base)
    segments, k = np.array([[1] * 7 + [2] * 3, [1] + [2] * 9, [1] * 10], np.int32), drafter.spec.num_draft_heads - 1

    @quick_jit
    def last_head(params):
        layout = row_layout(tokens[:, :10], segments)
        read = drafter.teacher_hidden(params, hidden, tokens[:, :10], base, None, *layout)
        return drafter.head_logits(params, k, read[-1], base)

    logits = np.asarray(last_head(params))
    for row, (start, end) in enumerate(((7, 10), (1, 10), (0, 10))):
        for t in range(start, end - k - 1):
            text = hidden[row, start : t + 1].astype(np.float64), tokens[row, start + 1 : t + 1].tolist()
            expected = plain.logits(k, text, tokens[row, t + 1 : t + 2 + k].tolist())
            np.testing.assert_allclose(logits[row, t], expected, atol=1e-3, rtol=1e-3)


def test_eagle_3_reads_a_low_a_middle_and_a_high_layer():
    for n_layers in (*range(1, 12), 32):
        layers = [n_layers - place for place in default_aux_hidden_layers(n_layers)]
        assert layers == sorted(set(layers))
        assert all(0 <= layer < n_layers for layer in layers)
        if n_layers == 3 or n_layers >= 7:
            assert set(layers) == {2, n_layers // 2, n_layers - 3}


def test_bad_settings_of_amphista(base):
    heads = amphista(base.config)
    for layers in (-1, 5):
        message = f"adaptation_layers: got {layers}, expected 0 to num_draft_heads, 4"
        refusal(lambda layers=layers: replace(heads, adaptation_layers=layers), message)
    refusal(lambda: heads.trained_on(replace(heads, auto_embedding_layers=2)), "by the settings")
    assert heads.trained_on(amphista(base.config)) == heads
