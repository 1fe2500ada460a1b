"""Each thread traces for its own platform, and a trace reads nothing but `Trace` that a caller may change."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hydrajax
from helpers import described_programs
from hydrajax import ops
from hydrajax.bench.roofline import passes
from hydrajax.bench.roofline.traced import PLAIN
from hydrajax.bench.shapes import SHAPES
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.models.init import abstract_base
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


def test_threads_trace_the_programs_of_one_thread(monkeypatch):
    """Both ask for their backend at the same time, again and again."""
    cases = [
        (trace.Platform("gpu", 1, 9.0), "cuda", "bfloat16", "medusa", "chain-1"),
        (trace.Platform("tpu", 1), "tpu", "bfloat16", "medusa", "chain-1"),
    ]
    alone = [described_programs.traced_step(*case) for case in cases]
    step, real, calls = threading.Barrier(2, timeout=60), ops.here, threading.local()

    def here():
        calls.count = getattr(calls, "count", 0) + 1
        if calls.count <= 20:  # both programs make more calls
            step.wait()
        return real()

    monkeypatch.setattr(ops, "here", here)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda case: described_programs.traced_step(*case), cases)) == alone


# Contexts that a caller may change between two traces, and where the core reads them.
STATE = re.compile(r"ContextVar\(|os\.environ|get_abstract_mesh\(|jax_default_matmul_precision")
READ_OUTSIDE = {  # not while tracing
    "compilation.py": "the folder of JAX's cache on disk",
    "files.py": "the user's folder of caches",
    "processes.py": "the coordinator of several processes",
    "stored_trees.py": "whether commands measure trees",
}


def test_a_trace_reads_one_context():
    root = Path(hydrajax.__file__).parent
    rooms = [root, *(root / name for name in ("models", "ops", "families", "trees", "drafters", "decoding", "lowbit"))]
    files = [file for room in rooms for file in (room.rglob("*.py") if room != root else room.glob("*.py"))]
    found = {str(file.relative_to(root)) for file in files if STATE.search(file.read_text())}
    assert found - set(READ_OUTSIDE) == {"ops/trace.py"}


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
            kernel, *_ = jax.tree.leaves(abstract_base(model)["layers_0"]["gate_up"])
        assert (kernel.size, kernel.dtype) == (plain if platform else tiles, jnp.int8)
    for boxed in (passes.boxed_base(model), passes.boxed_draft(DraftModel(model, TINY.vocab_size), Llama(TINY))):
        shapes = [np.shape(x) for x in jax.tree.leaves(boxed) if x.dtype == jnp.int8]
        assert (TINY.width, 2, TINY.mlp_width) in shapes
