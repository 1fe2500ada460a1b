"""Each thread traces for its own platform, and no cached value belongs to another one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.bench.roofline import passes
from hydrajax.bench.roofline.traced import PLAIN
from hydrajax.bench.shapes import SHAPES
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.models.base_model import abstract_base
from hydrajax.models.llama import Llama
from hydrajax.ops import sharded, trace
from hydrajax.ssd.split_executor import _program

TINY = SHAPES["tiny"]


def test_threads_trace_for_their_own_devices():
    """All programs are begun before one is done."""
    counts, step = (2, 1, 5), threading.Barrier(3, timeout=60)

    def look(count):
        def program(x):
            for _ in range(2):
                seen.append(trace.platform().devices)
                step.wait()

        seen: list[int] = []
        _program(count, program).lower(0.0)
        return [*seen, trace.platform().devices]

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(look, counts)) == [[count, count, jax.device_count()] for count in counts]


def test_a_training_step_divides_no_other_threads_activations(monkeypatch):
    monkeypatch.setattr(sharded, "axis_over", lambda *_: 0)  # as on a mesh
    look = partial(sharded.shards_tokens, np.zeros((1, 2, 3)))
    with trace.tracing(sharded_tokens=True), ThreadPoolExecutor(1) as thread:
        assert [thread.submit(look).result(), look()] == [False, True]


@pytest.mark.skipif(not trace.has_few_bits(), reason="int8 weights are tiles for our CPU kernel only")
@pytest.mark.parametrize("first", [PLAIN, None])
def test_shapes_of_weights_are_those_of_the_platform(first):
    """A kernel is an array of inputs and outputs, and on a CPU tiles of 64 outputs and 32 inputs."""
    model = Llama(TINY.replace(max_positions=128 if first else 256), quantize="int8")  # a model that no test has seen
    plain, tiles = TINY.width * 2 * TINY.mlp_width, -(-2 * TINY.mlp_width // 64) * 64 * TINY.width
    for platform in (first, *(each for each in (PLAIN, None) if each != first)):
        with trace.tracing(platform=platform or trace.platform()):
            kernel = abstract_base(model)["layers_0"]["gate_up"].value
        assert (kernel.size, kernel.dtype) == (plain if platform else tiles, jnp.int8)
    for boxed in (passes.boxed_base(model), passes.boxed_draft(DraftModel(model, TINY.vocab_size), Llama(TINY))):
        shapes = [np.shape(x) for x in jax.tree.leaves(boxed) if x.dtype == jnp.int8]
        assert (TINY.width, 2, TINY.mlp_width) in shapes
