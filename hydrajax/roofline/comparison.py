"""Predictions for the present device beside what was measured on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hydrajax.decoding.executor import Executor
from hydrajax.measure.benchmark import BenchmarkRow, run_benchmark
from hydrajax.roofline.devices import Device, average, drift
from hydrajax.roofline.meter import Meter
from hydrajax.roofline.prediction import Prediction, Workload, predict


@dataclass
class Comparison:
    """The cells of a benchmark: ``measured[i]`` is what ``predicted[i]`` foretells.

    devices: what the device could do each time that it was asked, beside every cell.
    """

    devices: list[Device] = field(default_factory=list)
    predicted: list[Prediction] = field(default_factory=list)
    measured: list[BenchmarkRow] = field(default_factory=list)

    @property
    def device(self) -> Device:
        return average(self.devices)

    @property
    def drift(self) -> float:
        """By which factor the device's rates changed meanwhile; 1 on a quiet machine."""
        return drift(self.devices)


def compare(
    executors: Mapping[str, Executor],
    batches: Sequence[int],
    contexts: Sequence[int],
    itemsize: int,
    tokens_per_step: Sequence[float] = (),
    *,
    repeats: int = 5,
) -> Comparison:
    """Measure every cell, and predict it from what the device could do just before and after.

    executors: by names of their trees, in which alone they differ. itemsize: bytes of a number. tokens_per_step: of
    each tree, or none at all.
    """
    found, meter = Comparison(), None
    first, most = next(iter(executors.values())), max(contexts)
    config, drafter = first.model.config, first.spec.drafter
    trees = {name: executor.spec.tree for name, executor in executors.items()}
    plain_step = Workload(config, drafter, 1, most, itemsize).autoregressive_step()
    weight_bytes = sum(operator.count * operator.bytes for operator in plain_step if operator.kind == "weights")
    for context in contexts:
        for row in run_benchmark(executors, batches, context, repeats=repeats):
            # Made after the first timings, whose peak memory must not hold the meter's arrays.
            meter = meter or Meter(config, first.model.dtype, int(weight_bytes), most, repeats)
            found.devices.append(meter.measure())
            tau = tokens_per_step[list(trees).index(row.tree) :][:1]
            cell = ({row.tree: trees[row.tree]}, [row.batch], [row.context], itemsize, tau)
            found.predicted += predict(average(found.devices[-2:]), config, drafter, *cell)
            found.measured.append(row)
    return found
