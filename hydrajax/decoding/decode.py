"""From prompt to last token: one jitted pure function on static shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from hydrajax.decoding.acceptance import AcceptanceRule, Greedy
from hydrajax.decoding.step import DecodeState, Engine, Params
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.none import NoDrafter
from hydrajax.errors import HydrajaxError
from hydrajax.models.config import LlamaConfig
from hydrajax.models.llama import Llama
from hydrajax.trees import presets
from hydrajax.trees.tree import TreeTopology

SMALLEST_BUCKET = 16


class DecodeResult(NamedTuple):
    """What was generated.

    tokens:         int32 ``[B, max_new_tokens]`` generated ids, -1 beyond each row's length. EOS, if met, is the last.
    lengths:        int32 ``[B]`` generated tokens.
    accept_lengths: int32 ``[B, max_new_tokens]`` draft tokens emitted by each step (root not counted), -1 beyond the
                    row's steps; ``accept_lengths + 1`` sums to ``lengths``: tokens cut off by EOS or by the limit
                    are not counted as accepted.
    steps:          int32 ``[B]`` decode steps, that is base forward passes after the prompt's.
    """

    tokens: Int[Array, "B max_new"]
    lengths: Int[Array, " B"]
    accept_lengths: Int[Array, "B max_new"]
    steps: Int[Array, " B"]

    def tokens_per_step(self) -> float:
        """Mean tokens emitted per step over all rows (τ in the papers)."""
        return float(jnp.sum(self.lengths) / jnp.maximum(jnp.sum(self.steps), 1))


def bucket(length: int, max_positions: int) -> int:
    """The padded width of a prompt: the next power of two, at most the context."""
    width = max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())
    return max(length, min(width, max_positions))


def right_padded(rows: Sequence[Sequence[int]], width: int) -> tuple[Int[np.ndarray, "B width"], Int[np.ndarray, " B"]]:
    """Token ids of several lengths as one int32 array, filled up with 0, and the lengths."""
    padded = np.zeros((len(rows), width), np.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded, np.array([len(ids) for ids in rows], np.int32)


def decode_loop(engine: Engine, params: Params, state: DecodeState) -> DecodeState:
    """Step until every row is done: one `jax.lax.while_loop`, no trip to the host."""
    return jax.lax.while_loop(
        lambda state: ~jnp.all(state.done), lambda state: engine.decode_step(params, state), state
    )


def result_of(state: DecodeState) -> DecodeResult:
    """Cut the loop's buffers to what was emitted."""
    max_new = state.accept_lengths.shape[1] - 1
    valid = jnp.arange(max_new) < state.lengths[:, None]
    tokens = jnp.where(valid, state.tokens[:, :max_new], -1)
    return DecodeResult(tokens, state.lengths, state.accept_lengths[:, :max_new], state.steps)


def check_prompt(ids: np.ndarray, where: str, config: LlamaConfig) -> None:
    """Refuse an empty or overlong prompt and ids outside the vocabulary; ``where`` names the prompt in the message."""
    if ids.size == 0:
        raise HydrajaxError(f"{where}: is empty, at least one token is needed")
    if ids.size > config.max_positions:
        raise HydrajaxError(f"{where}: has {ids.size} tokens, the model's context is {config.max_positions}")
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    if outside.size:
        raise HydrajaxError(f"{where}: token id {outside[0]} is outside the vocabulary 0..{config.vocab_size - 1}")


def _check_prompts(prompt: np.ndarray, lengths: np.ndarray, config: LlamaConfig) -> None:
    if lengths.shape != prompt.shape[:1]:
        raise HydrajaxError(f"lengths: must be one per prompt row, found shape {lengths.shape} for {prompt.shape}")
    for row, (ids, length) in enumerate(zip(prompt, lengths, strict=True)):
        if not 0 <= length <= len(ids):
            raise HydrajaxError(f"lengths: row {row} has length {length}, the prompt has {len(ids)} columns")
        check_prompt(ids[:length], f"prompt {row}", config)


def make_decode_fn(
    model: Llama,
    drafter: Drafter,
    tree: TreeTopology,
    rule: AcceptanceRule | None = None,
    *,
    max_new_tokens: int = 256,
    eos_ids: tuple[int, ...] = (),
) -> Callable[..., DecodeResult]:
    """Build ``decode_fn(params, prompt, lengths=None, rng=None, limits=None) -> DecodeResult``.

    params:  `Params(base, draft)`.
    prompt:  int32 ``[B, P]``, right-padded; P is padded on to a power of two, so prompts of one bucket share a
             compilation.
    lengths: int32 ``[B]`` prompt lengths, default P for every row.
    rng:     a `jax.random.key`, or one for each row ``[B]``, for rules that sample. What a row draws depends on its
             key alone; a single key makes one for each row number.
    limits:  int32 ``[B]`` most tokens of each row, default (and at most) ``max_new_tokens``.

    The function is pure, compiled once per (B, bucket) and may itself be called under `jax.jit`. Row b's output does
    not depend on the other rows. Generation ends per row at the first of ``eos_ids``, after ``max_new_tokens``, or
    when prompt and output fill the context. Raises `HydrajaxError` for a tree the drafter cannot fill, and (outside
    a trace) for a bad prompt.
    """
    if max_new_tokens < 1:
        raise HydrajaxError(f"max_new_tokens: must be at least 1, found {max_new_tokens}")
    config = model.config
    tree.check(drafter.depth, config.vocab_size)
    engine = Engine(model, drafter, tree, rule or Greedy(), max_new_tokens, tuple(eos_ids))

    @jax.jit
    def run(params: Params, prompt, lengths, rng, limits=None) -> DecodeResult:
        return result_of(decode_loop(engine, params, engine.prefill(params, prompt, lengths, rng, limits)))

    def decode_fn(params: Params, prompt, lengths=None, rng=None, limits=None) -> DecodeResult:
        traced = isinstance(prompt, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer)
        xp = jnp if traced else np  # padding on the host compiles nothing for a new prompt width
        ids = xp.asarray(prompt)
        if ids.ndim != 2 or not xp.issubdtype(ids.dtype, xp.integer):
            raise HydrajaxError(f"prompt: must be int32 [batch, tokens], found {ids.dtype} {list(ids.shape)}")
        lengths = np.full(ids.shape[0], ids.shape[1], np.int32) if lengths is None else xp.asarray(lengths)
        if not xp.issubdtype(lengths.dtype, xp.integer):
            raise HydrajaxError(f"lengths: must be int32 [batch], found {lengths.dtype}")
        if not traced:
            _check_prompts(ids, lengths, config)
        padding = bucket(ids.shape[1], config.max_positions) - ids.shape[1]
        ready = isinstance(prompt, jax.Array) and prompt.dtype == jnp.int32 and not padding
        if not ready:  # a prompt placed on a mesh at full width keeps its sharding
            prompt = xp.pad(ids.astype(xp.int32), ((0, 0), (0, padding)))
        if limits is not None:
            limits = xp.asarray(limits)
            if limits.shape != lengths.shape or not xp.issubdtype(limits.dtype, xp.integer):
                raise HydrajaxError(f"limits: must be int32 [batch], found {limits.dtype} {list(limits.shape)}")
        return run(params, prompt, lengths.astype(xp.int32), jax.random.key(0) if rng is None else rng, limits)

    decode_fn.engine = engine
    decode_fn.jitted = run
    return decode_fn


def make_autoregressive_fn(
    model: Llama,
    rule: AcceptanceRule | None = None,
    *,
    max_new_tokens: int = 256,
    eos_ids: tuple[int, ...] = (),
) -> Callable[..., DecodeResult]:
    """The baseline: the same engine with the root-only tree. Pass `Params(base, {})`; see `make_decode_fn`."""
    return make_decode_fn(model, NoDrafter(), presets.root(), rule, max_new_tokens=max_new_tokens, eos_ids=eos_ids)
