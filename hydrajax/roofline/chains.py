"""How long a draft model's chains should be on a device: Leviathan et al. 2023, with its cost from the roofline."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hydrajax.models.config import LlamaConfig
from hydrajax.roofline.devices import Device
from hydrajax.roofline.prediction import Workload, milliseconds
from hydrajax.trees import presets
from hydrajax.trees.speculation import best_length, expected_tokens, improvement


@dataclass(frozen=True)
class BestChain:
    """The best chain of one (batch, context) cell, where every drafted token is accepted with chance ``acceptance``.

    draft_cost: c, the time of one drafted token in steps without a draft. length, tokens_per_step, improvement: K and
    what it gives by the paper's formula, to which the base's pass over K + 1 tokens costs as much as over one.
    roofline_length, roofline_speedup: where the whole step is predicted, the longer pass of the base included.
    """

    batch: int
    context: int
    acceptance: float
    draft_cost: float
    length: int
    tokens_per_step: float
    improvement: float
    roofline_length: int
    roofline_speedup: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def best_chain(
    device: Device, config: LlamaConfig, drafter, acceptance: float, batch: int, context: int, itemsize: int
) -> BestChain:
    """The chain of 0 to ``drafter.depth`` tokens that is the fastest by the formula, and by the roofline.

    Raises `HydrajaxError` for an acceptance that is no probability.
    """
    work = Workload(config, drafter, batch, context, itemsize)
    plain = milliseconds(device, work.autoregressive_step())
    one = milliseconds(device, work.step(presets.chain(1))["propose"])
    cost = one / plain
    length = best_length(acceptance, cost, drafter.depth)

    def speedup(k: int) -> float:
        if not k:  # then nothing is drafted at all
            return 1.0
        parts = work.step(presets.chain(k)).values()
        return expected_tokens(acceptance, k) * plain / sum(milliseconds(device, part) for part in parts)

    best = max(range(drafter.depth + 1), key=lambda k: (speedup(k), -k))
    tokens, faster = expected_tokens(acceptance, length), improvement(acceptance, length, cost)
    return BestChain(batch, context, acceptance, cost, length, tokens, faster, best, speedup(best))
