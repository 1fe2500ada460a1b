"""Times of a split pair against the bytes of its weights and caches."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import ssd_roofline
from ssd_roofline import pair_times

from helpers.operator_counts import flops, moved
from hydrajax.bench.roofline.devices import DEVICES
from hydrajax.bench.roofline.passes import forward
from hydrajax.bench.shapes import PRESETS
from hydrajax.models.llama import Llama

BASE, DRAFT, DEVICE = PRESETS["7b"], PRESETS["1b"], DEVICES["H200"]


def bytes_read(config, context: int) -> float:
    """Bytes of one token: every matrix of the layers, the lm head, and the cache, in 16 bits."""
    c = config
    heads = c.n_heads + 2 * c.n_kv_heads + c.n_heads
    layer = c.width * (heads * c.head_dim + 3 * c.mlp_width)
    cache = 2 * context * c.n_kv_heads * c.head_dim
    return 2.0 * (c.n_layers * (layer + cache) + c.width * c.vocab_size)


def test_small_passes_take_as_long_as_their_weights():
    times = pair_times(DEVICE, BASE, DRAFT, depth=4, outcomes=8, context=1024)
    assert times.verify == pytest.approx(bytes_read(BASE, 1024) / DEVICE.bandwidth, rel=0.03)
    assert times.draft == pytest.approx(4 * bytes_read(DRAFT, 1024) / DEVICE.bandwidth, rel=0.05)
    # A pass for eight outcomes reads the same weights, so preparing is a pass more than drafting, and a little.
    assert 5 / 4 < times.prepare / times.draft < 1.1 * 5 / 4


def test_operators_are_linear_in_the_slots_of_the_cache():
    for slots in [8, 1000]:
        model = Llama(PRESETS["8b"], jnp.bfloat16)
        traced, ours = forward(model, 2, 8, slots), ssd_roofline._forward(model, 2, 8, slots)
        assert (moved(ours), flops(ours)) == (moved(traced), flops(traced))


def test_launch_and_transfer_are_added():
    bare = pair_times(DEVICE, BASE, DRAFT, depth=3, outcomes=4)
    slow = pair_times(DEVICE, BASE, DRAFT, depth=3, outcomes=4, launch=1e-5, transfer=2e-5)
    assert slow.transfer == 2e-5
    assert slow.verify - bare.verify == pytest.approx(1e-5 * BASE.n_layers)
    assert slow.draft - bare.draft == pytest.approx(1e-5 * DRAFT.n_layers * 3)
    assert slow.prepare - bare.prepare == pytest.approx(1e-5 * DRAFT.n_layers * 4)
    assert pair_times(DEVICE, BASE, DRAFT, depth=3, outcomes=0).prepare == 0
