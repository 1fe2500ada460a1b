"""The part of `hydrajax.ops.check` that compares the kernels for few bits with NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.lowbit.kernels import few_bits_gpu, few_bits_tpu


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(jnp.bfloat16)


def _widened(values: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Return int4 weights ``[groups, 16, F]`` as ``[groups * 32, F]``."""
    numbers = np.concatenate([values & 15, values >> 4], axis=1).astype(np.float32)
    scaled = (numbers * scale[:, None].astype(np.float32)).astype(jnp.bfloat16).astype(np.float32)
    return (scaled + offset[:, None].astype(np.float32)).reshape(-1, values.shape[2])


def _int4_weights() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return rows and weights of 4 bits whose products are near 1."""
    random = np.random.default_rng(0)
    values = random.integers(0, 256, (4, 16, 128), np.uint8)
    scale = random.uniform(0.001, 0.02, (4, 128)).astype(np.float16)
    return normal(5, 128), values, scale, (-7.5 * scale).astype(np.float16)


def _int4(interpret: bool):
    x, *weights = _int4_weights()
    got = jax.jit(functools.partial(few_bits_gpu.matmul, interpret=interpret))(x, *weights)
    return np.max(np.abs(got - x.astype(np.float32) @ _widened(*weights)))


def _int4_tpu(interpret: bool):
    x, values, scale, offset = _int4_weights()
    call = functools.partial(few_bits_tpu.matmul_int4, dtype=jnp.float32, interpret=interpret)
    got = jax.jit(call)(x, values.swapaxes(0, 1)[None], scale[None], offset[None])
    return np.max(np.abs(got[0] - x.astype(np.float32) @ _widened(values, scale, offset)))


def _int8_tpu(interpret: bool):
    random, x = np.random.default_rng(0), normal(5, 256)
    values, scale = random.integers(-127, 128, (2, 256, 128), np.int8), np.float32([[0.001], [0.0005]]) * np.ones(128)
    call = functools.partial(few_bits_tpu.matmul_int8, dtype=jnp.float32, interpret=interpret)
    got = jax.jit(call)(x, values, scale.astype(np.float32))
    return np.max(np.abs(got - x.astype(np.float32) @ (values * scale[:, None])))


# By device: functions that return the largest difference.
CHECKS = {"GPU": {"int4 weights": _int4}, "TPU": {"int8 weights": _int8_tpu, "int4 weights": _int4_tpu}}
