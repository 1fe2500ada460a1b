"""Compare products with 8- and 4-bit weights with NumPy in float64, and the weights with GGUF's types."""

import ctypes
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.errors import HydrajaxError
from hydrajax.lowbit.int4_tiles import Int4Tiles, Int4TilesBy64, Int4TilesBy128
from hydrajax.lowbit.kernels import few_bits
from hydrajax.lowbit.mxfp4 import Mxfp4Tiles
from hydrajax.lowbit.tiles import Int8Tiles, Int8TilesBy64, Int8TilesBy128
from hydrajax.ops import trace
from hydrajax.ops.cpu import library

pytestmark = pytest.mark.skipif(not trace.has_few_bits(), reason="the CPU kernels were not built, or several devices")

SHAPES = [(64, 128), (320, 1100), (36, 70), (7, 5), (1, 1)]
KINDS = [Int8Tiles, Int8TilesBy128, Int4Tiles, Int4TilesBy64, Int4TilesBy128, Mxfp4Tiles]
GROUPS = {Int8Tiles: 32, Int8TilesBy64: 64, Int8TilesBy128: 128, Int4Tiles: 32, Int4TilesBy64: 64, Int4TilesBy128: 128}
GROUPS |= {Mxfp4Tiles: 32}


def rounded(x: np.ndarray) -> np.ndarray:
    """x in 255 steps for each group of 32 numbers, in float64."""
    out = np.zeros(x.shape)
    for row, at in np.ndindex(len(x), -(-x.shape[1] // 32)):
        group = x[row, 32 * at : 32 * at + 32]
        largest = np.abs(group).max()
        if largest > 0:
            steps = np.rint(group * (np.float32(127) / largest))
            out[row, 32 * at : 32 * at + 32] = steps * (float(largest) / 127)
    return out


def product(x, weight) -> np.ndarray:
    return np.asarray(jax.jit(lambda x, weight: weight.project(x, jnp.float32))(x, weight))


CASES = [((320, 1100), (1, 2, 3, 4, 5, 6, 8, 65), 1), *((shape, (5,), 1) for shape in SHAPES if shape != (320, 1100))]
CASES += [((64, 128), (3,), 1e-5)]  # scales that float16 holds as denormal numbers


@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_numpy(kind):
    rng, given = np.random.default_rng(0), []
    for shape, numbers, weights in CASES:
        inputs = [
            rng.standard_normal((rows, shape[0])) * np.exp(rng.standard_normal((1, shape[0]))) for rows in numbers
        ]
        kernel = rng.standard_normal(shape).astype(np.float32) * np.float32(weights)
        given.append(([x.astype(np.float32) for x in inputs], kind.of(kernel)))

    @jax.jit  # one compilation for all cases
    def products(given):
        return [[weight.project(x, jnp.float32) for x in inputs] for inputs, weight in given]

    for (shape, _, weights), (inputs, weight), found in zip(CASES, given, products(given), strict=True):
        kernel = np.asarray(weight.dequantized(), np.float64)
        for x, out in zip(inputs, found, strict=True):
            size = np.abs(rounded(x)) @ np.abs(kernel)
            # An offset of 4 bits cancels against the numbers.
            size += np.abs(rounded(x)) @ np.full(shape, weights) if issubclass(kind, Int4Tiles) else 0
            error = np.abs(out - rounded(x) @ kernel) / (size + 1e-9 * weights)
            assert np.max(error) < 2e-6, (shape, len(x), weights)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_independent_to_the_last_bit(kind):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((70, 100)).astype(np.float32)
    weight = kind.of(rng.standard_normal((100, 200)).astype(np.float32))
    numbers = (1, 2, 3, 4, 63, 64, 65)
    of_some = jax.jit(lambda x, weight: [weight.project(x[:rows], jnp.float32) for rows in (70, *numbers)])
    together, *others = map(np.asarray, of_some(x, weight))
    for rows, found in zip(numbers, others, strict=True):
        np.testing.assert_array_equal(found, together[:rows])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_in_its_row(kind):
    x, weight = np.ones((5, 64), np.float32), kind.of(np.ones((64, 64), np.float32))
    x[1, 5], x[3, 40] = np.nan, np.inf
    out = product(x, weight)
    assert not np.isfinite(out[[1, 3]]).any()
    np.testing.assert_allclose(out[[0, 2, 4]], 64, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_products_without_the_kernels(kind, monkeypatch):
    """The gradient is that of the product with the kernel. Without our kernels, as on several devices, where int4
    weights lie in tiles too, x is not rounded.
    """
    rng = np.random.default_rng(1)
    x, slope = rng.standard_normal((3, 40)).astype(np.float32), rng.standard_normal((3, 70)).astype(np.float32)
    weight = kind.of(rng.standard_normal((40, 70)).astype(np.float32))
    wide = np.asarray(weight.dequantized())
    found = jax.jit(jax.grad(lambda x: jnp.sum(weight.project(x, jnp.float32) * slope)))(x)
    np.testing.assert_allclose(found, slope @ wide.T, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(trace, "has_few_bits", lambda: False)
    np.testing.assert_allclose(product(x, weight), x @ wide, rtol=1e-5, atol=1e-5)


@functools.cache
def inputs_of_codes() -> tuple[list, list]:
    """Return rows of numbers with weights, and their products by the code that this CPU gets."""
    rng, given = np.random.default_rng(7), []
    halves = np.resize(np.arange(-254, 255, dtype=np.float32) / 2, (16, 100))  # ties of rounding
    for kind in KINDS:
        weight = kind.of(rng.standard_normal((100, 200)).astype(np.float32) * np.logspace(-5, 0, 200, dtype=np.float32))
        numbers = (1, 2, 3, 4, 6, 9, 20, 70)
        given.append(([*(rng.standard_normal((rows, 100)).astype(np.float32) for rows in numbers), halves], weight))
    # The largest integers, which saturate where 16 bits do not hold their sums.
    x = np.array([[127], [-127]], np.float32) * np.ones((1, 32), np.float32)
    one = np.ones((1, 1, 64), np.float16)
    for number in (-128, -127, 127):
        given.append(([x], Int8Tiles(np.full((1, 1, 8, 64, 4), number, np.int8), one, (32, 64))))
    given.append(([x], Int4Tiles(np.full((1, 1, 4, 64, 4), 255, np.uint8), one, 0 * one, (32, 64))))
    expected = jax.jit(lambda given: [[weight.project(x, jnp.float32) for x in xs] for xs, weight in given])(given)
    for (found,), number in zip(expected[-4:], (-128, -127, 127, 15), strict=True):
        np.testing.assert_array_equal(found[:, 5], 32 * number * x[:, 0])
    return given, jax.device_get(expected)


@pytest.mark.parametrize("code", ["avx512vnni", "avxvnni", "avx2", "1"])
def test_every_instruction_set_gives_the_same_bits(code, tmp_path, monkeypatch):
    """A library chooses its code once, so each code has a copy of it. Missing instructions make that plain code."""
    given, expected = inputs_of_codes()
    copy = shutil.copy(library.library(), tmp_path / f"{code}.so")
    symbol = ctypes.CDLL(copy).hydrajax_matmul_few_bits
    jax.ffi.register_ffi_target(f"few_bits_{code}", jax.ffi.pycapsule(symbol), platform="cpu")
    monkeypatch.setenv("HYDRAJAX_PLAIN_CPU_KERNELS", code)  # read by the copy's first product

    def by_copy(x, weight):
        out = jax.ShapeDtypeStruct((len(x), weight.shape[1]), jnp.float32)
        return jax.ffi.ffi_call(f"few_bits_{code}", out)(x, *weight.arrays().values())

    found = jax.jit(lambda given: [[by_copy(x, weight) for x in xs] for xs, weight in given])(given)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(("kind", "name"), [(Int8Tiles, "Q8_0"), (Int4Tiles, "Q4_1")])
def test_numbers_from_gguf_stay_what_they_are(kind, name):
    gguf = pytest.importorskip("gguf")
    stored = gguf.GGMLQuantizationType[name]
    weight = np.random.default_rng(2).standard_normal((96, 320)).astype(np.float32) * 0.05
    before = gguf.quants.dequantize(gguf.quants.quantize(weight, stored), stored)  # [out, in]
    after = np.asarray(kind.of(before.T).dequantized()).T
    np.testing.assert_array_equal(after, before)


STEPS = {kind: 7.5 if issubclass(kind, Int4Tiles) else 127 for kind in KINDS} | {Mxfp4Tiles: 2}  # 8 becomes 6


@pytest.mark.parametrize(("kind", "steps"), STEPS.items())
def test_weights_are_within_half_a_step(kind, steps):
    kernel = np.random.default_rng(3).standard_normal((300, 2, 35)).astype(np.float32)
    kernel[:, 1, 4] = 0
    found = kind.of(kernel)
    assert found.shape == kernel.shape
    size = GROUPS[kind]
    step = np.pad(np.abs(kernel), [(0, -300 % size), (0, 0), (0, 0)])
    step = step.reshape(-1, size, 2, 35).max(axis=1).repeat(size, 0)
    assert (np.abs(found.dequantized() - kernel) <= 0.51 * step[:300] / steps + 1e-3 * step[:300]).all()
    np.testing.assert_array_equal(found.dequantized()[:, 1, 4], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_weight_within_float16(kind):
    kernel = np.ones((40, 3), np.float32)
    for bad in (np.nan, np.inf, 1e5):
        kernel[33, 1] = bad
        with pytest.raises(HydrajaxError, match="not finite, expected finite numbers within float16"):
            kind.of(kernel)
    weight = kind.of(np.ones((256, 64), np.float32))
    expected = 4 + 32 / GROUPS[kind] if issubclass(kind, Int4Tiles) else 8 + 16 / GROUPS[kind]
    expected = 4.25 if kind is Mxfp4Tiles else expected
    assert sum(x.nbytes for x in weight.arrays().values()) * 8 / (256 * 64) == expected


def test_scales_that_do_not_fit_the_weight_are_refused():
    weight, x = Int4TilesBy128.of(np.ones((256, 64), np.float32)), np.ones((1, 256), np.float32)
    for bad in (weight.scale[:, :1], np.ones((1, 5, 64), np.float16), np.ones((1, 16, 64), np.float16)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="the weight and its scales do not fit"):
            few_bits.matmul(x, 64, weight.values, bad, bad)


@pytest.mark.parametrize("kind", [Int8Tiles, Int8TilesBy64])
def test_columns_of_an_embedding(kind):
    table = np.random.default_rng(4).standard_normal((150, 48)).astype(np.float32)  # [tokens, D]
    kernel = jax.tree.map(jnp.asarray, kind.of(table.T))
    whole = np.asarray(kernel.dequantized()).T
    tokens = np.array([[149, 0], [64, 63]])
    np.testing.assert_array_equal(jax.jit(lambda kernel: kernel.columns(tokens))(kernel), whole[tokens])
    assert kernel.columns(jnp.zeros((2, 3, 0), jnp.int32)).shape == (2, 3, 0, 48)
    some = kernel.select(np.array([140, 3, 77]), jnp.float32)
    np.testing.assert_array_equal(some.dequantized().T, whole[[140, 3, 77]])
