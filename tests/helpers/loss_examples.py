"""Inputs for the tests of training objectives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3
from hydrajax.drafters.gemma4_assistant import Gemma4Assistant
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.mtp import MTP
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.train.losses import IGNORED

WIDTH, VOCAB, HEADS = 32, 61, 3  # width and vocabulary of the `tiny_model` fixture
MIXED = {"lm_weight": 0.5, "teacher_weight": 1.5, "reconstruction_weight": 0.7}


def drafter_of(kind: str):
    """Return a drafter of three guesses for `tiny_model`; EAGLE-3 knows every other token."""
    shape = LlamaConfig(VOCAB, WIDTH, 80, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, max_positions=64)
    if kind in ("eagle", "eagle3", "mtp", "gemma4-assistant"):
        cls = {"eagle": Eagle, "eagle3": Eagle3, "mtp": MTP, "gemma4-assistant": Gemma4Assistant}[kind]
        known = {"vocabulary": Vocabulary(range(1, VOCAB, 2))} if kind == "eagle3" else {}
        return dataclasses.replace(cls.for_base(shape, jnp.float32), depth=HEADS, ttt_length=HEADS, **known)
    if kind == "medusa":
        return MedusaHeads(HEADS, WIDTH, VOCAB)
    heads = HydraHeads(HEADS, WIDTH, VOCAB, n_layers=2)
    return heads.with_prefix(shape) if kind == "hydra++" else heads


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
