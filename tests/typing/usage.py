"""The public interface as a user writes it. mypy reads this file; it is never run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_type

import jax
import numpy as np

import hydrajax
from hydrajax import (
    Chat,
    DecodeResult,
    ExactSampling,
    Generation,
    Greedy,
    HydrajaxError,
    LanguageModel,
    LogitBias,
    Params,
    Penalties,
    Program,
    RejectionSampling,
    Request,
    Stream,
    TraversalVerification,
    TreeTopology,
    Typical,
)
from hydrajax.trees import DynamicTree, presets


def loading() -> LanguageModel:
    m = hydrajax.load("path/to/llama", "path/to/heads", dtype="bfloat16")
    assert_type(m, LanguageModel)
    assert_type(m.params, Params)
    assert_type(m.eos_ids, tuple[int, ...])
    assert_type(m.default_tree(batch_size=4), TreeTopology | DynamicTree)
    assert_type(m.with_draft("lookup"), LanguageModel)
    return hydrajax.load("org/name@main", quantize="int8")


def trees() -> TreeTopology:
    tree = TreeTopology.from_choices([[0], [0, 0], [1]])
    assert_type(tree.size, int)
    assert_type(tree.choices, tuple[tuple[int, ...], ...])
    assert_type(presets.by_name("chain-4"), TreeTopology | DynamicTree)
    assert_type(hydrajax.trees.presets.cartesian((4, 2)), TreeTopology)
    return tree


def decoding(m: LanguageModel, prompt: np.ndarray) -> np.ndarray:
    decode_fn = hydrajax.make_decode_fn(m.model, m.drafter, presets.chain(3), Greedy(), max_new_tokens=64)
    out = decode_fn(m.params, prompt, lengths=np.array([3, 4]), rng=jax.random.key(0))
    assert_type(out, DecodeResult)
    assert_type(out.tokens, jax.Array | np.ndarray)  # the latter after jax.device_get
    plain = hydrajax.make_autoregressive_fn(m.model, ExactSampling(0.7, top_k=40, top_p=0.9), eos_ids=m.eos_ids)
    assert_type(plain(m.params, prompt, rule=ExactSampling(0.2)), DecodeResult)
    return np.asarray(out.lengths)


def texts(m: LanguageModel) -> list[str | None]:
    processors = [Penalties(presence_penalty=0.5), LogitBias({13: -2.0})]
    request = Request(Typical(epsilon=0.1), processors)
    program = m.program(request, tree=trees(), logprobs=3)
    assert_type(program, Program)
    answers = hydrajax.generate(m.executor(program, request), ["Once", [1, 2, 3]], stop=["\n"])
    assert_type(answers, Iterator[Generation])
    first = next(answers)
    assert_type(first.output_ids, list[int])
    assert_type(first.text, str | None)
    assert_type(first.wall_time, float)
    assert_type(m.generate("Once", tree="chain-2", draft="lookup"), Generation)
    messages = [{"role": "user", "content": "hi"}]
    assert_type(m.generate(["Once", [1, 2], messages], rule="exact", temperature=[0.2, 1.0, 0]), list[Generation])
    assert_type(m.generate("Once", n=4, temperature=1.0), list[Generation])
    assert_type(m.generate(["Once"], n=4, tree="root"), list[Generation])
    assert_type(m.stream("Once", rule="exact", top_p=0.9), Stream)
    assert_type(m.chat(template="plain"), Chat)
    assert_type(m.decode(hydrajax.make_decode_fn(m, tree="chain-2")(m.params, *m.encode(["a"]))), list[str])
    request = Request(RejectionSampling(1.0), max_new_tokens=9)
    request = request.replace(rule=TraversalVerification(draft_temperature=1.1))
    pieces = hydrajax.stream(m.executor(m.program(request)), "Once", request)
    assert_type(pieces, Stream)
    for piece in pieces:
        assert_type(piece, str)
    assert_type(pieces.result, Generation | None)
    return [answer.text for answer in answers]


def mistakes() -> str:
    try:
        tokenizer: Any = loading().tokenizer
    except HydrajaxError as error:
        return str(error)
    return str(tokenizer)
