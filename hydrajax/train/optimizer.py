"""AdamW or Muon with warm-up, decay and clipping; a joint run has two optimizers."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from hydrajax.train.muon import scale_by_muon
from hydrajax.train.run_config import OptimizerConfig, TrainConfig


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the schedule: 0 to ``lr`` in ``warmup_steps``, then decay to ``final_fraction * lr`` at ``steps``.

    The released Hydra code does the same.
    """
    warmup = min(config.warmup_steps, steps)
    rest, final = max(steps - warmup, 1), config.final_fraction
    decay = {
        "cosine": lambda: optax.cosine_decay_schedule(config.lr, rest, alpha=final),
        "linear": lambda: optax.linear_schedule(config.lr, config.lr * final, rest),
        "constant": lambda: optax.constant_schedule(config.lr),
    }[config.schedule]()
    if warmup == 0:
        return decay
    return optax.join_schedules([optax.linear_schedule(0.0, config.lr, warmup), decay], [warmup])


def optimizer_of(config: TrainConfig, steps: int, mesh: Mesh | None = None) -> optax.GradientTransformation:
    """Return the optimizer of a run of ``steps`` steps, which shards its own work over ``mesh``.

    A joint run clips once and has two optimizers, for its parameters ``adapter`` and ``draft`` (medusa 2.2.2,
    "differential learning rates"): the heads learn at a multiple of the adapter's rate, and the adapter starts after
    ``joint.heads_alone_steps``.
    """
    if config.task != "joint":
        return make_optimizer(config.optimizer, steps, mesh)
    adapter, heads = _joint_settings(config)
    alone = config.joint.heads_alone_steps
    updates = {"adapter": from_step(_update(adapter, steps - alone), alone), "draft": _update(heads, steps)}
    return optax.chain(_clip(config.optimizer), optax.partition(updates, {name: name for name in updates}))


def learning_rates(config: TrainConfig, steps: int) -> dict[str, optax.Schedule]:
    """Return the learning rate schedules of a run by their names in the metrics."""
    if config.task != "joint":
        return {"learning_rate": learning_rate(config.optimizer, steps)}
    adapter, heads = _joint_settings(config)
    alone = config.joint.heads_alone_steps
    later = learning_rate(adapter, steps - alone)
    return {
        "learning_rate": lambda step: jnp.where(step < alone, 0.0, later(jnp.maximum(step - alone, 0))),
        "heads_learning_rate": learning_rate(heads, steps),
    }


def _joint_settings(config: TrainConfig) -> tuple[OptimizerConfig, OptimizerConfig]:
    """``(the adapter's settings, the heads' settings)``."""
    optimizer = config.optimizer
    return optimizer, dataclasses.replace(optimizer, lr=optimizer.lr * config.joint.heads_lr_multiple)


class FromStep(NamedTuple):
    """The state of a delayed optimizer."""

    count: jax.Array
    inner: Any


def from_step(update: optax.GradientTransformation, start: int) -> optax.GradientTransformation:
    """Delay ``update`` by ``start`` steps, in which neither parameters nor its state change (moments, step counts)."""

    def delayed(grads, state: FromStep, params=None):
        updates, inner = update.update(grads, state.inner, params)
        started = state.count >= start
        updates = jax.tree.map(lambda x: jnp.where(started, x, jnp.zeros_like(x)), updates)
        inner = jax.tree.map(lambda new, old: jnp.where(started, new, old), inner, state.inner)
        return updates, FromStep(state.count + 1, inner)

    return optax.GradientTransformation(lambda params: FromStep(jnp.zeros((), jnp.int32), update.init(params)), delayed)


def make_optimizer(config: OptimizerConfig, steps: int, mesh: Mesh | None = None) -> optax.GradientTransformation:
    """Return AdamW or Muon for a run of ``steps`` steps. ``mesh``: see `hydrajax.train.muon`."""
    return optax.chain(_clip(config), _update(config, steps, mesh))


def _clip(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)


def _update(config: OptimizerConfig, steps: int, mesh: Mesh | None = None) -> optax.GradientTransformation:
    schedule = learning_rate(config, steps)
    if config.name == "adamw":
        return optax.adamw(schedule, config.b1, config.b2, weight_decay=config.weight_decay, mask=_decaying)
    scaled = {
        "muon": scale_by_muon(lambda path: _FUSED.get(path[-1].key), mesh),
        "adam": optax.scale_by_adam(config.b1, config.b2, nesterov=True),
    }
    return optax.chain(
        optax.partition(scaled, _muon_or_adam),
        optax.add_decayed_weights(config.weight_decay, _decaying),
        optax.scale_by_learning_rate(schedule),
    )


def _decaying(params):
    """True for matrices, but not for the bias ``[2, D]`` of a conditioned block (`hydrajax.drafters.head_stack`)."""
    return jax.tree.map_with_path(lambda path, x: x.ndim > 1 and path[-1].key != "bias", params)


# A fused kernel holds several matrices, counted by this axis, each orthogonalised separately.
_FUSED = {"qkv": 2, "gate_up": 1, "shared_kernel": 1, "path_kernel": 1}
_TOKENS = ("embedding", "lm_head", "lm_kernel")  # one row or column per token: not maps between hidden spaces


def _muon_or_adam(params):
    decays = _decaying(params)
    return jax.tree.map_with_path(lambda path, x: "muon" if x and path[-1].key not in _TOKENS else "adam", decays)
