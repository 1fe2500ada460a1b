"""Inputs for the tests of training objectives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.train.losses import IGNORED

WIDTH, VOCAB, HEADS = 32, 61, 3  # width and vocabulary of the `tiny_model` fixture
MIXED = {"lm_weight": 0.5, "teacher_weight": 1.5, "reconstruction_weight": 0.7}


def random_params(drafter, base, seed=0):
    """Return parameters with noise, because fresh heads are identities and would hide errors."""
    random = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: drafter.init(jax.random.key(0), base))
    return jax.tree.map(lambda x: jnp.asarray(0.3 * random.standard_normal(x.shape), jnp.float32), shapes)


def rows_with_gaps():
    """Return hidden states, other hidden states, and labels with gaps at the start, inside and at the end."""
    random = np.random.default_rng(1)
    aux_hidden_states, hidden = random.standard_normal((2, 2, 11, WIDTH)).astype(np.float32)
    tokens = random.integers(VOCAB, size=(2, 11), dtype=np.int32)
    labels = tokens.copy()
    labels[0, :4] = labels[1, 5] = labels[1, 9:] = IGNORED
    return aux_hidden_states, 0.5 * hidden, {"tokens": tokens, "labels": labels}


def check_ranks(ranks, logits, tokens) -> None:
    """Compare ranks ``[3, B, T]`` with a stable sort of logits ``[K, B, T, V]``; unknown tokens rank after all."""
    for k, row, at in np.ndindex(3, *ranks.shape[1:]):
        if at + k + 2 < tokens.shape[1]:
            order, token = np.argsort(-logits[k, row, at], kind="stable").tolist(), tokens[row, at + k + 2]
            known = np.isfinite(logits[k, row, at, token])
            assert ranks[k, row, at] == (order.index(token) if known else VOCAB)
