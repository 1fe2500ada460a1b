"""Sequence parallelism: the devices that share a model divide its activations between products too, by tokens.

Tensor parallelism alone repeats norms, residual additions, dropout and shifts on every device. Here each device has
them for a stretch of every text (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). All tokens are gathered
before a product whose outputs are divided, and the sums of a product whose inputs are divided are scattered over the
tokens; together they move the bytes of the all-reduce that they replace. After a product whose outputs are divided and
that no norm follows, as in draft heads, the features stay divided (`hydrajax.models.per_device.whole`).

Only training steps use it (`dividing_tokens`): the few rows of a decode step are bound by weights and latency.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax.numpy as jnp
from jaxtyping import Shaped

from hydrajax.models.arrays import Array
from hydrajax.models.per_device import DATA, MODEL, axis_over, divided, placed

_used: ContextVar[bool] = ContextVar("divides_tokens", default=False)


@contextlib.contextmanager
def dividing_tokens() -> Iterator[None]:
    """Trace what follows with activations divided by tokens; without a mesh this changes nothing."""
    before = _used.set(True)
    try:
        yield
    finally:
        _used.reset(before)


def divides_tokens(x: Array) -> bool:
    """Return whether the devices divide ``x``, ``[B, T, D]``, by its tokens."""
    return _used.get() and x.ndim == 3 and axis_over(MODEL, x.shape[1]) is not None


def by_token(x: Shaped[Array, "*rows D"]) -> Shaped[Array, "*rows D"]:
    """Return ``x`` with a stretch of tokens on each device."""
    return divided(x, DATA, MODEL) if divides_tokens(x) else x


def by_feature(x: Shaped[Array, "*rows D"]) -> Shaped[Array, "*rows D"]:
    """Return ``x`` with some features of all tokens on each device."""
    return divided(x, DATA, None, MODEL) if divides_tokens(x) else x


def all_tokens(x: Shaped[Array, "*rows D"], trained: int | None = None) -> Shaped[Array, "*rows D"]:
    """Gather the tokens before a product whose outputs are divided. Its gradient is summed and scattered.

    ``trained``: the number of features, from the first on, that need a gradient; None: all.
    """

    def backward(gradient):
        scattered = _scattered(gradient[..., :trained])
        return jnp.pad(scattered, ((0, 0), (0, 0), (0, gradient.shape[-1] - scattered.shape[-1])))

    return placed(_everywhere, backward)(x) if divides_tokens(x) else x


def summed_by_token(x: Shaped[Array, "*rows D"]) -> Shaped[Array, "*rows D"]:
    """Scatter the sums of a product whose inputs are divided over the tokens. Its gradient is gathered."""
    return placed(_scattered, _everywhere)(x) if divides_tokens(x) else x


def _everywhere(x: Array) -> Array:
    return divided(x, DATA)


def _scattered(x: Array) -> Array:
    """Divide sums over all devices by tokens, in two steps as `hydrajax.models.per_device.whole` does."""
    return by_token(_everywhere(x))
