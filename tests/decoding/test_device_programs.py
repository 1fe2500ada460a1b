"""The decode step traced for a GPU or a TPU: its operations, compiled program, and tokens with interpreted kernels."""

import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from helpers import described_programs
from helpers.described_programs import CONFIG
from hydrajax import ops
from hydrajax.api import make_autoregressive_fn
from hydrajax.bench.random_models import random_base
from hydrajax.decoding.state import Params
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BoundBase
from hydrajax.models.cache import append
from hydrajax.ops import trace
from hydrajax.ops.gpu import add_norm, append_rows, tree_attention
from hydrajax.sharding import placer

GPU, TPU, NONE = trace.Platform("gpu", 1, 9.0), trace.Platform("tpu", 1), trace.Platform("none", 1)
TOOL = Path(__file__).resolve().parents[2] / "tools" / "tpu" / "compile_report.py"

step_of_gpu = functools.cache(functools.partial(described_programs.lowered_step, GPU, "cuda"))
step_of_tpu = functools.cache(functools.partial(described_programs.lowered_step, TPU, "tpu", "bfloat16"))
step_of_two_tpus = functools.partial(described_programs.lowered_step, TPU.replace(devices=2), "tpu", "bfloat16")


def kernels_in(text: str) -> Counter:
    return Counter(re.findall(r'name = "(hydrajax_\w+)"', text))


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "DEFAULT"), ("float32", "HIGHEST")])
def test_only_float32_uses_the_highest_precision(dtype, precision):
    """Under "highest" a GPU would round the terms of one-row bfloat16 products before the sum."""
    text = step_of_gpu(dtype, "hydra++", "chain-2")
    assert set(re.findall(r"precision = \[(\w+), \w+\]", text)) == {precision}


def test_a_step_has_one_kernel_per_layer_and_one_to_append():
    names = tree_attention.NAME, tree_attention.SUM_NAME, append_rows.NAME, add_norm.NAME
    # Two layers and the prefix layer; one append for the base's caches and one for the prefix layer's.
    drafted = kernels_in(step_of_gpu("bfloat16", "hydra++", "chain-2"))
    plain = kernels_in(step_of_gpu("bfloat16", "none", "root"))
    assert [drafted[name] for name in names] == [3, 3, 2, 0]
    # One token: two norms per layer and the last one.
    assert [plain[name] for name in names] == [2, 2, 1, 5]


@pytest.mark.slow
def test_each_of_several_gpus_runs_the_kernels():
    plain = kernels_in(described_programs.lowered_step(GPU.replace(devices=2), "cuda", "bfloat16", "none", "root"))
    assert plain == kernels_in(step_of_gpu("bfloat16", "none", "root"))


@pytest.mark.slow
def test_compiler_options_apply_to_outermost_functions_only(monkeypatch):
    """JAX rejects them elsewhere, and a jitted function may call a decode function."""
    model, base = random_base(CONFIG)
    monkeypatch.setattr(ops, "compiler_options", lambda: {"xla_cpu_enable_fast_math": False})
    decode_fn = make_autoregressive_fn(model, max_new_tokens=4)
    prompt = np.arange(16, dtype=np.int32)[None]
    alone = decode_fn(Params(base, {}), prompt).tokens
    np.testing.assert_array_equal(jax.jit(lambda base: decode_fn(Params(base, {}), prompt).tokens)(base), alone)
    np.testing.assert_array_equal(jax.jit(lambda: decode_fn(Params(base, {}), prompt).tokens)(), alone)


def test_each_layer_has_one_kernel():
    """Two layers, and the prefix layer."""
    assert step_of_tpu("none", "root").count("@tpu_custom_call") == 2
    assert step_of_tpu("hydra++", "chain-2").count("@tpu_custom_call") == 3
    assert step_of_two_tpus("none", "root").count("@tpu_custom_call") == 2


def test_no_weight_is_multiplied_by_a_single_row():
    """A TPU does that on its vector unit, several times slower than two rows."""
    for kind, tree in (("none", "root"), ("hydra++", "chain-2")):
        products = [line for line in step_of_tpu(kind, tree).splitlines() if "dot_general" in line]
        assert len(products) >= 9  # four for each layer, and the lm head
        assert not any(re.search(r"tensor<1x\d+xbf16>", line) for line in products)


def test_a_single_token_fills_a_tile_with_its_rows():
    """On one TPU; several would exchange all rows."""
    of_layers = re.findall(r"dot_general .*tensor<16x(?:128|192|256)xbf16>", step_of_tpu("none", "root"))
    assert len(of_layers) == 2 * 4
    assert not re.search(r"dot_general .*tensor<16x", step_of_two_tpus("none", "root"))


@pytest.mark.parametrize("window", [None, pytest.param(20, marks=pytest.mark.slow)])
def test_a_repeated_token_gets_the_state_of_a_single_one(window, monkeypatch):
    """The cache too: only one of the rows may enter it. The text is compared below, with a window."""
    model, base = random_base(CONFIG.replace(sliding_window=window), np.dtype("float32"))
    prompt = np.random.default_rng(0).integers(0, 128, (1, 24)).astype(np.int32)
    bound = BoundBase(model, base)
    prefilled = jax.jit(lambda: bound.forward(prompt, np.arange(24)[None], causal_mask(24)))()
    cache = jax.jit(lambda block: append(model.init_cache(1, 64), block, np.array([24], np.int32)))(prefilled.block)
    token, position = np.array([[7]], np.int32), np.array([[24]], np.int32)

    def passed(platform):
        with trace.tracing(platform=platform):
            return jax.jit(lambda cache: bound.forward(token, position, np.ones((1, 1), bool), cache, (0, 1)))(cache)

    with described_programs.interpreted(TPU, monkeypatch):
        found, want = passed(TPU), passed(NONE)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, want)


def test_weights_are_stored_as_a_tpu_reads_them():
    """Fused kernels with the input next to the last axis; their logical shape and numbers stay."""
    for shape, order in (((8, 2, 16), (1, 0, 2)), ((8, 3, 4, 6), (2, 1, 0, 3)), ((8, 16), (0, 1)), ((4,), (0,))):
        array = np.random.default_rng(0).random(shape, np.float32)
        with trace.tracing(platform=TPU):
            placed = placer(None)(array, None)
        np.testing.assert_array_equal(placed, array)
        assert placed.format.layout.major_to_minor == order
        assert jax.jit(lambda x: x + 1).lower(placed).compile().input_formats[0][0].layout.major_to_minor == order
        assert placer(None)(array, None).format.layout.major_to_minor == tuple(range(len(shape)))


def test_parts_of_a_fused_product_with_many_rows_equal_numpy():
    """With many rows a TPU multiplies by section: gate and up, 1 and 4 queries a key."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 70, 16)).astype(np.float32)
    for features in ((24,), (2, 24), (3, 3, 8), (3, 6, 8)):
        kernel = rng.normal(size=(16, *features)).astype(np.float32)
        with trace.tracing(platform=TPU):
            found = jax.jit(lambda x, kernel: ops.matmul_parts(x, kernel, np.float32))(x, kernel)
        want = np.moveaxis(np.tensordot(x, kernel, 1), (0, 1), (-3, -2))
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


SLOW_PRODUCTS = pytest.mark.xfail(strict=True, reason="bare products take 1.88 to 2.05 of the bytes (docs/tpu.md)")


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", pytest.param("v5p", marks=SLOW_PRODUCTS), "v6e"])
def test_the_compiled_program_copies_no_weights(tmp_path, chip):
    """Compiled for a described chip; it must stay within a quarter of the cycles of the bytes."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("pip install 'jax[tpu]': the TPU's compiler is missing")
    command = [sys.executable, TOOL, "--what", "ar,verify", "--chips", chip, "--json", tmp_path / "rows.json"]
    subprocess.run(command, check=True, timeout=600)
    for row in json.loads((tmp_path / "rows.json").read_text())["rows"]:
        assert row["fits"]
        assert row["own_cycles"] > 0
        assert row["copies"] == 0
        assert 0.8 < row["cycles"] / row["floor_cycles"] < 1.35


# In bfloat16 a tree's sums have another order, so nearly equal tokens may change places.
@pytest.mark.parametrize(
    ("platform", "kind", "tree", "dtype", "window"),
    [
        (TPU, "lookup", "chain-3", "float32", 20),
        pytest.param(TPU, "hydra++", "cartesian-3x2", "float32", None, marks=pytest.mark.slow),
        pytest.param(TPU, "hydra++", "cartesian-3x2", "bfloat16", None, marks=pytest.mark.slow),
        # tests/ops compares the kernels of a GPU with NumPy
        pytest.param(GPU, "lookup", "chain-3", "bfloat16", None, marks=pytest.mark.slow),
        pytest.param(GPU, "hydra++", "cartesian-3x2", "bfloat16", None, marks=pytest.mark.slow),
    ],
)
def test_tree_decoding_equals_plain_decoding(platform, kind, tree, dtype, window, monkeypatch):
    """With the kernels of the device; in float32 compared with XLA's own operations."""
    with described_programs.interpreted(platform, monkeypatch):
        found = described_programs.decoded_with(kind, tree, dtype, window)
        with trace.tracing(platform=NONE if dtype == "float32" else platform):
            plain = described_programs.decoded_without(dtype, window)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert kind != "lookup" or found.tokens_per_step() > (1.2 if platform is GPU else 1.1)


def test_compiler_options(monkeypatch):
    """The loop is one CUDA graph; products of one TPU get more vector memory; unless the user sets either."""
    assert ops.compiler_options() is None  # on a CPU
    with trace.tracing(platform=GPU):
        assert "WHILE" in ops.compiler_options()["xla_gpu_enable_command_buffer"]
    with trace.tracing(platform=TPU):
        assert ops.compiler_options() == {"xla_tpu_scoped_vmem_limit_kib": "32768"}
    with trace.tracing(platform=TPU.replace(devices=8)):  # these fetch more weights early
        assert ops.compiler_options() is None
    monkeypatch.setenv("HYDRAJAX_CUDA_GRAPHS", "0")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=65536")
    for platform in (trace.Platform("gpu", 1, 9.0), trace.Platform("tpu", 1)):
        with trace.tracing(platform=platform):
            assert ops.compiler_options() is None
