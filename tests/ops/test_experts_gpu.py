"""The GPU kernel of experts, run by Pallas' interpreter: blocks, int8 weights and absent experts."""

from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.lowbit.quantized import Int8
from hydrajax.models.experts import _by_kernel
from hydrajax.models.layers import ACTIVATIONS
from hydrajax.ops.gpu import experts as experts_gpu

WIDTH, MLP, COUNT, PER_TOKEN = 128, 64, 5, 3
INTERPRETED = ModuleType("interpreted")
INTERPRETED.matmul = partial(experts_gpu.matmul, interpret=True)
INTERPRETED.rows_of_block = experts_gpu.rows_of_block


@pytest.mark.parametrize(("rows", "quantized"), [(1, True), (40, False)])
def test_the_mlp_of_every_pair(rows, quantized):
    random = np.random.default_rng(rows)
    x = random.normal(size=(rows, WIDTH)).astype(jnp.bfloat16)
    ids = np.sort(random.permuted(np.tile(np.arange(COUNT + 1), (rows, 1)), axis=1)[:, :PER_TOKEN], axis=1)
    kernels = [random.normal(0, 0.1, shape).astype(jnp.bfloat16) for shape in ((WIDTH, 2, MLP), (MLP, WIDTH))] * COUNT
    gate_up, down = (np.stack(kernels[i::2]) * np.arange(1, COUNT + 1).reshape(-1, *[1] * (3 - i)) for i in (0, 1))
    stored = [jnp.asarray(a, jnp.bfloat16) for a in (gate_up, down)]
    if quantized:
        stored = [jax.tree.map(lambda *parts: np.stack(parts), *map(Int8.of, np.asarray(a))) for a in stored]
    wide = [np.stack([k.dequantized() for k in each(a)]) if quantized else np.float32(a) for a in stored]
    bias = random.normal(size=(COUNT + 1, 2 * MLP)).astype(np.float32)

    def inner(pairs, experts):
        return ACTIVATIONS["silu"](*jnp.split(pairs + jnp.asarray(bias, pairs.dtype)[experts], 2, axis=-1))

    outs = jax.jit(lambda x, ids, kernels: _by_kernel(INTERPRETED, x, ids, *kernels, COUNT, inner))(x, ids, stored)
    for (row, place), expert in np.ndenumerate(ids):
        if expert == COUNT:  # of another device
            assert not np.any(outs[row * PER_TOKEN + place])
            continue
        gate, up = np.einsum("d,dpf->pf", np.float32(x[row]), wide[0][expert]) + bias[expert].reshape(2, -1)
        expected = (gate / (1 + np.exp(-gate)) * up) @ wide[1][expert]
        np.testing.assert_allclose(outs[row * PER_TOKEN + place], expected, atol=0.02 * np.abs(expected).max())


def each(kernels: Int8) -> list[Int8]:
    """Return the kernels of experts one by one."""
    return [jax.tree.map(lambda a, i=i: a[i], kernels) for i in range(COUNT)]
