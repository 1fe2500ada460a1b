"""A mixture of experts in place of a decoder layer's MLP (`hydrajax.models.llama_config.Experts`).

A router scores all experts for each token, and a token's output is a weighted sum of the MLPs of the best ones, perhaps
with an MLP that every token passes through. `hydrajax.models.expert_products` multiplies.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.models import products
from hydrajax.models.arrays import Array, DType
from hydrajax.models.expert_products import expert_sum
from hydrajax.models.llama_config import Experts
from hydrajax.models.weights import declare, declare_experts, declare_kernel, project, project_parts

TINY = 1e-20  # added to a sum of weights before a division, as by transformers


class ExpertMLP(nn.Module):
    """The experts of one layer, their router and the shared MLP.

    Router and shared gate stay in float: they decide, and are small. An adapter does not reach experts.

    Attributes:
        experts: Shapes and rules.
        activation: Of the gates.
        dtype: Of parameters and computation, except for the router's bias, which is float32.
        quantize: How the weights of products are stored.
    """

    experts: Experts
    activation: Callable
    dtype: DType
    quantize: str | None = None

    adapter = None  # not a field: `declare_kernel` reads it

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the layer's MLP of x."""
        e, width, normal = self.experts, x.shape[-1], nn.initializers.normal(0.02)
        router = declare(self, "router", (width, e.count), (None, None), normal)
        bias = None
        if e.choice_bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, (None,))
            bias = self.param("choice_bias", zeros, (e.count,), jnp.float32)
        gate_up = declare_experts(self, "gate_up", e.count, (width, 2, e.width))
        down = declare_experts(self, "down", e.count, (e.width, width))
        ids, weights = route(products.matmul_float32(x, router), e, bias)
        out = expert_sum(x, ids, weights, gate_up, down, e.count, self.activation)
        if not e.shared_width:
            return out
        shared_gate_up = declare_kernel(self, "shared_gate_up", (width, 2, e.shared_width), ("width", None, "mlp"))
        shared_down = declare_kernel(self, "shared_down", (e.shared_width, width), ("mlp", "width"))
        gate, up = project_parts(x, shared_gate_up)
        shared = project(self.activation(gate) * up, shared_down)
        if e.shared_gate:
            gate = declare(self, "shared_gate", (width, 1), (None, None), normal)
            shared = shared * jax.nn.sigmoid(products.matmul_float32(x, gate)).astype(shared.dtype)
        return out + shared


def route(
    logits: Float[Array, "*rows E"], e: Experts, bias: Float[Array, " E"] | None
) -> tuple[Int[Array, "*rows k"], Float[Array, "*rows k"]]:
    """Return each token's experts in ascending order, int32, and their weights.

    All in float32. transformers computes the logits of a softmax in the model's dtype, the softmax in float32, and
    rounds the weights to the model's dtype (Mixtral's stay float32); those of a sigmoid are float32 throughout. In
    bfloat16 a token with two nearly equal experts can therefore take another one there.

    Of equal scores the first expert wins. Sums have an order that does not depend on the number of rows.
    """
    if e.scores == "softmax":
        scores = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
        scores = scores / _sum(scores)
    else:
        scores = jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if e.groups > 1:
        choice = _of_best_groups(choice, e)
    ids = jnp.sort(jax.lax.top_k(choice, e.per_token)[1], axis=-1).astype(jnp.int32)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if e.normalized:
        weights = weights / (_sum(weights) + TINY)
    return ids, weights * e.scale


def _of_best_groups(choice: Float[Array, "*rows E"], e: Experts) -> Float[Array, "*rows E"]:
    """Replace the scores of experts outside the best groups by minus infinity (DeepSeek-V3 2.1.2)."""
    groups = choice.reshape(*choice.shape[:-1], e.groups, -1)
    sums = _sum(jax.lax.top_k(groups, 2)[0])[..., 0]
    best = jax.lax.top_k(sums, e.chosen_groups)[1]
    chosen = jnp.any(best[..., None] == jnp.arange(e.groups), axis=-2)
    return jnp.where(chosen[..., None], groups, -jnp.inf).reshape(choice.shape)


def _sum(x: Float[Array, "*rows n"]) -> Float[Array, "*rows 1"]:
    """Return the sum over the last axis, half by half. XLA sums one row in another order than several."""
    while (size := x.shape[-1]) > 1:
        half = size // 2
        rest = x[..., 2 * half :]
        x = jnp.concatenate([x[..., :half] + x[..., half : 2 * half], rest], axis=-1)
    return x
