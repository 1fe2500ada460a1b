"""FLOPs of training, for model FLOPs utilisation (MFU), counted in traced forward passes.

MFU counts the operations of the model itself (PaLM, appendix B): no recomputation, and half of the causal attention.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hydrajax.bench.roofline.operators import flops
from hydrajax.bench.roofline.passes import abstract_params, of_all_kinds, with_layers
from hydrajax.bench.roofline.traced import trace
from hydrajax.drafters.block import BlockDrafter
from hydrajax.drafters.trainable import Trainable, abstract_draft
from hydrajax.models.base_model import BoundBase
from hydrajax.models.llama import Llama
from hydrajax.models.packed_forward import run_base

# Lengths of the traced sequences: so short that attention is one matmul over the whole square.
SHORT, LONG = 64, 128


class PerToken(NamedTuple):
    """FLOPs per token: matmuls with weights (and others of constant size), and causal attention."""

    weights: float
    attention: float

    @property
    def total(self) -> float:
        return self.weights + self.attention


def forward_flops(model: Llama, length: int, logits: bool = True) -> PerToken:
    """Count a base's forward pass over sequences of ``length`` tokens, with or without its lm head."""

    def operators(model: Llama, tokens):
        def forward(params, tokens):
            hidden = run_base(model, params, tokens).hidden
            return BoundBase(model, params).logits(hidden) if logits else hidden

        return trace(forward, abstract_params(model), tokens)[0]

    return _per_token(lambda ids: of_all_kinds(model, lambda model: operators(model, ids)), length)


def drafter_forward_flops(drafter: Trainable, model: Llama, length: int) -> float:
    """Count the FLOPs per token of the drafter's training forward pass over sequences of ``length`` tokens."""
    # Drafters read its embedding and lm head, and perhaps the keys and values of its last layers.
    base = model if drafter.spec.reads_cache else with_layers(model, 1)
    width = len(drafter.spec.aux_hidden_layers) * base.config.width
    params = nn.unbox(abstract_draft(drafter, base)), abstract_params(base)

    def forward(params, aux_hidden_states, tokens, block):
        bound = BoundBase(base, params[1], block=block)
        if isinstance(drafter, BlockDrafter):
            text = drafter.read(params[0], aux_hidden_states, tokens, None, bound)
            anchors = jnp.zeros((1, min(drafter.num_anchors, length - 1)), jnp.int32)
            hidden = drafter.hidden_of_guesses(params[0], text, anchors, bound)
            return drafter.block_logits(params[0], hidden, jnp.zeros(hidden.shape[:-1], jnp.int32), bound)
        read = drafter.teacher_hidden(params[0], aux_hidden_states, tokens, bound)
        return [drafter.head_logits(params[0], k, hidden, bound) for k, hidden in enumerate(read)]

    def operators(tokens):
        aux_hidden_states, block = jax.ShapeDtypeStruct((*tokens.shape, width), base.dtype), None
        if drafter.spec.reads_cache:
            block = jax.eval_shape(lambda params: run_base(base, params, jnp.zeros(tokens.shape, int)).block, params[1])
        return trace(forward, params, aux_hidden_states, tokens, block)[0]

    if isinstance(drafter, BlockDrafter):  # the number of blocks does not grow with the text
        return flops(operators(jax.ShapeDtypeStruct((1, length), jnp.int32))) / length
    return _per_token(operators, length).total


def _per_token(operators: Callable[[jax.ShapeDtypeStruct], Any], length: int) -> PerToken:
    """Split the count into a part linear in the length and the attention, of whose square a token needs half."""
    short, long = (flops(operators(jax.ShapeDtypeStruct((1, n), jnp.int32))) / n for n in (SHORT, LONG))
    slope = (long - short) / (LONG - SHORT)
    return PerToken(short - slope * SHORT, slope * length / 2)
