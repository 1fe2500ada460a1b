"""From prompt to last token: one jitted pure function on static shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.decode_loop import run_steps
from hydrajax.decoding.engine import Engine
from hydrajax.decoding.logprobs import TopTokens
from hydrajax.decoding.numbers import batched, broadcast
from hydrajax.decoding.processors import batched_processors
from hydrajax.decoding.prompt_batch import bucket, check_prompts
from hydrajax.decoding.spec import DecodeSpec, SamplingParams
from hydrajax.decoding.state import OutputState, Params
from hydrajax.errors import HydrajaxError
from hydrajax.models import backend
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BaseModel
from hydrajax.models.llama_config import LlamaConfig


class DecodeResult(NamedTuple):
    """What was generated.

    tokens:         int32 ``[B, max_new_tokens]`` generated ids, -1 beyond each row's length. EOS, if met, is the last.
    lengths:        int32 ``[B]`` generated tokens.
    accept_lengths: int32 ``[B, max_new_tokens]`` draft tokens emitted by each step (root not counted), -1 beyond the
                    row's steps; ``accept_lengths + 1`` sums to ``lengths``: tokens cut off by EOS or by the limit
                    are not counted as accepted.
    steps:          int32 ``[B]`` decode steps, that is base forward passes after the prompt's.
    logprobs:       float32 ``[B, max_new_tokens]`` the natural logarithm of each token's probability in the base's own
                    distribution given all before it: without processors, temperature and cuts, whatever the rule, as
                    vLLM reports it by default. 0 beyond each row's length. None unless they were asked for.
    top:            the base's K most likely tokens at each place, the most likely first, and their log-probabilities:
                    int32 ``ids`` and float32 ``logprobs`` ``[B, max_new_tokens, K]``, -1 and 0 beyond each row's
                    length. None unless they were asked for.
    """

    tokens: Int[Array, "B max_new"]
    lengths: Int[Array, " B"]
    accept_lengths: Int[Array, "B max_new"]
    steps: Int[Array, " B"]
    logprobs: Float[Array, "B max_new"] | None = None
    top: TopTokens | None = None

    def ids(self) -> list[list[int]]:
        """Return each row's generated token ids, without the -1 beyond them."""
        rows = zip(np.asarray(self.tokens), np.asarray(self.lengths), strict=True)
        return [tokens[:length].tolist() for tokens, length in rows]

    def tokens_per_step(self) -> float:
        """Return the mean tokens emitted per step over all rows (τ in the papers)."""
        return float(jnp.sum(self.lengths) / jnp.maximum(jnp.sum(self.steps), 1))


def result_of(output: OutputState) -> DecodeResult:
    """Cut the loop's buffers to what was emitted."""
    max_new = output.accept_lengths.shape[1] - 1
    valid = jnp.arange(max_new) < output.lengths[:, None]
    tokens = jnp.where(valid, output.tokens[:, :max_new], -1)
    result = DecodeResult(tokens, output.lengths, output.accept_lengths[:, :max_new], output.steps)
    if output.logprobs is None:
        return result
    chosen, top = jax.tree.map(lambda x: x[:, :max_new], output.logprobs)
    if top is not None:
        there = valid[:, :, None]
        top = TopTokens(jnp.where(there, top.ids, -1), jnp.where(there, top.logprobs, 0.0))
    return result._replace(logprobs=jnp.where(valid, chosen, 0.0), top=top)


class Inputs(NamedTuple):
    """The arguments of a decode function, checked and completed: those of `Engine.prefill` in their order."""

    prompt: Int[Array, "B P"]
    lengths: Int[Array, " B"]
    sampling: SamplingParams


def settled_inputs(
    spec: DecodeSpec, config: LlamaConfig, prompt, lengths=None, rng=None, limits=None, rule=None, processors=None
) -> Inputs:
    """Complete the arguments of a decode function (`make_decode_fn`) from its spec.

    Raises `HydrajaxError` for what cannot be used; of a prompt that is being traced only the shape and dtype are known.
    """
    traced = isinstance(prompt, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer)
    xp = jnp if traced else np  # padding on the host compiles nothing for a new prompt width
    ids = xp.asarray(prompt)
    if ids.ndim != 2 or not xp.issubdtype(ids.dtype, xp.integer):
        raise HydrajaxError(f"prompt: must be int32 [batch, tokens], found {ids.dtype} {list(ids.shape)}")
    batch = ids.shape[0]
    lengths = np.full(batch, ids.shape[1], np.int32) if lengths is None else xp.asarray(lengths)
    if not xp.issubdtype(lengths.dtype, xp.integer):
        raise HydrajaxError(f"lengths: must be int32 [batch], found {lengths.dtype}")
    if not traced:
        check_prompts(ids, lengths, config)
    padding = bucket(ids.shape[1], config.max_positions) - ids.shape[1]
    ready = isinstance(prompt, jax.Array) and prompt.dtype == jnp.int32 and not padding
    if not ready:  # a prompt placed on a mesh at full width keeps its sharding
        prompt = xp.pad(ids.astype(xp.int32), ((0, 0), (0, padding)))
    if limits is None:  # an array all the same, so that limits compile nothing
        limits = np.full(lengths.shape, spec.max_new_tokens, np.int32)
    else:
        limits = xp.asarray(limits)
        if limits.shape != lengths.shape or not xp.issubdtype(limits.dtype, xp.integer):
            raise HydrajaxError(f"limits: must be int32 [batch], found {limits.dtype} {list(limits.shape)}")
    rule = _rule_of_rows(spec, rule, batch)
    if rng is None:
        if rule.draws:
            raise HydrajaxError("rng: is needed, as this rule draws: rng=jax.random.key(seed)")
        rng = jax.random.key(0)
    processors = batched_processors(_of_each_row(spec, processors, batch), config.vocab_size)
    return Inputs(prompt, lengths.astype(xp.int32), SamplingParams(rng, rule, processors, limits))


def _rule_of_rows(spec: DecodeSpec, rule, batch: int) -> AcceptanceRule:
    """The rule with arrays ``[batch]``, from one for all rows or one for each."""
    rule = spec.rule if rule is None else rule
    if isinstance(rule, AcceptanceRule):
        found = broadcast(rule, batch)
    elif len(rule) != batch:
        raise HydrajaxError(f"rule: must be one or one per row, found {len(rule)} for {batch} rows")
    else:
        found = batched(rule)
    if type(found) is not type(spec.rule):
        raise HydrajaxError(f"rule: must be of the same kind as {spec.rule}, found {type(found).__name__}")
    return found


def _of_each_row(spec: DecodeSpec, processors, batch: int) -> list:
    """The processors of each row, from those for all rows or a list for each."""
    processors = spec.processors if processors is None else tuple(processors)
    if not all(isinstance(one, (list, tuple)) for one in processors) or not processors:
        return [processors] * batch
    if len(processors) != batch:
        raise HydrajaxError(f"processors: must be for all rows or a list per row, found {len(processors)} lists")
    return list(processors)


def make_decode_fn(model: BaseModel, spec: DecodeSpec) -> Callable[..., DecodeResult]:
    """Build ``decode_fn(params, prompt, lengths=None, rng=None, limits=None, rule=None, processors=None)``.

    The function's arguments:

    params:  `Params(base, draft)`.
    prompt:  int32 ``[B, P]``, right-padded; P is padded on to a power of two, so prompts of one bucket share a
             compilation.
    lengths: int32 ``[B]`` prompt lengths, default P for every row.
    rng:     a `jax.random.key`, or one for each row ``[B]``, needed by rules that sample. What a row draws depends on
             its key alone; a single key makes one for each row number.
    limits:  int32 ``[B]`` most tokens of each row, default (and at most) the spec's ``max_new_tokens``.
    rule:    the spec's kind of rule with other numbers, or a list of such rules, one for each row. Other numbers
             compile nothing, unless some have an effect that had none before.
    processors: in place of the spec's: for all rows, or a list for each row.

    The function is pure, compiled once per (B, bucket) and may itself be called under `jax.jit`. Row b's output does
    not depend on the other rows. Generation ends per row at the first of the EOS ids, after ``max_new_tokens``, or when
    prompt and output fill the context.

    Returns:
        The function, which gives a `DecodeResult`.

    Raises:
        HydrajaxError: where base and spec do not fit each other; the function (outside a trace) for a bad prompt.
    """
    engine, config = Engine.of(model, spec), model.config
    outermost, inner = decode_programs(engine)

    def decode_fn(params: Params, prompt, *args: Any, **settings: Any) -> DecodeResult:
        given = settled_inputs(spec, config, prompt, *args, **settings)
        called_in_jit = inner is not outermost and isinstance(jnp.zeros(()), jax.core.Tracer)
        call = inner if called_in_jit else outermost
        return call(params, *given)

    decode_fn.engine, decode_fn.spec = engine, spec  # to drive the steps one by one
    decode_fn.jitted = outermost  # to look at the compiled program
    return decode_fn


def decode_programs(engine: Engine) -> tuple[Callable[..., DecodeResult], Callable[..., DecodeResult]]:
    """Return the jitted ``decode(params, prompt, lengths, sampling)``, and the one to call inside another program."""

    def run(params: Params, prompt, lengths, sampling: SamplingParams) -> DecodeResult:
        return result_of(run_steps(engine, params, engine.prefill(params, prompt, lengths, sampling)).output)

    options = backend.compiler_options()
    outermost = jax.jit(run, compiler_options=options)
    return outermost, jax.jit(run) if options else outermost  # JAX takes options of an outermost function only


def make_autoregressive_fn(model: BaseModel, spec: DecodeSpec | None = None) -> Callable[..., DecodeResult]:
    """Build the baseline: the same engine with the root-only tree. Pass `Params(base, {})`; see `make_decode_fn`."""
    return make_decode_fn(model, (spec or DecodeSpec()).autoregressive())
