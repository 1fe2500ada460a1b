"""``hydrajax roofline``: printed and written predictions, the comparison with measurements, and errors."""

import dataclasses
import json
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from helpers.runs import refused
from hydrajax.bench.benchmark import BenchmarkRow
from hydrajax.bench.roofline import comparison, meter
from hydrajax.bench.roofline.devices import Device
from hydrajax.bench.shapes import PRESETS
from hydrajax.cli import COMMANDS, run_command
from hydrajax.cli import roofline as command


@pytest.fixture
def program(capsys):
    def run(*argv) -> SimpleNamespace:
        capsys.readouterr()
        argv = [str(arg) for arg in argv]
        code = run_command("hydrajax roofline", COMMANDS["roofline"], command.add_arguments, command.run, argv)
        return SimpleNamespace(code=code, **capsys.readouterr()._asdict())

    return run


@pytest.mark.slow
def test_command_predicts_every_cell(program, tmp_path):
    file = tmp_path / "roofline.json"
    grid = ("--tree-sizes", "1,16,64", "--batch-sizes", "1,8", "--context", "1024,4096")
    result = program("--shape", "7b", "--device", "H200", *grid, "--tokens-per-step", "1,2.5,3", "--json", file)
    assert result.code == 0, result
    report = json.loads(file.read_text())
    assert report["device"]["name"] == "H200"
    cells = [row["predicted"] for row in report["rows"]]
    found = [(cell["context"], cell["batch"], cell["nodes"]) for cell in cells]
    assert found == [(s, b, n) for s in (1024, 4096) for b in (1, 8) for n in (1, 16, 64)]
    assert all("measured" not in row for row in report["rows"])
    assert f"{cells[-1]['break_even']:.2f}" in result.out
    assert f"{cells[-1]['speedup']:.2f}x" in result.out
    assert "…" not in result.out


@pytest.mark.slow
def test_command_predicts_eagle_and_a_dynamic_tree(program):
    rows = []
    for tree in ((), ("--tree", "dynamic-60-7-10")):
        rows += json.loads(program("--shape", "7b", "--draft-kind", "eagle", "--json", *tree).out)["rows"]
    assert [row["predicted"]["nodes"] for row in rows] == [1, 4, 16, 26, 60]
    assert rows[4]["predicted"]["tree"] == "dynamic-60-7-10"
    assert rows[4]["predicted"]["propose"] > rows[3]["predicted"]["propose"]  # seven levels in place of four


@pytest.mark.slow
def test_command_predicts_a_mesh_and_what_fits(program):
    heads = ("--shape", "70b", "--draft-kind", "medusa", "--tree-sizes", "1,16", "--device", "TPUv5e")
    shown = program(*heads, "--mesh", "model=8", "--quantize", "int8", "--batch-sizes", "1,256")
    assert shown.code == 0, shown
    for words in ("int8 weights in the base, on 8 TPUv5e (1 x 8)", "100 GB/s between devices", "10 us each"):
        assert words in shown.out
    assert [line.split()[-2:] for line in shown.out.splitlines()[-3:-1]] == [["all", "trees"], ["19.90", "no"]]
    assert "…" not in shown.out
    grid = ("--mesh", "data=2,model=4", "--batch-sizes", "2", "--json")
    (_, row) = json.loads(program(*heads, *grid).out)["rows"]
    found = row["predicted"]
    assert not found["fits"]
    assert found["collectives"] == 2 * 80 + 1 + 1 + 8
    assert found["collective_time"] == pytest.approx(
        1e3 * (found["collectives"] * 10e-6 + found["collective_bytes"] / 100e9)
    )


def test_command_reads_the_shape_of_a_base(program, tmp_path):
    config = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 172}
    config |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    few = ("--draft-kind", "medusa", "--tree-sizes", "1,4", "--json")
    results = [program(*base, *few) for base in (("--base", tmp_path), ("--shape", "tiny"))]
    assert json.loads(results[0].out)["rows"] == json.loads(results[1].out)["rows"]


def test_command_counts_the_windows_of_short_convolutions(program, tmp_path):
    """LFM2-1.2B as published: 6 layers keep keys and values, 10 the last two inputs of their convolution."""
    config = {"model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "block_ff_dim": 12288}
    config |= {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    few = ("--draft-kind", "medusa", "--tree-sizes", "1", "--context", "1024", "--json")
    found = json.loads(program("--base", tmp_path, *few).out)["rows"][0]["predicted"]
    keys_values, windows, hidden, length = 1025 * 6 * 2 * 8 * 64, 10 * 2 * 2048, 2048, 2
    assert found["cache_memory"] == 2 * (keys_values + windows + hidden + length)
    layers = 16 * (3 * 2048 * 8192 + 2 * 2048) + 10 * (4 * 2048 + 3) * 2048 + 6 * (2 * 2048 * (2048 + 512) + 2 * 64)
    assert found["base_memory"] == 2 * (65536 * 2048 + layers + 2048)


QUICKLY = ("--shape", "tiny", "--draft-kind", "medusa", "--tree-sizes", "4", "--context", "64", "--repeats", "1")


@pytest.mark.slow
def test_command_compares_predictions_with_measurements(program, monkeypatch, tmp_path):
    """With given times; the slow test below measures."""
    times = {"autoregressive_step": 4.0, "step": 8.0, "propose": 1.0, "verify": 6.0, "accept_commit": 0.5}
    rest = ("observe", "draft_overhead", "prefill", "compile_seconds", "autoregressive_bandwidth_fraction")
    others = dict.fromkeys(rest, 0.5)
    cell = {"batch": 1, "context": 64, "tree": "first-4", "nodes": 4, "depth": 2, "break_even": 2.0}
    sizes = {"autoregressive_bytes_per_step": 1, "peak_memory_bytes": 1}
    rows = [BenchmarkRow(**cell, **times, **others, **sizes)]
    monkeypatch.setattr(comparison, "run_benchmark", lambda *args, **settings: iter(rows))
    peak = Device("here", 1e9, 1e9, ((1, 0.5e9), (4, 1e9)), ((1, 0.5e9), (4, 1e9)))
    monkeypatch.setattr(comparison, "Meter", lambda *args: SimpleNamespace(measure=lambda: peak))
    file = tmp_path / "here.json"
    result = program(*QUICKLY, "--device", "here", "--dtype", "float32", "--json", file)
    assert result.code == 0, result
    report = json.loads(file.read_text())
    predicted = report["rows"][0]["predicted"]
    assert report["rows"][0]["measured"] == dataclasses.asdict(rows[0])
    assert report["device"]["weight_rates"] == [[1, pytest.approx(0.5e9)], [4, pytest.approx(1e9)]]
    assert f"{predicted['step'] / 8 - 1:+.0%}" in result.out
    assert f"{predicted['verify']:.3g} (6)" in result.out
    assert report["drift"] == 1
    assert "…" not in result.out


def test_measured_rates_are_positive_and_the_bandwidth_is_at_least_that_of_a_copy(monkeypatch):
    monkeypatch.setattr(meter, "CPU_ROWS", (1, 4))
    monkeypatch.setattr(meter, "MIN_SECONDS", 0.001)
    monkeypatch.setattr(meter, "copy_bandwidth", lambda megabytes: 1e6)
    tiny = PRESETS["tiny"]
    here = meter.Meter(tiny, jnp.float32, weight_bytes=200_000, slots=32, repeats=1).measure()
    assert [rows for rows, _ in here.weight_rates] == [rows for rows, _ in here.attention_rates] == [1, 4]
    assert all(rate > 0 for _, rate in here.weight_rates + here.attention_rates)
    assert here.flops == max(rate for _, rate in here.weight_rates)
    assert here.bandwidth == max(1e6, 2 * here.weight_rates[0][1])  # 4 bytes for every 2 operations


@pytest.mark.slow
def test_command_measures_here(program):
    result = program(*QUICKLY, "--device", "here", "--dtype", "float32", "--json")
    assert result.code == 0, result
    (row,) = json.loads(result.out)["rows"]
    for verb in ("autoregressive_step", "step", "verify", "propose", "accept_commit"):
        assert row["predicted"][verb] > 0, verb
        assert row["measured"][verb] > 0, verb


def test_mistakes_end_in_one_line(program, tmp_path):
    file = tmp_path / "no" / "such" / "file"
    for arguments, message in (
        ("", "exactly one of --shape and --base"),
        ("--shape 8x7b", "--shape: got '8x7b', expected tiny"),
        (f"--base {tmp_path / 'none'}", "--base: no such file"),
        ("--shape tiny --context 64,4096", "--context: got 4096, expected at most the model's 1024"),
    ):
        assert message in refused(program(*arguments.split())), arguments
    for arguments, message in (
        ("--device B200", "invalid choice: 'B200'"),
        ("--device A100 --dtype float32", "--dtype: got 'float32', expected bfloat16 for the peaks of A100"),
        ("--tree-sizes 65", "tree sizes: got 65, expected 1 to 64"),
        ("--tree chain-5", "got a depth of 5, expected at most"),
        ("--draft-kind lookup --tree dynamic-8-1-4", "expected a static tree because PromptLookup cannot fill dynamic"),
        ("--tree dynamic-8-1-4 --tree-sizes 2", "dynamic-8-1-4, expected a static tree for a sweep over tree sizes"),
        ("--batch-sizes 1,x", "got 'x', expected an integer from 1 up"),
        ("--tree-sizes 1,16 --tokens-per-step 3", "-per-step: got 1 values, expected one for each of 2 tree sizes"),
        ("--tree-sizes 64 --tokens-per-step 6", "got 6.0 for 64 nodes, expected 1 to 5"),
        ("--tokens-per-step 1;2", "got '1;2', expected numbers separated by commas"),
        (f"--json {file}", "--json: cannot write"),
        ("--mesh model=5", "--mesh: got model=5, expected a divisor of the base's 32 heads"),
        ("--mesh rows=2", "got 'rows=2', expected model=M or data=D,model=M"),
        ("--device TPUv4i --mesh model=2", "--mesh: the bandwidth between several TPUv4i is unknown"),
        ("--device here --quantize int8", "--quantize: cannot be used with --device here"),
    ):
        assert message in refused(program("--shape", "7b", *arguments.split())), arguments
