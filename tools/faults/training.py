"""Faults in a training run. The same command must then finish with the result of an undisturbed run."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from tools.faults.commands import expect, mounted, start, wait
from tools.faults.fixtures import base, training_config
from tools.faults.registry import Failure, Trial, fault

STEPS, EVERY = 30, 2  # steps of a run, and of a checkpoint
KILLS = 10  # of one run
LONG = 600  # steps of a run that outlasts a hundred kills
CLOCK = {"tokens_per_second", "tflops_per_second"}  # metrics that differ from run to run
UNFINISHED = "*.orbax-checkpoint-tmp*"


def undisturbed(trial: Trial, steps: int = STEPS) -> tuple[Path, float]:
    """The output of an undisturbed run, and its seconds."""

    def make(folder: Path) -> tuple[Path, float]:
        config = training_config(trial, steps, EVERY)
        expect(start("train", "--config", config, f"output={folder / 'first'}"), trial)  # fills the compilation cache
        began = time.monotonic()
        expect(start("train", "--config", config, f"output={folder / 'run'}"), trial)
        return folder / "run", time.monotonic() - began

    return trial.once(f"undisturbed for {steps} steps", make)


def metrics(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in CLOCK} for line in lines]


def heads(run: Path) -> bytes:
    (path,) = (run / "heads").glob("*.safetensors")
    return path.read_bytes()


def check_equal(run: Path, whole: Path) -> None:
    """Require bitwise equal heads, and equal metrics except for the clock's."""
    if heads(run) != heads(whole):
        raise Failure("the heads differ from those of an undisturbed run")
    found, wanted = metrics(run), metrics(whole)
    if found != wanted:
        steps = [(line["step"], line["kind"]) for line in found]
        doubled = sorted({step for step in steps if steps.count(step) > 1})
        lost = sorted({(line["step"], line["kind"]) for line in wanted} - set(steps))
        raise Failure(f"metrics.jsonl differs: doubled {doubled[:3]}, lost {lost[:3]}")


def writes_checkpoint(trial: Trial) -> bool:
    return any((trial.folder / "run" / "checkpoints").glob(UNFINISHED))


def kill(trial: Trial, process: subprocess.Popen, seconds: float, in_checkpoint: bool) -> bool:
    """Send SIGKILL within these seconds, or inside the next write of a checkpoint. Return whether the run was alive."""
    until = time.monotonic() + trial.random.uniform(0, seconds)
    if in_checkpoint:
        for state in (False, True):  # the run first removes what the last kill has left
            while process.poll() is None and writes_checkpoint(trial) != state:
                time.sleep(0.001)
        time.sleep(trial.random.choice((0, 0.002, 0.01, 0.05)))
    else:
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
    process.kill()
    _, err = process.communicate()
    if process.returncode not in (0, -signal.SIGKILL):
        raise Failure(f"ended by itself with code {process.returncode}: {err[-200:]}")
    return process.returncode != 0


def kill_and_finish(trial: Trial, steps: int, kills: int) -> int:
    """Kill one run repeatedly, every other time inside a checkpoint's write, and let it finish."""
    whole, _ = undisturbed(trial, steps)
    _, seconds = undisturbed(trial)
    config = training_config(trial, steps, EVERY)
    count = sum(
        kill(trial, start("train", "--config", config), seconds, in_checkpoint=number % 2 == 1)
        for number in range(kills)
    )
    expect(start("train", "--config", config), trial)
    check_equal(trial.folder / "run", whole)
    return count


@fault("train-sigkill", seeds=10)
def sigkill(trial: Trial) -> int:
    return kill_and_finish(trial, STEPS, KILLS)


@fault("train-sigkill-100")
def sigkill_100(trial: Trial) -> int:
    if (count := kill_and_finish(trial, LONG, 100)) < 100:
        raise Failure(f"the run of {LONG} steps ended after {count} kills")
    return count


@fault("train-signal", seeds=4)
def stopped(trial: Trial) -> None:
    """SIGTERM or SIGINT. Once training has begun, the run saves and ends with the code of the signal."""
    whole, seconds = undisturbed(trial)
    config = training_config(trial, STEPS, EVERY)
    process = start("train", "--config", config)
    time.sleep(trial.random.uniform(0.3 * seconds, seconds))
    number = trial.random.choice((signal.SIGTERM, signal.SIGINT))
    process.send_signal(number)
    expect(process, trial, (0, 128 + number))
    expect(start("train", "--config", config), trial)
    check_equal(trial.folder / "run", whole)


@fault("train-concurrent", seeds=3)
def concurrent(trial: Trial) -> None:
    """Two processes, one output: the second is refused and names the first, which is not disturbed."""
    whole, seconds = undisturbed(trial)
    config, run = training_config(trial, STEPS, EVERY), trial.folder / "run"
    first = start("train", "--config", config)
    while first.poll() is None and not list(run.glob("*")):
        time.sleep(0.01)
    time.sleep(trial.random.uniform(0, seconds / 4))
    code, _, err = expect(start("train", "--config", config), trial, (0, 2))
    if code == 2 and f"process {first.pid} on " not in err:
        raise Failure(f"refused for another reason: {err[-200:]}")
    if code == 0 and first.poll() is None:
        raise Failure("both processes ran at the same time")
    expect(first, trial)
    check_equal(run, whole)


def refused_then_finished(trial: Trial, code: int, whole: Path) -> None:
    """After a run that ended with this code, the same command without the fault finishes."""
    if code == 2:
        expect(start("train", "--config", training_config(trial, STEPS, EVERY)), trial)
    check_equal(trial.folder / "run", whole)


@fault("train-full-disk", seeds=4)
def full_disk(trial: Trial) -> None:
    whole, _ = undisturbed(trial)
    config, small = training_config(trial, STEPS, EVERY), trial.folder / "small"
    with mounted(small, f"size={trial.random.choice((8, 50, 200, 800, 1600))}k"):
        code, _, _ = expect(start("train", "--config", config, f"output={small / 'run'}"), trial, (0, 2))
        shutil.copytree(small / "run", trial.folder / "run", dirs_exist_ok=True)
    refused_then_finished(trial, code, whole)


@fault("train-file-size-limit", seeds=4)
def file_size_limit(trial: Trial) -> None:
    """A limit on every file: single writes of orbax's threads fail."""
    whole, _ = undisturbed(trial)
    config = training_config(trial, STEPS, EVERY)
    size = trial.random.choice((100, 1000, 5000, 20_000, 60_000))
    code, _, _ = expect(start("train", "--config", config, file_size=size), trial, (0, 2))
    refused_then_finished(trial, code, whole)


@fault("train-read-only")
def read_only(trial: Trial) -> None:
    disk = trial.folder / "disk"
    with mounted(disk, "ro"):
        expect(start("train", "--config", training_config(trial, 2, 1), f"output={disk}"), trial, (2,))


@fault("train-damaged-checkpoint", seeds=5)
def damaged_checkpoint(trial: Trial) -> None:
    """The run reports the damage and resumes from the checkpoint before."""
    whole, _ = undisturbed(trial)
    config, run = training_config(trial, STEPS, EVERY), trial.folder / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "heads")
    newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    record = newest / "hydrajax.json"
    path = trial.random.choice([record, trial.random.choice(files)])
    # Files that only orbax reads, such as timestamps, have no checksum: their damage need not be reported.
    checked = path == record or str(path.relative_to(newest)) in json.loads(record.read_text())["files"]
    content = path.read_bytes()
    match trial.random.randrange(5):
        case 0:
            path.unlink()
        case 1:
            path.write_bytes(b"")
        case 2:
            path.write_bytes(content[: len(content) // 2])
        case 3:
            path.write_bytes(trial.random.randbytes(100))
        case _:
            path.write_text(trial.random.choice(("[]", '{"meta": []}', "null", "[" * 100_000)))
    _, out, _ = expect(start("train", "--config", config), trial)
    if checked and not re.search(rf"step {newest.name}\b.*damaged", out):
        raise Failure(f"damage of step {newest.name} was not reported ({path.name})")
    check_equal(run, whole)


# --- numbers ----------------------------------------------------------------------------------------------------------


@fault("train-diverges", seeds=4)
def diverges(trial: Trial) -> None:
    """Learning rates of 1e3 to 3e38: one line, and only finite numbers in checkpoints and heads."""
    config, run = training_config(trial, STEPS, EVERY), trial.folder / "run"
    rate = trial.random.choice(("1e3", "1e10", "1e30", "3e38"))
    arguments = ("train", "--config", config, f"optimizer.lr={rate}", "max_bad_steps=5", "optimizer.clip_norm=null")
    for _ in range(2):  # the second run resumes from the first
        code, _, err = expect(start(*arguments), trial, (0, 2))
        if code == 2 and "max_bad_steps: " not in err and "max-bad-steps: " not in err:
            raise Failure(f"refused for another reason: {err[-200:]}")
    check_finite(run)


@fault("train-nan-base", seeds=2)
def nan_base(trial: Trial) -> None:
    """NaN in the base's embedding: training skips the steps that meet it, or ends with one line."""
    from safetensors.numpy import load_file, save_file

    model, run = trial.folder / "model", trial.folder / "run"
    shutil.copytree(base(trial), model)
    tensors = load_file(model / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding[trial.random.choice((slice(None), slice(100, 101), slice(280, 281)))] = np.nan
    save_file(tensors, model / "model.safetensors")
    arguments = ("train", "--config", training_config(trial, STEPS, EVERY), f"model={model}", "max_bad_steps=5")
    expect(start(*arguments), trial, (0, 2))
    check_finite(run)
    expect(start("generate", "--base", model, "--prompt", "the tree", "--dtype", "float32"), trial, (0, 2))


def check_finite(run: Path) -> None:
    """Require finite numbers in all checkpoints and exported heads."""
    from orbax.checkpoint import v1 as ocp
    from safetensors.numpy import load_file

    arrays = [(path, ocp.load(path)) for path in (run / "checkpoints").iterdir()]
    arrays += [(path, load_file(path)) for path in (run / "heads").glob("*.safetensors")]
    for path, content in arrays:
        for name, array in content.items():
            if not np.isfinite(np.asarray(array, np.float64)).all():
                raise Failure(f"{path.name}: {name} is not finite")


# --- two processes of one run -----------------------------------------------------------------------------------------


def start_two(trial: Trial, output: Path, host: str = "127.0.0.1", within: Callable = lambda number: ()) -> list:
    """Start one run as two processes that meet at a free port. ``within(number)`` begins their commands."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        meeting = {"JAX_COORDINATOR_ADDRESS": f"{host}:{found.getsockname()[1]}", "JAX_NUM_PROCESSES": "2"}
    config = training_config(trial, STEPS, EVERY)
    arguments = ("train", "--config", config, "mesh.data=2", "mesh.cpu_devices=1", f"output={output}")
    return [start(*arguments, environment=meeting | {"JAX_PROCESS_ID": str(i)}, within=within(i)) for i in range(2)]


def undisturbed_two(trial: Trial) -> Path:
    """The output of an undisturbed run of two processes."""

    def make(folder: Path) -> Path:
        for process in start_two(replace(trial, folder=folder), folder / "run"):
            expect(process, trial)
        return folder / "run"

    return trial.once("undisturbed two", make)


def at_step(run: Path, step: int) -> bool:
    path = run / "metrics.jsonl"
    return path.exists() and any(json.loads(line)["step"] >= step for line in path.read_text().splitlines(True)[:-1])


@fault("train-process-loss", seeds=4)
def process_loss(trial: Trial) -> None:
    """SIGKILL to one of two processes: the other ends and reports why. Restarted, both finish the run."""
    whole, run = undisturbed_two(trial), trial.folder / "run"
    processes, victim = start_two(trial, run), trial.random.randrange(2)
    step = trial.random.randrange(STEPS)
    while processes[0].poll() is None and not at_step(run, step):
        time.sleep(0.01)
    processes[victim].kill()
    processes[victim].communicate()
    began = time.monotonic()
    code, _, err = wait(processes[1 - victim], trial)
    what = f"process {victim} killed at step {step}, the other ended after {time.monotonic() - began:.0f} s"
    if code not in (0, 2, 128 + signal.SIGABRT):  # JAX itself aborts where it notices first
        raise Failure(f"{what} with code {code}: {err[-200:]}")
    if code and "another process" not in err and "another task died" not in err:
        raise Failure(f"{what} without a reason: {err[-200:]}")
    if code == 2 and "Traceback" in err:
        raise Failure(f"{what} with a traceback: {err[-200:]}")
    for process in start_two(trial, run):
        expect(process, trial)
    check_equal(run, whole)
