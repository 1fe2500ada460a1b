"""A rule of another package is an argument of `generate` and decode functions, and is served."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

import hydrajax
from helpers import letters
from hydrajax import plugins
from hydrajax.decoding.acceptance import JudgesBestGuesses, walk
from hydrajax.decoding.parameters import parameters_as_arrays
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.ops import over_rows
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.executor_pool import PoolSizes

NEW = 12


@parameters_as_arrays
@dataclass(frozen=True)
class Reluctant(JudgesBestGuesses):
    """Emit the most likely token other than one that is avoided, if its logit is lower by at most ``reluctance``."""

    avoided: int = 0
    reluctance: float = 0.0
    draws: ClassVar[bool] = False
    same_output: ClassVar[bool] = True

    def __post_init__(self):
        if self.reluctance < 0:
            raise HydrajaxError(f"reluctance: got {self.reluctance}, expected a number from 0 up")

    def baseline(self):
        return self

    def choose(self, logits: Array) -> Array:
        avoided = jnp.arange(logits.shape[1]) == over_rows(self.avoided, logits)
        return jnp.argmax(logits - jnp.where(avoided, over_rows(self.reluctance, logits), 0.0), axis=1).astype(
            jnp.int32
        )

    def first_root(self, logits, keys):
        return self.choose(logits)

    def accept(self, verify_result, keys):
        return walk(verify_result.proposal, lambda node, depth: self.choose(verify_result.at(node, depth)))


@pytest.fixture(scope="module")
def served():
    plugins.add("rules", "reluctant", Reluctant)
    yield letters.model()
    del plugins.ADDED["rules"]["reluctant"]


@pytest.fixture(scope="module")
def prompt():
    return np.arange(9, dtype=np.int32)


@pytest.fixture(scope="module")
def expected(served, prompt):
    """Outputs without the parameter's effect, and with it."""
    plain = served.generate([prompt], draft="none", max_new_tokens=NEW)[0].output_ids
    avoided = max(set(plain), key=plain.count)
    given = {"rule": "reluctant", "avoided": avoided, "max_new_tokens": NEW}
    other = served.generate([prompt], tree=letters.TREE, reluctance=50.0, **given)[0].output_ids
    assert served.generate([prompt], draft="none", reluctance=50.0, **given)[0].output_ids == other
    assert served.generate([prompt], tree=letters.TREE, **given)[0].output_ids == plain
    assert avoided not in other
    return avoided, plain, other


def test_a_batch_mixes_its_parameters(served, prompt, expected):
    avoided, plain, other = expected
    settings = {"rule": "reluctant", "avoided": avoided, "tree": letters.TREE, "max_new_tokens": NEW, "batch_size": 2}
    both = served.generate([prompt, prompt], reluctance=[0.0, 50.0], **settings)
    assert [result.output_ids for result in both] == [plain, other]
    decode_fn = hydrajax.make_decode_fn(served, tree=letters.TREE, rule="reluctant", max_new_tokens=NEW)
    rules = [Reluctant(avoided), Reluctant(avoided, 50.0)]
    assert decode_fn(served.params, np.stack([prompt, prompt]), rule=rules).ids() == [plain, other]
    with pytest.raises(HydrajaxError, match="reluctance: got -1, expected a number from 0 up"):
        served.generate([prompt], rule="reluctant", reluctance=-1)
    with pytest.raises(HydrajaxError, match="reluctance: got a value for the rule exact, expected none, only with rel"):
        served.generate([prompt], rule="exact", reluctance=1.0)


def test_a_server_has_its_parameter_as_a_field(served, prompt, expected):
    from hydrajax.serve.protocol import CompletionBody, parse_body

    avoided, plain, other = expected
    pool = letters.pool(served, PoolSizes(slots=2, chunk=16, cache_len=64, rule="reluctant"))
    batcher = Batcher(pool).start()
    try:
        bodies = [{"avoided": avoided}, {"avoided": avoided, "reluctance": 50}]
        parsed = [parse_body(CompletionBody, json.dumps({"prompt": "a"} | body).encode()) for body in bodies]
        requests = [batcher.request(prompt, max_new_tokens=NEW, **body.sampling()) for body in parsed]
        handles = batcher.submit(requests)
        assert [handle.wait(300).output_ids for handle in handles] == [plain, other]
        with pytest.raises(HydrajaxError, match="temperature: got a value for the rule reluctant, expected none"):
            batcher.request(prompt, temperature=0.5)
    finally:
        batcher.close()
    with pytest.raises(HydrajaxError, match="reluctance: got 'much', expected a finite number"):
        parse_body(CompletionBody, b'{"prompt": "a", "reluctance": "much"}')
