"""The best chain length of a draft model on a device: Leviathan et al. 2023, with costs from the roofline."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hydrajax.bench.roofline.devices import Device
from hydrajax.bench.roofline.division import ONE_DEVICE, Division
from hydrajax.bench.roofline.prediction import Workload, milliseconds
from hydrajax.bench.trees.speculation import ChainEstimate, estimate, expected_tokens
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.trees import presets


@dataclass(frozen=True)
class BestChain(ChainEstimate):
    """The best chain of one (batch, context) cell, if every drafted token is accepted with probability ``acceptance``.

    The paper's formula assumes that the base's pass over K + 1 tokens costs as much as over one. roofline_length,

    Attributes:
        roofline_speedup: From the predicted time of the whole step, the longer pass of the base included.
    """

    batch: int
    context: int
    roofline_length: int
    roofline_speedup: float


def best_chain(
    device: Device,
    config: LlamaConfig,
    drafter,
    acceptance: float,
    batch: int,
    context: int,
    itemsize: int,
    quantize: str | None = None,
    division: Division = ONE_DEVICE,
) -> BestChain:
    """Return the fastest chain of 0 to ``drafter.spec.depth`` tokens, by the formula and by the roofline.

    Raises:
        HydrajaxError: ``acceptance`` is not a probability.
    """
    work = Workload(config, drafter, batch, context, itemsize, quantize, division)
    plain = milliseconds(device, work.autoregressive_step())
    one = milliseconds(device, work.step(presets.chain(1))["propose"])
    by_formula = estimate(acceptance, one / plain, drafter.spec.depth)

    best, speedup = 0, 1.0  # no draft
    most_tokens = expected_tokens(acceptance, drafter.spec.depth)
    for k in range(1, drafter.spec.depth + 1):
        cost = sum(milliseconds(device, phase) for phase in work.step(presets.chain(k)).values()) / plain
        if expected_tokens(acceptance, k) / cost > speedup:
            best, speedup = k, expected_tokens(acceptance, k) / cost
        if most_tokens / cost < speedup:  # longer chains cost more
            break
    return BestChain(**asdict(by_formula), batch=batch, context=context, roofline_length=best, roofline_speedup=speedup)
