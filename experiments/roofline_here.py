"""Predict decode steps from this device's measured rates, and measure them: the roofline against the clock.

    python experiments/roofline_here.py --shape 25m --dtype float32 --output experiments/results/roofline_here.json

Weights are random. `hydrajax roofline` predicts for other devices, from their data sheets.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich.console import Console

from hydrajax import api
from hydrajax.bench.benchmark import BenchmarkRow, run_benchmark
from hydrajax.bench.device_memory import copy_bandwidth
from hydrajax.bench.random_models import random_base, with_random_params
from hydrajax.bench.report.results import Result, write_result
from hydrajax.bench.report.tables import cell, print_table
from hydrajax.bench.roofline.devices import Device
from hydrajax.bench.roofline.operators import Operator
from hydrajax.bench.roofline.prediction import Prediction, Workload, predict
from hydrajax.bench.rounds import medians, seconds
from hydrajax.bench.shapes import SHAPES
from hydrajax.cli import options, roofline, run_command
from hydrajax.decoding.executor import Executor, FusedExecutor
from hydrajax.decoding.program import Program
from hydrajax.files import WholeFile
from hydrajax.formats.draft_registry import KINDS
from hydrajax.machine import machine
from hydrajax.models.attention import KVSegment, attend
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import project

Rates = tuple[tuple[int, float], ...]  # (rows of the left matrix, FLOP/s), rows rising
PHASES = ("verify", "propose", "accept_commit", "observe")
CPU_ROWS = (1, 2, 4, 8, 16, 64, 256)  # the rate differs by number of rows
ACCELERATOR_ROWS = (*CPU_ROWS, 1024, 4096)
MAX_BYTES = 512 * 2**20  # of weights, and of keys and values: more than any cache has
MIN_SECONDS = 0.05  # per timed call, much longer than dispatch and a scheduler's time slice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="25m", help="shape of the base (default %(default)s)")
    parser.add_argument("--draft-kind", choices=list(KINDS), default="hydra++", help="default %(default)s")
    parser.add_argument("--tree", metavar="NAME|FILE.json|JSON", help="tree (default: the drafter's)")
    parser.add_argument("--context", metavar="S,S,...", type=options.positives, default=[1024], help="default 1024")
    parser.add_argument("--dtype", choices=list(api.DTYPES), default="bfloat16", help="default %(default)s")
    options.add(parser, "--tree-sizes", "--batch-sizes", "--repeats")
    parser.add_argument("--output", metavar="FILE.json", required=True, help="result file")


def run(args: argparse.Namespace) -> None:
    config, dtype = SHAPES[args.shape], jnp.dtype(api.DTYPES[args.dtype])
    drafter = KINDS[args.draft_kind].build(config, dtype)
    trees = roofline.trees_of(args, drafter, config)
    with WholeFile(args.output, "--output") as file:
        with Console(stderr=True).status("measuring"):
            model, base = random_base(config, dtype)
            drafter, params = with_random_params(model, base, drafter)
            executors = {name: FusedExecutor(model, params, Program(drafter, tree)) for name, tree in trees.items()}
            cells = list(compare(executors, args.batch_sizes, args.context, dtype.itemsize, repeats=args.repeats))
        rows = [
            {name: getattr(found, name) for name in ("batch", "context", "nodes", "step", "autoregressive_step")}
            | {f"predicted_{name}": getattr(predicted, name) for name in ("step", "autoregressive_step")}
            for _, predicted, found in cells
        ]
        devices = [device for device, *_ in cells]
        rates = f"the measured rates changed by a factor of up to {drift(devices):.2f} meanwhile (1.00: quiet)"
        title = "steps predicted from the device's rates, and measured"
        settings = options.recorded(args) | {"device": asdict(average(devices))}
        command = f"python experiments/{Path(sys.argv[0]).name}"
        write_result(file, Result("prediction", "", title, rows, command, machine(), settings, [rates]))
    show(cells)
    print(rates)


def show(cells: Sequence[tuple[Device, Prediction, BenchmarkRow]]) -> None:
    steps, phases = [], []
    for _, predicted, found in cells:
        place, times = [predicted.batch, predicted.context, predicted.nodes], []
        for key in ("autoregressive_step", "step"):
            ours, theirs = getattr(predicted, key), getattr(found, key)
            times += [ours, theirs, f"{ours / theirs - 1:+.0%}"]
        steps.append([*place, *times, f"{found.break_even:.2f}"])
        pairs = [(cell(getattr(predicted, name)), cell(getattr(found, name))) for name in PHASES]
        phases.append([*place, *(f"{ours} ({theirs})" for ours, theirs in pairs)])
    columns = ("AR step", "measured", "error", "step", "measured", "error", "even")
    print_table(("batch", "context", "nodes", *columns), steps)
    print("measured: median ms. error: of the prediction. even: as measured.")
    print_table(("batch", "context", "nodes", *PHASES), phases)
    print("ms predicted (measured). The prediction has only matrix products and traffic: it leaves out the sort of a")
    print("top-k (in propose), the commit and the start of each operator.")


def compare(
    executors: Mapping[str, Executor], batches: Sequence[int], contexts: Sequence[int], itemsize: int, *, repeats: int
) -> Iterator[tuple[MeasuredDevice, Prediction, BenchmarkRow]]:
    """Measure every cell and predict it from the device's rates just before and after.

    Args:
        executors: by tree name; they differ in their trees only.
    """
    meter, before = None, []
    first, most = next(iter(executors.values())), max(contexts)
    config, drafter = first.model.config, first.program.drafter
    trees = {name: executor.program.tree for name, executor in executors.items()}
    plain_step = Workload(config, drafter, 1, most, itemsize).autoregressive_step()
    weight_bytes = sum(operator.count * operator.bytes for operator in plain_step if operator.kind == "weights")
    for context in contexts:
        for row in run_benchmark(executors, batches, context, repeats=repeats):
            # Created after the first timings, whose peak memory must not include the meter's arrays.
            meter = meter or Meter(config, first.model.dtype, int(weight_bytes), most, repeats)
            before = [*before[-1:], meter.measure()]
            (found,) = predict(
                average(before), config, drafter, {row.tree: trees[row.tree]}, [row.batch], [row.context], itemsize
            )
            yield before[-1], found, row


@dataclass(frozen=True)
class MeasuredDevice(Device):
    """A device without a single peak, such as a CPU: its FLOP/s depend on the rows of the left matrix."""

    weight_rates: Rates = ()
    attention_rates: Rates = ()

    def rate(self, operator: Operator) -> float:
        """Return the FLOP/s for this operator, interpolated between measured rows on a log-log scale."""
        rates = {"weights": self.weight_rates, "attention": self.attention_rates}.get(operator.kind)
        if not rates:
            return self.flops
        rows, flops = np.log(np.array(rates)).T
        return float(np.exp(np.interp(math.log(operator.rows), rows, flops)))

    def seconds(self, operator: Operator) -> float:
        return operator.count * max(operator.flops / self.rate(operator), operator.bytes / self.bandwidth)


def average(devices: Sequence[MeasuredDevice]) -> MeasuredDevice:
    """Return the geometric mean of measurements of one device, on the same numbers of rows."""

    def rates(name: str) -> Rates:
        columns = zip(*(getattr(device, name) for device in devices), strict=True)
        return tuple((column[0][0], statistics.geometric_mean(rate for _, rate in column)) for column in columns)

    return MeasuredDevice(
        devices[0].name,
        statistics.geometric_mean(device.flops for device in devices),
        statistics.geometric_mean(device.bandwidth for device in devices),
        weight_rates=rates("weight_rates"),
        attention_rates=rates("attention_rates"),
    )


def drift(devices: Sequence[MeasuredDevice]) -> float:
    """Return the ratio of the fastest to the slowest measurement, for the rate that changed most."""
    everything = [(*d.weight_rates, *d.attention_rates, (0, d.bandwidth)) for d in devices]
    columns = zip(*everything, strict=True)
    return max(max(rate for _, rate in column) / min(rate for _, rate in column) for column in columns)


class Meter:
    """Measures the present device on as many matrices of a model's shape as a step reads, up to 512 MB.

    The weights of a small model are thus read from the device's cache, as in a step. Compiled once, so that `measure`
    can be called with every timing: the rates of a shared machine change within minutes.

    Args:
        weight_bytes: bytes of weights that a step reads.
    """

    def __init__(self, config: LlamaConfig, dtype, weight_bytes: int, slots: int, repeats: int = 5):
        self.dtype, self.repeats = jnp.dtype(dtype), repeats
        on_cpu = jax.default_backend() == "cpu"
        self.copy_megabytes = 256 if on_cpu else 1024
        width, mlp_width = config.width, config.mlp_width
        heads, slot_shape = config.n_kv_heads, (1, config.n_kv_heads, slots, config.head_dim)
        weights = _pairs((width, mlp_width), (mlp_width, width), dtype, weight_bytes)
        numbers = max(math.prod(slot_shape), slots * sum(heads * features for heads, features in config.kv_shapes))
        cache_bytes = 2 * numbers * self.dtype.itemsize
        caches = _pairs(slot_shape, slot_shape, dtype, cache_bytes)
        self._loops = {}
        for rows in CPU_ROWS if on_cpu else ACCELERATOR_ROWS:
            self._loops["weights", rows] = _Loop(_through_weights, (rows, width), weights)
            self._loops["attention", rows] = _Loop(_through_caches, (1, heads, rows, config.head_dim), caches)

    def measure(self) -> MeasuredDevice:
        """Return the medians of interleaved timings.

        The bandwidth is the larger of a copy's and of a one-row product's, which hardly does more than read weights.
        """
        found = medians(self._loops, self.repeats)
        rates: dict[str, Rates] = {"weights": (), "attention": ()}
        for (kind, rows), loop in self._loops.items():
            rates[kind] += ((rows, loop.flops / found[kind, rows]),)
        read = rates["weights"][0][1] / 2 * self.dtype.itemsize  # two operations per weight
        bandwidth = max(copy_bandwidth(self.copy_megabytes), read)
        flops = max(rate for _, rate in rates["weights"])
        return MeasuredDevice(
            "here", flops, bandwidth, weight_rates=rates["weights"], attention_rates=rates["attention"]
        )


def _through_weights(x: Float[Array, "rows D"], weights: Sequence[tuple[Array, Array]]) -> Float[Array, "rows D"]:
    for up, down in weights:
        x = project(project(x, up), down)
    return x


def _through_caches(
    x: Float[Array, "1 kv rows H"], caches: Sequence[tuple[Array, Array]]
) -> Float[Array, "1 kv rows H"]:
    for keys, values in caches:
        out = attend(x, [KVSegment(keys, values, np.ones((x.shape[2], keys.shape[2]), bool))])
        x = out.reshape(1, x.shape[2], *x.shape[1::2]).swapaxes(1, 2)
    return x


class _Loop:
    """Passes of ``x`` through pairs of matrices, in one compiled loop of at least `MIN_SECONDS`."""

    def __init__(self, one_pass: Callable, shape: tuple[int, ...], pairs: Sequence[tuple[Array, Array]]):
        first = pairs[0][0]
        self.flops = len(pairs) * 4.0 * math.prod(first.shape) * shape[-2]  # two products with every pair
        self._data = _random(shape, first.dtype), pairs
        with jax.default_matmul_precision("highest"):  # as in the decode step
            loop = jax.jit(lambda n, x, pairs: jax.lax.fori_loop(0, n, lambda _, x: one_pass(x, pairs), x))
            self._loop = loop.lower(1, *self._data).compile()
        self._passes = 1
        self()
        self._passes = max(1, math.ceil(MIN_SECONDS / self()))

    def __call__(self, number: int = 0) -> float:
        """Return the seconds per pass."""
        return seconds(self._loop, self._passes, *self._data) / self._passes


def _pairs(first: tuple[int, ...], second: tuple[int, ...], dtype, wanted_bytes: int) -> list[tuple[Array, Array]]:
    """Pairs of matrices of these shapes with about ``wanted_bytes`` in total, at most `MAX_BYTES`.

    All have the same numbers in separate buffers.
    """
    pair = _random(first, dtype), _random(second, dtype)
    many = max(1, round(min(wanted_bytes, MAX_BYTES) / sum(matrix.nbytes for matrix in pair)))
    return [(jnp.copy(pair[0]), jnp.copy(pair[1])) for _ in range(many)]


def _random(shape: tuple[int, ...], dtype) -> Array:
    """Random numbers (zeros can run faster), scaled so that repeated products neither overflow nor vanish."""
    return jax.random.normal(jax.random.key(0), shape, dtype) * jnp.asarray(shape[-2] ** -0.5, dtype)


if __name__ == "__main__":
    sys.exit(run_command("roofline_here.py", __doc__.splitlines()[0], add_arguments, run, sys.argv[1:]))
