"""`experiments/roofline_here.py`: rates of this device, and steps predicted from them next to measured ones."""

import json
import sys

import jax.numpy as jnp
import pytest
import roofline_here as script

from hydrajax.bench.roofline.operators import Operator
from hydrajax.bench.shapes import PRESETS
from hydrajax.cli import run_command


def test_measured_rates_are_interpolated_in_logarithms_and_averaged_rate_by_rate():
    device = script.MeasuredDevice("here", 400.0, 1e9, weight_rates=((1, 100.0), (16, 400.0)))
    rate = {rows: device.rate(Operator("", 1.0, 1.0, rows, "weights")) for rows in (1, 4, 16, 64)}
    assert rate == pytest.approx({1: 100, 4: 200, 16: 400, 64: 400})
    assert device.rate(Operator("", 1.0, 1.0, 1, "attention")) == 400  # none measured: the peak
    assert device.seconds(Operator("", 1000.0, 1.0, 1, "weights", count=2)) == pytest.approx(20)
    slow, fast = (
        script.MeasuredDevice("here", k, 10 * k, weight_rates=((1, k), (4, 2 * k)), attention_rates=((1, k),))
        for k in (100.0, 400.0)
    )
    mean = script.average([slow, fast])
    assert (mean.flops, mean.bandwidth) == pytest.approx((200, 2000))
    assert dict(mean.weight_rates) == pytest.approx({1: 200, 4: 400})
    assert dict(mean.attention_rates) == pytest.approx({1: 200})
    assert script.drift([slow, fast, mean]) == 4


def test_measured_rates_are_positive_and_the_bandwidth_is_at_least_that_of_a_copy(monkeypatch):
    monkeypatch.setattr(script, "CPU_ROWS", (1, 4))
    monkeypatch.setattr(script, "MIN_SECONDS", 0.001)
    monkeypatch.setattr(script, "copy_bandwidth", lambda megabytes: 1e6)
    tiny = PRESETS["tiny"]
    here = script.Meter(tiny, jnp.float32, weight_bytes=200_000, slots=32, repeats=1).measure()
    assert [rows for rows, _ in here.weight_rates] == [rows for rows, _ in here.attention_rates] == [1, 4]
    assert all(rate > 0 for _, rate in here.weight_rates + here.attention_rates)
    assert here.flops == max(rate for _, rate in here.weight_rates)
    assert here.bandwidth == max(1e6, 2 * here.weight_rates[0][1])  # 4 bytes for every 2 operations


@pytest.mark.slow
def test_a_step_is_predicted_and_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "CPU_ROWS", (1, 4))
    monkeypatch.setattr(sys, "argv", ["roofline_here.py"])
    flags = ["--shape", "tiny", "--draft-kind", "medusa", "--tree-sizes", "4", "--context", "64"]
    flags += ["--repeats", "1", "--dtype", "float32"]
    argv = [*flags, "--output", str(tmp_path / "here.json")]
    assert run_command("roofline_here.py", "help", script.add_arguments, script.run, argv) == 0
    found = json.loads((tmp_path / "here.json").read_text())
    (row,) = found["rows"]
    assert found["kind"] == "prediction"
    assert all(row[name] > 0 for name in ("step", "predicted_step", "autoregressive_step"))
    assert "…" not in capsys.readouterr().out
