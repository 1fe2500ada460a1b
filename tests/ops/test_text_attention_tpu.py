"""The attention of a prompt on TPUs, interpreted on a CPU, against XLA's own operations in float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.models.attention import Causal, KVSegment, attend, attend_plain
from hydrajax.ops import trace
from hydrajax.ops.tpu import text_attention as text_attention_tpu

TPU = trace.Platform("tpu", 1)


@pytest.mark.parametrize(
    ("heads", "kv", "tokens", "head_dim", "window"),
    [(4, 2, 300, 64, 129), (2, 2, 256, 128, None), (2, 1, 140, 64, 900)],
)
@pytest.mark.quick("4-2-300-64-129")
def test_equals_attention_in_float32(heads, kv, tokens, head_dim, window):
    rng = np.random.default_rng(0)
    shapes = ((2, heads, tokens, head_dim), *[(2, kv, tokens, head_dim)] * 2)
    inputs = [rng.normal(size=shape).astype(jnp.bfloat16) for shape in shapes]

    def exact(q, k, v, sinks=None):
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        return attend_plain(q, [KVSegment(k, v, Causal(tokens, window))], sinks)

    if window == 129:
        inputs.append(rng.normal(2, 2, heads).astype(np.float32))  # sinks
    found = jax.jit(lambda q, k, v, *sinks: text_attention_tpu.attend(q, k, v, window, *sinks, interpret=True))(*inputs)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), jax.jit(exact)(*inputs), atol=0.02)


@pytest.mark.slow
def test_the_gradient_equals_that_in_float32():
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 2, 300, 64)).astype(jnp.bfloat16)

    def loss(work, *inputs):
        return (work(*inputs).astype(jnp.float32) ** 2).sum()

    def exact(*inputs):
        q, k, v = (x.astype(jnp.float32) for x in inputs)
        return attend_plain(q, [KVSegment(k, v, Causal(300, 70))])

    kernel = partial(text_attention_tpu.attend, window=70, interpret=True)
    for found, want in zip(
        *(jax.grad(partial(loss, work), argnums=(0, 1, 2))(q, k, v) for work in (kernel, exact)), strict=True
    ):
        np.testing.assert_allclose(found.astype(np.float32), want.astype(np.float32), atol=0.1)


def test_a_tpu_uses_it_for_long_prompts_in_bfloat16(monkeypatch):
    called = []
    monkeypatch.setattr(
        text_attention_tpu,
        "attend",
        lambda q, k, v, window: called.append((q.dtype.name, window)) or jnp.zeros((1, 300, 256)),
    )
    with trace.tracing(platform=TPU):
        for dtype in (jnp.bfloat16, jnp.float32):
            shape = jax.ShapeDtypeStruct((1, 4, 300, 64), dtype)
            jax.eval_shape(lambda q, k, v: attend(q, [KVSegment(k, v, Causal(300, 50))]), shape, shape, shape)
    assert called == [("bfloat16", 50)]
