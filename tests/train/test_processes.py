"""Training in two processes with two CPU devices each, connected by `jax.distributed`."""

import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from helpers.hosts import GLOO, meeting
from helpers.runs import finish, heads_file, start, wait_for_step, without_clock
from hydrajax.errors import HydrajaxError
from hydrajax.sharding import make_mesh

STEPS = 24
MESH = {"data": 2, "model": 2}  # the model axis lies within a process, the data axis between the two


@pytest.fixture(scope="module")
def launch(settings, tmp_path_factory):
    """``launch(output, n_processes, *overrides) -> [Popen]``: the same command, in one process or in several."""
    config = tmp_path_factory.mktemp("processes") / "run.yaml"
    changes = {"steps": STEPS, "checkpoint_every": 5, "eval_every": 8, "log_every": 2, "output": "given below"}
    config.write_text(yaml.safe_dump(settings | changes))

    def launch(output: Path, n_processes: int, *overrides: str) -> list[subprocess.Popen]:
        mesh = MESH | {"cpu_devices": 4 // n_processes}
        overrides = (*(f"mesh.{name}={value}" for name, value in mesh.items()), *overrides)
        if n_processes == 1:
            return [start(config, output, *overrides)]
        return [start(config, output, *overrides, **variables) for variables in meeting(n_processes)]

    return launch


@pytest.fixture(scope="module")
def two(launch, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("two")
    main, other = launch(output, 2)
    assert f"finished {STEPS} steps: --draft {output / 'heads'}" in finish(main)
    lines = [line for line in finish(other).splitlines() if line and not GLOO.search(line)]
    assert lines == []  # only the main process prints
    return output


@pytest.mark.slow
def test_two_processes_train_what_one_trains(two, launch, tmp_path):
    (process,) = launch(tmp_path / "one", 1)
    finish(process)
    one = tmp_path / "one"
    found, expected = (without_clock(output) for output in (two, one))
    for line, wanted in zip(found, expected, strict=True):
        assert line["kind"] == wanted["kind"]
        for name in wanted.keys() - {"kind"}:
            np.testing.assert_allclose(line[name], wanted[name], rtol=1e-3, err_msg=f"{wanted['step']} {name}")
    found, expected = load_file(heads_file(two)), load_file(heads_file(one))
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_stopping_either_process_stops_both_and_they_resume(two, launch, tmp_path):
    output = tmp_path / "run"
    main, other = launch(output, 2)
    wait_for_step(main, output, 6)
    other.send_signal(signal.SIGTERM)
    out = finish(main, 143)
    finish(other, 143)
    (line,) = [line for line in out.splitlines() if line.startswith("stopped at step ")]
    stopped_at = int(line.split()[3])
    assert 6 <= stopped_at < STEPS, line

    # A byte of the newest checkpoint is lost: both processes must restore the same earlier one.
    damaged = next((output / "checkpoints" / str(stopped_at) / "state").rglob("d/*"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    main, other = launch(output, 2)
    out = finish(main)
    finish(other)
    assert f"step {stopped_at} is damaged: " in out
    assert "resumed at step " in out
    assert heads_file(output).read_bytes() == heads_file(two).read_bytes()
    assert without_clock(output) == without_clock(two)


@pytest.mark.slow
def test_one_that_is_killed_ends_the_other_at_once_and_they_resume(two, launch, tmp_path):
    output = tmp_path / "run"
    main, other = launch(output, 2)
    wait_for_step(main, output, 6)
    other.kill()
    other.communicate()
    began = time.monotonic()
    err = finish(main, 2)
    assert time.monotonic() - began < 60  # JAX alone takes 100 seconds to notice
    assert "hydrajax: another process of this run has ended or cannot be reached: " in err
    assert "Traceback" not in err
    for process in launch(output, 2):
        finish(process)
    assert heads_file(output).read_bytes() == heads_file(two).read_bytes()
    assert without_clock(output) == without_clock(two)


def test_a_mesh_has_all_devices_of_all_processes(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(HydrajaxError, match="mesh: got data=1 x model=2, expected all 1 devices of 2 processes"):
        make_mesh(model=2)


@pytest.mark.slow
def test_what_several_processes_cannot_do_is_refused_by_all(launch, tmp_path):
    for process in launch(tmp_path / "run", 2, "mesh.data=1"):
        assert "hydrajax: mesh: got data=1 x model=2, expected all 4 devices of 2 processes" in finish(process, 2)
