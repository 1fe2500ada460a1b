"""Compare matmuls with float and int8 weights with NumPy, and an int8 base with transformers.

The reference of an int8 base is the model of transformers with its linear layers rounded (`helpers.rounded`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from transformers import AutoModelForCausalLM

from helpers.lab import quick_jit
from helpers.rounded import with_int8
from hydrajax.formats.huggingface import load_llama
from hydrajax.lowbit.quantized import Int8
from hydrajax.models.attention import causal_mask
from hydrajax.models.weights import project

VOCAB = 17


def test_project_is_a_matmul_over_the_first_axis():
    """A CPU uses another path for single rows of even and odd width."""
    random = np.random.default_rng(0)
    for rows in ((), (1,), (1, 1, 1), (2,), (2, 3)):
        for kernel in ((6,), (6, 5), (7, 5), (6, 3, 5), (6, 2, 3, 4)):
            x = random.standard_normal((*rows, kernel[0])).astype(np.float32)
            w = random.standard_normal(kernel).astype(np.float32)
            expected = np.tensordot(x.astype(np.float64), w.astype(np.float64), 1).reshape(*rows, -1)
            found = project(jnp.asarray(x), jnp.asarray(w))
            assert (found.dtype, found.shape) == (np.float32, expected.shape)
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [(1,), (3,)])
def test_project_in_bfloat16_sums_in_the_wanted_dtype(rows):
    """300 products of 1: bfloat16 cannot tell 300 from its neighbours, float32 can."""
    x, w = jnp.ones((*rows, 300), jnp.bfloat16), jnp.ones((300, 2), jnp.bfloat16).at[0, 0].set(2)
    wide = project(x, w, jnp.float32)
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide, np.broadcast_to(np.float32([301, 300]), (*rows, 2)))
    narrow = project(x, w)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), wide, rtol=2**-7)


# Large enough that no scale is a denormal number.
FINITE = st.floats(-1e4, 1e4, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0)
KERNELS = arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=4, max_side=6), elements=FINITE)


@settings(max_examples=50, deadline=None)
@given(KERNELS)
def test_quantize_rounds_to_the_nearest_of_255_steps(kernel):
    found = Int8.of(kernel)
    values, scale = found.values, found.scale
    assert (values.dtype, values.shape) == (np.int8, kernel.shape)
    assert (scale.dtype, scale.shape) == (np.float32, kernel.shape[1:])
    largest = np.abs(kernel.astype(np.float64)).max(axis=0)
    steps = largest / 127
    used = largest > 0
    np.testing.assert_allclose(scale[used], steps[used], rtol=1e-6)
    error = np.abs(values.astype(np.float64) * scale - kernel)
    assert (error <= 0.5001 * steps).all()  # an all-zero feature stays exactly 0
    assert (np.abs(values).max(axis=0) == np.where(used, 127, 0)).all()
    assert (np.abs(values.astype(np.int16)) <= 127).all()
    assert np.isfinite(scale).all()
    extreme = np.abs(kernel) == np.abs(kernel).max(axis=0)
    np.testing.assert_array_equal(values[extreme], np.sign(kernel[extreme]) * 127)


def test_quantize_a_kernel_of_many_rows():
    """Kernels may be bfloat16 and transposed views, as in checkpoints."""
    random = np.random.default_rng(0)
    kernel = random.standard_normal((3, 9000)).astype(np.float32).T
    kernel[8999, 1] = -50.0  # the last row sets the scale of the first
    for given_kernel in (kernel, kernel.astype(jnp.bfloat16)):
        wide = given_kernel.astype(np.float64)
        steps = np.abs(wide).max(axis=0) / 127
        found = Int8.of(given_kernel)
        values, scale = found.values, found.scale
        np.testing.assert_allclose(scale, steps, rtol=1e-6)
        assert (np.abs(values - wide / steps) <= 0.5001).all()


@pytest.mark.parametrize(
    ("dtype", "tolerance", "rows"),
    [(jnp.float32, 1e-6, (2, 3)), (jnp.bfloat16, 2**-8, (1,)), (jnp.bfloat16, 2**-8, (6,))],
)
def test_project_with_int8_is_the_product_with_the_dequantised_kernel(rows, dtype, tolerance):
    random = np.random.default_rng(1)
    found = Int8.of(random.standard_normal((24, 2, 5)).astype(np.float32) * np.linspace(0.01, 3, 5))
    values, scale = found.values, found.scale
    kernel = jax.tree.map(jnp.asarray, found)
    x = jnp.asarray(random.standard_normal((*rows, 24)), dtype)
    wide = np.asarray(x, np.float64)
    expected = np.tensordot(wide, values.astype(np.float64) * scale, 1).reshape(*rows, -1)
    size = np.tensordot(np.abs(wide), np.abs(values.astype(np.float64) * scale), 1).reshape(*rows, -1)
    found = project(x, kernel)
    assert found.dtype == dtype
    assert (np.abs(found.astype(np.float32) - expected) <= tolerance * size).all()
    in_float32 = project(x, kernel, jnp.float32)  # weights are exact in bfloat16 and scaled after the sum
    assert in_float32.dtype == jnp.float32
    assert (np.abs(in_float32 - expected) <= 1e-6 * size).all()
    np.testing.assert_allclose(kernel.dequantized(), values.astype(np.float64) * scale, rtol=1e-6)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def loaded(request, llama_checkpoint):
    """Return a checkpoint directory and its base with int8 weights."""
    directory = llama_checkpoint(vocab_size=VOCAB, tie_word_embeddings=request.param)
    return directory, *load_llama(directory, quantize="int8")


def test_int8_logits_are_those_of_the_rounded_model(loaded):
    directory, model, params = loaded
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 50))

    @quick_jit
    def logits(params):
        positions = np.broadcast_to(np.arange(50), ids.shape)
        hidden = model.apply({"params": params}, ids, positions, causal_mask(50)).hidden
        return model.apply({"params": params}, hidden, method="logits")

    found = np.asarray(logits(params))
    hf = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        before = hf(torch.tensor(ids)).logits.numpy()
        after = with_int8(hf)(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(found, after, atol=1e-4, rtol=0)
    assert np.abs(found - before).max() > 1e-3
    assert np.sqrt(np.mean((found - before) ** 2)) < 0.05 * before.std()


def test_int8_scales_and_bfloat16_numbers(loaded):
    directory, _, params = loaded
    low_model, low = load_llama(directory, jnp.bfloat16, quantize="int8")
    assert low_model.quantize == "int8"
    assert low_model.dtype == jnp.bfloat16
    for (path, mine), before in zip(jax.tree.leaves_with_path(low), jax.tree.leaves(params), strict=True):
        kept = isinstance(path[-1], jax.tree_util.GetAttrKey)  # of a quantised kernel
        assert mine.dtype == (before.dtype if kept else jnp.bfloat16)
        np.testing.assert_array_equal(mine, before if kept else before.astype(jnp.bfloat16))
