"""The scripts of ``experiments/``: those that need a GPU, on a CPU with tiny shapes and without timing asserts; the one
that measures the memory of loading, at full size.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
GPU = EXPERIMENTS / "gpu"


@pytest.mark.slow
def test_train_bench(tmp_path):
    spec = importlib.util.spec_from_file_location("train_bench", GPU / "train_bench.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    out = tmp_path / "bench.jsonl"
    sizes = ["--length", "16", "--batches", "2", "--repeats", "1", "--chunk-tokens", "32"]
    assert bench.main(["--shape", "tiny", "--dtype", "float32", *sizes, "--out", str(out)]) == 0
    header, line = (json.loads(text) for text in out.read_text().splitlines())
    assert header["base_parameters"] == 3 * (4 * 64 * 64 + 3 * 64 * 172 + 2 * 64) + 2 * 64 * 512 + 64
    assert header["peak_flops"] is None  # of a CPU, so no utilisation either
    assert line["mfu"] is None
    for part in ("step", "base_forward", "heads_loss_and_gradient", "optimizer"):
        assert line[f"{part}_milliseconds"] > 0
    assert line["tokens_per_second"] == pytest.approx(2 * 16 / line["step_milliseconds"] * 1e3)
    assert line["tflops_per_second"] == pytest.approx(line["tokens_per_second"] * header["flops_per_token"] / 1e12)
    assert line["peak_memory_bytes"] > 0


@pytest.mark.slow
def test_loading_holds_little_more_than_the_device_copy(tmp_path):
    """2 GB in four shards: beside the device copy at most 1.3 shards, also cast, quantised and over eight devices."""
    script = [sys.executable, str(EXPERIMENTS / "load_memory.py"), "--directory", str(tmp_path)]
    subprocess.run([*script, "--output", str(tmp_path / "report.json")], check=True, capture_output=True)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["checkpoint_bytes"] > 1.9e9
    assert report["largest_shard_bytes"] < report["checkpoint_bytes"] / 3
    assert len(report["cases"]) == 4
    for case in report["cases"]:
        assert case["device_bytes"] > report["checkpoint_bytes"] / 5  # it really holds the model
        assert 0 < case["beside_device_copy_in_largest_shards"] < 1.3
