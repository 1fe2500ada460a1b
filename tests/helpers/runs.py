"""Run the training program, optionally in another process, and read its messages and files."""

import os
import subprocess
import sys
import time
from pathlib import Path

from hydrajax.train.metrics import read_metrics

PROJECT = Path(__file__).resolve().parents[2]
CLOCK = {"tokens_per_second", "tflops_per_second"}  # fields that differ between runs
JOINT = {
    "task": "joint",
    "draft": {"heads": "medusa", "num_draft_heads": 2},
    "objective": {"lm_weight": 1.0, "teacher_weight": 0.0, "head_decay": 0.8},
    "adapter": {"rank": 2, "alpha": 4.0, "dropout": 0.1},
    "joint": {"distill": True, "heads_alone_steps": 2, "rise_steps": 2},
    "steps": 6,
}


def start(config: Path, output: Path, *overrides: str, **environment: str) -> subprocess.Popen:
    """Start ``python -m hydrajax.train`` with additional environment variables."""
    command = [sys.executable, "-m", "hydrajax.train", "--config", str(config), f"output={output}", *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=PROJECT, env=os.environ | environment, **pipes)


def finish(process: subprocess.Popen, code: int = 0) -> str:
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    return out if code in (0, 130, 143) else err


def wait_for_step(process: subprocess.Popen, output: Path, step: int) -> None:
    """Wait until this process has logged the step; it first drops lines that follow the resumed checkpoint."""
    until = time.monotonic() + 600
    while not any(line["step"] >= step for line in read_metrics(output / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)


def refused(result) -> str:
    """Return the one-line error of a rejected run."""
    assert result.code == 2, result.out + result.err
    assert "Traceback" not in result.err
    (line,) = [line for line in result.err.splitlines() if line.startswith("hydrajax: ")]
    return line.removeprefix("hydrajax: ")


def heads_file(output: Path) -> Path:
    (path,) = (output / "heads").glob("*.safetensors")
    return path


def without_clock(output: Path) -> list[dict]:
    """Return the metrics lines without fields that differ between equal runs."""
    lines = read_metrics(output / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in CLOCK} for line in lines]
