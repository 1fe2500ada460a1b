"""Emulated matmul precision on a CPU, where XLA ignores the setting, and products of a single row on a GPU."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hydrajax import ops
from hydrajax.ops import trace

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="other backends follow the precision setting")


def rounded(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def test_inputs_and_gradients_are_rounded_and_sums_are_not():
    rng = np.random.default_rng(0)
    a, b, slope = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 70, 300), (2, 300, 90), (2, 70, 90)))

    def product(a, b):
        return ops.contract("bij,bjk->bik", a, b, jnp.float32)

    with jax.default_matmul_precision("bfloat16"):
        out, gradient = jax.vjp(product, a, b)
        to_a, to_b = gradient(slope)
    np.testing.assert_allclose(out, rounded(a) @ rounded(b), atol=1e-4)
    np.testing.assert_allclose(to_a, rounded(slope) @ rounded(b).swapaxes(1, 2), atol=1e-4)
    np.testing.assert_allclose(to_b, rounded(a).swapaxes(1, 2) @ rounded(slope), atol=1e-4)
    # Without the setting nothing is rounded; rounding would exceed the tolerance a hundredfold.
    np.testing.assert_allclose(product(a, b), a.astype(np.float64) @ b.astype(np.float64), atol=1e-4)


def test_gradients_of_stacked_kernels():
    """XLA compiled some of these to an instruction that fails when it runs."""
    sizes, rng = {"r": 64, "d": 48, "k": 2, "p": 3, "f": 32}, np.random.default_rng(0)
    for spec in ("rd,dpf->rpf", "rd,dpf->prf", "rd,dkpf->kprf", "kprf,dkpf->rd", "rd,fd->rf"):
        left, right, out = re.split(",|->", spec)
        a, b, slope = (rng.standard_normal([sizes[x] for x in axes]).astype(np.float32) for axes in (left, right, out))

        def gradients(a, b, slope, spec=spec):
            return jax.vjp(lambda a, b: ops.contract(spec, a, b, jnp.float32), a, b)[1](slope)

        with jax.default_matmul_precision("bfloat16"):
            to_a, to_b = jax.jit(gradients)(a, b, slope)
        expected_a = np.einsum(f"{out},{right}->{left}", rounded(slope), rounded(b))
        expected_b = np.einsum(f"{left},{out}->{right}", rounded(a), rounded(slope))
        np.testing.assert_allclose(to_a, expected_a, atol=1e-4, err_msg=spec)
        np.testing.assert_allclose(to_b, expected_b, atol=1e-4, err_msg=spec)


def test_bfloat16_products_are_accumulated_in_float32_and_rounded_once():
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((70, 1000), (1000, 90)))
    found = ops.contract("ij,jk->ik", a, b, jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), rounded(a) @ rounded(b), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("product", [ops.matmul, ops.matmul_transposed])
def test_a_single_row_is_doubled_on_a_gpu(product):
    """cuBLAS has no 16-bit matrix-vector product with a float32 result: XLA would convert the whole weight."""
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(24, 24)), jnp.bfloat16)
    for rows, multiplied in ((1, 2), (3, 3)):
        x = jnp.asarray(rng.normal(size=(rows, 24)), jnp.bfloat16)
        with trace.tracing(platform=trace.Platform("gpu", 1, 9.0)):
            call = jax.jit(lambda x, weight: product(x, weight, jnp.float32))
            assert f"(tensor<{multiplied}x24xbf16>, tensor<24x24xbf16>)" in call.lower(x, weight).as_text()
            found = call(x, weight)
        assert found.shape == (rows, 24)
        wide = np.asarray(weight, np.float64)
        exact = np.asarray(x, np.float64) @ (wide.T if product is ops.matmul_transposed else wide)
        np.testing.assert_allclose(found, exact, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_of_an_embedding_are_clipped_and_have_a_gradient(dtype):
    table = jnp.arange(7 * 16, dtype=dtype).reshape(7, 16) / 8
    index = np.array([[3, -1], [6, 900]])
    rows, gradient = jax.vjp(lambda table: ops.take_rows(table, index), table)
    np.testing.assert_array_equal(rows, np.asarray(table)[[[3, 0], [6, 6]]])
    np.testing.assert_array_equal(gradient(jnp.ones_like(rows))[0].astype(np.float32)[:, 0], [1, 0, 0, 1, 0, 0, 2])
    assert ops.take_rows(table, np.zeros((2, 0), np.int32)).shape == (2, 0, 16)


@pytest.mark.skipif(not trace.has_cpu_kernels(), reason="the CPU kernels were not built, or several devices")
def test_a_bfloat16_embedding_is_not_widened():
    table = jnp.zeros((300, 32), jnp.bfloat16)
    assert "f32[300,32]" not in jax.jit(ops.take_rows).lower(table, np.arange(5)).compile().as_text()
