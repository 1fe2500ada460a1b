"""One optimizer step: of a base on its next token, and of draft heads on a frozen base.

Both are pure jitted functions that donate what they replace, so a step needs no second copy of parameters or of
optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from hydrajax.drafters.drafter import BoundBase, Drafter
from hydrajax.models.layers import causal_mask
from hydrajax.models.llama import Forward, Llama
from hydrajax.train.losses import head_losses, next_token_loss


def learning_rate(peak: float, steps: int, warmup: int, final_fraction: float) -> optax.Schedule:
    """Linear from 0 to ``peak`` over ``warmup`` steps, then a cosine down to ``final_fraction * peak`` at ``steps``."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, peak * final_fraction)


def make_optimizer(
    peak_lr: float,
    steps: int,
    *,
    warmup: int,
    final_fraction: float = 0.33,  # of the Hydra++ recipe, as are the other defaults (DESIGN section 4)
    weight_decay: float = 0.1,
    clip_norm: float = 1.0,
) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine and clipping by global norm. Norm scales and biases do not decay."""
    schedule = learning_rate(peak_lr, steps, warmup, final_fraction)
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    )


def run_base(model: Llama, base_params, tokens: Int[Array, "B T"], feature_offset: int = 0) -> Forward:
    """The base over whole rows, without a cache."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    mask = causal_mask(tokens.shape[1])
    return model.apply({"params": base_params}, tokens, positions, mask, feature_offset=feature_offset)


def make_base_step(model: Llama, optimizer: optax.GradientTransformation) -> Callable:
    """``step(params, opt_state, tokens) -> (params, opt_state, loss)`` on int32 tokens ``[B, T]``.

    ``params`` and ``opt_state`` are donated. The loss is the mean next-token cross entropy in nats.
    """

    def loss_fn(params, tokens):
        logits = BoundBase(model, params).logits(run_base(model, params, tokens).hidden)
        return next_token_loss(logits, tokens)

    def step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def make_head_step(
    model: Llama, drafter: Drafter, optimizer: optax.GradientTransformation, *, teacher: bool = True
) -> Callable:
    """``step(draft_params, opt_state, base_params, tokens) -> (draft_params, opt_state, losses [K])``.

    ``draft_params`` and ``opt_state`` are donated; the base is only read. Its forward pass lies outside the
    differentiated function, so it has no backward pass and keeps no activations. ``teacher`` trains against the
    base's distribution (Hydra++), otherwise against the text; the sum over heads is minimised.
    """

    def step(draft_params, opt_state, base_params, tokens):
        base = BoundBase(model, base_params)
        forward = run_base(model, base_params, tokens, drafter.hidden_state_offset)
        base_logits = base.logits(forward.hidden) if teacher else None

        def loss_fn(draft_params):
            head_logits = drafter.teacher_forced(draft_params, forward.features, tokens, base)
            losses = head_losses(head_logits, tokens, base_logits)
            return jnp.sum(losses), losses

        grads, losses = jax.grad(loss_fn, has_aux=True)(draft_params)
        updates, opt_state = optimizer.update(grads, opt_state, draft_params)
        return optax.apply_updates(draft_params, updates), opt_state, losses

    return jax.jit(step, donate_argnums=(0, 1))


def init_draft(model: Llama, drafter: Drafter, base_params, rng: Array):
    """Fresh draft parameters that share no buffer with the base, or with each other.

    Every draft lm head starts as the base's (medusa 2.1.1), the very same array; donating it would take the base's.
    """
    return jax.tree.map(lambda x: jnp.array(x, copy=True), drafter.init(rng, BoundBase(model, base_params)))
