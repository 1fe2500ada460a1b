"""Compare the CPU kernels with NumPy in float64 and with the operations of XLA."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.numpy_attention import exact_attention
from hydrajax import ops
from hydrajax.models import attention
from hydrajax.models.attention import KVSegment
from hydrajax.ops.cpu import backend as cpu
from hydrajax.ops.cpu import library

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not library.available(), reason="the CPU kernels were not built"
)


def normal(rng, *shape, dtype=jnp.float32):
    return rng.standard_normal(shape).astype(dtype)


BFLOAT16 = 2**-8  # the largest rounding error, relative
EVERY = (*range(1, 16), 17, 64)  # numbers of rows: each up to 14 has its own code
SOME = (1, 8, 9, 14, 15)
SOME_QUERIES = 1, 3, 6, 8, 9, 11, 17
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.mark.parametrize(
    ("numbers", "depth", "width"),
    [(EVERY, 320, 2048), (SOME, 1031, 270), (EVERY, 96, 113), (SOME, 17, 31), (SOME, 1, 32), (SOME, 50, 65)],
)
@DTYPES
def test_products_equal_numpy(numbers, depth, width, dtype):
    rng = np.random.default_rng(depth + width)
    weight = normal(rng, depth, width, dtype=dtype)
    inputs = [normal(rng, rows, depth, dtype=dtype) for rows in numbers]
    turned = np.ascontiguousarray(weight.T)

    @jax.jit  # one compilation for all numbers of rows
    def products(inputs, weight, turned):
        return [
            (cpu.matmul(x, weight), cpu.matmul(x, weight, jnp.bfloat16), cpu.matmul_transposed(x, turned))
            for x in inputs
        ]

    for x, (found, rounded, transposed) in zip(inputs, products(inputs, weight, turned), strict=True):
        exact = x.astype(np.float64) @ weight.astype(np.float64)
        size = np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64)
        assert found.dtype == jnp.float32
        for one in (found, transposed):
            assert np.max(np.abs(np.asarray(one) - exact) / size) < depth * 2**-24, len(x)
        np.testing.assert_array_equal(rounded, found.astype(jnp.bfloat16))


@pytest.mark.parametrize(("x", "weight"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_products_of_two_dtypes(x, weight):
    rng = np.random.default_rng(6)
    x, weight = normal(rng, 3, 48, dtype=x), normal(rng, 48, 70, dtype=weight)
    wide = x.astype(np.float32), weight.astype(np.float32)
    np.testing.assert_array_equal(cpu.matmul(x, weight), cpu.matmul(*wide))
    transposed = cpu.matmul_transposed(x, np.ascontiguousarray(weight.T))
    np.testing.assert_array_equal(transposed, cpu.matmul_transposed(wide[0], np.ascontiguousarray(wide[1].T)))


@pytest.mark.parametrize(
    ("product", "shape"), [(cpu.matmul, (320, 1030)), (cpu.matmul, (1031, 270)), (cpu.matmul_transposed, (1031, 320))]
)
@DTYPES
def test_rows_are_independent(product, shape, dtype):
    rng = np.random.default_rng(0)
    depth = shape[0] if product is cpu.matmul else shape[1]
    x, weight = normal(rng, 35, depth, dtype=dtype), normal(rng, *shape, dtype=dtype)
    numbers = (1, 2, 7, 8, 9, 15, 16, 17, 33)
    of_some = jax.jit(lambda x, weight: [product(x[:rows], weight) for rows in (35, *numbers)])
    together, *others = map(np.asarray, of_some(x, weight))
    for rows, found in zip(numbers, others, strict=True):
        np.testing.assert_array_equal(found, together[:rows])


OTHER_CODE = """
from hydrajax.ops.cpu import backend as cpu
from hydrajax.ops.cpu import library
library.LIBRARIES = library.LIBRARIES[{first}:]
from test_cpu import *
test_products_equal_numpy(EVERY, 320, 2048, "bfloat16")
test_rows_are_independent(cpu.matmul, (1031, 270), "bfloat16")
if {first}:
    from test_ranking import test_likeliest_tokens_are_the_first_of_equal_ones_with_their_log_probabilities as likeliest
    likeliest()
    test_products_equal_numpy(EVERY, 320, 2048, "float32")
    test_rows_are_independent(cpu.matmul_transposed, (1031, 320), "float32")
    test_norms_equal_numpy_and_rows_are_independent(37, True, "bfloat16")
    test_attention_equals_numpy("float32", True)
    test_queries_are_independent(6, "bfloat16")
    test_no_other_scores_than_those_of_keys_are_read(29, 20)
print("passed")
"""


@pytest.mark.parametrize("first", [0, 1])
def test_the_code_for_every_cpu_gives_the_same(first):
    """The choice of instructions is made once in a process. The second library is that of CPUs with AVX2 only, if there
    are several. With AMX the tests of bfloat16 above are of its code.
    """
    env = os.environ | {"HYDRAJAX_PLAIN_CPU_KERNELS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command, folder = [sys.executable, "-c", OTHER_CODE.format(first=first)], Path(__file__).parent
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "passed\n", done.stderr[-2000:]


@pytest.mark.parametrize(
    ("width", "summand", "dtype"),
    [(576, True, "float32"), (37, False, "float32"), (37, True, "bfloat16"), (5, False, "bfloat16")],
)
def test_norms_equal_numpy_and_rows_are_independent(width, summand, dtype):
    rng = np.random.default_rng(width)
    x, scale = normal(rng, 13, width, dtype=dtype), normal(rng, width, dtype=dtype)
    added = normal(rng, 13, width, dtype=dtype) if summand else None
    norm = jax.jit(lambda x, added: ops.add_norm(x, added, scale, 1e-5))
    assert "hydrajax_add_norm" in norm.lower(x, added).as_text()
    total, normed = norm(x, added)
    rounding = BFLOAT16 if dtype == "bfloat16" else 0
    exact = x.astype(np.float64) + (added.astype(np.float64) if summand else 0)
    np.testing.assert_allclose(np.asarray(total, np.float64), exact, rtol=1e-6 + rounding, atol=1e-6)
    exact = np.asarray(total, np.float64)
    expected = exact / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + 1e-5) * scale.astype(np.float64)
    np.testing.assert_allclose(np.asarray(normed, np.float64), expected, rtol=2e-6 + rounding, atol=1e-6)
    for row in range(3):
        alone = norm(x[row], None if added is None else added[row])
        np.testing.assert_array_equal(alone[1], normed[row])


@DTYPES
def test_nan_stays_in_its_row(dtype):
    x, weight = np.ones((3, 40), dtype), np.ones((40, 64), dtype)
    x[1, 5] = np.nan
    out = np.asarray(cpu.matmul(x, weight, jnp.dtype(dtype)), np.float32)
    assert np.isnan(out[1]).all()
    assert (out[[0, 2]] == 40).all()


SHAPES = [  # batch, heads, key-value heads, tokens, slots, head_dim
    (1, 8, 8, 8, 552, 64),
    (2, 4, 2, 13, 100, 32),
    (3, 6, 3, 2, 70, 16),
    (1, 8, 1, 16, 33, 128),
    (2, 5, 5, 64, 300, 64),
    (1, 4, 4, 7, 9, 48),
    (1, 1, 1, 2, 5, 256),
    (1, 8, 1, 9, 20, 512),
]


def parts_of(rng, batch, kv_heads, tokens, slots, head_dim, *, window: bool, dtype=jnp.float32):
    """Return a block with a causal mask and a cache in which each sequence fills a different number of slots."""
    lengths = rng.integers(0, slots + 1, batch)
    lengths[0] = slots
    visible = (np.arange(slots) < lengths[:, None])[:, None, None, None, :]
    if window:
        visible = visible & (np.arange(slots) >= np.arange(tokens)[:, None])
    shapes = (batch, kv_heads, tokens, head_dim), (batch, kv_heads, slots, head_dim)
    block, cache = ([normal(rng, *shape, dtype=dtype) for _ in range(2)] for shape in shapes)
    return [KVSegment(*block, np.asarray(attention.causal_mask(tokens))), KVSegment(*cache, visible)]


@pytest.mark.quick("float32-True", "bfloat16-False")
@pytest.mark.parametrize("window", [False, True])
@DTYPES
def test_attention_equals_numpy(dtype, window):
    for shape in SHAPES:
        batch, heads, kv_heads, tokens, slots, head_dim = shape
        rng = np.random.default_rng(sum(shape))
        parts = parts_of(rng, batch, kv_heads, tokens, slots, head_dim, window=window, dtype=dtype)
        queries = (3 * normal(rng, batch, heads, tokens, head_dim)).astype(dtype)
        sinks = normal(rng, heads) * 4 if tokens % 2 else None  # some larger than all scores
        attend = jax.jit(lambda queries, parts=parts, sinks=sinks: attention.attend(queries, parts, sinks=sinks))
        assert "hydrajax_attend" in attend.lower(queries).as_text()
        found, rounding = np.asarray(attend(queries), np.float64), BFLOAT16 if dtype == "bfloat16" else 0
        expected = exact_attention(queries, parts, sinks=sinks)
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-7 + rounding, err_msg=str(shape))


@pytest.mark.parametrize("heads", [2, 6])
@DTYPES
def test_queries_are_independent(heads, dtype):
    """Few queries are scored by other code than many, and see fewer slots together."""
    rng = np.random.default_rng(heads)
    block, cache = parts_of(rng, 1, 2, 20, 100, 48, window=True, dtype=dtype)
    queries = normal(rng, 1, heads, 20, 48, dtype=dtype)

    def of_first(tokens):
        visible = block.visible[:tokens], cache.visible[..., :tokens, :]
        parts = [part._replace(visible=some) for part, some in zip((block, cache), visible, strict=True)]
        return attention.attend(queries[:, :, :tokens], parts, sinks=np.arange(heads, dtype=np.float32))

    together, *others = jax.jit(lambda: [of_first(tokens) for tokens in (20, *SOME_QUERIES)])()
    for tokens, found in zip(SOME_QUERIES, others, strict=True):
        np.testing.assert_array_equal(found, together[:, :tokens])


@pytest.mark.parametrize(("slots", "tokens"), [(12, 7), (300, 3), (29, 20)])
def test_no_other_scores_than_those_of_keys_are_read(slots, tokens):
    """Memory after the last score holds 0 or what an earlier call left, more than each score here."""
    rng = np.random.default_rng(4)
    parts = parts_of(rng, 2, 1, tokens, slots, 16, window=False)
    parts = [part._replace(keys=part.keys / 8 - 6) for part in parts]
    queries = normal(rng, 2, 1, tokens, 16) / 8 + 6
    np.testing.assert_allclose(attention.attend(queries, parts), exact_attention(queries, parts), atol=1e-4)


def test_invisible_slots_are_not_read():
    """Slots after the length of a sequence contain garbage, which must not enter the result even as 0 * NaN."""
    rng = np.random.default_rng(1)
    block, cache = parts_of(rng, 1, 2, 3, 40, 16, window=False)
    cache.keys[:, :, 20:], cache.values[:, :, 20:] = np.nan, np.nan
    visible = np.broadcast_to(np.arange(40) < 20, (1, 1, 1, 1, 40))
    queries = normal(rng, 1, 2, 3, 16)
    short = KVSegment(cache.keys[:, :, :20], cache.values[:, :, :20], visible[..., :20])
    with_garbage = attention.attend(queries, [block, cache._replace(visible=visible)])
    np.testing.assert_array_equal(with_garbage, attention.attend(queries, [block, short]))


@pytest.mark.parametrize("tokens", [3, 20])
def test_a_key_that_is_not_a_number_shows_in_the_queries_that_see_it(tokens):
    rng = np.random.default_rng(3)
    block, cache = parts_of(rng, 1, 2, tokens, 40, 16, window=False)
    block.keys[:, :, 1] = np.nan
    out = np.asarray(attention.attend(normal(rng, 1, 2, tokens, 16), [block, cache]))
    assert np.isnan(out[:, 1:]).all()


def test_a_query_without_visible_keys_gives_finite_numbers():
    rng = np.random.default_rng(2)
    queries = normal(rng, 1, 2, 3, 16)
    part = KVSegment(normal(rng, 1, 2, 5, 16), normal(rng, 1, 2, 5, 16), np.zeros((3, 5), bool))
    assert np.isfinite(attention.attend(queries, [part])).all()


@pytest.mark.parametrize("product", [ops.matmul, ops.matmul_transposed])
def test_gradients_of_bfloat16_products_are_rounded_once(product):
    rng = np.random.default_rng(7)
    x, slope = normal(rng, 5, 32, dtype="bfloat16"), normal(rng, 5, 32, dtype="bfloat16")
    weight = normal(rng, 32, 32, dtype="bfloat16")
    out, gradient = jax.vjp(lambda x, weight: product(x, weight, jnp.bfloat16), x, weight)
    wide_x, wide_weight, wide_slope = (array.astype(np.float64) for array in (x, weight, slope))
    if product is ops.matmul_transposed:
        expected = wide_x @ wide_weight.T, wide_slope @ wide_weight, wide_slope.T @ wide_x
    else:
        expected = wide_x @ wide_weight, wide_slope @ wide_weight.T, wide_x.T @ wide_slope
    for found, exact in zip((out, *gradient(slope)), expected, strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=BFLOAT16, atol=1e-5)


def test_gradients_equal_those_of_the_plain_operations():
    rng = np.random.default_rng(3)
    x, weight, slope = normal(rng, 5, 24), normal(rng, 24, 40), normal(rng, 5, 40)
    slopes = [jax.jit(lambda f=f: jax.vjp(f, x, weight)[1](slope))() for f in (cpu.matmul, jnp.matmul)]
    for ours, plain in zip(*slopes, strict=True):
        np.testing.assert_array_equal(ours, plain)
    parts = parts_of(rng, 1, 2, 4, 9, 16, window=False)
    queries, slope = normal(rng, 1, 4, 4, 16), normal(rng, 1, 4, 64)

    def gradient(attend):
        def of(queries, keys, values):
            return attend(queries, [parts[0], KVSegment(keys, values, parts[1].visible)])

        return jax.jit(lambda *inputs: jax.vjp(of, *inputs)[1](slope))(queries, parts[1].keys, parts[1].values)

    for ours, plain in zip(gradient(attention.attend), gradient(attention.attend_plain), strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-6)


def test_vmap():
    rng = np.random.default_rng(4)
    x, weight = normal(rng, 3, 5, 24), normal(rng, 24, 40)
    mapped = jax.vmap(cpu.matmul, in_axes=(0, None))(x, weight)
    np.testing.assert_array_equal(mapped.reshape(15, 40), cpu.matmul(x.reshape(15, 24), weight))


def test_shapes_that_use_the_kernels():
    for rows, dtype in ((1, "float32"), (2, "float32"), (64, "float32"), (65, "float32"), (8, "bfloat16")):
        x, weight = jnp.ones((rows, 32), dtype), jnp.ones((32, 64), dtype)
        text = jax.jit(lambda x, w: ops.matmul(x, w, x.dtype)).lower(x, weight).as_text()
        assert ("hydrajax_matmul" in text) == (rows <= 64), rows
