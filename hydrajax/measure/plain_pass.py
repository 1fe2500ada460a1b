"""Whole texts through a base, without a cache, a tree or a loop: the reference that decoding is held against."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jaxtyping import Float, Int

from hydrajax.decoding.engine import true_float32
from hydrajax.decoding.prompt_batch import bucket, right_padded
from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.models.packed_forward import run_base


def last_logits(model: BaseModel, base_params, texts: Sequence[np.ndarray]) -> Float[np.ndarray, "n V"]:
    """Float32 logits of the token after each text."""
    return np.stack([all_logits(model, base_params, text)[-1] for text in texts])


def all_logits(model: BaseModel, base_params, text: Int[np.ndarray, " T"]) -> Float[np.ndarray, "T V"]:
    """Float32 logits after every token of a text. Texts of one bucket share a compilation."""
    padded, _ = right_padded([text], bucket(len(text), model.config.max_positions))
    return np.asarray(_pass(model, base_params, padded), np.float32)[0, : len(text)]


@partial(jax.jit, static_argnums=0)
def _pass(model: BaseModel, base_params, tokens):
    with true_float32(model.dtype):
        return BoundBase(model, base_params).logits(run_base(model, base_params, tokens).hidden)
