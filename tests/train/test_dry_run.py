"""The dry run against counts written out by hand, and its verdicts. XLA's plan is checked for its magnitude only."""

import io
import json
import re
import sys
from pathlib import Path

import jax
import pytest
from rich.console import Console

from helpers.refusals import assert_refused
from hydrajax.models.adapter import Adapter
from hydrajax.sharding import make_mesh
from hydrajax.train import dry_run as module
from hydrajax.train.run_config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig, draft_of

GB = 1e9
D, MLP, V = 4096, 11_008, 32_000  # Vicuna 7B


def settings(**changes) -> TrainConfig:
    defaults = {
        "output": "nowhere", "model": "tiny", "dtype": "float32",
        "draft": draft_of(num_draft_heads=2, n_layers=2, prefix=True),
        "data": DataConfig(files=("absent.json",), length=32), "tree": "cartesian-2x2", "batch_size": 8,
        "steps": 1000,
    }  # fmt: skip
    return TrainConfig(**(defaults | changes))


def dry_run(config, memory: float | None = 80.0) -> tuple[bool, str]:
    """Return ``(fits, printed lines)``."""
    out = io.StringIO()
    fits = module.dry_run(config, Console(file=out, width=200, highlight=False, markup=False), memory)
    return fits, out.getvalue()


@pytest.fixture
def no_compilation(monkeypatch):
    """10 GB in one micro-batch, half in two, and so on; records ``(accumulation, layers)`` of each call."""
    asked = []

    def planned(config, shape, mesh):
        asked.append((config.accumulation, shape.n_layers))
        return 10 * GB / config.accumulation

    monkeypatch.setattr(module, "planned_bytes", planned)
    return asked


def figure(text: str, label: str) -> float:
    """Return the GB in a line."""
    ((number, prefix),) = re.findall(rf"^ *{label} +([\d.]+) (k|M|G|)B$", text, re.MULTILINE)
    return float(number) * {"k": 1e-6, "M": 1e-3, "G": 1}[prefix]


def test_counts_of_vicuna_7b(no_compilation):
    """Hydra++ on LLaMA 7B in bfloat16: 2 bytes a base weight, 4 and 8 a trained weight."""
    draft = draft_of(num_draft_heads=4, n_layers=4, prefix=True)
    fits, text = dry_run(settings(model="vicuna-7b", dtype="bfloat16", draft=draft))
    layer = 4 * D * D + 3 * D * MLP + 2 * D
    base = 32 * layer + 2 * V * D + D
    heads = sum(2 * ((k + 2) * D * D + D) + (D * D + D) + (V * D + V) for k in range(4))
    trained = layer + D + heads
    assert f"{base / 1e6:,.1f} million parameters in bfloat16, frozen" in text
    assert f"{trained / 1e6:,.1f} million parameters in float32" in text
    assert figure(text, "base weights") == pytest.approx(2 * base / GB, abs=1e-3)
    assert figure(text, "draft weights") == pytest.approx(4 * trained / GB, abs=1e-3)
    assert figure(text, "optimizer") == pytest.approx(8 * trained / GB, abs=1e-3)
    assert figure(text, "total") == pytest.approx((2 * base + 12 * trained) / GB + 10, abs=2e-3)
    assert fits
    assert [layers for _, layers in no_compilation] == [2, 4]
    assert "extrapolated from 2 and 4 layers" in text


@pytest.mark.slow
def test_counts_of_an_adapter_on_vicuna_7b(no_compilation, monkeypatch):
    """Rank r costs r numbers for every input and output of a linear layer, the lm head too. The int8 base is a byte
    for a weight and 4 for the scale of an output.
    """
    monkeypatch.setattr("hydrajax.ops.trace.has_few_bits", lambda: False)  # as for several devices: no tiles of a CPU
    medusa, rank = draft_of(heads="medusa", num_draft_heads=2), 32
    changes = {"task": "joint", "adapter": Adapter(rank=rank), "quantize": "int8"}
    _, text = dry_run(settings(model="vicuna-7b", dtype="bfloat16", draft=medusa, **changes))
    adapter = rank * (32 * (4 * 2 * D + 3 * (D + MLP)) + D + V)
    heads = 2 * (D * D + D + V * D)
    kernels, outputs = 32 * (4 * D * D + 3 * D * MLP) + V * D, 32 * (5 * D + 2 * MLP) + V
    assert f"train  adapter, rank 32: {adapter / 1e6:,.1f} million parameters in float32" in text
    assert figure(text, "adapter") == pytest.approx(4 * adapter / GB, abs=1e-3)
    assert figure(text, "draft weights") == pytest.approx(4 * heads / GB, abs=2e-3)
    assert figure(text, "optimizer") == pytest.approx(8 * (adapter + heads) / GB, abs=4e-3)
    assert figure(text, "base weights") == pytest.approx((kernels + 4 * outputs + 2 * V * D) / GB, abs=2e-3)


@pytest.mark.slow
def test_counts_of_eagle_3_on_vicuna_7b(no_compilation):
    """EAGLE-3 reads three layers, so the smallest base compiled has three."""
    draft = draft_of(heads="eagle3", vocabulary=8000)
    _, text = dry_run(settings(model="vicuna-7b", dtype="bfloat16", draft=draft, tree="chain-4"))
    trained = 3 * D * D + (2 * D * 3 * D + D * D + 3 * D * MLP) + 4 * D + 8000 * D
    assert f"train  Eagle3: {trained / 1e6:,.1f} million parameters in float32" in text
    assert [depth for _, depth in no_compilation] == [3, 5]


def test_verdict_and_smaller_micro_batches(no_compilation):
    for memory, fitting, words, absent in (
        (11, True, ["fits in 11 GB"], "DOES NOT FIT"),
        (4, False, ["FIT in 4 GB: 10.0 GB needed", "lation=2: 5.0 GB\n", "lation=4: 2.5 GB, fits"], "accumulation=8"),
        # The last has one sequence per micro-batch.
        (1, False, ["accumulation=8: 1.3 GB\n", "no accumulation fits"], "accumulation=16"),
    ):
        fits, text = dry_run(settings(), memory=memory)
        assert fits == fitting
        assert all(word in text for word in words), text
        assert absent not in text


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_cpu_has_the_memory_of_the_machine(no_compilation, monkeypatch):
    monkeypatch.setattr(module, "make_mesh", lambda *sizes: make_mesh())  # without a second device
    (kibibytes,) = re.findall(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    for count, whose in ((1, "this machine's memory"), (2, "each device's share of this machine's memory")):
        _, text = dry_run(settings(mesh=MeshConfig(data=count)), None)
        (found,) = re.findall(rf"(?:fits in|FIT in) ([\d.]+) GB, {whose}: ", text)
        assert float(found) == pytest.approx(int(kibibytes) * 1024 / GB / count, rel=1e-3)


def test_hours(no_compilation):
    """About 6 N D for a base from scratch: without the embedding, which is looked up, and with attention."""
    shape = module.SHAPES["tiny"]
    _, text = dry_run(settings(task="base", model=None, scratch=shape, optimizer=OptimizerConfig(name="muon")))
    weights = 3 * (4 * 64 * 64 + 3 * 64 * 172) + 64 * 512
    per_token = 6 * weights + 3 * 3 * 2 * 64 * 32
    assert f"\n{per_token / 1e9:.3g} GFLOP per token; time for 1000 steps, 256,000 tokens on GPUs" in text
    hours = per_token * 1e10 * 8 * 32 / (312e12 * 0.4) / 3600
    assert "1 x A100: less than 1 s" in text
    _, text = dry_run(settings(task="base", model=None, scratch=shape, steps=10**10))
    assert f"1 x A100: {hours:.3g} h" in text
    for seconds, text in {2: "2 s", 180: "3 min", 5400: "1.5 h", 86400 * 12: "12 days"}.items():
        assert module.duration(seconds) == text
    _, text = dry_run(settings(steps=None, epochs=2.0))
    assert "per million tokens" in text


@pytest.mark.slow
def test_the_plan_of_a_real_compilation():
    """The temporaries of a tiny run hold at least the gradients, and not 30 times as much."""
    fits, text = dry_run(settings())
    assert fits
    assert "extrapolated" not in text  # three layers are compiled as they are
    config, mesh = settings(), make_mesh()
    task = module.abstract_task(config, module.named_shape(config, "model"), mesh)
    gradients = sum(4 * leaf.size for leaf in jax.tree.leaves(task.abstract_params))
    planned = figure(text, "temporaries") * GB
    assert gradients < planned < 30 * gradients


def test_a_directory_needs_its_config_alone(tmp_path, no_compilation):
    raw = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    _, named = dry_run(settings())
    _, read = dry_run(settings(model=str(tmp_path)))
    assert read.replace(str(tmp_path), "tiny") == named
    assert "shipped" in dry_run(settings(model="shipped"))[1]
    long = settings(model=str(tmp_path), data=DataConfig(files=("absent.json",), length=2048))
    assert_refused(
        dry_run,
        (long, "data.length: got 2048, expected at most the base's context 1024"),
        (settings(model="vicuna-8b"), "model: ...'vicuna-8b'... vicuna-7b, vicuna-13b, vicuna-33b"),
        (settings(mesh=MeshConfig(data=4, model=1000)), "mesh: got data=4 x model=1000, expected"),
    )
