"""A logits processor of another package is a keyword, a flag and a field of requests to servers."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field, fields
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from helpers import letters
from hydrajax import plugins
from hydrajax.cli import options
from hydrajax.decoding.keywords import SamplingKeywords
from hydrajax.decoding.parameters import effective, parameters_as_arrays
from hydrajax.decoding.processors import NumericProcessor
from hydrajax.errors import HydrajaxError
from hydrajax.ops import over_rows
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.executor_pool import PoolSizes

NEW, PROMPT = 12, np.arange(9, dtype=np.int32)


@parameters_as_arrays
@dataclass(frozen=True, kw_only=True)
class LowIds(NumericProcessor):
    """Favour tokens with low ids."""

    id_slope: float = field(default=0.0, metadata={"help": "subtract S times its id from a token's logit"})
    NEUTRAL: ClassVar[dict[str, float]] = {"id_slope": 0.0}

    def __post_init__(self):
        if self.id_slope < 0:
            raise HydrajaxError(f"id_slope: got {self.id_slope}, expected a number from 0 up")

    def __call__(self, logits, context):
        if (slope := effective(self, "id_slope")) is None:
            return logits
        return logits - over_rows(slope, logits) * jnp.arange(logits.shape[1])

    def reference(self, logits, prompt, output):
        return logits - self.id_slope * np.arange(len(logits))


@pytest.fixture(scope="module")
def served():
    plugins.add("processors", "low_ids", LowIds)
    yield letters.model()
    del plugins.ADDED["processors"]["low_ids"]


@pytest.fixture(scope="module")
def expected(served):
    """Outputs without and with the processor."""
    found = [
        served.generate([PROMPT], tree=letters.TREE, id_slope=slope, max_new_tokens=NEW)[0].output_ids
        for slope in (0.0, 100.0)
    ]
    assert set(found[0]) != {0}
    assert found[1] == [0] * NEW
    return found


def test_a_batch_mixes_its_parameters(served, expected):
    settings = {"tree": letters.TREE, "max_new_tokens": NEW, "batch_size": 2}
    both = served.generate([PROMPT, PROMPT], id_slope=[0.0, 100.0], **settings)
    assert [result.output_ids for result in both] == expected
    with pytest.raises(HydrajaxError, match="id_slope: got -1, expected a number from 0 up"):
        served.generate([PROMPT], id_slope=-1)


def test_a_server_has_its_parameter_as_a_field(served, expected):
    from hydrajax.serve.protocol import CompletionBody, parse_body

    batcher = Batcher(letters.pool(served, PoolSizes(slots=2, chunk=16, cache_len=64))).start()
    try:
        parsed = [
            parse_body(CompletionBody, json.dumps({"prompt": "a", "id_slope": slope}).encode()) for slope in (0, 100)
        ]
        assert [body.sampling()["id_slope"] for body in parsed] == [None, 100]
        requests = [batcher.request(PROMPT, max_new_tokens=NEW, **body.sampling()) for body in parsed]
        assert [handle.wait(300).output_ids for handle in batcher.submit(requests)] == expected
    finally:
        batcher.close()


def test_type_checkers_see_all_parameters_of_our_own():
    ours = (plugins.find(group, name) for group in ("rules", "processors") for name in plugins.BUILT_IN[group])
    assert SamplingKeywords.__annotations__.keys() == {each.name for kind in ours for each in fields(kind)}


def test_commands_have_its_parameter_as_a_flag(served):
    parser = argparse.ArgumentParser()
    options.add_sampling_arguments(parser)
    args = parser.parse_args(["--id-slope", "2"])
    assert options.request_from(args).processors == (LowIds(id_slope=2.0),)
