"""The decode step traced for a TPU: its operations, its tokens with the simulated kernel, and its compiled program."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from helpers import described_programs
from hydrajax import ops
from hydrajax.bench.random_models import random_base
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BoundBase
from hydrajax.models.cache import append
from hydrajax.ops import trace
from hydrajax.sharding import placer

TPU = trace.Platform("tpu", 1)
TOOL = Path(__file__).resolve().parents[2] / "tools" / "tpu" / "compile_report.py"

lowered_step = functools.cache(functools.partial(described_programs.lowered_step, TPU, "tpu", "bfloat16"))


@pytest.fixture
def simulated(monkeypatch):
    """Simulate the TPU kernel on this CPU."""
    with described_programs.interpreted(TPU, monkeypatch):
        yield


def test_each_layer_has_one_kernel():
    """Two layers, and the prefix layer."""
    assert lowered_step("none", "root").count("@tpu_custom_call") == 2
    assert lowered_step("hydra++", "chain-2").count("@tpu_custom_call") == 3
    several = described_programs.lowered_step(TPU.replace(devices=2), "tpu", "bfloat16", "none", "root")
    assert several.count("@tpu_custom_call") == 2


def test_no_weight_is_multiplied_by_a_single_row():
    """A TPU does that on its vector unit, several times slower than two rows."""
    for kind, tree in (("none", "root"), ("hydra++", "chain-2")):
        products = [line for line in lowered_step(kind, tree).splitlines() if "dot_general" in line]
        assert len(products) >= 9  # four for each layer, and the lm head
        assert not any(re.search(r"tensor<1x\d+xbf16>", line) for line in products)


def test_a_single_token_fills_a_tile_with_its_rows():
    """On one TPU; several would exchange all rows."""
    of_layers = re.findall(r"dot_general .*tensor<16x(?:128|192|256)xbf16>", lowered_step("none", "root"))
    assert len(of_layers) == 2 * 4
    two = described_programs.lowered_step(TPU.replace(devices=2), "tpu", "bfloat16", "none", "root")
    assert not re.search(r"dot_general .*tensor<16x", two)


@pytest.mark.parametrize("window", [None, pytest.param(20, marks=pytest.mark.slow)])
def test_a_repeated_token_gets_the_state_of_a_single_one(simulated, window):
    """The cache too: only one of the rows may enter it. The text is compared below, with a window."""
    model, base = random_base(described_programs.CONFIG.replace(sliding_window=window), np.dtype("float32"))
    prompt = np.random.default_rng(0).integers(0, 128, (1, 24)).astype(np.int32)
    bound = BoundBase(model, base)
    prefilled = jax.jit(lambda: bound.forward(prompt, np.arange(24)[None], causal_mask(24)))()
    cache = jax.jit(lambda block: append(model.init_cache(1, 64), block, np.array([24], np.int32)))(prefilled.block)
    token, position = np.array([[7]], np.int32), np.array([[24]], np.int32)

    def passed(platform):
        with trace.tracing(platform=platform):
            return jax.jit(lambda cache: bound.forward(token, position, np.ones((1, 1), bool), cache, (0, 1)))(cache)

    found, want = passed(TPU), passed(trace.Platform("none", 1))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, want)


def test_products_of_one_tpu_get_more_vector_memory_unless_the_user_sets_it(monkeypatch):
    assert ops.compiler_options() is None  # on a CPU
    with trace.tracing(platform=TPU):
        assert ops.compiler_options() == {"xla_tpu_scoped_vmem_limit_kib": "32768"}
    with trace.tracing(platform=TPU.replace(devices=8)):  # these fetch more weights early
        assert ops.compiler_options() is None
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=65536")
    with trace.tracing(platform=trace.Platform("tpu", 1)):
        assert ops.compiler_options() is None


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


# In bfloat16 a tree's sums have another order, so nearly equal tokens may change places.
@pytest.mark.parametrize(
    ("kind", "tree", "dtype", "window"),
    [("lookup", "chain-3", "float32", 20)]
    + [
        pytest.param("hydra++", "cartesian-3x2", dtype, None, marks=pytest.mark.slow)
        for dtype in ("float32", "bfloat16")
    ],
)
def test_tree_decoding_on_a_tpu_equals_plain_decoding(simulated, kind, tree, dtype, window):
    found = described_programs.decoded_with(kind, tree, dtype, window)
    assert kind != "lookup" or found.tokens_per_step() > 1.1
    # In float32 compared with XLA's own operations.
    with trace.tracing(platform=trace.Platform("none", 1) if dtype == "float32" else trace.platform()):
        plain = described_programs.decoded_without(dtype, window)
    np.testing.assert_array_equal(found.tokens, plain.tokens)


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
