"""One sequence on the host, for `generate`, conversations and servers: its seed and key, its text, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hydrajax.decoding.decode_loop import Snapshot
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.request import Request
from hydrajax.errors import HydrajaxError
from hydrajax.processes import agreed
from hydrajax.text.answers import Generation
from hydrajax.text.continuation import Continuation
from hydrajax.text.stopping import GrowingText


def drawn(executor: Executor, request: Request) -> Request:
    """Return `Request.with_seed`, whose seed is the same for all processes that decode together."""
    if not request.rule.draws or request.seed is not None:
        return request.with_seed()
    return request.replace(seed=agreed(executor.mesh, lambda: request.with_seed().seed))


@jax.jit
def _keys(seeds, numbers):
    """Return each prompt's key: that of its seed, folded with its number."""
    return jax.vmap(lambda seed, number: jax.random.fold_in(jax.random.key(seed), number))(seeds, numbers)


def keys_of(requests: Sequence[Request]) -> jax.Array:
    """Return the random keys ``[B]`` of requests; those of rules without randomness are not read."""
    return _keys(*np.array([(one.seed or 0, one.number) for one in requests], np.uint32).T)


def growing_text(tokenizer: Any, request: Request, prompt: Sequence[int] = ()) -> GrowingText:
    """Return an empty text that continues a prompt, to append tokens to. Without a tokenizer the text is the ids.

    Raises `HydrajaxError` for an empty stop string, and for any stop string without a tokenizer.
    """
    if request.stop and tokenizer is None:
        raise HydrajaxError("stop: requires a tokenizer, which the base does not have")
    stops = request.stop, request.stop_token_ids, request.include_stop_str_in_output
    return GrowingText(Continuation(tokenizer, prompt), *stops)


def row_result(
    executor: Executor, request: Request, ids: np.ndarray, now: Snapshot, row: int, text: GrowingText, seconds: float
) -> Generation:
    """Return the result of a row of a snapshot. Tokens after a stop string are not counted."""
    output_ids = now.tokens[row, : text.used].tolist()
    emitted_per_step, left = [], text.used
    for emitted in (now.accept_lengths[row, : now.steps[row]] + 1).tolist():
        if left > 0:
            emitted_per_step.append(min(emitted, left))
        left -= emitted
    reason, stop_reason = "context", None
    if output_ids and output_ids[-1] in executor.program.eos_ids and not request.ignore_eos:
        reason = "eos"
    elif text.stopped:
        reason, stop_reason = "stop", text.reason
    elif len(output_ids) >= request.max_new_tokens:
        reason = "length"
    elif request.grammar is not None and len(ids) + len(output_ids) < executor.model.config.max_positions:
        reason = "grammar"
    return Generation(
        prompt_ids=ids.tolist(),
        output_ids=output_ids,
        text=None if executor.tokenizer is None else text.text,
        steps=len(emitted_per_step),
        emitted_per_step=emitted_per_step,
        new_tokens=len(output_ids),
        wall_time=seconds,
        finish_reason=reason,
        stop_reason=stop_reason,
        seed=request.seed,
        **_logprobs(now, row, text.used),
    )


def _logprobs(now: Snapshot, row: int, used: int) -> dict[str, Any]:
    """Return the fields of `Generation` for the log-probabilities of a row's first tokens."""
    if now.logprobs is None:
        return {}
    chosen, top = now.logprobs
    found = {"logprobs": chosen[row, :used].tolist()}
    if top is not None:
        places = zip(top.ids[row, :used].tolist(), top.logprobs[row, :used].tolist(), strict=True)
        found["top_logprobs"] = [list(zip(ids, logprobs, strict=True)) for ids, logprobs in places]
    return found


def remember(executor: Executor, result: Generation) -> None:
    """Add an output to the corpus that the executor's draft reads, if it reads one."""
    if (corpus := executor.params.corpus) is not None:
        corpus.remember(result.output_ids, result.prompt_ids)
