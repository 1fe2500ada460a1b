"""Runs that are ended, resumed, or moved to another mesh end with the parameters of an uninterrupted run."""

import contextlib
import io
import itertools
import json
import random
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from helpers.full_disk import MAY_REPORT_LATE, full_disk
from helpers.runs import finish, heads_file, refused, start, wait_for_step, without_clock
from hydrajax.cli.train import main
from hydrajax.train import train_loop, train_step
from hydrajax.train.checkpoints import TrainCheckpoints
from hydrajax.train.metrics import TrainMetrics, read_metrics

STEPS, EVERY = 16, 4  # steps of a run, and of each checkpoint in it
FINISHING = "finishing the step, saving the checkpoint; Ctrl-C again quits without saving"
LONG = 60  # steps of a run in another process, which is killed while it runs


@pytest.fixture(scope="module")
def config(settings, tmp_path_factory) -> Path:
    """A run with frequent checkpoints."""
    path = tmp_path_factory.mktemp("runs") / "run.yaml"
    changes = {"steps": STEPS, "checkpoint_every": EVERY, "eval_every": 6}
    path.write_text(yaml.safe_dump(settings | changes | {"output": "given below"}))
    return path


@pytest.fixture
def at_step(monkeypatch):
    """``at_step(number, event)`` calls ``event`` before this step of the next run."""
    make = train_loop.make_train_step

    def arrange(number: int, event) -> None:
        def made(*settings):
            step, calls = make(*settings), []

            def watched(*inputs):
                calls.append(1)
                if len(calls) == number:
                    event()
                return step(*inputs)

            return watched

        monkeypatch.setattr(train_loop, "make_train_step", made)

    return arrange


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory) -> Path:
    """The output of a run."""
    output = tmp_path_factory.mktemp("uninterrupted")
    done = []  # in their order

    def noted(name, call):
        return lambda *args, **settings: (done.append(name), call(*args, **settings))[1]

    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.MonkeyPatch.context() as patch:
        for owner, name in ((TrainMetrics, "persist"), (TrainMetrics, "log"), (TrainCheckpoints, "save")):
            patch.setattr(owner, name, noted(name, getattr(owner, name)))
        assert main(["--config", str(config), f"output={output}"]) == 0
    assert f"finished {STEPS} steps: --draft {output / 'heads'}" in out.getvalue()
    # Metrics are on the disk before their checkpoint, so a run that resumes after a power cut has all of them.
    assert done.count("save") > 1
    assert all(before == "persist" for before, name in itertools.pairwise(done) if name == "save")
    return output


def test_metrics_of_an_uninterrupted_run(uninterrupted):
    lines = read_metrics(uninterrupted / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [0, 6, 12, STEPS]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])  # otherwise two runs that learn nothing would be equal
    assert all(line["bad_steps"] == 0 for line in lines if line["kind"] == "train")
    assert list((uninterrupted / "tensorboard").iterdir())


def test_a_run_that_ends_early_resumes_and_ends_bitwise_as_the_uninterrupted_one(
    config, uninterrupted, program, at_step, tmp_path
):
    """Signals end it, at first between two checkpoints. The slow test kills the process."""
    output = tmp_path / "run"
    there = ("--config", config, f"output={output}")
    at_step(8, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    result = program(*there)
    assert result.code == 130
    assert result.err.splitlines() == [f"hydrajax: interrupted: {FINISHING}", "hydrajax: interrupted"]
    assert max(line["step"] for line in read_metrics(output / "metrics.jsonl")) == 7
    at_step(3, lambda: signal.raise_signal(signal.SIGTERM))
    result = program(*there)
    assert (result.code, result.err) == (143, f"hydrajax: terminated: {FINISHING}\n")
    assert f"resumed at step 6 of {STEPS}" in result.out
    assert f"stopped at step 9 of {STEPS}; the same command resumes there" in result.out
    assert max(line["step"] for line in read_metrics(output / "metrics.jsonl")) == 9
    at_step(2, lambda: signal.raise_signal(signal.SIGINT))
    result = program(*there)
    assert (result.code, result.err) == (130, f"hydrajax: interrupted: {FINISHING}\n")
    assert f"stopped at step 11 of {STEPS}; the same command resumes there" in result.out
    at_step(None, None)
    result = program(*there)
    assert f"resumed at step 11 of {STEPS}" in result.out  # no step is repeated
    assert heads_file(output).read_bytes() == heads_file(uninterrupted).read_bytes()
    # No line is repeated or missing, and all numbers are equal.
    assert without_clock(output) == without_clock(uninterrupted)


@pytest.mark.slow
def test_a_killed_run_resumes_on_another_mesh(config, train, tmp_path):
    """No line of the metrics is repeated or missing, and numbers differ by rounding only."""
    whole, output = tmp_path / "whole", tmp_path / "run"
    settings = (f"steps={LONG}", "checkpoint_every=5", "eval_every=16")
    train(config, f"output={whole}", *settings)
    killed = start(config, output, *settings, "mesh.data=2", "mesh.cpu_devices=2")
    wait_for_step(killed, output, random.randint(6, 30))
    killed.kill()
    finish(killed, -signal.SIGKILL)
    assert max(line["step"] for line in read_metrics(output / "metrics.jsonl")) < LONG, "killed too late"
    assert "resumed at step " in train(config, f"output={output}", *settings).out
    for line, expected in zip(without_clock(output), without_clock(whole), strict=True):
        assert (line["step"], line["kind"]) == (expected["step"], expected["kind"])
        if line["kind"] == "train":
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    found, expected = load_file(heads_file(output)), load_file(heads_file(whole))
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_a_run_whose_kernels_lie_in_another_order_resumes(config, uninterrupted, program, train, monkeypatch, tmp_path):
    """As on a TPU, which no test has; the platform's own order is JAX's."""
    changed = 0

    def reversed_axes(shape):
        nonlocal changed
        changed += len(shape) == 3
        return tuple(reversed(range(3))) if len(shape) == 3 else None

    monkeypatch.setattr(train_step, "trained_order", reversed_axes)
    output = tmp_path / "run"
    assert f"stopped at step 1 of {STEPS}" in program("--config", config, f"output={output}", stopped=1).out
    assert f"resumed at step 1 of {STEPS}" in train(config, f"output={output}").out
    assert changed
    found, expected = (load_file(heads_file(folder)) for folder in (output, uninterrupted))
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_one_step_runs_ahead(config, train, monkeypatch, tmp_path):
    """A signal is handled after a step or two, also if no metrics are read. JAX alone runs 16 and more ahead."""
    make, losses, ahead = train_loop.make_train_step, [], []

    def made(*settings):
        step = make(*settings)
        busy = jax.jit(
            lambda x: x + 0 * jax.lax.fori_loop(0, 60, lambda i, y: y @ y, jnp.full((256, 256), x / 1e9))[0, 0]
        )

        def slow(*inputs):
            ahead.append(sum(not loss.is_ready() for loss in losses))
            state, report = step(*inputs)
            losses.append(busy(report["loss"]))
            return state, report | {"loss": losses[-1]}

        return slow

    monkeypatch.setattr(train_loop, "make_train_step", made)
    few = (f"{name}={STEPS}" for name in ("log_every", "eval_every", "checkpoint_every"))
    assert f"finished {STEPS} steps" in train(config, f"output={tmp_path / 'run'}", *few).out
    assert len(ahead) == STEPS
    assert max(ahead) <= 1


@pytest.mark.slow
def test_finished_run_is_exported_again_and_other_settings_are_refused(
    config, settings, uninterrupted, program, train, monkeypatch, tmp_path
):
    output = tmp_path / "run"
    shutil.copytree(uninterrupted, output)
    there = ("--config", config, f"output={output}")
    end = " as in the run in this output; set another output for a new run"
    for name, changed, found in (("optimizer.lr", 0.5, 0.003), ("steps", STEPS + 1, STEPS), ("seed", 1, 0)):
        assert refused(program(*there, f"{name}={changed}")) == f"{name}: got {changed}, expected {found}{end}"
    texts = shutil.copytree(settings["data"]["files"][0], tmp_path / "texts")
    assert refused(program(*there, f"data.files=[{texts}]")).startswith(f"data.files: got ['{texts}'], expected ['")
    with monkeypatch.context() as patch:  # other content under the same names
        patch.setattr(train_loop, "digest", lambda *rows: "ab" * 32)
        assert refused(program(*there)).startswith("data: got the digest 'abababababababab', expected '")

    before = next((output / "heads").glob("*.safetensors")).read_bytes()
    shutil.rmtree(output / "heads")
    # The frequency of logs, checkpoints and evaluations may change.
    again = train(*there[1:], "log_every=7", "checkpoint_every=3", "keep_checkpoints=1")
    assert f"holds a finished run of {STEPS} steps" in again.out
    # A setting missing in an older run had its default.
    for record in output.glob("checkpoints/*/hydrajax.json"):
        content = json.loads(record.read_text())
        del content["meta"]["settings"]["draft"]["ttt_length"], content["checksum"]
        record.write_text(json.dumps(content))
    train(*there[1:])
    assert next((output / "heads").glob("*.safetensors")).read_bytes() == before
    assert without_clock(output) == without_clock(uninterrupted)


@MAY_REPORT_LATE
def test_disk_that_fills_up_ends_the_run_with_one_line(config, uninterrupted, program, tmp_path):
    output = tmp_path / "run"
    with full_disk(20_000):  # the metrics fit, a checkpoint does not
        line = refused(program("--config", config, f"output={output}"))
    assert line.startswith(f"checkpoint: saving step {EVERY} in ")
    assert not (output / "heads").exists()
