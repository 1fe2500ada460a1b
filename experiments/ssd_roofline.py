"""Times of a base and a draft model on separate devices, from the roofline, for `ssd_simulator`."""

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
    """Predict the parts of a round, with base and draft on one ``device`` each.

    depth: K of the chain. outcomes: F of the speculation cache. itemsize: bytes per parameter of both models. transfer:
    seconds of a small message between the devices. launch: seconds per layer and pass on top of the roofline; 0 gives a
    bound. The lookup of an outcome moves a few kilobytes and counts as free.
    """

    def seconds(config: LlamaConfig, tokens: int, beside: int) -> float:
        """A pass of ``tokens`` per sequence that attend to ``beside`` tokens beyond the context."""
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
    """Extrapolate `passes.forward` linearly from two cache lengths: tracing each one would take 0.1 s."""
    first = tokens + 1  # more slots than tokens, so that products with the block and with the cache differ
    near, far = (passes.forward(model, batch, tokens, first + more) for more in (0, 1))

    def at(a: float, b: float) -> float:
        return a + (b - a) * (slots - first)

    return [replace(a, flops=at(a.flops, b.flops), bytes=at(a.bytes, b.bytes)) for a, b in zip(near, far, strict=True)]
