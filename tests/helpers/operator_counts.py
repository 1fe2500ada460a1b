"""Sums of operator costs, and parameter counts to compare them with."""

import flax.linen as nn
import jax.numpy as jnp

from hydrajax.models.init import abstract_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig


def flops(operators) -> float:
    return sum(operator.count * operator.flops for operator in operators)


def moved(operators) -> float:
    return sum(operator.count * operator.bytes for operator in operators)


def abstract_params(config: LlamaConfig, dtype=jnp.float32):
    model = Llama(config, dtype)
    return model, nn.unbox(abstract_base(model))
