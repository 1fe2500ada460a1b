"""Attacks on a training run: killed, doubled, without room, without leave to write. It must end as if undisturbed."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from attacks.commands import base, done, finish, mounted, start, training_config
from attacks.registry import Fell, Place, attack

STEPS, EVERY = 30, 2
CLOCK = {"tokens_per_second", "tflops_per_second"}  # what differs from run to run
UNFINISHED = "*.orbax-checkpoint-tmp*"
KILLS = 10  # of one run
LONG = 600  # steps of a run that is not over after a hundred


def metrics(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in CLOCK} for line in lines]


def heads(run: Path) -> bytes:
    (path,) = (run / "heads").glob("*.safetensors")
    return path.read_bytes()


def undisturbed(place: Place, steps: int = STEPS) -> tuple[Path, float]:
    """A run that nothing happens to, and the seconds that it takes."""

    def make(folder: Path) -> tuple[Path, float]:
        config = training_config(place, steps, EVERY)
        done(start("train", "--config", config, f"output={folder / 'first'}"), place)  # what is compiled stays cached
        began = time.monotonic()
        done(start("train", "--config", config, f"output={folder / 'run'}"), place)
        return folder / "run", time.monotonic() - began

    return place.once(f"undisturbed for {steps} steps", make)


def check_equal(run: Path, whole: Path) -> None:
    if heads(run) != heads(whole):
        raise Fell("the heads are others than those of an undisturbed run")
    found, wanted = metrics(run), metrics(whole)
    if found != wanted:
        steps = [(line["step"], line["kind"]) for line in found]
        doubled = sorted({step for step in steps if steps.count(step) > 1})
        lost = sorted({(line["step"], line["kind"]) for line in wanted} - set(steps))
        raise Fell(f"metrics.jsonl differs: doubled {doubled[:3]}, lost {lost[:3]}")


def unfinished(place: Place) -> bool:
    return any((place.folder / "run" / "checkpoints").glob(UNFINISHED))


def kill(place: Place, process: subprocess.Popen, seconds: float, writing: bool) -> bool:
    """SIGKILL at a moment of these seconds, or while a checkpoint is written. Whether the run had not ended before."""
    until = time.monotonic() + place.random.uniform(0, seconds)
    if writing:
        for there in (False, True):  # what the last kill has left goes first
            while process.poll() is None and unfinished(place) != there:
                time.sleep(0.001)
        time.sleep(place.random.choice((0, 0.002, 0.01, 0.05)))
    else:
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
    process.kill()
    _, err = process.communicate()
    if process.returncode not in (0, -signal.SIGKILL):
        raise Fell(f"ended by itself with code {process.returncode}: {err[-200:]}")
    return process.returncode != 0


def killed_and_whole(place: Place, steps: int, kills: int) -> int:
    """Kill one run again and again, every other time inside a checkpoint's writing, and let it go on to the end."""
    whole, _ = undisturbed(place, steps)
    _, seconds = undisturbed(place)
    config, count = training_config(place, steps, EVERY), 0
    for number in range(kills):
        count += kill(place, start("train", "--config", config), seconds, writing=number % 2 == 1)
    done(start("train", "--config", config), place)
    check_equal(place.folder / "run", whole)
    return count


@attack("training is killed", count=10)
def killed(place: Place) -> int:
    """SIGKILL at any moment, every other time inside a checkpoint's writing, again and again, and then to the end."""
    return killed_and_whole(place, STEPS, KILLS)


@attack("one training run is killed a hundred times", count=1)
def killed_often(place: Place) -> int:
    """A run so long that every kill meets it before its end."""
    if (count := killed_and_whole(place, LONG, 100)) < 100:
        raise Fell(f"the run of {LONG} steps was over after {count} kills")
    return count


@attack("training is stopped", count=4)
def stopped(place: Place) -> None:
    """SIGTERM or Ctrl-C at any moment. Once training has begun it saves and ends with code 0."""
    whole, seconds = undisturbed(place)
    config = training_config(place, STEPS, EVERY)
    process = start("train", "--config", config)
    time.sleep(place.random.uniform(0.3 * seconds, seconds))
    number = place.random.choice((signal.SIGTERM, signal.SIGINT))
    process.send_signal(number)
    done(process, place, (0, 128 + number))
    done(start("train", "--config", config), place)
    check_equal(place.folder / "run", whole)


@attack("two trainers", count=3)
def two(place: Place) -> None:
    """The second is refused with the first's number; the first does not notice."""
    whole, seconds = undisturbed(place)
    config, run = training_config(place, STEPS, EVERY), place.folder / "run"
    first = start("train", "--config", config)
    while first.poll() is None and not list(run.glob("*")):
        time.sleep(0.01)
    time.sleep(place.random.uniform(0, seconds / 4))
    second = start("train", "--config", config)
    code, _, err = done(second, place, (0, 2))
    if code == 2 and f"is in use by process {first.pid} on " not in err:
        raise Fell(f"refused for another reason: {err[-200:]}")
    if code == 0 and first.poll() is None:
        raise Fell("the second ran while the first did")
    done(first, place)
    check_equal(run, whole)


@attack("training on a disk that fills up", count=4)
def full(place: Place) -> None:
    """No room at any size; then the same command with room."""
    whole, _ = undisturbed(place)
    config, small = training_config(place, STEPS, EVERY), place.folder / "small"
    kilobytes = place.random.choice((8, 50, 200, 800, 1600))
    with mounted(small, f"size={kilobytes}k"):
        code, _, _ = done(start("train", "--config", config, f"output={small / 'run'}"), place, (0, 2))
        shutil.copytree(small / "run", place.folder / "run", dirs_exist_ok=True)
    if code == 2:
        done(start("train", "--config", config), place)
    check_equal(place.folder / "run", whole)


@attack("training with a limit on files", count=4)
def limited(place: Place) -> None:
    """As a full disk, but of every file: parts of what orbax writes with many threads fail."""
    whole, _ = undisturbed(place)
    config = training_config(place, STEPS, EVERY)
    size = place.random.choice((100, 1000, 5000, 20_000, 60_000))
    code, _, _ = done(start("train", "--config", config, file_size=size), place, (0, 2))
    if code == 2:
        done(start("train", "--config", config), place)
    check_equal(place.folder / "run", whole)


@attack("training without leave to write", count=1)
def read_only(place: Place) -> None:
    disk = place.folder / "disk"
    with mounted(disk, "ro"):
        done(start("train", "--config", training_config(place, 2, 1), f"output={disk}"), place, (2,))


def both(place: Place, output: Path, host: str = "127.0.0.1", within: Callable = lambda number: ()) -> list:
    """One run by two processes, which meet at a port of this host that is free; ``within`` begins their commands."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        meeting = {"JAX_COORDINATOR_ADDRESS": f"{host}:{found.getsockname()[1]}", "JAX_NUM_PROCESSES": "2"}
    config = training_config(place, STEPS, EVERY)
    arguments = ("train", "--config", config, "mesh.data=2", "mesh.cpu_devices=1", f"output={output}")
    return [start(*arguments, environment=meeting | {"JAX_PROCESS_ID": str(i)}, within=within(i)) for i in range(2)]


def undisturbed_two(place: Place) -> Path:
    """`undisturbed`, of two processes."""

    def make(folder: Path) -> Path:
        for process in both(replace(place, folder=folder), folder / "run"):
            done(process, place)
        return folder / "run"

    return place.once("undisturbed two", make)


@attack("one of two processes is killed", count=4)
def one_of_two(place: Place) -> None:
    """Either, at any moment once both have met. The other ends, and says why; together they go on."""
    whole, run = undisturbed_two(place), place.folder / "run"
    processes, victim = both(place, run), place.random.randrange(2)
    step = place.random.randrange(STEPS)
    while processes[0].poll() is None and not at_step(run, step):
        time.sleep(0.01)
    processes[victim].kill()
    processes[victim].communicate()
    began = time.monotonic()
    code, _, err = finish(processes[1 - victim], place)
    what = f"process {victim} was killed at step {step}, the other ended after {time.monotonic() - began:.0f} s"
    if code not in (0, 2, 128 + signal.SIGABRT):  # the last where JAX itself notices first
        raise Fell(f"{what} with code {code}: {err[-200:]}")
    if code and "another process of this run has ended" not in err and "another task died" not in err:
        raise Fell(f"{what} and did not say why: {err[-200:]}")
    if code == 2 and "Traceback" in err:
        raise Fell(f"{what} with a traceback: {err[-200:]}")
    for process in both(place, run):
        done(process, place)
    check_equal(run, whole)


def at_step(run: Path, step: int) -> bool:
    path = run / "metrics.jsonl"
    return path.exists() and any(json.loads(line)["step"] >= step for line in path.read_text().splitlines(True)[:-1])


@attack("training that diverges", count=4)
def diverges(place: Place) -> None:
    """Learning rates without measure: one line, and no checkpoint or heads with a number that is none."""
    config, run = training_config(place, STEPS, EVERY), place.folder / "run"
    rate = place.random.choice(("1e3", "1e10", "1e30", "3e38"))
    arguments = ("train", "--config", config, f"optimizer.lr={rate}", "max_bad_steps=5", "optimizer.clip_norm=null")
    for _ in range(2):  # the second goes on from what the first has left
        code, _, err = done(start(*arguments), place, (0, 2))
        if code == 2 and "max_bad_steps: " not in err and "max-bad-steps: " not in err:
            raise Fell(f"refused for another reason: {err[-200:]}")
    check_finite(run)


@attack("training on a base with numbers that are none", count=2)
def not_numbers(place: Place) -> None:
    """NaN in one row of the embedding, or in all: the steps with it are left out, or training ends in one line."""
    from safetensors.numpy import load_file, save_file

    spoilt, run = place.folder / "model", place.folder / "run"
    shutil.copytree(base(place), spoilt)
    tensors = load_file(spoilt / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding[place.random.choice((slice(None), slice(100, 101), slice(280, 281)))] = np.nan
    save_file(tensors, spoilt / "model.safetensors")
    arguments = ("train", "--config", training_config(place, STEPS, EVERY), f"model={spoilt}", "max_bad_steps=5")
    done(start(*arguments), place, (0, 2))
    check_finite(run)
    done(start("generate", "--base", spoilt, "--prompt", "the tree", "--dtype", "float32"), place, (0, 2))


def check_finite(run: Path) -> None:
    """All numbers that a run goes on from, and that it has exported."""
    from orbax.checkpoint import v1 as ocp
    from safetensors.numpy import load_file

    for path in (run / "checkpoints").iterdir():
        for name, array in ocp.load(path).items():
            if not np.isfinite(np.asarray(array, np.float64)).all():
                raise Fell(f"checkpoint {path.name} has numbers in {name} that are none")
    for path in (run / "heads").glob("*.safetensors"):
        if any(not np.isfinite(array.astype(np.float64)).all() for array in load_file(path).values()):
            raise Fell("the heads have numbers that are none")


@attack("newest checkpoint damaged", count=5)
def damaged(place: Place) -> None:
    """A file of it cut, emptied, overwritten or gone, or its record of another kind: the one before is used."""
    whole, _ = undisturbed(place)
    config, run = training_config(place, STEPS, EVERY), place.folder / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "heads")
    newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    record = newest / "hydrajax.json"
    path = place.random.choice([record, place.random.choice(files)])
    # What orbax keeps for itself, such as the time, may go without a word, as long as the run ends as it must.
    needed = path == record or str(path.relative_to(newest)) in json.loads(record.read_text())["files"]
    match place.random.randrange(5):
        case 0:
            path.unlink()
        case 1:
            path.write_bytes(b"")
        case 2:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case 3:
            path.write_bytes(place.random.randbytes(100))
        case _:
            path.write_text(place.random.choice(("[]", '{"meta": []}', "null", "[" * 100_000)))
    _, out, _ = done(start("train", "--config", config), place)
    if needed and f"step {newest.name} is damaged" not in out:
        raise Fell(f"not said that step {newest.name} is damaged ({path.name})")
    check_equal(run, whole)
