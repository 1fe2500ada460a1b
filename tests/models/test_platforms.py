"""Each thread traces for its own platform, and no cached value belongs to another one."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax.drafters.draft_model import DraftModel
from hydrajax.measure.shapes import SHAPES
from hydrajax.models import platforms, sequence_parallel
from hydrajax.models.base_model import abstract_base
from hydrajax.models.llama import Llama
from hydrajax.roofline import passes
from hydrajax.roofline.traced import PLAIN
from hydrajax.ssd.split_executor import _program

TINY = SHAPES["tiny"]
DEADLINE = 60  # seconds


def traced_at_once(*devices: int) -> dict[int, list[int]]:
    """Trace one program per thread, which all begin before one ends; return what each was traced for, and when."""
    seen: dict[int, list[int]] = {count: [] for count in devices}
    step = threading.Barrier(len(devices))

    def run(count):
        def program(x):
            for _ in range(2):
                seen[count].append(platforms.platform().devices)
                step.wait(DEADLINE)
            return x

        step.wait(DEADLINE)
        _program(count, program).lower(0.0)
        seen[count].append(platforms.platform().devices)

    threads = [threading.Thread(target=run, args=(count,)) for count in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    return seen


def test_threads_trace_for_their_own_devices():
    here = jax.device_count()
    assert traced_at_once(2, 1, 5) == {count: [count, count, here] for count in (2, 1, 5)}
    assert platforms.platform().devices == here


def test_a_training_step_divides_no_other_threads_activations(monkeypatch):
    monkeypatch.setattr(sequence_parallel, "axis_over", lambda *_: 0)  # as on a mesh
    found = []

    def look():
        found.append(sequence_parallel.divides_tokens(np.zeros((1, 2, 3))))

    with sequence_parallel.dividing_tokens():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(DEADLINE)
        look()
    look()
    assert found == [False, True, False]


@pytest.mark.skipif(not platforms.has_few_bits(), reason="int8 weights are tiles for our CPU kernel only")
@pytest.mark.parametrize("first", [PLAIN, None])
def test_shapes_of_weights_are_those_of_the_platform(first):
    """A kernel is an array of inputs and outputs, and on a CPU tiles of 64 outputs and 32 inputs."""
    model = Llama(TINY.replace(max_positions=128 if first else 256), quantize="int8")  # a model that no test has seen
    plain, tiles = TINY.width * 2 * TINY.mlp_width, -(-2 * TINY.mlp_width // 64) * 64 * TINY.width
    for platform in (first, *(each for each in (PLAIN, None) if each != first)):
        with platforms.traced_for(platform or platforms.platform()):
            kernel = abstract_base(model)["layers_0"]["gate_up"].value
        assert (kernel.size, kernel.dtype) == (plain if platform else tiles, jnp.int8)
    for boxed in (passes.boxed_base(model), passes.boxed_draft(DraftModel(model, TINY.vocab_size), Llama(TINY))):
        shapes = [np.shape(x) for x in jax.tree.leaves(boxed) if x.dtype == jnp.int8]
        assert (TINY.width, 2, TINY.mlp_width) in shapes
