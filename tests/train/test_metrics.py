"""metrics.jsonl and TensorBoard across interruptions."""

import io
import json
import struct

import numpy as np
import pytest
from rich.console import Console

from hydrajax.errors import HydrajaxError
from hydrajax.train.metrics import TrainMetrics, read_metrics


def opened(directory, resumed_at: int) -> TrainMetrics:
    return TrainMetrics(directory, resumed_at, 9, Console(file=io.StringIO()))


def events(directory) -> list[bytes]:
    """The records of all event files: length, its checksum, the record, its checksum (TensorFlow's TFRecord)."""
    records = []
    for path in (directory / "tensorboard").iterdir():
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            records.append(data[12 : 12 + length])
            data = data[16 + length :]
    return records


def test_lines_are_json_and_arrays_become_lists_and_curves(tmp_path):
    with opened(tmp_path, 0) as metrics:
        metrics.log(3, "train", {"loss": np.float32(0.5), "lm": np.array([1.0, 2.0], np.float32)})
        # Flushed at once: a killed process loses none.
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
        metrics.log(4, "eval", {"tokens_per_step": 1.25})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 3, "kind": "train", "loss": 0.5, "lm": [1.0, 2.0]},
        {"step": 4, "kind": "eval", "tokens_per_step": 1.25},
    ]
    assert read_metrics(tmp_path / "metrics.jsonl") == lines
    found = b"".join(events(tmp_path))
    for curve in (b"train/loss", b"train/lm_0", b"train/lm_1", b"eval/tokens_per_step"):
        assert curve in found


def test_lines_of_lost_work_and_lines_that_were_cut_off_are_dropped(tmp_path):
    """A run killed before its first checkpoint evaluates step 0 again, which must give one line and not two."""
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    for _ in range(2):
        with opened(tmp_path, 0) as metrics:
            for step in range(7):
                metrics.log(step, "train", {"x": step})
    with opened(tmp_path, 4) as metrics:
        metrics.log(5, "train", {"x": 50})
    assert [(line["step"], line["x"]) for line in read_metrics(path)] == [*((n, n) for n in range(5)), (5, 50)]
    for rest in ('{"step": 2, "ki', '{"step": 2', "\0\0\0"):
        path.write_text('{"step": 1, "kind": "train"}\n' + rest)
        assert read_metrics(path) == [{"step": 1, "kind": "train"}]
        with opened(tmp_path, 1) as metrics:
            metrics.log(2, "train", {"loss": float("nan")})
        assert [line["step"] for line in read_metrics(path)] == [1, 2]
        assert np.isnan(read_metrics(path)[1]["loss"])


@pytest.mark.parametrize("file", ["lines", "curves"])
def test_a_full_disk_is_one_line_and_nothing_waits(tmp_path, monkeypatch, file):
    """The two files that a run writes fail alike."""
    metrics = opened(tmp_path, 0)
    owner, name, mode = (metrics, "_file", "w") if file == "lines" else (metrics._tensorboard._file, "_writer", "wb")
    monkeypatch.setattr(owner, name, open("/dev/full", mode))  # noqa: SIM115
    with pytest.raises(HydrajaxError, match=r"output: cannot write .*: No space left on device"), metrics:
        metrics.log(1, "train", {"x": 1.0})
