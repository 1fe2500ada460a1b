"""Draft heads of every kind for the tiny model, random parameters, training forwards and comparison of pytrees."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.models.base_model import BoundBase

VOCAB, WIDTH = 61, 32  # of the tiny model


def heads_of(kind: str, config=None, **settings):
    """Return heads: ``hydra``, ``ungrounded`` or ``medusa``; ``++`` adds a prefix layer of this configuration.

    The default is three heads of one block.
    """
    sizes = {"num_draft_heads": 3, "width": WIDTH, "vocab_size": VOCAB, "n_layers": 1} | settings
    medusa = {"lm_head_bias": kind.startswith("ungrounded")}
    heads = HydraHeads(**sizes) if kind.startswith("hydra") else MedusaHeads(**sizes, **medusa)
    return heads.with_prefix(config) if kind.endswith("++") else heads


def random_params(drafter, base) -> dict:
    """Return weights in the nonlinear range of SiLU, without the zeros and copies of fresh parameters.

    base: the model and its parameters.
    """
    shapes = jax.eval_shape(lambda: drafter.init(jax.random.key(0), BoundBase(*base)))
    random = np.random.default_rng(4)

    def draw(leaf):
        noise = random.standard_normal(leaf.shape).astype(np.float32)
        return jnp.asarray(1 + 0.3 * noise if noise.ndim == 1 else noise * len(noise) ** -0.5, leaf.dtype)

    return jax.tree.map(draw, shapes)


def forced_logits(drafter, params, aux_hidden_states, tokens, base):
    """Return float32 logits ``[K, B, T, V]``: head k at position t predicts token t + 2 + k. Tokens outside its
    vocabulary have -inf.
    """
    hidden = drafter.teacher_hidden(params, aux_hidden_states, tokens, base)
    logits = jnp.stack([drafter.head_logits(params, k, rows, base) for k, rows in enumerate(hidden)])
    if drafter.vocabulary is None:
        return logits
    unknown = jnp.full((*logits.shape[:-1], base.config.vocab_size), -jnp.inf)
    return unknown.at[..., drafter.vocabulary.tokens].set(logits)


def identical(ours, theirs, dtype=None) -> None:
    """Compare two pytrees bit for bit, so that -0 differs from 0. dtype: ours are cast to it first."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, mine), other in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        mine = np.asarray(mine, dtype)
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        assert mine.tobytes() == np.asarray(other).tobytes(), jax.tree_util.keystr(path)


def config_in(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())
