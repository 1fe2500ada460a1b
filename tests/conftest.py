"""Fixtures shared by all tests: recordings of the official code, tiny checkpoints by transformers, a tiny base."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import tempfile

# Before jax or torch starts its threads. A test machine may have an accelerator, but the tolerances are for CPU
# float32; torch's models here are so small that a second thread only costs.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HYDRAJAX_MEASURE_TREES"] = "0"  # a tree that depends on the machine is tested in a place of its own

from pathlib import Path

from jaxtyping import install_import_hook

from helpers import programs, recordings, type_checks

# In the tests every array that enters or leaves a function of these rooms is checked against its annotated shape and
# dtype. The hook must come before the first import of hydrajax.
CHECKED = ("models", "trees.topology", "trees.simulation", "drafters", "decoding", "train.losses", "train.chunks")
install_import_hook([f"hydrajax.{room}" for room in CHECKED], f"{type_checks.__name__}.checker")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.llama import Llama
from hydrajax.models.base_model import init_base

PROJECT = Path(__file__).resolve().parents[1]
QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def pytest_configure(config):
    """Make the tests' compilations cheap, which are nearly all of their time.

    Compiled programs are kept for the other tests of the run and for the processes that tests start. In the default run
    they are compiled without LLVM's optimisation, by the shorter of XLA's two ways from a fusion to LLVM, as one
    module; what XLA makes of a program before that is the same. Slow tests get what users get.
    """
    if hasattr(config, "workerinput"):  # of xdist: it has the environment of the process that started it
        return
    folder = tempfile.mkdtemp(prefix="hydrajax-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    settings = {"jax_compilation_cache_dir": folder, "jax_persistent_cache_min_compile_time_secs": 0.1}
    for name, value in (settings | {"jax_persistent_cache_min_entry_size_bytes": 0}).items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)  # jax has read the environment already
    if config.option.markexpr == "not slow":
        os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *QUICK)).strip()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items):
    """Mark all cases of a parametrised test slow that its marker ``quick`` does not list."""
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick and hasattr(item, "callspec") and item.callspec.id not in quick.args:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session):
    """Look for garbage less often: what was imported and collected stays, and JAX's programs are millions of objects,
    which Python would go through thousands of times. It takes an eighth of the tests' time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Path:
    """The folder of recordings of the official code: the full set where it is at hand, else tests/golden, unpacked.

    The full set is looked for in ``$HYDRAJAX_GOLDEN``, or in ``../shared/golden`` if that is not set.
    """
    full = Path(os.environ.get("HYDRAJAX_GOLDEN") or PROJECT.parent / "shared" / "golden")
    if (full / "base" / "mha" / "config.json").is_file():
        return full
    assert "HYDRAJAX_GOLDEN" not in os.environ, f"HYDRAJAX_GOLDEN: no recordings in {full}"
    folder = tmp_path_factory.mktemp("golden")
    for archive in sorted((PROJECT / "tests" / "golden").glob("*.xz")):
        recordings.unpack(archive, folder)
    return folder


@pytest.fixture(scope="session")
def on_eight_devices():
    """``run(folder, program, *arguments, flags="") -> answer``: one of tests/programs, on 8 CPU devices.

    XLA fixes their number when it starts. The program is given the folder and the arguments; its findings, with the
    number of ``devices`` among them, go to ``answer.json`` in the folder. flags: more of XLA's.
    """

    def run(folder: Path, program: str, *arguments, flags: str = "") -> dict:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {flags}"
        done = subprocess.run(
            programs.command(program, folder, *arguments),
            env=os.environ | programs.ENVIRONMENT | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        answer = json.loads((folder / "answer.json").read_text())
        assert answer["devices"] == 8
        return answer

    return run


@pytest.fixture(scope="session")
def llama_checkpoint(tmp_path_factory):
    """``make(max_shard_size="1GB", **settings) -> Path``: a directory saved by transformers, once per settings.

    settings: fields of transformers' configuration over the small defaults below, of LLaMA or the ``model_type`` given.
    Weights are random, large enough that attention is not uniform and that the greedy token has a healthy margin; norm
    scales are not all ones.
    """
    made: dict[str, Path] = {}

    def make(max_shard_size: str = "1GB", **settings) -> Path:
        name = repr((max_shard_size, sorted(settings.items())))
        if name not in made:
            made[name] = tmp_path_factory.mktemp("llama")
            random_hf_llama(**settings).save_pretrained(made[name], max_shard_size=max_shard_size)
        return made[name]

    return make


def random_hf_llama(model_type: str = "llama", **settings):
    """A transformers model with the random weights described at `llama_checkpoint`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    defaults = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = AutoConfig.for_model(model_type, **(defaults | settings))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else 0.3 * noise)
    return model


@pytest.fixture(scope="session")
def tiny_checkpoint(llama_checkpoint) -> Path:
    """The default `llama_checkpoint`: vocabulary 96, width 32, 2 layers, 4 heads, 2 key-value heads, context 128."""
    return llama_checkpoint()


@pytest.fixture(scope="session")
def tiny_model() -> tuple[Llama, dict]:
    """``(Llama, base_params)``: random, float32, vocabulary 61, width 32, 2 layers, 4 heads, 2 kv heads, context 64.

    Normal weights of std 0.3 in place of 0.02, so that the logits differ by much more than rounding.
    """
    model = Llama(LlamaConfig(61, 32, 80, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, max_positions=64))
    shapes = jax.eval_shape(lambda: init_base(model, jax.random.key(0)))
    random = np.random.default_rng(5)

    def draw(leaf):
        noise = random.standard_normal(leaf.shape).astype(np.float32)
        return jnp.asarray(1 + 0.2 * noise if len(leaf.shape) == 1 else 0.3 * noise)

    return model, jax.tree.map(draw, shapes)
