"""Language-model training of a base from scratch: what the loop needs to know of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hydrajax.checkpoints.base import export_llama
from hydrajax.errors import HydrajaxError
from hydrajax.models.base import BaseModel, abstract_base, init_base
from hydrajax.models.llama import Llama
from hydrajax.models.rows import run_base
from hydrajax.sharding import replicated, tree_shardings
from hydrajax.train.config import TrainConfig
from hydrajax.train.data.dataset import Dataset
from hydrajax.train.flops import forward_flops
from hydrajax.train.forward import cast
from hydrajax.train.losses import language_model_loss, targets
from hydrajax.train.step import Batch, batch_placer


@dataclass(frozen=True)
class BaseLoss:
    """Mean next-token cross entropy in nats; see `hydrajax.train.step.Loss`."""

    model: BaseModel  # computes in its own dtype; the parameters it is given are float32
    chunk_tokens: int

    def totals(self, batch: Batch):
        return jnp.maximum(jnp.sum(targets(batch["labels"], 1, batch.get("segments"))[1]), 1)

    def __call__(self, params, frozen, batch: Batch, totals, rng, step=0):
        params = cast(params, self.model.dtype)
        segments = batch.get("segments")
        hidden = run_base(self.model, params, batch["tokens"], segments=segments).hidden
        nats, _ = language_model_loss(self.model, params, hidden, batch["labels"], segments, self.chunk_tokens)
        return nats / totals, {}


class BaseTask:
    """A base from scratch: see `hydrajax.train.loop.Task`."""

    metric, higher_is_better = "loss", False
    frozen, frozen_shardings = (), ()

    def __init__(self, config: TrainConfig, dataset: Dataset, mesh: Mesh):
        self.config, self.dataset, self.mesh = config, dataset, mesh
        self.extras: dict[str, Any] = {}
        self.model = Llama(config.scratch, jnp.dtype(config.dtype))
        vocab_size = len(dataset.tokenizer)
        if vocab_size != config.scratch.vocab_size:
            raise HydrajaxError(
                f"scratch.vocab_size: is {config.scratch.vocab_size}, the tokenizer has {vocab_size} ids"
            )
        self.loss = BaseLoss(self.model, config.objective.chunk_tokens)
        master = Llama(config.scratch, jnp.float32)
        boxed = abstract_base(master)
        self.abstract_params = nn.unbox(boxed)
        self.param_shardings = tree_shardings(mesh, boxed)
        self._init = jax.jit(lambda rng: scaled_init(master, rng), out_shardings=self.param_shardings)
        self._place = batch_placer(mesh)
        self._nats_and_count = jax.jit(
            lambda params, batch: (self.loss(params, (), batch, 1, None)[0], self.loss.totals(batch)),
            out_shardings=replicated(mesh),
        )
        # Forward, and twice as much backward.
        self.flops_per_token = 3 * forward_flops(config.scratch, self.abstract_params, config.data.length)

    def init_params(self, rng):
        return self._init(rng)

    def evaluate(self, params, batches: Iterable[dict[str, np.ndarray]]) -> dict[str, Any]:
        """Held-out ``loss`` (nats per token) and ``bits_per_byte``, which does not depend on the tokenizer."""
        nats = count = 0
        for batch in batches:
            more = jax.device_get(self._nats_and_count(params, self._place(batch)))
            nats, count = nats + float(more[0]), count + int(more[1])
        loss = nats / max(count, 1)
        report = {"loss": loss}
        if self.dataset.bytes_per_token:
            report["bits_per_byte"] = loss / math.log(2) / self.dataset.bytes_per_token
        return report

    def note(self, metrics: dict[str, Any]) -> str:
        return ""

    def export(self, directory: Path, params) -> str:
        tokenizer = self.dataset.tokenizer
        eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        export_llama(directory / "base", self.model, params, tokenizer=tokenizer, dtype=jnp.float16, eos_ids=eos)
        return f"--base {directory / 'base'}"


def scaled_init(model: BaseModel, rng):
    """Normal weights of std 1 / sqrt(width): the usual 0.02 suits widths of thousands, a narrow model starts slowly."""
    scale = model.config.width**-0.5 / 0.02
    return jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, init_base(model, rng))
