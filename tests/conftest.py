"""Fixtures shared by all tests: recordings of the official code, tiny transformers checkpoints, a tiny base."""

import gc
import json
import os
import shutil
import subprocess
import tempfile

# Set before jax or torch starts its threads. Tolerances are for CPU float32, even on machines with an accelerator. The
# torch models are so small that a second thread only adds overhead.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HYDRAJAX_MEASURE_TREES"] = "0"  # tests/bench/contests covers measured trees, which depend on the machine

from pathlib import Path

import jaxtyping
from jaxtyping import install_import_hook

from helpers import programs, recordings, type_checks

# The hook checks arrays that enter or leave functions of these packages against the annotated shapes and dtypes. It
# must precede the first import of hydrajax.
CHECKED = (
    *("models", "ops"),
    *(f"lowbit.{room}" for room in ("quantized", "int4", "int4_tiles", "mxfp4", "tiles", "products", "kernels")),
    *("drafters", "amphista.heads", "lookahead.drafter", "trees.topology", "bench.trees.simulation"),
    *("decoding", "train.losses", "train.chunks"),
)
install_import_hook([f"hydrajax.{room}" for room in CHECKED], f"{type_checks.__name__}.checker")

import jax
import pytest

from helpers.noise import noise
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.llama import Llama
from hydrajax.models.init import init_base

PROJECT = Path(__file__).resolve().parents[1]
QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    *(["--xla_cpu_use_fusion_emitters=false"] if jax.__version_info__ < (0, 11) else []),  # later XLA only has these
)


def pytest_configure(config):
    """Speed up compilation, which takes nearly all the time of the tests.

    A temporary cache shares compiled programs between the tests and the processes that they start. The default run
    compiles without LLVM's optimisation and fusion emitters, as one module; the optimised HLO stays the same. Slow
    tests compile as users do.
    """
    if hasattr(config, "workerinput"):  # an xdist worker inherits the environment of its parent
        return
    folder = tempfile.mkdtemp(prefix="hydrajax-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
        "jax_traceback_in_locations_limit": 0,  # source lines in a program take time to write
    }
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)  # jax has already read the environment
    if config.option.markexpr == "not slow":
        os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *QUICK)).strip()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects slow tests
def pytest_collection_modifyitems(items):
    """Mark parametrised cases as slow if the marker ``quick`` of their test does not list them.

    The files that take longest come first, so that two workers end at about the same time.
    """
    items.sort(key=lambda item: "train" not in item.path.parts)
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick and hasattr(item, "callspec") and item.callspec.id not in quick.args:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session):
    """Collect garbage less often: scanning the millions of objects of JAX programs takes an eighth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Path:
    """Return the folder of recordings of the official code: the full set if available, else tests/golden, unpacked.

    The full set is in ``$HYDRAJAX_GOLDEN``, by default in ``../shared/golden``.
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
def parallel(golden) -> Path:
    """Return the folder of recordings of drafts of one pass."""
    return golden / "parallel"


@pytest.fixture(scope="session")
def on_eight_devices():
    """Return ``run(folder, program, *arguments, flags="") -> answer``, which runs a program on 8 CPU devices.

    XLA fixes the number of devices at its start. The program gets the folder and the arguments and writes its results
    and the number of ``devices`` to ``answer.json`` in the folder. flags: additional XLA flags.
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
    """Return ``make(max_shard_size="1GB", **settings) -> Path``: a directory saved by transformers, once per settings.

    settings: fields of the transformers configuration over the small defaults below; the default type is llama.
    Weights are random and large enough for clear attention and greedy margins; norm scales are not all ones.
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
    """Return a transformers model with the random weights that `llama_checkpoint` describes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    defaults = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
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
    """Return the default `llama_checkpoint`: vocabulary 96, width 32, 2 layers, 4 heads, 2 KV heads, context 128."""
    return llama_checkpoint()


@pytest.fixture(scope="session")
def tiny_model() -> tuple[Llama, dict]:
    """Return ``(Llama, params)``: float32, vocabulary 61, width 32, 2 layers, 4 heads, 2 KV heads, context 64.

    Weights have std 0.3, not 0.02, so that the logits differ by much more than rounding.
    """
    model = Llama(LlamaConfig(61, 32, 80, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, max_positions=64))
    return model, noise(jax.eval_shape(lambda: init_base(model, jax.random.key(0))), 5)


@pytest.fixture(scope="session")
def lab():
    """Return the `Lab` of this process."""
    from helpers.lab import shared_lab

    return shared_lab()


@pytest.fixture
def unchecked():
    """As users call it, without the checks of annotations in tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
