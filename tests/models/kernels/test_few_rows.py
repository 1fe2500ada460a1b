"""Compare the CPU kernels with NumPy in float64 and with the operations of XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.models import attention, backend
from hydrajax.models.attention import KVSegment
from hydrajax.models.kernels import few_rows

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not few_rows.available(), reason="the CPU kernels were not built"
)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 64])
@pytest.mark.parametrize(("depth", "width"), [(320, 2048), (17, 31), (1, 32), (50, 65), (1024, 320)])
def test_products_equal_numpy(rows, depth, width):
    rng = np.random.default_rng(rows * depth + width)
    x, weight = normal(rng, rows, depth), normal(rng, depth, width)
    exact = x.astype(np.float64) @ weight.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(weight)
    assert np.max(np.abs(jax.jit(few_rows.matmul)(x, weight) - exact) / size) < depth * 2**-24


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 64])
@pytest.mark.parametrize(("depth", "width"), [(320, 2048), (17, 31), (1, 32), (50, 65)])
def test_products_with_transposed_weights_equal_numpy(rows, depth, width):
    rng = np.random.default_rng(rows * depth + width)
    x, weight = normal(rng, rows, depth), normal(rng, width, depth)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(weight.T)
    assert np.max(np.abs(jax.jit(few_rows.matmul_transposed)(x, weight) - exact) / size) < depth * 2**-24


@pytest.mark.parametrize(
    ("product", "shape"), [(few_rows.matmul, (320, 1030)), (few_rows.matmul_transposed, (1031, 320))]
)
def test_rows_are_independent(product, shape):
    rng = np.random.default_rng(0)
    x, weight = normal(rng, 13, 320), normal(rng, *shape)
    together = np.asarray(product(x, weight))
    for rows in (1, 2, 7, 8, 9):
        np.testing.assert_array_equal(product(x[:rows], weight), together[:rows])


@pytest.mark.parametrize("width", [576, 37, 5])
@pytest.mark.parametrize("summand", [True, False])
def test_norms_equal_numpy_and_rows_are_independent(width, summand):
    rng = np.random.default_rng(width)
    x, scale = normal(rng, 13, width), normal(rng, width)
    added = normal(rng, 13, width) if summand else None
    norm = jax.jit(lambda x, added: backend.add_norm(x, added, scale, 1e-5))
    total, normed = norm(x, added)
    exact = x.astype(np.float64) + (added if summand else 0)
    np.testing.assert_allclose(total, exact, rtol=1e-6, atol=1e-6)
    expected = exact / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(normed, expected, rtol=2e-6, atol=1e-6)
    for row in range(3):
        alone = norm(x[row], None if added is None else added[row])
        np.testing.assert_array_equal(alone[1], normed[row])


def test_nan_stays_in_its_row():
    x, weight = np.ones((3, 40), np.float32), np.ones((40, 64), np.float32)
    x[1, 5] = np.nan
    out = np.asarray(few_rows.matmul(x, weight))
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
]


def parts_of(rng, batch, kv_heads, tokens, slots, head_dim, *, window: bool):
    """Return a block with a causal mask and a cache in which each sequence fills a different number of slots."""
    lengths = rng.integers(0, slots + 1, batch)
    lengths[0] = slots
    visible = (np.arange(slots) < lengths[:, None])[:, None, None, None, :]
    if window:
        visible = visible & (np.arange(slots) >= np.arange(tokens)[:, None])
    shapes = (batch, kv_heads, tokens, head_dim), (batch, kv_heads, slots, head_dim)
    block, cache = ((normal(rng, *shape), normal(rng, *shape)) for shape in shapes)
    return [KVSegment(*block, np.asarray(attention.causal_mask(tokens))), KVSegment(*cache, visible)]


def exact_attention(queries, parts):
    """Compute attention in float64 over the concatenated segments."""
    batch, heads, tokens, head_dim = queries.shape
    keys, values = (
        np.concatenate([part[i].astype(np.float64) for part in parts], axis=2).repeat(
            heads // parts[0].keys.shape[1], 1
        )
        for i in (0, 1)
    )
    masks = [part.visible[None] if part.visible.ndim == 2 else part.visible[:, 0, 0] for part in parts]
    visible = np.concatenate([np.broadcast_to(m, (batch, tokens, m.shape[-1])) for m in masks], axis=-1)[:, None]
    scores = np.where(visible, queries @ keys.swapaxes(2, 3) / np.sqrt(head_dim), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = weights @ values / weights.sum(axis=-1, keepdims=True)
    return out.swapaxes(1, 2).reshape(batch, tokens, -1)


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_equals_numpy(shape, window):
    batch, heads, kv_heads, tokens, slots, head_dim = shape
    rng = np.random.default_rng(sum(shape))
    parts = parts_of(rng, batch, kv_heads, tokens, slots, head_dim, window=window)
    queries = 3 * normal(rng, batch, heads, tokens, head_dim)
    attend = jax.jit(lambda queries: attention.attend(queries, parts))
    assert "hydrajax_attend" in attend.lower(queries).as_text()
    np.testing.assert_allclose(attend(queries), exact_attention(queries, parts), atol=1e-5)


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


def test_a_query_without_visible_keys_gives_finite_numbers():
    rng = np.random.default_rng(2)
    queries = normal(rng, 1, 2, 3, 16)
    part = KVSegment(normal(rng, 1, 2, 5, 16), normal(rng, 1, 2, 5, 16), np.zeros((3, 5), bool))
    assert np.isfinite(attention.attend(queries, [part])).all()


def test_gradients_equal_those_of_the_plain_operations():
    rng = np.random.default_rng(3)
    x, weight, slope = normal(rng, 5, 24), normal(rng, 24, 40), normal(rng, 5, 40)
    for ours, plain in zip(*(jax.vjp(f, x, weight)[1](slope) for f in (few_rows.matmul, jnp.matmul)), strict=True):
        np.testing.assert_array_equal(ours, plain)
    parts = parts_of(rng, 1, 2, 4, 9, 16, window=False)
    queries, slope = normal(rng, 1, 4, 4, 16), normal(rng, 1, 4, 64)

    def gradient(attend):
        def of(queries, keys, values):
            return attend(queries, [parts[0], KVSegment(keys, values, parts[1].visible)])

        return jax.vjp(of, queries, parts[1].keys, parts[1].values)[1](slope)

    for ours, plain in zip(gradient(attention.attend), gradient(attention.attend_plain), strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-6)


def test_vmap():
    rng = np.random.default_rng(4)
    x, weight = normal(rng, 3, 5, 24), normal(rng, 24, 40)
    mapped = jax.vmap(few_rows.matmul, in_axes=(0, None))(x, weight)
    np.testing.assert_array_equal(mapped.reshape(15, 40), few_rows.matmul(x.reshape(15, 24), weight))


@pytest.mark.parametrize(
    ("rows", "dtype", "taken"),
    [
        (1, "float32", True),
        (2, "float32", True),
        (64, "float32", True),
        (65, "float32", False),
        (8, "bfloat16", True),
    ],
)
def test_shapes_that_use_the_kernels(rows, dtype, taken):
    x, weight = jnp.ones((rows, 32), dtype), jnp.ones((32, 64), dtype)
    text = jax.jit(lambda x, w: backend.matmul(x, w, x.dtype)).lower(x, weight).as_text()
    assert ("hydrajax_matmul" in text) == taken


def test_xla_gives_the_same_products(monkeypatch):
    rng = np.random.default_rng(5)
    x, weight = normal(rng, 8, 64), normal(rng, 64, 96)
    with_kernels = backend.matmul(x, weight, jnp.float32)
    monkeypatch.setattr(few_rows, "available", lambda: False)
    np.testing.assert_allclose(backend.matmul(x, weight, jnp.float32), with_kernels, atol=1e-5)
