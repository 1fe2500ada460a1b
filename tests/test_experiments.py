"""The scripts of ``experiments/`` that need a GPU run on a CPU with tiny shapes. No timing asserts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[1] / "experiments" / "gpu"


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
