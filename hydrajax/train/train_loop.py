"""The training loop of all tasks.

A step is a function of the state, the data at that step and the seed, so a run that was killed and resumed ends with
the same parameters as an uninterrupted one.
"""

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from hydrajax.bench.roofline.devices import device_of
from hydrajax.errors import HydrajaxError
from hydrajax.processes import from_main, is_main
from hydrajax.sharding import laid_out, replicated
from hydrajax.text.records import OBJECT
from hydrajax.train.checkpoints import TrainCheckpoints
from hydrajax.train.data.dataset import Dataset
from hydrajax.train.data.feed import feed
from hydrajax.train.data.packing import Rows, digest
from hydrajax.train.losses import IGNORED
from hydrajax.train.metrics import NoMetrics, TrainMetrics
from hydrajax.train.optimizer import learning_rates, optimizer_of
from hydrajax.train.run_config import TrainConfig, check_alone_steps
from hydrajax.train.several_processes import anywhere, or_end, same_everywhere, to_host
from hydrajax.train.train_step import Loss, abstract_state, batch_placer, init_state, make_train_step, state_shardings

HostBatch = dict[str, np.ndarray]


class Task(Protocol):
    """A model to train, its data and its loss.

    Attributes:
        metric, higher_is_better: the held-out metric by which the best checkpoint is kept.
        frozen: parameters that the loss reads but does not train.
        flops_per_token: of training, for MFU.
        extras: further arrays indexed by training sequence (`feed`).
    """

    metric: str
    higher_is_better: bool
    dataset: Dataset
    loss: Loss
    frozen: Any
    frozen_shardings: Any
    abstract_params: Any
    param_shardings: Any
    flops_per_token: float
    extras: dict[str, Any]

    def init_params(self, rng) -> Any: ...

    def evaluate(self, params, batches: Iterator[HostBatch]) -> dict[str, Any]: ...

    def note(self, metrics: dict[str, Any]) -> str:
        """Return what the progress bar shows after the loss."""

    def export(self, directory: Path, params) -> str:
        """Write what `--base` or `--draft` load, and return these flags."""


# Settings that may change when a run is resumed.
FREE = (
    "output", "log_every", "eval_every", "eval_rows", "checkpoint_every", "keep_checkpoints", "max_bad_steps", "mesh",
)  # fmt: skip


def total_steps(config: TrainConfig, n_rows: int) -> int:
    """The optimizer steps of a run on ``n_rows`` sequences."""
    steps = config.steps or max(1, round(config.epochs * (n_rows // config.batch_size)))
    check_alone_steps(config, steps)
    return steps


def train(config: TrainConfig, task: Task, mesh: Mesh, console: Console) -> int:
    """Train to the end or to a SIGTERM or Ctrl-C, then save the state.

    Returns:
        The exit code: 0 at the end of the run, 128 plus the number of the signal that stopped it.

    Raises:
        HydrajaxError: the run in ``output`` has other settings, or the loss or gradient was not finite in
            ``max_bad_steps`` steps in a row.
    """
    output = Path(config.output)
    rows = task.dataset.train
    steps = total_steps(config, len(rows.tokens))
    optimizer = optimizer_of(config, steps, mesh)
    schedules = learning_rates(config, steps)
    shardings = state_shardings(mesh, task.abstract_params, task.param_shardings, optimizer)
    step_fn = make_train_step(
        task.loss, optimizer, config.accumulation, shardings, task.frozen_shardings, config.precision
    )
    rng = jax.jit(jax.random.key, static_argnums=0, out_shardings=replicated(mesh))(config.seed)
    place = batch_placer(mesh)
    content = digest(*rows)  # the files may have changed since the run began
    fingerprint = settings_of(config) | {"rows": content[:16]}
    if not same_everywhere(bytes.fromhex(content)):
        raise HydrajaxError("data: the processes read different training data")

    with (
        TrainCheckpoints(
            output / "checkpoints",
            keep=config.keep_checkpoints,
            higher_is_better=task.higher_is_better,
            meta_fields={"settings": OBJECT},
        ) as checkpoints,
        Interrupts() as interrupts,
        or_end(),
    ):
        if checkpoints.latest() is None:
            state = init_state(task.init_params(jax.random.fold_in(rng, 2**31)), optimizer, shardings)
            start = 0
        else:
            if (meta := checkpoints.meta()) is not None:  # else `restore` reports that all checkpoints are damaged
                check_settings(meta, fingerprint)
            abstract = abstract_state(task.abstract_params, optimizer, shardings)
            start, restored, _ = checkpoints.restore(abstract, on_warning=console.print)
            state = laid_out(restored, shardings)
            console.print(f"resumed at step {start} of {steps}")
        if start >= steps:
            console.print(f"{output} holds a finished run of {steps} steps; set another output for a new run")
        meter = Throughput(task.flops_per_token, rows.tokens.shape[1] * config.batch_size, mesh)
        with (
            TrainMetrics(output, start, steps, console) if is_main() else NoMetrics() as metrics,
            feed(
                rows, config.batch_size, start, steps, seed=config.seed, place=place, extras=task.extras,
                depth=config.data.prefetch,
            ) as batches,
        ):  # fmt: skip

            def evaluate(step: int) -> float | None:
                if task.dataset.held_out is None:
                    return None
                with meter.paused():
                    batches = eval_batches(task.dataset.held_out, config.batch_size, config.eval_rows)
                    report = task.evaluate(state.params, batches)
                metrics.log(step, "eval", report)
                metrics.message(f"step {step}: held-out " + ", ".join(f"{k} {_short(v)}" for k, v in report.items()))
                return float(report[task.metric])

            def save(step: int, metric: float | None, wait: bool = False) -> None:
                metrics.persist()
                checkpoints.save(step, state, {"settings": fingerprint, task.metric: metric}, metric, wait=wait)

            if start == 0:
                evaluate(0)
            saved, before = start, None
            for step, batch in batches:
                state, report = step_fn(state, task.frozen, batch, rng)
                jax.block_until_ready(before)  # one step runs ahead: a signal cannot interrupt a wait for many
                done, before = step + 1, report
                meter.tick()
                if done % config.log_every == 0 or done == steps:
                    report = jax.device_get(report)
                    stop_if_bad(int(report["bad_steps"]), done, config.max_bad_steps, output)
                    report |= {name: float(rate(step)) for name, rate in schedules.items()} | meter.read()
                    metrics.log(done, "train", report)
                    metrics.progress(done, progress_note(task, report))
                metric = None
                if done % config.eval_every == 0 or done == steps:
                    metric = evaluate(done)
                if done % config.checkpoint_every == 0 or done == steps or metric is not None:
                    save(done, metric)
                    saved = done
                if interrupts.agreed(done % config.log_every == 0):
                    if saved != done:
                        save(done, None, wait=True)
                    checkpoints.wait()
                    metrics.message(f"stopped at step {done} of {steps}; the same command resumes there")
                    return 128 + (interrupts.number or signal.SIGTERM)  # without a signal here, another process had it
            checkpoints.wait()
    params = to_host(state.params)
    from_main(lambda: console.print(f"finished {steps} steps: {task.export(output, params)}", soft_wrap=True))
    return 0


def progress_note(task: Task, report: dict[str, Any]) -> str:
    mfu = f" mfu {report['mfu']:.1%}" if "mfu" in report else f" {report['tflops_per_second']:.2f} TFLOP/s"
    loss = " ".join(filter(None, [f"loss {float(report['loss']):.3f}", task.note(report)]))
    return f"{loss} {report['tokens_per_second']:.0f} tok/s{mfu}"


def stop_if_bad(bad_steps: int, step: int, most: int, output: Path) -> None:
    if bad_steps >= most:
        raise HydrajaxError(
            f"max_bad_steps: got {bad_steps} steps in a row, up to step {step}, with a non-finite loss or gradient; "
            f"lower optimizer.lr and set another output. The last good checkpoint is in {output / 'checkpoints'}"
        )


def settings_of(config: TrainConfig) -> dict:
    """The settings that must not change when a run is resumed, as JSON values."""
    raw = dataclasses.asdict(config)
    raw["draft"] = config.draft.keys()
    for name in FREE:
        del raw[name]
    return json.loads(json.dumps(raw))


def check_settings(meta: dict, wanted: dict) -> None:
    """Refuse to resume a run with other settings. Settings missing in an older version's run had today's defaults."""
    defaults = _flat(settings_of(TrainConfig(output="", model="", steps=1)))
    found, wanted = defaults | _flat(meta["settings"]), _flat(wanted)
    changed = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
    if changed:
        # The digest of the training data may differ because of another setting.
        name = next((name for name in changed if name != "rows"), "rows")
        shown = "data: got the digest" if name == "rows" else f"{name}: got"
        raise HydrajaxError(
            f"{shown} {wanted.get(name)!r}, expected {found.get(name)!r} as in the run in this output; "
            "set another output for a new run"
        )


def _flat(raw: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in raw.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def eval_batches(rows: Rows, batch_size: int, limit: int) -> Iterator[HostBatch]:
    """The first ``limit`` sequences in batches of one shape; the last is padded with sequences without targets."""
    for start in range(0, min(limit, len(rows.tokens)), batch_size):
        batch = {}
        for name, array in rows._asdict().items():
            if array is not None:
                part = array[start : min(start + batch_size, limit)]
                empty = IGNORED if name == "labels" else 0
                batch[name] = np.pad(part, ((0, batch_size - len(part)), (0, 0)), constant_values=empty)
        yield batch


def _short(value) -> str:
    values = np.atleast_1d(np.asarray(value))
    return " ".join(f"{x:.3f}" for x in values)


class Throughput:
    """Tokens per second and MFU since the last `read`, without `paused` time (evaluation)."""

    def __init__(self, flops_per_token: float, tokens_per_step: int, mesh: Mesh):
        self._flops, self._tokens = flops_per_token, tokens_per_step
        device = device_of(mesh.devices.flat[0].device_kind)
        self._peak = device.flops * mesh.size if device else None
        self._steps, self._began = 0, None

    def tick(self) -> None:
        """Count a step, but not the first, which compiles."""
        if self._began is None:
            self._began = time.perf_counter()
        else:
            self._steps += 1

    def read(self) -> dict[str, float]:
        now = time.perf_counter()
        rate = self._steps * self._tokens / max(now - self._began, 1e-9)
        self._steps, self._began = 0, now
        report = {"tokens_per_second": rate, "tflops_per_second": rate * self._flops / 1e12}
        return report | ({"mfu": rate * self._flops / self._peak} if self._peak else {})

    @contextmanager
    def paused(self) -> Iterator[None]:
        at = time.perf_counter()
        yield
        if self._began is not None:
            self._began += time.perf_counter() - at


class Interrupts:
    """Note and acknowledge the first SIGTERM or Ctrl-C; a second Ctrl-C interrupts at once."""

    def __init__(self):
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def agreed(self, synchronise: bool) -> bool:
        """Return True to stop now. Several processes agree only if ``synchronise`` is set, as this takes time."""
        requested = self.number is not None
        return requested if jax.process_count() == 1 else synchronise and anywhere(requested)

    def _handle(self, number, frame) -> None:
        if self.number is None:
            self.number, name = number, "interrupted" if number == signal.SIGINT else "terminated"
            what = "finishing the step, saving the checkpoint; Ctrl-C again quits without saving"
            print(f"hydrajax: {name}: {what}", file=sys.stderr, flush=True)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def __enter__(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
