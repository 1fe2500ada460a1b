"""What a base and a draft model on devices of their own take, from the roofline, for `hydrajax.ssd.simulator`."""

from __future__ import annotations

from dataclasses import replace

from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.roofline import passes
from hydrajax.roofline.devices import Device
from hydrajax.roofline.prediction import base_dtype
from hydrajax.roofline.traced import Operator, ranking
from hydrajax.ssd.simulator import Times


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
    """Both on a ``device`` each, with chains of ``depth`` tokens and so many outcomes that are prepared for.

    itemsize: bytes of a number of both. transfer: seconds for a few numbers from one device to the other. launch:
    seconds that every layer of a pass takes besides what the roofline says; 0 is a bound.

    As the code has it the draft runs one token more than it hands over when it prepares, and all outcomes share its
    cache. Taking a verdict in costs nothing here: it moves a few kilobytes.
    """

    def seconds(config: LlamaConfig, tokens: int, beside: int) -> float:
        """A pass of so many tokens a row, which see so many others beyond the context."""
        operators = _forward(Llama(config, base_dtype(itemsize)), batch, tokens, context + beside)
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
    """`passes.forward` from its operators with two other numbers of slots, in which they are linear.

    A pair of devices is asked about with thousands of numbers of slots, and tracing takes a tenth of a second.
    """
    first = tokens + 1  # with as many slots as tokens, products with the block and the cache would be equal
    near, far = (passes.forward(model, batch, tokens, first + more) for more in (0, 1))

    def at(a: float, b: float) -> float:
        return a + (b - a) * (slots - first)

    return [replace(a, flops=at(a.flops, b.flops), bytes=at(a.bytes, b.bytes)) for a, b in zip(near, far, strict=True)]
