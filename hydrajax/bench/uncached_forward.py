"""Logits of whole sequences without a cache, a tree or a loop: the reference for decoding."""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jaxtyping import Float, Int

from hydrajax.decoding.prompt_batch import bucket, right_padded
from hydrajax.decoding.step import true_float32
from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.models.packed_forward import run_base


def last_logits(model: BaseModel, base_params, sequences: Sequence[np.ndarray]) -> Float[np.ndarray, "n V"]:
    """Return the float32 logits after the last token of each sequence."""
    return np.stack([all_logits(model, base_params, sequence)[-1] for sequence in sequences])


def all_logits(model: BaseModel, base_params, sequence: Int[np.ndarray, " T"]) -> Float[np.ndarray, "T V"]:
    """Return the float32 logits after every token. Sequences of one bucket share a compilation."""
    padded, _ = right_padded([sequence], bucket(len(sequence), model.config.max_positions))
    return np.asarray(_forward(model, base_params, padded), np.float32)[0, : len(sequence)]


@partial(jax.jit, static_argnums=0)
def _forward(model: BaseModel, base_params, tokens):
    with true_float32(model.dtype):
        return BoundBase(model, base_params).logits(run_base(model, base_params, tokens).hidden)
