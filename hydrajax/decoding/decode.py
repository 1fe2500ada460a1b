"""From prompt to last token: one jitted pure function on static shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax.decoding.acceptance import AcceptanceRule, Greedy
from hydrajax.decoding.logprobs import TopTokens
from hydrajax.decoding.loop import run_steps
from hydrajax.decoding.prompts import bucket, check_prompts
from hydrajax.decoding.sampling import Sampling, per_row
from hydrajax.decoding.state import OutputState, Params
from hydrajax.decoding.step import Engine
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.models import backend
from hydrajax.models.arrays import Array
from hydrajax.models.base import BaseModel
from hydrajax.models.config import LlamaConfig
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree, DynamicTree


class DecodeResult(NamedTuple):
    """What was generated.

    tokens:         int32 ``[B, max_new_tokens]`` generated ids, -1 beyond each row's length. EOS, if met, is the last.
    lengths:        int32 ``[B]`` generated tokens.
    accept_lengths: int32 ``[B, max_new_tokens]`` draft tokens emitted by each step (root not counted), -1 beyond the
                    row's steps; ``accept_lengths + 1`` sums to ``lengths``: tokens cut off by EOS or by the limit
                    are not counted as accepted.
    steps:          int32 ``[B]`` decode steps, that is base forward passes after the prompt's.
    logprobs:       float32 ``[B, max_new_tokens]`` the natural logarithm of each token's probability in the base's own
                    distribution given all before it: without penalties, temperature and cuts, whatever the rule, as
                    vLLM reports it by default. 0 beyond each row's length. None unless they were asked for.
    top:            the base's K likeliest tokens at each place, the likeliest first, and their log-probabilities: int32
                    ``ids`` and float32 ``logprobs`` ``[B, max_new_tokens, K]``, -1 and 0 beyond each row's length.
                    None unless they were asked for.
    """

    tokens: Int[Array, "B max_new"]
    lengths: Int[Array, " B"]
    accept_lengths: Int[Array, "B max_new"]
    steps: Int[Array, " B"]
    logprobs: Float[Array, "B max_new"] | None = None
    top: TopTokens | None = None

    def ids(self) -> list[list[int]]:
        """Each row's generated token ids, without the -1 beyond them."""
        rows = zip(np.asarray(self.tokens), np.asarray(self.lengths), strict=True)
        return [tokens[:length].tolist() for tokens, length in rows]

    def tokens_per_step(self) -> float:
        """Mean tokens emitted per step over all rows (τ in the papers)."""
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


def check_fit(drafter: Drafter, tree: CandidateTree, rule: AcceptanceRule, vocab_size: int) -> None:
    """Refuse a tree that the drafter cannot fill or the rule cannot judge, and a rule that the drafter cannot serve."""
    if isinstance(tree, DynamicTree) and not drafter.spec.supports_dynamic_tree:
        raise HydrajaxError(f"tree: {tree.name} needs a drafter that can grow trees, not {type(drafter).__name__}")
    tree.check(drafter.spec.depth, vocab_size)
    rule.check(tree)
    if rule.needs_draws and drafter.spec.longest_path(tree) and not drafter.spec.supports_sampling:
        raise HydrajaxError(f"rule: {type(rule).__name__} needs a drafter that samples, not {type(drafter).__name__}")


def make_engine(
    model: BaseModel,
    drafter: Drafter,
    tree: CandidateTree,
    rule: AcceptanceRule,
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    logprobs: bool = False,
    top_logprobs: int = 0,
) -> Engine:
    """An `Engine` whose parts fit each other. Raises `HydrajaxError` where they do not."""
    if max_new_tokens < 1:
        raise HydrajaxError(f"max_new_tokens: must be at least 1, found {max_new_tokens}")
    check_fit(drafter, tree, rule, model.config.vocab_size)
    context = model.config.max_positions
    if drafter.spec.reach >= context:
        raise HydrajaxError(
            f"draft: looks {drafter.spec.reach} tokens ahead, which a context of {context} has no room for"
        )
    if not 0 <= top_logprobs <= model.config.vocab_size:
        vocab_size = model.config.vocab_size
        raise HydrajaxError(f"top_logprobs: must be from 0 to the vocabulary's {vocab_size}, found {top_logprobs}")
    return Engine(model, drafter, tree, max_new_tokens, tuple(eos_ids), logprobs, top_logprobs)


class Inputs(NamedTuple):
    """What a decode function is given, checked and filled up: the arguments of `Engine.prefill` in their order."""

    prompt: Int[Array, "B P"]
    lengths: Int[Array, " B"]
    rng: Array
    rule: AcceptanceRule
    limits: Int[Array, " B"]


def settled_inputs(
    config: LlamaConfig, default_rule: AcceptanceRule, max_new_tokens: int, prompt, lengths, rng, limits, rule
) -> Inputs:
    """The arguments of a decode function (`make_decode_fn` says what they are), with the defaults for None.

    Raises `HydrajaxError` for what cannot be used; of a prompt that is being traced only the shape and dtype are known.
    """
    traced = isinstance(prompt, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer)
    xp = jnp if traced else np  # padding on the host compiles nothing for a new prompt width
    ids = xp.asarray(prompt)
    if ids.ndim != 2 or not xp.issubdtype(ids.dtype, xp.integer):
        raise HydrajaxError(f"prompt: must be int32 [batch, tokens], found {ids.dtype} {list(ids.shape)}")
    lengths = np.full(ids.shape[0], ids.shape[1], np.int32) if lengths is None else xp.asarray(lengths)
    if not xp.issubdtype(lengths.dtype, xp.integer):
        raise HydrajaxError(f"lengths: must be int32 [batch], found {lengths.dtype}")
    if not traced:
        check_prompts(ids, lengths, config)
    padding = bucket(ids.shape[1], config.max_positions) - ids.shape[1]
    ready = isinstance(prompt, jax.Array) and prompt.dtype == jnp.int32 and not padding
    if not ready:  # a prompt placed on a mesh at full width keeps its sharding
        prompt = xp.pad(ids.astype(xp.int32), ((0, 0), (0, padding)))
    if limits is None:  # an array all the same, so that limits compile nothing
        limits = np.full(lengths.shape, max_new_tokens, np.int32)
    else:
        limits = xp.asarray(limits)
        if limits.shape != lengths.shape or not xp.issubdtype(limits.dtype, xp.integer):
            raise HydrajaxError(f"limits: must be int32 [batch], found {limits.dtype} {list(limits.shape)}")
    rule = per_row(default_rule if rule is None else rule, ids.shape[0])
    if jax.tree.structure(rule) != jax.tree.structure(default_rule):
        raise HydrajaxError(f"rule: must be of the same kind and give the same numbers as {default_rule}")
    if rng is None:
        if isinstance(rule, Sampling):
            raise HydrajaxError("rng: is needed, as this rule draws: rng=jax.random.key(seed)")
        rng = jax.random.key(0)
    return Inputs(prompt, lengths.astype(xp.int32), rng, rule, limits)


def make_decode_fn(
    model: BaseModel,
    drafter: Drafter,
    tree: CandidateTree,
    rule: AcceptanceRule | None = None,
    *,
    max_new_tokens: int = 256,
    eos_ids: tuple[int, ...] = (),
    logprobs: bool = False,
    top_logprobs: int = 0,
) -> Callable[..., DecodeResult]:
    """Build ``decode_fn(params, prompt, lengths=None, rng=None, limits=None, rule=None) -> DecodeResult``.

    params:  `Params(base, draft)`.
    prompt:  int32 ``[B, P]``, right-padded; P is padded on to a power of two, so prompts of one bucket share a
             compilation.
    lengths: int32 ``[B]`` prompt lengths, default P for every row.
    rng:     a `jax.random.key`, or one for each row ``[B]``, needed by rules that sample. What a row draws depends on
             its key alone; a single key makes one for each row number.
    limits:  int32 ``[B]`` most tokens of each row, default (and at most) ``max_new_tokens``.
    rule:    the same kind of rule with other numbers, or a list of such rules, one for each row. Compiles nothing.

    With ``logprobs`` the result has the tokens' log-probabilities, with ``top_logprobs=K`` also the base's K likeliest
    tokens at each place, see `DecodeResult`.

    The function is pure, compiled once per (B, bucket) and may itself be called under `jax.jit`. Row b's output does
    not depend on the other rows. Generation ends per row at the first of ``eos_ids``, after ``max_new_tokens``, or
    when prompt and output fill the context. Raises `HydrajaxError` for a tree the drafter cannot fill, and (outside
    a trace) for a bad prompt.
    """
    default_rule = rule or Greedy()
    settings = {"max_new_tokens": max_new_tokens, "eos_ids": eos_ids, "logprobs": logprobs}
    settings["top_logprobs"] = top_logprobs
    engine = make_engine(model, drafter, tree, default_rule, **settings)
    config = model.config

    def run(params: Params, prompt, lengths, rng, rule, limits=None) -> DecodeResult:
        return result_of(run_steps(engine, params, engine.prefill(params, prompt, lengths, rng, rule, limits)).output)

    options = backend.compiler_options()
    outermost = jax.jit(run, compiler_options=options)
    inner = jax.jit(run) if options else outermost  # JAX takes compiler options of an outermost function only

    def decode_fn(params: Params, prompt, lengths=None, rng=None, limits=None, rule=None) -> DecodeResult:
        given = settled_inputs(config, default_rule, max_new_tokens, prompt, lengths, rng, limits, rule)
        called_in_jit = inner is not outermost and isinstance(jnp.zeros(()), jax.core.Tracer)
        call = inner if called_in_jit else outermost
        return call(params, *given)

    decode_fn.engine = engine  # to drive the steps one by one
    decode_fn.jitted = outermost  # to look at the compiled program
    return decode_fn


def make_autoregressive_fn(
    model: BaseModel,
    rule: AcceptanceRule | None = None,
    *,
    max_new_tokens: int = 256,
    eos_ids: tuple[int, ...] = (),
    logprobs: bool = False,
    top_logprobs: int = 0,
) -> Callable[..., DecodeResult]:
    """The baseline: the same engine with the root-only tree. Pass `Params(base, {})`; see `make_decode_fn`."""
    settings = {"max_new_tokens": max_new_tokens, "eos_ids": eos_ids, "logprobs": logprobs}
    settings["top_logprobs"] = top_logprobs
    return make_decode_fn(model, NoDrafter(), presets.root(), rule, **settings)
