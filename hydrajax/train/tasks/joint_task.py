"""The task ``joint``: train draft heads together with an adapter of their base (Medusa-2, medusa 2.2.2 and 2.3.2).

The base's weights are frozen; only the low-rank adapter (`hydrajax.models.adapter`) and the heads are trained. The
original model, the teacher in self-distillation, is the base without the adapter and needs no second copy.
"""

import math
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
from jaxtyping import Array, Float

from hydrajax.drafters.block import BlockDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.formats.export_base import export_merged
from hydrajax.formats.hub import resolve
from hydrajax.formats.peft import save_adapter
from hydrajax.models.adapter import check_adapter, split_adapter, with_adapter
from hydrajax.models.base_model import BoundBase
from hydrajax.models.init import abstract_base, init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.packed_forward import run_base
from hydrajax.sharding import replicated, tree_shardings
from hydrajax.train.data.dataset import Dataset
from hydrajax.train.flops import drafter_forward_flops, forward_flops
from hydrajax.train.losses import draft_loss, language_model_loss, targets
from hydrajax.train.run_config import JointConfig, TrainConfig
from hydrajax.train.tasks.heads_task import HeadsLoss, HeadsTask, make_drafter
from hydrajax.train.train_step import Batch, Loss


def heads_weight(config: JointConfig, step: int | Array) -> Float[Array, ""]:
    """Return λ0 at a step, counted from 0.

    While the heads are trained alone, λ0 has its final value. Adam's updates do not depend on its scale, so nothing
    jumps when the adapter starts without a rise.
    """
    together = jnp.asarray(step) - config.heads_alone_steps
    share = jnp.clip((together + 1) / max(config.rise_steps, 1), 0.0, 1.0)
    rising = config.heads_weight * jnp.sin(jnp.pi / 2 * share)
    return jnp.where(together < 0, config.heads_weight, rising).astype(jnp.float32)


def check_joint(config: TrainConfig, base: LlamaConfig) -> None:
    """Refuse an adapter that does not fit the base or that the heads' loss would not reach.

    `draft_loss` uses the base's lm head without its adapter.
    """
    check_adapter(config.adapter, base)
    heads = make_drafter(config.draft, base, config.dtype)
    if isinstance(heads, BlockDrafter):
        raise HydrajaxError(
            f"draft.heads: got {config.draft.heads}, expected heads of every position, such as hydra, for task joint"
        )
    if heads.spec.shared_lm_head and "lm_head" in config.adapter.targets:
        raise HydrajaxError(
            f"adapter.targets: got lm_head, but {config.draft.heads} heads use the base's lm head without its adapter; "
            "remove lm_head"
        )


@dataclass(frozen=True)
class JointLoss(Loss):
    """base_weight · (the base's loss) + λ0 · `draft_loss`; see `hydrajax.train.train_step.Loss`.

    Parameters are ``adapter`` and ``draft``; ``frozen`` are the base's. The heads' loss reaches the adapter through the
    hidden states that the heads read.
    """

    heads: HeadsLoss  # with the adapter in its model
    original: Llama  # the model without the adapter
    joint: JointConfig

    def totals(self, batch: Batch):
        counts = targets(batch["labels"], 1, batch.get("segments"))[1]
        return self.heads.totals(batch), jnp.maximum(jnp.sum(counts, dtype=jnp.float32), 1)

    def __call__(self, params, frozen, batch: Batch, totals, rng, step=0):
        adapted, objective, config = self.heads.model, self.heads.objective, self.joint
        params = optax.tree.cast(params, adapted.dtype)
        head_counts, n_targets = totals
        base_key, lm_key, heads_key = (None,) * 3 if rng is None else jax.random.split(rng, 3)

        alone = jnp.asarray(step) < config.heads_alone_steps
        adapter = jax.tree.map(lambda x: jnp.where(alone, jax.lax.stop_gradient(x), x), params["adapter"])
        base_params, segments = with_adapter(frozen, adapter), batch.get("segments")
        aux_hidden_layers = self.heads.drafter.spec.aux_hidden_layers
        forward = run_base(adapted, base_params, batch["tokens"], aux_hidden_layers, segments, base_key)
        heads_loss, parts = draft_loss(
            objective, self.heads.drafter, params["draft"], forward.aux_hidden_states, forward.hidden, batch,
            BoundBase(adapted, base_params, block=forward.block), heads_key, head_counts,
        )  # fmt: skip
        # The layers' part of the adapter is in the hidden states; only the lm head's is needed here.
        lm_head = {name: leaf for name, leaf in adapter.items() if not isinstance(leaf, dict)}
        teacher = None
        if config.distill:
            unchanged = run_base(self.original, frozen, batch["tokens"], segments=segments).hidden
            teacher = BoundBase(self.original, frozen), unchanged
        nats = language_model_loss(
            adapted, lm_head, forward.hidden, batch["labels"], segments, objective.chunk_tokens,
            frozen=frozen, teacher=teacher, rng=lm_key,
        ).nats  # fmt: skip
        base_loss = nats / n_targets
        loss = config.base_weight * base_loss + heads_weight(config, step) * heads_loss
        return loss, self.heads.reported(parts) | {"base_loss": jax.lax.stop_gradient(base_loss)}

    def ranks(self, params, frozen, batch: Batch, depth: int):
        """See `HeadsLoss.ranks`."""
        return self.heads.ranks(params["draft"], self.adapted(params, frozen), batch, depth)

    def adapted(self, params, frozen) -> dict:
        """Return the base's parameters with the adapter, in the dtype of the computation."""
        return with_adapter(frozen, optax.tree.cast(params["adapter"], self.heads.model.dtype))

    def nats(self, params, frozen, batch: Batch) -> Float[Array, ""]:
        """Return the nats of the text, summed over targets, under the base with the adapter; None: without it."""
        model, base_params = self.original, frozen
        if params is not None:
            model, base_params = self.heads.model, self.adapted(params, frozen)
        labels, segments = batch["labels"], batch.get("segments")
        hidden = run_base(model, base_params, batch["tokens"], segments=segments).hidden
        chunk_tokens = self.heads.objective.chunk_tokens
        return language_model_loss(model, base_params, hidden, labels, segments, chunk_tokens).nats


class JointTask(HeadsTask):
    """Draft heads and an adapter; see `hydrajax.train.train_loop.Task`."""

    def __init__(self, config: TrainConfig, dataset: Dataset, model: Llama, base_params: Any, mesh: Mesh):
        check_joint(config, model.config)
        self._adapted = adapted = model.clone(adapter=config.adapter, remat=config.joint.remat)
        self._adapter_master = adapted.clone(dtype=jnp.dtype(jnp.float32))
        boxed = split_adapter(abstract_base(self._adapter_master))[1]
        self.abstract_adapter = nn.unbox(boxed)
        super().__init__(config, dataset, model, base_params, mesh)
        self.loss = JointLoss(HeadsLoss(adapted, self.drafter, config.objective), model, config.joint)
        self.abstract_params = {"adapter": self.abstract_adapter, "draft": self.abstract_params}
        self.param_shardings = {"adapter": tree_shardings(mesh, boxed), "draft": self.param_shardings}
        self._nats = jax.jit(self.loss.nats, out_shardings=replicated(mesh))
        self._before: float | None = None  # constant held-out nats per target without the adapter

    def _flops(self) -> float:
        """Forward and backward passes; the base's weights get no gradient."""
        length = self.config.data.length
        frozen, adapted = (forward_flops(model, length) for model in (self.model, self._adapted))
        passes = 2 + self.config.joint.distill
        adapter = adapted.weights - frozen.weights
        trained = 3 * (adapter + drafter_forward_flops(self.drafter, self.model, length))
        return passes * frozen.total + frozen.attention + trained

    def init_params(self, rng):
        adapter_key, heads_key = jax.random.split(rng)
        # XLA removes the computation of the other weights.
        init = jax.jit(
            lambda key: split_adapter(init_base(self._adapter_master, key))[1],
            out_shardings=self.param_shardings["adapter"],
        )
        return {"adapter": init(adapter_key), "draft": self.init_heads(heads_key, self.param_shardings["draft"])}

    def evaluate(self, params, batches: Iterable[dict[str, np.ndarray]]) -> dict[str, Any]:
        """Return the metrics of `HeadsTask.evaluate`, and the base's ``loss`` (nats per token) and ``bits_per_byte``
        with the adapter and (``loss_before``, ``bits_per_byte_before``) without it.
        """
        batches = list(batches)
        report = super().evaluate(params, batches)
        n_targets = n_bytes = 0
        for batch in batches:
            tokens, counts = jax.device_get(targets(batch["labels"], 1, batch.get("segments")))
            n_targets += int(counts.sum())
            for ids, counted in zip(tokens, counts, strict=True):
                text = self.dataset.tokenizer.decode(ids[counted].tolist(), skip_special_tokens=False)
                n_bytes += len(text.encode())
        placed = [self._place(batch) for batch in batches]
        loss = sum(float(self._nats(params, self.frozen, batch)) for batch in placed) / max(n_targets, 1)
        if self._before is None:
            before = sum(float(self._nats(None, self.frozen, batch)) for batch in placed)
            self._before = before / max(n_targets, 1)
        to_bits = n_targets / max(n_bytes, 1) / math.log(2)
        report |= {"loss": loss, "loss_before": self._before}
        return report | {"bits_per_byte": loss * to_bits, "bits_per_byte_before": self._before * to_bits}

    def export(self, directory: Path, params) -> str:
        """Write the heads, the adapter in PEFT's format, and the base with the adapter merged."""
        base, adapter = resolve(self.config.model, "model"), directory / "adapter"
        save_adapter(adapter, self.config.adapter, params["adapter"], self.model.config, str(self.config.model))
        heads = self.export_heads(directory / "heads", params["draft"], adapter)
        export_merged(directory / "base", base, adapter, overwrite=True)
        return (
            f"--base {directory / 'base'} --draft {heads}, or with the adapter unmerged: "
            f"--base {self.config.model} --adapter {adapter} --draft {heads}"
        )
