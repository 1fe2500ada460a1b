"""Floating-point operations of training, for model FLOPs utilisation (MFU), counted in the traced forward passes.

MFU counts what the mathematics needs (PaLM, appendix B): no recomputation, a causal half of the attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hydrajax.drafters.drafter import Trainable, abstract_draft
from hydrajax.models.base_model import BoundBase
from hydrajax.models.llama import Llama
from hydrajax.models.packed_forward import run_base
from hydrajax.roofline.passes import abstract_params, with_layers
from hydrajax.roofline.traced import at_depth, flops, trace

# Lengths of the rows that are traced. So short a text is attended to as a whole square, in one product.
SHORT, LONG = 64, 128


class PerToken(NamedTuple):
    """Operations for each token of a row: products with weights (and of constant size), and the causal attention."""

    weights: float
    attention: float

    @property
    def total(self) -> float:
        return self.weights + self.attention


def forward_flops(model: Llama, length: int, logits: bool = True) -> PerToken:
    """Count a base's forward pass over rows of ``length`` tokens, with or without its lm head."""

    def run(model: Llama):
        def forward(params, tokens):
            hidden = run_base(model, params, tokens).hidden
            return BoundBase(model, params).logits(hidden) if logits else hidden

        return lambda tokens: trace(forward, abstract_params(model), tokens)[0]

    return _per_token(lambda row: at_depth(model.config.n_layers, lambda n: run(with_layers(model, n))(row)), length)


def drafter_forward_flops(drafter: Trainable, model: Llama, length: int) -> float:
    """Count, for each token, the drafter's training forward pass over rows of ``length`` tokens."""
    base = with_layers(model, 1)  # drafters read its embedding and lm head
    width = len(drafter.spec.aux_hidden_layers) * base.config.width
    params = nn.unbox(abstract_draft(drafter, base)), abstract_params(base)

    def forward(params, aux_hidden_states, tokens):
        bound = BoundBase(base, params[1])
        read = drafter.teacher_hidden(params[0], aux_hidden_states, tokens, bound)
        return [drafter.head_logits(params[0], k, hidden, bound) for k, hidden in enumerate(read)]

    def operators(tokens):
        return trace(forward, params, jax.ShapeDtypeStruct((*tokens.shape, width), base.dtype), tokens)[0]

    return _per_token(operators, length).total


def _per_token(operators: Callable[[jax.ShapeDtypeStruct], Any], length: int) -> PerToken:
    """Split what is counted for a row into parts that grow with the row and with its square, the attention.

    A token needs half of the square: the tokens up to itself.
    """
    short, long = (flops(operators(jax.ShapeDtypeStruct((1, n), jnp.int32))) / n for n in (SHORT, LONG))
    slope = (long - short) / (LONG - SHORT)
    return PerToken(short - slope * SHORT, slope * length / 2)
