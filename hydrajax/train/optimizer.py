"""The optimizer of a run: AdamW or Muon under warm-up and decay, with clipping."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from hydrajax.train.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """From 0 to ``lr`` over ``warmup_steps``, then down to ``final_fraction * lr`` at ``steps``, as the released code.

    ``cosine`` and ``linear`` name the way down; ``constant`` stays at ``lr``.
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


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW or Muon for a run of ``steps`` optimizer steps."""
    schedule = learning_rate(config, steps)
    decays = {"weight_decay": config.weight_decay}
    if config.name == "adamw":
        update = optax.adamw(schedule, config.b1, config.b2, **decays, mask=_decaying)
    else:
        muon_and_adam = muon(
            schedule,
            **decays,
            consistent_rms=0.2,  # the RMS of Adam's updates, so that one learning rate suits both (Moonlight, 2025)
            adam_b1=config.b1,
            adam_b2=config.b2,
            adam_weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=_muon_dimensions,
        )
        update = _sparing_decay(muon_and_adam)
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clip, update)


def _decaying(params):
    """True for matrices. The bias of a conditioned block, ``[2, D]``, is none (`hydrajax.drafters.heads`)."""
    return jax.tree.map_with_path(lambda path, x: x.ndim > 1 and path[-1].key != "bias", params)


def _sparing_decay(update: optax.GradientTransformation) -> optax.GradientTransformation:
    """``update`` without decay of norm scales and biases: it sees zeros in their place.

    optax's Muon has a mask for the decay of its matrices, none for what it leaves to Adam. Neither reads parameters for
    anything but the decay.
    """

    def sparing(grads, state, params):
        seen = jax.tree.map(lambda x, decays: x if decays else jnp.zeros_like(x), params, _decaying(params))
        return update.update(grads, state, seen)

    return optax.GradientTransformation(update.init, sparing)


# A fused kernel holds several matrices; each is orthogonalised by itself.
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
