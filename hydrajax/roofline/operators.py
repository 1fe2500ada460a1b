"""What every operator of a forward pass computes and moves, in closed form (medusa appendix G, table 5).

A matrix product of ``rows`` by ``[fan_in, fan_out]`` is 2 rows fan_in fan_out operations; its traffic is its two inputs
and its output, each once. That is the paper's count (its O() drops the 2, and the bytes of a number, which are 2 in
float16), so the intensities of tables 6 to 8 are those of `linear` and `attention`. Beyond the paper, whose block has
neither an out projection nor norms, softmax or lm head, a step here has all of them, and grouped key-value heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import flax.linen as nn
import jax

from hydrajax.drafters.costs import Cost, DecoderLayers, Ranking
from hydrajax.drafters.drafter import Drafter
from hydrajax.models.base import BoundBase, abstract_base
from hydrajax.models.config import LlamaConfig
from hydrajax.models.llama import Llama

FLOAT32 = 4  # bytes: of logits and of the scores inside softmax, whatever the model's dtype


@dataclass(frozen=True)
class Operator:
    """One operator, or ``count`` equal ones.

    flops, bytes: floating-point operations and bytes to and from memory, of one of them. rows: of the left matrix, per
    key-value head in attention; how fast a device multiplies depends on it. kind: ``weights`` is a product with a
    parameter, ``attention`` one with keys or values, ``elementwise`` everything else, counted as traffic alone.
    """

    name: str
    flops: float
    bytes: float
    rows: int
    kind: Literal["weights", "attention", "elementwise"]
    count: int = 1

    @property
    def intensity(self) -> float:
        """Operations per byte, "operational intensity" in the paper."""
        return self.flops / self.bytes


def linear(name: str, rows: int, fan_in: int, fan_out: int, itemsize: int) -> Operator:
    """``[rows, fan_in]`` times a weight. Table 5: bqh² operations over 2bqh + h², bqhi over bq(h + i) + hi."""
    numbers = rows * (fan_in + fan_out) + fan_in * fan_out
    return Operator(name, 2.0 * rows * fan_in * fan_out, itemsize * numbers, rows, "weights")


def attention(name: str, config: LlamaConfig, batch: int, queries: int, keys: int, itemsize: int) -> Operator:
    """QKᵀ or PV of one layer; both cost the same. Table 5: bsqnd operations over bsqn + b(s + q)nd.

    keys: s, all that are attended to. Masked scores count: they are computed. With grouped queries the n of the keys'
    (or values') snd is that of key-value heads.
    """
    c = config
    scores = batch * c.n_heads * queries * keys
    numbers = scores + batch * (keys * c.n_kv_heads + queries * c.n_heads) * c.head_dim
    return Operator(name, 2.0 * scores * c.head_dim, itemsize * numbers, queries * c.queries_per_kv, "attention")


def elementwise(name: str, moved: float) -> Operator:
    """An operator that moves so many bytes and whose arithmetic hides behind that."""
    return Operator(name, 0.0, moved, 1, "elementwise")


def layer_operators(config: LlamaConfig, batch: int, queries: int, keys: int, itemsize: int) -> list[Operator]:
    """One decoder layer over ``queries`` new tokens per row, each attending to ``keys`` tokens (new ones included).

    queries: 1 to decode, the nodes of a tree, or a prompt's length. Not counted: rotations and biases.
    """
    c, rows = config, batch * queries
    heads, kv_heads = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    scores = batch * c.n_heads * queries * keys
    return [
        elementwise("norms", itemsize * 2 * 2 * rows * c.width),
        linear("query", rows, c.width, heads, itemsize),
        linear("key", rows, c.width, kv_heads, itemsize),
        linear("value", rows, c.width, kv_heads, itemsize),
        attention("scores", c, batch, queries, keys, itemsize),
        elementwise("softmax", FLOAT32 * 2 * scores),
        attention("weighted sum", c, batch, queries, keys, itemsize),
        linear("out", rows, heads, c.width, itemsize),
        linear("gate", rows, c.width, c.mlp_width, itemsize),
        linear("up", rows, c.width, c.mlp_width, itemsize),
        elementwise("silu", itemsize * 3 * rows * c.mlp_width),
        linear("down", rows, c.mlp_width, c.width, itemsize),
    ]


def forward_operators(
    config: LlamaConfig, batch: int, queries: int, keys: int, itemsize: int, logits_at: int | None = None
) -> list[Operator]:
    """The whole base: every layer, and logits at ``logits_at`` tokens per row (default all of them).

    A tied lm head is read like any other; of the embedding table a row per token is, tied or not.
    """
    c, rows = config, batch * queries
    logits = batch * (queries if logits_at is None else logits_at)
    layers = layer_operators(c, batch, queries, keys, itemsize)
    return [
        elementwise("embedding", itemsize * 2 * rows * c.width),
        *(replace(operator, count=c.n_layers) for operator in layers),
        elementwise("last norm", itemsize * 2 * rows * c.width),
        lm_head("lm head", logits, c.width, c.vocab_size, itemsize),
    ]


def lm_head(name: str, rows: int, width: int, vocab_size: int, itemsize: int) -> Operator:
    """As `linear`, with float32 output."""
    product = linear(name, rows, width, vocab_size, itemsize)
    return replace(product, bytes=product.bytes + (FLOAT32 - itemsize) * rows * vocab_size)


def ranking(name: str, rows: int, vocab_size: int) -> Operator:
    """An argmax or top-k, which reads the logits once."""
    return elementwise(name, FLOAT32 * rows * vocab_size)


# --- the draft ------------------------------------------------------------------------------------------------------


def draft_parameters(config: LlamaConfig, drafter: Drafter) -> int:
    """How many numbers the drafter's parameters are; nothing is allocated."""
    model = Llama(config.replace(n_layers=1))  # drafters read its embedding and lm head; tracing 60 layers takes long
    params = jax.eval_shape(
        lambda base: drafter.init(jax.random.key(0), BoundBase(model, base)), nn.unbox(abstract_base(model))
    )
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def operators_of(costs: Iterable[Cost], itemsize: int) -> list[Operator]:
    """What a drafter says that it computes (`hydrajax.drafters.costs`), as operators."""
    return [operator for cost in costs for operator in _operators_of(cost, itemsize)]


def _operators_of(cost: Cost, itemsize: int) -> list[Operator]:
    if isinstance(cost, DecoderLayers):
        layer = layer_operators(cost.config, cost.batch, cost.tokens, cost.slots + cost.tokens, itemsize)
        return [
            replace(operator, name=f"{cost.name} {operator.name}", count=cost.config.n_layers) for operator in layer
        ]
    if isinstance(cost, Ranking):
        return [ranking(cost.name, cost.rows, cost.vocab_size)]
    product = (lm_head if cost.float32_out else linear)(cost.name, cost.rows, cost.fan_in, cost.fan_out, itemsize)
    # A weight that is multiplied with again counts as read once: it is still in a cache.
    return [replace(product, flops=product.flops * cost.repeats)]
