"""A rule and a logits processor of another package: keywords, flags, and fields of requests to servers."""

import argparse
import json
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

import hydrajax
from helpers import letters
from hydrajax import plugins
from hydrajax.cli import options
from hydrajax.decoding.acceptance import JudgesBestGuesses, walk
from hydrajax.decoding.keywords import SamplingKeywords
from hydrajax.decoding.parameters import effective, parameters_as_arrays
from hydrajax.decoding.processors import NumericProcessor
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.ops import over_rows
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.executor_pool import PoolSizes
from hydrajax.serve.protocol import CompletionBody, parse_body

NEW, PROMPT = 12, np.arange(9, dtype=np.int32)


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


ADDED = [("rules", "reluctant", Reluctant), ("processors", "low_ids", LowIds)]


@pytest.fixture(scope="module")
def served():
    for added in ADDED:
        plugins.add(*added)
    yield letters.model()
    for group, name, _ in ADDED:
        del plugins.ADDED[group][name]


def answers(served, bodies: list[dict], **sizes) -> list:
    """Return a server's output for each request."""
    pool = letters.pool(served, PoolSizes(slots=2, chunk=16, cache_len=64, **sizes))
    with closing(Batcher(pool).start()) as batcher:
        requests = [batcher.request(PROMPT, max_new_tokens=NEW, **body) for body in bodies]
        return [handle.wait(300).output_ids for handle in batcher.submit(requests)]


def sampling(**fields) -> dict:
    """Return the sampling parameters of a request's body."""
    return parse_body(CompletionBody, json.dumps({"prompt": "a"} | fields).encode()).sampling()


@pytest.fixture(scope="module")
def of_rule(served):
    """The token that is avoided, and outputs without the rule's effect and with it."""
    plain = served.generate([PROMPT], draft="none", max_new_tokens=NEW)[0].output_ids
    avoided = max(set(plain), key=plain.count)
    given = {"rule": "reluctant", "avoided": avoided, "max_new_tokens": NEW}
    other = served.generate([PROMPT], tree=letters.TREE, reluctance=50.0, **given)[0].output_ids
    assert served.generate([PROMPT], draft="none", reluctance=50.0, **given)[0].output_ids == other
    assert served.generate([PROMPT], tree=letters.TREE, **given)[0].output_ids == plain
    assert avoided not in other
    return avoided, plain, other


@pytest.fixture(scope="module")
def of_processor(served):
    """Outputs without and with the processor."""
    settings = {"tree": letters.TREE, "max_new_tokens": NEW}
    found = [served.generate([PROMPT], id_slope=slope, **settings)[0].output_ids for slope in (0.0, 100.0)]
    assert set(found[0]) != {0}
    assert found[1] == [0] * NEW
    return found


def test_a_batch_mixes_their_parameters(served, of_rule, of_processor):
    avoided, plain, other = of_rule
    rule = {"rule": "reluctant", "avoided": avoided}
    settings = {"tree": letters.TREE, "max_new_tokens": NEW, "batch_size": 2}
    for given, expected in (
        (rule | {"reluctance": [0.0, 50.0]}, [plain, other]),
        ({"id_slope": [0.0, 100.0]}, of_processor),
    ):
        both = served.generate([PROMPT, PROMPT], **given, **settings)
        assert [result.output_ids for result in both] == expected
    decode_fn = hydrajax.make_decode_fn(served, tree=letters.TREE, rule="reluctant", max_new_tokens=NEW)
    rules = [Reluctant(avoided), Reluctant(avoided, 50.0)]
    assert decode_fn(served.params, np.stack([PROMPT, PROMPT]), rule=rules).ids() == [plain, other]
    for given, message in (
        ({"rule": "reluctant", "reluctance": -1}, "reluctance: got -1, expected a number from 0 up"),
        ({"rule": "exact", "reluctance": 1.0}, "reluctance: got a value for the rule exact, expected none, only "),
        ({"id_slope": -1}, "id_slope: got -1, expected a number from 0 up"),
    ):
        with pytest.raises(HydrajaxError, match=message):
            served.generate([PROMPT], **given)


@pytest.mark.slow
def test_a_server_has_their_parameters_as_fields(served, of_rule, of_processor):
    avoided, *expected = of_rule
    bodies = [sampling(avoided=avoided), sampling(avoided=avoided, reluctance=50)]
    assert answers(served, bodies, rule="reluctant") == expected
    bodies = [sampling(id_slope=slope) for slope in (0, 100)]
    assert [body["id_slope"] for body in bodies] == [None, 100]
    assert answers(served, bodies) == of_processor
    with pytest.raises(HydrajaxError, match="temperature: got a value for the rule reluctant, expected none"):
        answers(served, [{"temperature": 0.5}], rule="reluctant")
    with pytest.raises(HydrajaxError, match="reluctance: got 'much', expected a finite number"):
        sampling(reluctance="much")


def test_type_checkers_see_all_parameters_of_our_own():
    ours = (plugins.find(group, name) for group in ("rules", "processors") for name in plugins.BUILT_IN[group])
    assert SamplingKeywords.__annotations__.keys() == {each.name for kind in ours for each in fields(kind)}


def test_commands_have_the_parameter_as_a_flag(served):
    parser = argparse.ArgumentParser()
    options.add_sampling_arguments(parser)
    args = parser.parse_args(["--id-slope", "2"])
    assert options.request_from(args).processors == (LowIds(id_slope=2.0),)
