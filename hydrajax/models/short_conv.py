"""The short convolution in place of attention (LFM2, LFM3)."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from hydrajax.models.arrays import Array, DType
from hydrajax.models.recurrence import Order, convolve, stored
from hydrajax.models.recurrent_cache import PathNodes, RecurrentCache
from hydrajax.models.recurrent_settings import ShortConv
from hydrajax.models.weights import declare, declare_kernel, project, project_parts


class ShortConvLayer(nn.Module):
    """Two gates and the input of a causal convolution of each channel: ``output(after * conv(before * input))``.

    The kernel keeps groups of channels as an axis of its own, so that they can be sharded.
    """

    settings: ShortConv
    dtype: DType
    quantize: str | None = None

    adapter = None  # not a field: `declare_kernel` reads it; an adapter does not reach states

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], order: Order, past: RecurrentCache
    ) -> tuple[Float[Array, "B T D"], RecurrentCache | PathNodes]:
        """Return what the layer adds, and what its cache takes in of these tokens."""
        s, (batch, n_tokens, width), zeros = self.settings, x.shape, nn.initializers.zeros
        parts, by_group = (s.groups, 3, s.width // s.groups), ("kv_heads", None)
        kernel = declare_kernel(self, "inputs", (width, *parts), ("width", *by_group, None))
        conv = declare(self, "conv", (*parts[::2], s.kernel), (*by_group, None), nn.initializers.normal(0.02))
        out_kernel = declare_kernel(self, "output", (s.width, width), ("heads", "width"))

        projected = project_parts(x, kernel)  # [groups, parts, B, T, channels]
        if s.bias:
            projected = projected + declare(self, "inputs_bias", parts, (*by_group, None), zeros)[:, :, None, None]
        before, after, inputs = projected.transpose(1, 2, 0, 3, 4)
        inputs = before * inputs
        mixed = convolve(inputs, past.inputs, conv, order)
        if s.bias:
            mixed = mixed + declare(self, "conv_bias", parts[::2], by_group, zeros)[:, None]
        mixed = jnp.moveaxis(after * mixed, 1, 2).reshape(batch, n_tokens, s.width)
        added = project(mixed, out_kernel)
        if s.bias:
            added = added + declare(self, "output_bias", (width,), ("width",), zeros)
        return added, stored(inputs, past, order)
