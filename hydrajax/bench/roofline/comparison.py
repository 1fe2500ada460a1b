"""Predict the steps of a benchmark on the present device and measure them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hydrajax.bench.benchmark import BenchmarkRow, run_benchmark
from hydrajax.bench.roofline.devices import Device, average, drift
from hydrajax.bench.roofline.meter import Meter
from hydrajax.bench.roofline.prediction import Prediction, Workload, predict
from hydrajax.decoding.executor import Executor


@dataclass
class Comparison:
    """The cells of a benchmark: ``predicted[i]`` and the rates in ``devices[i]`` belong to ``measured[i]``."""

    devices: list[Device] = field(default_factory=list)
    predicted: list[Prediction] = field(default_factory=list)
    measured: list[BenchmarkRow] = field(default_factory=list)

    @property
    def device(self) -> Device:
        return average(self.devices)

    @property
    def drift(self) -> float:
        """Factor by which the device's rates changed meanwhile; 1 on a quiet machine."""
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
    """Measure every cell and predict it from the device's rates just before and after.

    Args:
        executors: by tree name; they differ in their trees only.
        itemsize: bytes per number.
        tokens_per_step: one value per tree, or empty.
    """
    found, meter = Comparison(), None
    first, most = next(iter(executors.values())), max(contexts)
    config, drafter = first.model.config, first.program.drafter
    trees = {name: executor.program.tree for name, executor in executors.items()}
    plain_step = Workload(config, drafter, 1, most, itemsize).autoregressive_step()
    weight_bytes = sum(operator.count * operator.bytes for operator in plain_step if operator.kind == "weights")
    for context in contexts:
        for row in run_benchmark(executors, batches, context, repeats=repeats):
            # Created after the first timings, whose peak memory must not include the meter's arrays.
            meter = meter or Meter(config, first.model.dtype, int(weight_bytes), most, repeats)
            found.devices.append(meter.measure())
            tau = tokens_per_step[list(trees).index(row.tree) :][:1]
            cell = ({row.tree: trees[row.tree]}, [row.batch], [row.context], itemsize, tau)
            found.predicted += predict(average(found.devices[-2:]), config, drafter, *cell)
            found.measured.append(row)
    return found
