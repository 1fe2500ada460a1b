"""The arguments of a decode function, checked and completed."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.batching import batched, broadcast
from hydrajax.decoding.processing import batched_processors
from hydrajax.decoding.program import Program
from hydrajax.decoding.prompt_batch import bucket, check_prompts
from hydrajax.decoding.request import Request, SamplingParams
from hydrajax.errors import HydrajaxError, one_line
from hydrajax.models.arrays import Array
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.text.prompt import refuse_mapping


class Inputs(NamedTuple):
    """The checked and completed arguments of a decode function, in the order of `Engine.prefill`."""

    prompt: Int[Array, "B P"]
    lengths: Int[Array, " B"]
    sampling: SamplingParams


def settled_inputs(
    program: Program,
    config: LlamaConfig,
    prompt,
    lengths=None,
    rng=None,
    limits=None,
    rule=None,
    processors=None,
    request: Request | None = None,
) -> Inputs:
    """Complete the arguments of a decode function (`make_decode_fn`) from a request, by default the program's own.

    Raises:
        HydrajaxError: For an invalid argument. Of a traced prompt only the shape and dtype are checked.
    """
    request = request or program.request()
    ids = _array("prompt", prompt, "int32 [batch, tokens]")
    if not all(isinstance(size, int) for size in ids.shape):
        raise HydrajaxError(f"prompt: got the symbolic shape {ids.shape}, expected integers: export once per shape")
    if ids.ndim != 2 or not len(ids) or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise HydrajaxError(f"prompt: got {ids.dtype} {list(ids.shape)}, expected int32 [batch, tokens]")
    batch = ids.shape[0]
    if lengths is None:
        lengths = np.full(batch, ids.shape[1], np.int32)
    lengths = _array("lengths", lengths, "int32 [batch]")
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise HydrajaxError(f"lengths: got {lengths.dtype}, expected int32 [batch]")
    if lengths.shape != ids.shape[:1]:
        raise HydrajaxError(f"lengths: got shape {lengths.shape} for prompts {ids.shape}, expected one per prompt")
    if _xp(ids) is np and _xp(lengths) is np:
        check_prompts(ids, lengths, config)
    padding = bucket(ids.shape[1], config.max_positions) - ids.shape[1]
    ready = isinstance(prompt, jax.Array) and prompt.dtype == jnp.int32 and not padding
    if not ready:  # a prompt placed on a mesh at full width keeps its sharding
        prompt = _xp(ids).pad(ids.astype(np.int32), ((0, 0), (0, padding)))
    if limits is None:  # an array all the same, so that limits compile nothing
        limits = np.full(lengths.shape, request.max_new_tokens, np.int32)
    else:
        limits = _array("limits", limits, "int32 [batch]")
        if limits.shape != lengths.shape or not jnp.issubdtype(limits.dtype, jnp.integer):
            raise HydrajaxError(f"limits: got {limits.dtype} {list(limits.shape)}, expected int32 [batch]")
    rule = _rule_of_rows(program, request.rule if rule is None else rule, batch)
    if rng is None:
        if rule.draws:
            raise HydrajaxError(
                "rng: got None, expected a key because this rule samples: pass rng=jax.random.key(seed)"
            )
        rng = jax.random.key(0)
    rows = _of_each_row(request.processors if processors is None else tuple(processors), batch)
    ignore_eos = np.ones(batch, bool) if request.ignore_eos else None
    sampling = SamplingParams(rng, rule, batched_processors(rows, config.vocab_size), limits, ignore_eos)
    return Inputs(prompt, lengths.astype(np.int32), sampling)


def _xp(given: Any) -> Any:
    """Return NumPy for an array that is not traced: padding on the host compiles nothing for a new prompt width."""
    return jnp if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given)) else np


def _array(field: str, given: Any, expected: str) -> Any:
    refuse_mapping(given, field, expected)
    try:
        return _xp(given).asarray(given)
    except (TypeError, ValueError):
        raise HydrajaxError(f"{field}: got {one_line(repr(given), 60)}, expected {expected}") from None


def _rule_of_rows(program: Program, rule, batch: int) -> AcceptanceRule:
    """Return the rule with arrays ``[batch]``, from one for all sequences or one for each."""
    if isinstance(rule, AcceptanceRule):
        found = broadcast(rule, batch)
    elif len(rule) != batch:
        raise HydrajaxError(f"rule: got {len(rule)} rules for {batch} prompts, expected one or one per prompt")
    else:
        found = batched(rule)
    if type(found) is not program.rule:
        raise HydrajaxError(f"rule: got {type(found).__name__}, expected {program.rule.__name__}")
    return found


def _of_each_row(processors: tuple, batch: int) -> list:
    """Return the processors of each sequence, from one list for all or one list each."""
    if not all(isinstance(one, (list, tuple)) for one in processors) or not processors:
        return [processors] * batch
    if len(processors) != batch:
        raise HydrajaxError(
            f"processors: got {len(processors)} lists, expected one for all or one for each of {batch} prompts"
        )
    return list(processors)
