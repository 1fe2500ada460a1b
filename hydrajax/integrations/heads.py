"""Train a policy's draft heads in the loop of its own training, on the texts of its rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hydrajax.decoding.prompt_batch import bucket
from hydrajax.drafters.drafter import CORPUS, Drafter
from hydrajax.drafters.trainable import Trainable
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import title_of
from hydrajax.formats.load import load_draft
from hydrajax.language_model import LanguageModel
from hydrajax.loaded_model import replace_leaves
from hydrajax.models.weights import Quantized
from hydrajax.train.losses import IGNORED, Objective
from hydrajax.train.tasks.heads_task import make_loss


class HeadsInLoop:
    """Heads of a model that follow it: the teacher loss of hydra 3.1 on texts that the model has sampled.

    Training reads the base's present parameters and writes the heads' in place, so that nothing is compiled again.
    """

    def __init__(self, m: LanguageModel, learning_rate: float, batch_size: int):
        """Start from the model's heads, with new moments.

        Raises:
            HydrajaxError: for a draft that is not trained.
        """
        drafter = trained_part(m.drafter)
        if not isinstance(drafter, Trainable):
            raise HydrajaxError(f"refresh_heads: got {title_of(m.drafter)}, expected a draft with heads")
        self._m, self._batch_size = m, batch_size
        self._loss = make_loss(m.model, drafter, Objective())
        self._optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.0))
        self._master = optax.tree.cast(self._float_params(drafter), jnp.float32)
        self._moments = self._optimizer.init(self._master)
        self._step = jax.jit(self._one_step, donate_argnums=(0, 1))

    def _float_params(self, drafter: Drafter) -> dict:
        """Return the heads' parameters. Heads in few bits are read again as they were trained."""
        m = self._m
        own = {name: x for name, x in m.params.draft.items() if name != CORPUS}
        if not any(isinstance(x, Quantized) for x in jax.tree.leaves(own, is_leaf=lambda x: isinstance(x, Quantized))):
            return own
        _, own = load_draft(m.draft_directory, m.config, drafter.dtype)
        m.params.draft.update(own)
        return own

    def train(self, texts: Sequence[np.ndarray], seed: int = 0) -> list[float]:
        """Take one step on each batch of texts, int32 ``[T]``, and return the losses."""
        width = bucket(max(map(len, texts)), self._m.config.max_positions)
        tokens = np.zeros((len(texts), width), np.int32)
        labels = np.full_like(tokens, IGNORED)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = labels[row, : len(text)] = text
        order, losses = np.random.default_rng(seed).permutation(len(texts)), []
        for start in range(0, len(texts), self._batch_size):
            rows = np.resize(order[start : start + self._batch_size], self._batch_size)
            batch = {"tokens": tokens[rows], "labels": labels[rows]}
            key = jax.random.fold_in(jax.random.key(seed), start)
            given = self._master, self._moments, self._m.params.base, batch, key
            self._master, self._moments, loss = self._step(*given)
            losses.append(loss)
        replace_leaves(self._m.params.draft, optax.tree.cast(self._master, self._loss.drafter.dtype))
        return [float(loss) for loss in losses]

    def _one_step(self, params: Any, moments: Any, frozen: Any, batch: Any, key: Any) -> tuple[Any, Any, jax.Array]:
        given = frozen, batch, self._loss.totals(batch), key
        (value, _), gradients = jax.value_and_grad(self._loss, has_aux=True)(params, *given)
        updates, moments = self._optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value


def trained_part(drafter: Drafter) -> Drafter:
    """Return the drafter within those that add chains of text."""
    while not isinstance(drafter, Trainable) and hasattr(drafter, "drafter"):
        drafter = drafter.drafter
    return drafter
