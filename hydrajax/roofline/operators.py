"""What every operator of a forward pass computes and moves, in closed form (medusa appendix G, table 5).

A matrix product of ``rows`` by ``[fan_in, fan_out]`` is 2 rows fan_in fan_out operations; its traffic is its two inputs
and its output, each once. That is the paper's count (its O() drops the 2, and the bytes of a number, which are 2 in
float16), so the intensities of tables 6 to 8 are those of `linear` and `attention`. Beyond the paper, whose block has
neither an out projection nor norms, softmax or lm head, a step here has all of them, and grouped key-value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import flax.linen as nn
import jax

from hydrajax.drafters.drafter import abstract_draft
from hydrajax.drafters.prefix import heads_of
from hydrajax.models.config import LlamaConfig
from hydrajax.models.llama import Llama
from hydrajax.trees.tree import TreeTopology

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


def draft_shapes(config: LlamaConfig, drafter) -> Any:
    """The drafter's parameters as shapes, nothing allocated."""
    model = Llama(config.replace(n_layers=1))  # drafters read its embedding and lm head; tracing 60 layers takes long
    return nn.unbox(abstract_draft(drafter, model))


def draft_parameters(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def propose_operators(drafter, params: Any, tree: TreeTopology, batch: int, itemsize: int) -> list[Operator]:
    """Filling the tree: head k runs once per level, Hydra's for every parent of the level, Medusa's for one row.

    params: arrays or shapes. Heads deeper than the tree are not run.
    """
    heads = heads_of(drafter)
    params = params["heads"] if heads is not drafter else params
    operators = []
    for k, level in enumerate(tree.levels):
        head = heads.head(k)
        rows = batch if head.path_length is None else batch * len(level.parents)
        operators += _head_operators(f"head {k} ", head, params[f"head_{k}"], batch, rows, itemsize)
        operators.append(ranking(f"head {k} top-{level.width}", rows, head.vocab_size))
    return operators


def _head_operators(prefix: str, head, params: Any, batch: int, rows: int, itemsize: int) -> Iterator[Operator]:
    """Every matrix of a draft head times ``rows`` rows, but what all paths share times ``batch``.

    A block shared by several layers is multiplied with in each and counted as read once: it is still in a cache.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        names = [key.key for key in path]
        if leaf.ndim < 2 or names[-1] == "bias":
            continue
        fan_in, fan_out = leaf.shape[0], leaf.size // leaf.shape[0]
        name = prefix + " ".join(names).replace("_", " ")
        if names[-1] == "lm_kernel":
            yield lm_head(name, rows, fan_in, fan_out, itemsize)
            continue
        product = linear(name, batch if names[-1] == "shared_kernel" else rows, fan_in, fan_out, itemsize)
        shared_block = head.share_blocks and names[0].startswith("blocks_")
        yield replace(product, flops=product.flops * head.n_plain) if shared_block else product


def observe_operators(drafter, batch: int, tokens: int, slots: int, itemsize: int) -> list[Operator]:
    """A prefix layer over ``tokens`` new tokens per row and a cache of ``slots``; without one nothing is computed."""
    if not hasattr(drafter, "layer"):
        return []
    config = drafter.layer.config
    layer = layer_operators(config, batch, tokens, slots + tokens, itemsize)
    return [replace(operator, name=f"prefix {operator.name}") for operator in layer]
