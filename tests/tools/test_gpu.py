"""The scripts of ``tools/gpu``, on a CPU."""

import importlib.util
import json
import shlex
import subprocess
import sys

import pytest

from helpers.scripts import TOOLS, module
from hydrajax.bench.report.outputs import find_results
from hydrajax.cli import build_parser
from hydrajax.train.run_config import load_config


@pytest.mark.slow
def test_train_bench(tmp_path):
    bench, out = module(TOOLS / "gpu" / "train_bench.py"), tmp_path / "bench.jsonl"
    flags = "--shape tiny --dtype float32 --length 16 --batches 2 --repeats 1 --chunk-tokens 32"
    assert bench.main([*flags.split(), "--out", str(out)]) == 0
    header, line = (json.loads(text) for text in out.read_text().splitlines())
    assert header["base_parameters"] == 3 * (4 * 64 * 64 + 3 * 64 * 172 + 2 * 64) + 2 * 64 * 512 + 64
    assert header["peak_flops"] is line["mfu"] is None  # unknown for a CPU, and so is utilisation
    assert all(line[f"{part}_milliseconds"] > 0 for part in ("step", "base_forward", "optimizer"))
    assert line["tokens_per_second"] == pytest.approx(2 * 16 / line["step_milliseconds"] * 1e3)
    assert line["tflops_per_second"] == pytest.approx(line["tokens_per_second"] * header["flops_per_token"] / 1e12)


def run(name: str, *argv) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, TOOLS / f"{name}.py", *argv], capture_output=True, text=True)


@pytest.mark.slow
def test_half_hour_keeps_finished_parts(tmp_path):
    """Each part's result, log and exit code; a second call runs the remaining parts."""
    begin = ["--tiny", "--out", str(tmp_path)]
    done = run("gpu/half_hour", *begin, "--only", "without_graphs")
    assert done.returncode == 0, done.stdout + (tmp_path / "without_graphs.log").read_text()
    assert "no time left" in run("gpu/half_hour", *begin, "--only", "check", "--minutes", "0").stdout
    parts = json.loads((tmp_path / "parts.json").read_text())
    assert parts["without_graphs"]["exit_code"] == 0
    assert "got lunch, expected" in run("gpu/half_hour", *begin, "--only", "lunch").stderr
    done = run("gpu/half_hour", *begin)
    assert done.returncode == 0, done.stdout
    rest = json.loads((tmp_path / "parts.json").read_text())
    assert (len(rest), rest["without_graphs"]) == (13, parts["without_graphs"])
    check = json.loads((tmp_path / "check.json").read_text())
    assert (check["kernels"], len(check["cells"])) == ("agree with NumPy", 4)  # two dtypes, with and without ours


def test_commands_of_train_smollm2(tmp_path):
    """The commands parse, and the settings for one device replace those of the configs."""
    trainer = module(TOOLS / "gpu" / "train_smollm2.py")
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


def report(where: str, folder, flags: str) -> list[dict]:
    """Return the rows of a report of programs compiled for a described device."""
    packages = ("jax_cuda12_plugin", "jax_cuda13_plugin") if where == "gpu" else ("libtpu",)
    if not any(map(importlib.util.find_spec, packages)):
        pytest.skip(f"XLA's compiler is not installed: pip install 'jax[{'cuda12' if where == 'gpu' else 'tpu'}]'")
    done = run(f"{where}/compile_report", *shlex.split(flags), "--json", folder / "p.json")
    assert done.returncode == 0, done.stderr
    ((_, result),), _ = find_results(folder)
    return result.rows


@pytest.mark.slow
def test_compiled_program_of_a_gpu(tmp_path):
    """Two layers of a 7B, compiled for a described GPU."""
    for row in report("gpu", tmp_path, "--layers 2 --what ar,ar-step,verify,hydra++ --contexts 512"):
        assert row["one_graph"], row
        assert row["copies"] == 0, row
        assert row["kernels_per_layer"] <= 13, row
        assert row["gigabytes"] / row["floor_gigabytes"] < (1.01 if row["nodes"] == 1 else 1.2), row


# The bytes (on TPUs the cycles) at most, by program and weights. What a T4's attention moves in addition is XLA's, of
# all slots and in float32. A device would choose between the fixed split and split-K.
GPU = "--layers 2 '--flags= --xla_gpu_experimental_force_split_k=1'"
LOW_BITS = {
    f"{GPU} --device h100 --dtype bfloat16 --what ar": {"ar int8": 1.1, "ar int4": 1.1},
    f"{GPU} --device h100 --dtype bfloat16 --what verify": {"verify int8": 1.25, "verify int4": 1.25},
    f"{GPU} --device t4 --dtype float16 --what ar": {"ar int8": 1.1, "ar int4": 1.1},
    f"{GPU} --device t4 --dtype float16 --what verify": {"verify int8": 1.8},
    "--what ar,verify": {"ar int8": 1.3, "verify int8": 1.4, "ar int4": 1.5, "verify int4": 1.6},
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", LOW_BITS)
def test_low_bit_weights_cost_their_own_bytes(flags, tmp_path):
    where, unit = ("gpu", "gigabytes") if GPU in flags else ("tpu", "cycles")
    weights = ",".join(dict.fromkeys(name.split()[1] for name in LOW_BITS[flags]))
    rows = report(where, tmp_path, f"{flags} --weights {weights}")
    assert len(rows) == len(LOW_BITS[flags])
    for row in rows:
        assert row[unit] / row[f"floor_{unit}"] < LOW_BITS[flags][f"{row['what']} {row['weights']}"], row
        assert row["temporary_megabytes"] < 50, row  # no weight is laid out anew before the loop


@pytest.mark.slow
def test_mistakes_end_in_one_line():
    for flags, message in (
        ("--devices 3", "--devices: got 3, expected 1 or 8"),
        ("--devices 8 --what ar,prefill", "--what: got prefill, which has no loop"),
        ("--what train", "--what: got train, expected one of"),
    ):
        done = run("gpu/compile_report", *flags.split())
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr.splitlines()[-1]
