"""The scripts of ``tools/gpu``, on a CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from helpers.scripts import TOOLS, module
from hydrajax.bench.report.outputs import find_results
from hydrajax.cli import build_parser
from hydrajax.train.run_config import load_config

GPU = TOOLS / "gpu"


@pytest.mark.slow
def test_train_bench(tmp_path):
    bench, out = module(GPU / "train_bench.py"), tmp_path / "bench.jsonl"
    flags = "--shape tiny --dtype float32 --length 16 --batches 2 --repeats 1 --chunk-tokens 32"
    assert bench.main([*flags.split(), "--out", str(out)]) == 0
    header, line = (json.loads(text) for text in out.read_text().splitlines())
    assert header["base_parameters"] == 3 * (4 * 64 * 64 + 3 * 64 * 172 + 2 * 64) + 2 * 64 * 512 + 64
    assert header["peak_flops"] is line["mfu"] is None  # unknown for a CPU, and so is utilisation
    assert all(line[f"{part}_milliseconds"] > 0 for part in ("step", "base_forward", "optimizer"))
    assert line["tokens_per_second"] == pytest.approx(2 * 16 / line["step_milliseconds"] * 1e3)
    assert line["tflops_per_second"] == pytest.approx(line["tokens_per_second"] * header["flops_per_token"] / 1e12)


def script(name: str, *argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(GPU / f"{name}.py"), *argv], capture_output=True, text=True)


@pytest.mark.slow
def test_half_hour_keeps_finished_parts(tmp_path):
    """Each part's result, log and exit code; a second call runs the remaining parts."""
    begin = ["--tiny", "--out", str(tmp_path)]
    done = script("half_hour", *begin, "--only", "without_graphs")
    assert done.returncode == 0, done.stdout + (tmp_path / "without_graphs.log").read_text()
    assert "no time left" in script("half_hour", *begin, "--only", "check", "--minutes", "0").stdout
    parts = json.loads((tmp_path / "parts.json").read_text())
    assert parts["without_graphs"]["exit_code"] == 0
    assert "got lunch, expected" in script("half_hour", *begin, "--only", "lunch").stderr
    done = script("half_hour", *begin)
    assert done.returncode == 0, done.stdout
    rest = json.loads((tmp_path / "parts.json").read_text())
    assert (len(rest), rest["without_graphs"]) == (13, parts["without_graphs"])
    check = json.loads((tmp_path / "check.json").read_text())
    assert (check["kernels"], len(check["cells"])) == ("agree with NumPy", 4)  # two dtypes, with and without ours


def test_train_smollm2_carries_the_base_in_two_parts(tmp_path):
    trainer = module(GPU / "train_smollm2.py")
    (tmp_path / "base").write_bytes(content := bytes(range(256)) * 4 + b"odd")
    for name in ("seeds", "texts"):
        (tmp_path / f"{name}.jsonl").write_text(name)
    packed, arrived, work = tmp_path / "packed", tmp_path / "arrived", tmp_path / "work"
    trainer.main(["pack", str(packed), "--base", str(tmp_path / "base"), "--text", str(tmp_path)])
    assert {path.name for path in (packed / "1").iterdir()} == {"base.1"}
    join = ["join", str(arrived), "--work", str(work)]
    arrived.mkdir()
    (packed / "0").rename(arrived / "0")
    trainer.main(join)
    assert not (work / "base.gguf").exists()
    (arrived / "0").rename(tmp_path / "gone")  # the second call brings the second part only
    (packed / "1").rename(arrived / "1")
    trainer.main(join)
    assert (work / "base.gguf").read_bytes() == content
    assert (work / "seeds.jsonl").read_text() == "seeds"
    (work / "base.gguf").unlink()
    (arrived / "1" / "base.1").write_bytes(b"damaged")
    with pytest.raises(SystemExit, match="sha256"):
        trainer.main(join)
    assert not (work / "base.gguf").exists()


def test_commands_of_train_smollm2(tmp_path):
    """The commands parse, and the settings for one device replace those of the configs."""
    trainer = module(GPU / "train_smollm2.py")
    (tmp_path / "pack.json").write_text('{"base": "smollm2"}')
    (tmp_path / "answers-0.jsonl").touch()
    (tmp_path / "answers-0.jsonl.settings.json").touch()
    work = ["--work", str(tmp_path)]

    args = trainer.parse(["answers", *work, "--batch-size", "512", "dtype=float32"])
    for number, temperatures in enumerate([(0.0, 0.7), (0.7,)]):
        parsed = build_parser(command := trainer.distill_command(args, number)).parse_args(command)
        assert (parsed.temperatures, parsed.batch_size, parsed.seed) == (temperatures, 512, number)
        assert load_config(parsed.config, parsed.overrides).dtype == "float32"

    args = trainer.parse(["train", *work, "--out", "out", "objective.chunk_tokens=4096"])
    for name in args.heads:
        command = trainer.train_command(args, name, tmp_path / name, 1000)
        parsed = build_parser(command).parse_args(command)
        config = load_config(parsed.config, parsed.overrides)
        assert config.data.files == tuple(str(tmp_path / f"{file}.jsonl") for file in ("answers-0", "texts"))
        assert (config.steps, config.batch_size, config.objective.chunk_tokens) == (1000, 64, 4096)
        assert (config.mesh.data, config.mesh.cpu_devices, config.data.hidden_cache) == (1, None, None)
        parsed = build_parser(command := trainer.export_command(args, name)).parse_args(command)
        assert (parsed.dtype, parsed.base_name, parsed.draft) == ("int8", "smollm2", str(tmp_path / name / "heads"))


@pytest.mark.slow
def test_compiled_program_of_a_gpu(tmp_path):
    """Two layers of a 7B, compiled for a described GPU."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        pytest.skip("XLA's CUDA compiler is not installed: pip install 'jax[cuda12]'")
    argv = ["--layers", "2", "--what", "ar,ar-step,verify,hydra++", "--contexts", "512"]
    done = script("compile_report", *argv, "--json", str(tmp_path / "p.json"))
    assert done.returncode == 0, done.stderr
    ((_, result),), _ = find_results(tmp_path)
    for row in result.rows:
        assert row["one_graph"], row
        assert row["copies"] == 0, row
        assert row["kernels_per_layer"] <= 13, row
        assert row["gigabytes"] / row["floor_gigabytes"] < (1.01 if row["nodes"] == 1 else 1.2), row


# At most; what a T4's attention moves in addition is XLA's, of all slots and in float32.
LOW_BIT_RATIOS = {
    ("h100", "ar"): {"int8": 1.1, "int4": 1.1},
    ("h100", "verify"): {"int8": 1.25, "int4": 1.25},
    ("t4", "ar"): {"int8": 1.1, "int4": 1.1},
    ("t4", "verify"): {"int8": 1.8},
}


@pytest.mark.slow
@pytest.mark.parametrize(("device", "what"), LOW_BIT_RATIOS)
def test_low_bit_weights_cost_their_own_bytes_on_a_gpu(device, what, tmp_path):
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        pytest.skip("XLA's CUDA compiler is not installed: pip install 'jax[cuda12]'")
    bounds = LOW_BIT_RATIOS[device, what]
    argv = ["--layers", "2", "--device", device, "--what", what, "--weights", ",".join(bounds)]
    argv += ["--dtype", "float16" if device == "t4" else "bfloat16"]
    argv += ["--flags= --xla_gpu_experimental_force_split_k=1"]  # a device would choose between this and split-K
    done = script("compile_report", *argv, "--json", str(tmp_path / "p.json"))
    assert done.returncode == 0, done.stderr
    ((_, result),), _ = find_results(tmp_path)
    assert len(result.rows) == len(bounds)
    for row in result.rows:
        assert row["gigabytes"] / row["floor_gigabytes"] < bounds[row["weights"]], row
        assert row["temporary_megabytes"] < 50, row  # no weight is laid out anew before the loop


@pytest.mark.slow
def test_low_bit_weights_cost_their_own_bytes_on_a_tpu(tmp_path):
    if not importlib.util.find_spec("libtpu"):
        pytest.skip("XLA's TPU compiler is not installed: pip install 'jax[tpu]'")
    argv = ["--what", "ar,verify", "--weights", "int8,int4", "--json", str(tmp_path / "p.json")]
    report = [sys.executable, str(TOOLS / "tpu" / "compile_report.py"), *argv]
    done = subprocess.run(report, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ((_, result),), _ = find_results(tmp_path)
    bounds = {("ar", "int8"): 1.3, ("verify", "int8"): 1.4, ("ar", "int4"): 1.5, ("verify", "int4"): 1.6}
    for row in result.rows:
        assert row["cycles"] / row["floor_cycles"] < bounds[row["what"], row["weights"]], row
        assert row["temporary_megabytes"] < 50, row
