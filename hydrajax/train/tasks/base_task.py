"""The task ``base``: train a whole model on text, or on the distribution of a teacher."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Float

from hydrajax.formats.export_base import export_llama
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.models.init import abstract_base, init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.packed_forward import run_base
from hydrajax.sharding import distribute, jit_on, replicated, tree_shardings
from hydrajax.train.data.dataset import Dataset
from hydrajax.train.flops import forward_flops
from hydrajax.train.losses import LanguageLoss, language_model_loss, targets
from hydrajax.train.run_config import TrainConfig
from hydrajax.train.train_step import Batch, Loss, batch_placer


@dataclass(frozen=True)
class BaseLoss(Loss):
    """Mean next-token cross entropy in nats, or KL(teacher ‖ model); see `hydrajax.train.train_step.Loss`.

    ``params`` are float32 and cast to the model's dtype. ``frozen`` are the teacher's parameters.
    """

    model: BaseModel
    chunk_tokens: int
    teacher: BaseModel | None = None

    def totals(self, batch: Batch):
        return jnp.maximum(jnp.sum(targets(batch["labels"], 1, batch.get("segments"))[1]), 1)

    def __call__(self, params, frozen, batch: Batch, totals, rng, step=0):
        params = optax.tree.cast(params, self.model.dtype)
        found = self._language_loss(params, self._hidden(self.model, params, batch), batch, self._teach(frozen, batch))
        return found.nats / totals, jax.tree.map(lambda x: jax.lax.stop_gradient(x) / totals, found.similarity)

    def sums(self, params, frozen, batch: Batch) -> dict[str, Float[Array, ""]]:
        """Return sums over all targets: their number, nats of the text and, with a teacher, KL and similarity."""
        params = optax.tree.cast(params, self.model.dtype)
        hidden = self._hidden(self.model, params, batch)
        of_text = self._language_loss(params, hidden, batch)
        sums = {"n_targets": of_text.n_targets, "loss": of_text.nats}
        if self.teacher is None:
            return sums
        taught = self._language_loss(params, hidden, batch, self._teach(frozen, batch))
        return sums | {"kl": taught.nats} | taught.similarity

    def _teach(self, frozen, batch: Batch):
        if self.teacher is None:
            return None
        return BoundBase(self.teacher, frozen), self._hidden(self.teacher, frozen, batch)

    def _hidden(self, model: BaseModel, params, batch: Batch) -> Float[Array, "B T D"]:
        return run_base(model, params, batch["tokens"], segments=batch.get("segments")).hidden

    def _language_loss(self, params, hidden, batch: Batch, teacher=None) -> LanguageLoss:
        labels, segments = batch["labels"], batch.get("segments")
        return language_model_loss(self.model, params, hidden, labels, segments, self.chunk_tokens, teacher=teacher)


class BaseTask:
    """A whole model; see `hydrajax.train.train_loop.Task`.

    Attributes:
        start: float32 parameters to start from; None for random ones.
    """

    higher_is_better = False

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        mesh: Mesh,
        shape: LlamaConfig,
        start: Any = None,
        teacher: tuple[BaseModel, Any] | None = None,
    ):
        self.config, self.dataset, self.mesh, self._start = config, dataset, mesh, start
        self.extras: dict[str, Any] = {}
        self.model = Llama(shape, jnp.dtype(config.dtype))
        teacher_model, self.frozen = teacher or (None, ())
        self.metric = "kl" if teacher_model else "loss"
        self.frozen_shardings = tree_shardings(mesh, abstract_base(teacher_model)) if teacher_model else ()
        self.loss = BaseLoss(self.model, config.objective.chunk_tokens, teacher_model)
        master = Llama(shape, jnp.float32)
        boxed = abstract_base(master)
        self.abstract_params = nn.unbox(boxed)
        self.param_shardings = tree_shardings(mesh, boxed)
        self._init = jax.jit(lambda rng: scaled_init(master, rng), out_shardings=self.param_shardings)
        self._place = batch_placer(mesh)
        self._sums = jit_on(mesh, self.loss.sums, out_shardings=replicated(mesh))
        # The backward pass costs twice the forward pass, which is all that a teacher needs.
        length = config.data.length
        self.flops_per_token = 3 * forward_flops(self.model, length).total
        if teacher_model:
            self.flops_per_token += forward_flops(teacher_model, length).total

    def init_params(self, rng):
        """Return random weights or, the first time, those to start from."""
        if self._start is None:
            return self._init(rng)
        start, self._start = self._start, None
        return jax.tree.map(lambda x, home: distribute(np.asarray(x), home), start, self.param_shardings)

    def evaluate(self, params, batches: Iterable[dict[str, np.ndarray]]) -> dict[str, Any]:
        """Return held-out ``loss`` (nats per token of the text) and ``bits_per_byte``, independent of the tokenizer.

        With a teacher also ``kl`` (nats), ``acceptance`` and ``agreement`` (`hydrajax.train.losses.LanguageLoss`).
        """
        sums: Counter[str] = Counter()
        for batch in batches:
            found = jax.device_get(self._sums(params, self.frozen, self._place(batch)))
            sums.update({name: float(value) for name, value in found.items()})
        n_targets = max(sums.pop("n_targets"), 1)
        report = {name: value / n_targets for name, value in sums.items()}
        if self.dataset.bytes_per_token:
            report["bits_per_byte"] = report["loss"] / math.log(2) / self.dataset.bytes_per_token
        return report

    def note(self, metrics: dict[str, Any]) -> str:
        return f"acceptance {metrics['acceptance']:.2f}" if "acceptance" in metrics else ""

    def export(self, directory: Path, params) -> str:
        tokenizer = self.dataset.tokenizer
        eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        export_llama(directory / "base", self.model, params, tokenizer=tokenizer, dtype=jnp.float16, eos_ids=eos)
        return f"--base {directory / 'base'}"


def scaled_init(model: BaseModel, rng):
    """Return normal weights with std 1 / sqrt(width): with the usual 0.02, narrow models learn slowly at first."""
    scale = model.config.width**-0.5 / 0.02
    return jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, init_base(model, rng))
