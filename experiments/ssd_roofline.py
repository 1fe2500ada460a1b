"""Predict the times of a base and a draft model on separate devices, as input for `ssd_simulator`."""

from __future__ import annotations

from dataclasses import replace

from ssd_simulator import Times

from hydrajax.bench.roofline import passes
from hydrajax.bench.roofline.devices import Device
from hydrajax.bench.roofline.operators import Operator, ranking
from hydrajax.bench.roofline.prediction import base_dtype
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig


def pair_times(
    device: Device,
    base: LlamaConfig,
    draft: LlamaConfig,
    *,
    depth: int,
    outcomes: int,
    batch: int = 1,
    context: int = 1024,
    itemsize: int = 2,
    transfer: float = 0.0,
    launch: float = 0.0,
) -> Times:
    """Predict a pair on one ``device`` each, with chains of ``depth`` tokens and ``outcomes`` prepared ahead.

    As in the split executor, the draft runs one token more than it sends when it prepares, and all outcomes share its
    cache. Reading the outcome of a verification costs nothing here: it moves a few kilobytes.

    Args:
        itemsize: bytes per number of both models.
        transfer: seconds to send a few numbers from one device to the other.
        launch: seconds per layer of a pass in addition to the roofline; 0 gives a lower bound.
    """

    def seconds(config: LlamaConfig, tokens: int, more: int) -> float:
        """A pass of ``tokens`` per sequence over the context and ``more`` tokens."""
        operators = _forward(Llama(config, base_dtype(itemsize)), batch, tokens, context + more)
        ranked = ranking("ranking", batch * tokens, config.vocab_size)
        return sum(map(device.seconds, (*operators, ranked))) + config.n_layers * launch

    prepare = 0.0
    if outcomes:
        prepare = seconds(draft, 1, depth)
        prepare += sum(seconds(draft, outcomes, depth + 1 + level * outcomes) for level in range(depth))
    return Times(
        verify=seconds(base, depth + 1, 0),
        draft=sum(seconds(draft, 1 if level else 2, level) for level in range(depth)),
        prepare=prepare,
        transfer=transfer,
    )


def _forward(model: Llama, batch: int, tokens: int, slots: int) -> list[Operator]:
    """`passes.forward`, interpolated from two numbers of slots, in which it is linear.

    Tracing takes 0.1 s, and a sweep asks for thousands of numbers of slots.
    """
    first = tokens + 1  # with as many slots as tokens, products with the block and the cache would be equal
    near, far = (passes.forward(model, batch, tokens, first + more) for more in (0, 1))

    def at(a: float, b: float) -> float:
        return a + (b - a) * (slots - first)

    return [replace(a, flops=at(a.flops, b.flops), bytes=at(a.bytes, b.bytes)) for a, b in zip(near, far, strict=True)]
