"""The decode step traced for a GPU: its operations, and its tokens with interpreted kernels."""

from __future__ import annotations

import functools
import re
from collections import Counter

import jax
import numpy as np
import pytest

from helpers import described_programs
from helpers.described_programs import CONFIG
from hydrajax import ops
from hydrajax.api import make_autoregressive_fn
from hydrajax.bench.random_models import random_base
from hydrajax.decoding.state import Params
from hydrajax.ops import trace
from hydrajax.ops.gpu import add_norm, append_rows, tree_attention

GPU = trace.Platform("gpu", 1, 9.0)
TWO_GPUS = GPU.replace(devices=2)
lowered_step = functools.cache(functools.partial(described_programs.lowered_step, GPU, "cuda"))


def kernels_in(text: str) -> Counter:
    return Counter(re.findall(r'name = "(hydrajax_\w+)"', text))


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "DEFAULT"), ("float32", "HIGHEST")])
def test_only_float32_uses_the_highest_precision(dtype, precision):
    """Under "highest" a GPU would round the terms of one-row bfloat16 products before the sum."""
    text = lowered_step(dtype, "hydra++", "chain-2")
    assert set(re.findall(r"precision = \[(\w+), \w+\]", text)) == {precision}


def test_a_step_has_one_kernel_per_layer_and_one_to_append():
    names = tree_attention.NAME, tree_attention.SUM_NAME, append_rows.NAME, add_norm.NAME
    # Two layers and the prefix layer; one append for the base's caches and one for the prefix layer's.
    drafted = kernels_in(lowered_step("bfloat16", "hydra++", "chain-2"))
    plain = kernels_in(lowered_step("bfloat16", "none", "root"))
    assert [drafted[name] for name in names] == [3, 3, 2, 0]
    # One token: two norms per layer and the last one.
    assert [plain[name] for name in names] == [2, 2, 1, 5]


@pytest.mark.slow
def test_each_of_several_gpus_runs_the_kernels():
    plain = kernels_in(described_programs.lowered_step(TWO_GPUS, "cuda", "bfloat16", "none", "root"))
    assert plain == kernels_in(lowered_step("bfloat16", "none", "root"))


@pytest.fixture
def interpreted(monkeypatch):
    """Interpret the GPU kernels on this CPU."""
    with described_programs.interpreted(GPU, monkeypatch):
        yield


@pytest.mark.slow  # tests/ops compares the kernels with NumPy
@pytest.mark.parametrize(("kind", "tree"), [("lookup", "chain-3"), ("hydra++", "cartesian-3x2")])
def test_tree_decoding_with_gpu_kernels_equals_plain_decoding(interpreted, kind, tree):
    found = described_programs.decoded_with(kind, tree, "bfloat16")
    want = described_programs.decoded_without("bfloat16")
    np.testing.assert_array_equal(found.tokens, want.tokens)
    assert kind != "lookup" or found.tokens_per_step() > 1.2


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


def test_the_loop_is_one_cuda_graph_by_default(monkeypatch):
    assert ops.compiler_options() is None  # on a CPU
    with trace.tracing(platform=GPU):
        assert "WHILE" in ops.compiler_options()["xla_gpu_enable_command_buffer"]
    monkeypatch.setenv("HYDRAJAX_CUDA_GRAPHS", "0")
    with trace.tracing(platform=trace.Platform("gpu", 1, 9.0)):
        assert ops.compiler_options() is None
