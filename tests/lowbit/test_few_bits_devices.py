"""Products with weights of 8 and 4 bits on GPUs and TPUs: kernels interpreted on a CPU against NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.described_programs import interpreted
from hydrajax.lowbit.int4 import Int4
from hydrajax.lowbit.int4_tiles import Int4Tiles
from hydrajax.lowbit.kernels import few_bits_gpu, few_bits_tpu
from hydrajax.lowbit.quantized import Fp8, Int8
from hydrajax.ops import trace

PLATFORMS = {
    "t4": trace.Platform("gpu", 1, 7.5),
    "h100": trace.Platform("gpu", 1, 9.0),
    "tpu": trace.Platform("tpu", 1),
}
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(jnp.bfloat16)


def test_int4_means_the_same_on_every_device():
    """Also with a last group that is not whole."""
    kernel = RANDOM.normal(size=(72, 3, 64)).astype(np.float32)
    found, tiles = Int4.of(kernel), Int4Tiles.of(kernel)
    assert found.shape == tiles.shape == kernel.shape
    assert found.values.shape == (3, 16, 3, 64)
    np.testing.assert_array_equal(found.dequantized(), tiles.dequantized())


@pytest.mark.quick("t4-Int8", "h100-Int4", "h100-Fp8", "tpu-Int8", "tpu-Int4")
@pytest.mark.parametrize(("platform", "kind"), [*itertools.product(PLATFORMS, [Int8, Int4]), ("h100", Fp8)])
def test_products_of_rows_agree_with_numpy(platform, kind, monkeypatch):
    kernel = kind.of(RANDOM.normal(size=(128, 2, 128)).astype(np.float32) * np.linspace(0.1, 3, 128, dtype=np.float32))
    wide = np.asarray(kernel.dequantized(), np.float64)
    for rows in (1, 5):
        x = normal(rows, 1, 128)
        with interpreted(PLATFORMS[platform], monkeypatch):
            parts, flat = jax.jit(lambda x, k: (k.project_parts(x), k.project(x, jnp.float32)))(x, kernel)
        want = np.einsum("rtd,dpf->prtf", x.astype(np.float64), wide)
        # Weights of 4 bits are rounded to bfloat16 (on a TPU without their offset); 8-bit weights are exact, x nearly.
        largest = np.abs(wide) + (np.abs(kernel.offset).astype(np.float64).repeat(32, axis=0) if kind is Int4 else 0)
        size = np.einsum("rtd,dpf->prtf", np.abs(x).astype(np.float64), largest)
        assert (np.abs(np.asarray(parts, np.float64) - want) <= 2**-7 * np.abs(want) + 2**-10 * size).all()
        exact = np.moveaxis(want, 0, 2).reshape(flat.shape)
        bound = np.moveaxis(size, 0, 2).reshape(flat.shape) * (2**-9 if kind is Int4 else 2**-13)
        assert (np.abs(flat - exact) <= bound).all()


ON_TPU = [pytest.param("tpu", kind, marks=pytest.mark.slow) for kind in (Int8, Int4)]


@pytest.mark.parametrize(
    ("platform", "kind"), [pytest.param("t4", Int8, marks=pytest.mark.slow), ("h100", Int4), *ON_TPU]
)
def test_products_have_the_gradient_of_the_widened_weight(platform, kind, monkeypatch):
    kernel, x = kind.of(RANDOM.normal(size=(128, 128)).astype(np.float32)), normal(1, 128)
    with interpreted(PLATFORMS[platform], monkeypatch):
        _, gradient = jax.vjp(lambda x: kernel.project(x, jnp.float32), x)
        (found,) = gradient(jnp.ones((1, 128), jnp.float32))
    want = np.asarray(kernel.dequantized()).sum(axis=1)
    np.testing.assert_allclose(found[0].astype(np.float32), want, atol=0.02 * np.abs(want).max())


def test_float16_scales_are_exact_on_a_tpu():
    bits = np.arange(0, 2**16, 7).astype(np.uint16)
    numbers = bits.view(np.float16)
    finite = np.isfinite(numbers)
    found = few_bits_tpu._of_float16(jnp.asarray(bits[finite].view(np.int16)))
    np.testing.assert_array_equal(found, numbers[finite].astype(np.float32))


def test_rows_in_several_tiles_and_groups_in_several_shares():
    x, values = normal(70, 384), RANDOM.integers(0, 256, (12, 16, 64), np.uint8)
    scale, offset = (RANDOM.random((12, 64)).astype(np.float16) for _ in range(2))
    numbers = np.concatenate([values & 15, values >> 4], axis=1).astype(np.float32)
    weight = (numbers * scale[:, None] + offset[:, None]).astype(jnp.bfloat16).astype(np.float64)
    found = jax.jit(lambda *args: few_bits_gpu.matmul(*args, interpret=True))(x, values, scale, offset)
    np.testing.assert_allclose(found, x.astype(np.float64) @ weight.reshape(384, 64), rtol=1e-4, atol=1e-3)
