"""AdamW or Muon with warm-up, decay and clipping; a joint run has two optimizers."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

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


def optimizer_of(config: TrainConfig, steps: int) -> optax.GradientTransformation:
    """Return the optimizer of a run of ``steps`` steps.

    A joint run clips once and has two optimizers, for its parameters ``adapter`` and ``draft`` (medusa 2.2.2,
    "differential learning rates"): the heads learn at a multiple of the adapter's rate, and the adapter starts after
    ``joint.heads_alone_steps``.
    """
    if config.task != "joint":
        return make_optimizer(config.optimizer, steps)
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
    """The state of a delayed optimizer.

    Attributes:
        count: int32 number of updates.
        inner: the optimizer's own state.
    """

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


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Return AdamW or Muon for a run of ``steps`` steps."""
    return optax.chain(_clip(config), _update(config, steps))


def _clip(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)


def _update(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    schedule = learning_rate(config, steps)
    decays = {"weight_decay": config.weight_decay}
    if config.name == "adamw":
        return optax.adamw(schedule, config.b1, config.b2, **decays, mask=_decaying)
    muon_and_adam = muon(
        schedule,
        **decays,
        consistent_rms=0.2,  # the RMS of Adam's updates, so that one learning rate suits both (Moonlight, 2025)
        adam_b1=config.b1,
        adam_b2=config.b2,
        adam_weight_decay=config.weight_decay,
        muon_weight_dimension_numbers=_muon_dimensions,
    )
    return _masked_decay(muon_and_adam)


def _decaying(params):
    """True for matrices, but not for the bias ``[2, D]`` of a conditioned block (`hydrajax.drafters.head_stack`)."""
    return jax.tree.map_with_path(lambda path, x: x.ndim > 1 and path[-1].key != "bias", params)


def _masked_decay(update: optax.GradientTransformation) -> optax.GradientTransformation:
    """``update`` without decay of norm scales and biases, in whose place it gets zeros.

    optax's Muon has no decay mask for the parameters that it leaves to Adam. Both read parameters for the decay only.
    """

    def masked(grads, state, params):
        seen = jax.tree.map(lambda x, decays: x if decays else jnp.zeros_like(x), params, _decaying(params))
        return update.update(grads, state, seen)

    return optax.GradientTransformation(update.init, masked)


# A fused kernel holds several matrices, each orthogonalised separately.
_FUSED = {"qkv": MuonDimensionNumbers((0,), (1, 3)), "gate_up": MuonDimensionNumbers((0,), (2,))}
_FUSED |= dict.fromkeys(("shared_kernel", "path_kernel"), MuonDimensionNumbers((0,), (2,)))
_ADAM = ("embedding", "lm_head", "lm_kernel")  # one row or column per token: not maps between hidden spaces


def _muon_dimensions(params):
    def dimensions(path, leaf):
        name = path[-1].key
        if leaf.ndim < 2 or name in _ADAM or name == "bias":
            return None
        return _FUSED.get(name, MuonDimensionNumbers((0,), (1,)))

    return jax.tree.map_with_path(dimensions, params)
