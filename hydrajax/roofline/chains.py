"""How long a draft model's chains should be on a device: Leviathan et al. 2023, with its cost from the roofline."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hydrajax.models.llama_config import LlamaConfig
from hydrajax.roofline.devices import Device
from hydrajax.roofline.prediction import Workload, milliseconds
from hydrajax.trees import presets
from hydrajax.trees.speculation import ChainEstimate, estimate, expected_tokens


@dataclass(frozen=True)
class BestChain(ChainEstimate):
    """The best chain of one (batch, context) cell, where every drafted token is accepted with chance ``acceptance``.

    To the paper's formula the base's pass over K + 1 tokens costs as much as over one. roofline_length,
    roofline_speedup: where the whole step is predicted, the longer pass of the base included.
    """

    batch: int
    context: int
    roofline_length: int
    roofline_speedup: float


def best_chain(
    device: Device, config: LlamaConfig, drafter, acceptance: float, batch: int, context: int, itemsize: int
) -> BestChain:
    """The chain of 0 to ``drafter.spec.depth`` tokens that is the fastest by the formula, and by the roofline.

    Raises `HydrajaxError` for an acceptance that is no probability.
    """
    work = Workload(config, drafter, batch, context, itemsize)
    plain = milliseconds(device, work.autoregressive_step())
    one = milliseconds(device, work.step(presets.chain(1))["propose"])
    by_formula = estimate(acceptance, one / plain, drafter.spec.depth)

    best, speedup = 0, 1.0  # without a draft
    most_tokens = expected_tokens(acceptance, drafter.spec.depth)
    for k in range(1, drafter.spec.depth + 1):
        steps = sum(milliseconds(device, part) for part in work.step(presets.chain(k)).values()) / plain
        if expected_tokens(acceptance, k) / steps > speedup:
            best, speedup = k, expected_tokens(acceptance, k) / steps
        if most_tokens / steps < speedup:  # longer chains take longer
            break
    return BestChain(**asdict(by_formula), batch=batch, context=context, roofline_length=best, roofline_speedup=speedup)
