"""`generate` and `stream`: from prompts to text, in batches, ended by EOS, limits or stop strings."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.decode import Inputs
from hydrajax.decoding.decode_loop import Snapshot
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.prompt_batch import batches, bucket, encode_prompt, encode_prompts
from hydrajax.decoding.sampling import row_keys
from hydrajax.decoding.spec import DecodeSpec, sampling_params
from hydrajax.errors import HydrajaxError
from hydrajax.text.answers import Generation
from hydrajax.text.prompt import OnePrompt
from hydrajax.text.stopping import GrowingText
from hydrajax.text.tokenizer import decode_text

SEED_BITS = 32  # of a JAX key, unless 64-bit mode is on
STEPS_PER_BURST = 8  # between two looks for stop strings in text that nobody watches


def generate(
    executor: Executor,
    prompts: Sequence[OnePrompt],
    *,
    specs: Sequence[DecodeSpec] | None = None,
    stop: Sequence[str] = (),
    batch_size: int = 1,
    seed: int | Sequence[int] | None = None,
    on_status: Callable[[str], None] = lambda status: None,
) -> Iterator[Generation]:
    """Generate text for a list of prompts, ``batch_size`` prompts at a time.

    Batches keep the order of the prompts, and are padded to the bucket of their longest prompt. The last batch is
    filled up by repeating its prompts, so that it compiles nothing new.

    Args:
        executor: decodes, by its spec unless ``specs`` are given.
        prompts: texts, lists of token ids, conversations or `Prompt`s.
        specs: one per prompt: rules of one kind, processors and limits of each. The rest is the executor's.
        stop: strings that end a text. It is cut before one (`hydrajax.text.stopping.GrowingText`); ``output_ids`` end
            with the token that completed the string.
        batch_size: sequences that are decoded together.
        seed: for rules that draw; None draws a seed, which the results report. What is drawn for a prompt depends on
            the seed and on the prompt's number, not on the batch size. In a list every prompt has its own, and draws
            what it would draw alone.
        on_status: called with ``"compiling"`` before a new shape is compiled and with ``"decoding"`` before each batch.

    Returns:
        A generator: each batch's results are yielded when it is done.

    Raises:
        HydrajaxError: for every bad prompt, before any is run.
    """
    if batch_size < 1:
        raise HydrajaxError(f"batch_size: must be at least 1, found {batch_size}")
    _check(executor, specs or [executor.spec], stop)
    encoded = list(encode_prompts(prompts, executor.tokenizer, executor.model.config))
    specs = [executor.spec] * len(encoded) if specs is None else list(specs)
    if len(specs) != len(encoded):
        raise HydrajaxError(f"specs: must be one per prompt, found {len(specs)} for {len(encoded)} prompts")
    if not encoded:
        return iter(())
    return _generate(executor, encoded, specs, tuple(stop), min(batch_size, len(encoded)), seed, on_status)


def stream(
    executor: Executor,
    prompt: OnePrompt,
    *,
    stop: Sequence[str] = (),
    seed: int | None = None,
    number: int = 0,
    on_status: Callable[[str], None] = lambda status: None,
) -> Stream:
    """Generate text for one prompt, piece by piece: iterate over the returned value, then read its ``result``.

    The first piece comes after one step, later ones 10 to 20 times a second
    (`hydrajax.decoding.decode_loop.next_burst`). No piece ends within a character or shows a part of a stop string.
    Together they are the text that `generate` gives for the prompt of this ``number``. Arguments and errors:
    `generate`.
    """
    _check(executor, [executor.spec], stop)
    ids = encode_prompt(prompt, "prompt", executor.tokenizer, executor.model.config)
    return Stream(executor, ids, tuple(stop), seed_for(executor.spec.rule, seed), number, on_status)


class Stream:
    """An iterator over pieces of text. ``result``: the `Generation` up to now, complete when the iterator has ended."""

    def __init__(
        self,
        executor: Executor,
        ids: np.ndarray,
        stop: tuple[str, ...],
        seed: int | None,
        number: int,
        on_status: Callable[[str], None],
    ):
        self.result: Generation | None = None
        self._pieces = self._run(executor, ids, stop, seed, number, on_status)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def _run(self, executor, ids, stop, seed, number, on_status) -> Iterator[str]:
        spec, shown = executor.spec, 0
        text = growing_text(executor.tokenizer, stop)
        given = _inputs(executor, [ids], [spec], row_keys(jax.random.key(seed or 0), 1, number))
        for now, seconds in _decode(executor, given, [text], None, on_status):
            self.result = row_result(executor, spec, ids, now, 0, text, seconds, seed)
            if piece := text.text[shown:]:
                shown = len(text.text)
                yield piece


def growing_text(tokenizer: Any, stop: Sequence[str]) -> GrowingText:
    """Return the empty text of a sequence. Without a tokenizer its text is the ids.

    Raises `HydrajaxError` for an empty stop string, and for any where there is no tokenizer.
    """
    if stop and tokenizer is None:
        raise HydrajaxError("stop: the base has no tokenizer, so there is no text to stop")
    decode = (lambda ids: " ".join(map(str, ids))) if tokenizer is None else partial(decode_text, tokenizer)
    return GrowingText(decode, stop)


def seed_for(rule: AcceptanceRule, seed: int | None) -> int | None:
    """Return the seed, a new one if none is given, or None for a rule that draws nothing."""
    if not rule.draws:
        return None
    return secrets.randbits(SEED_BITS) if seed is None else seed


def row_result(
    executor: Executor,
    spec: DecodeSpec,
    ids: np.ndarray,
    now: Snapshot,
    row: int,
    text: GrowingText,
    seconds: float,
    seed: int | None,
) -> Generation:
    """Return a row of a snapshot as if it had ended there. What was emitted after a stop string is not counted."""
    output_ids = now.tokens[row, : text.used].tolist()
    step_lengths, left = [], text.used
    for accepted in (now.accept_lengths[row, : now.steps[row]] + 1).tolist():
        if left > 0:
            step_lengths.append(min(accepted, left))
        left -= accepted
    reason = "context"
    if text.stopped:
        reason = "stop"
    elif output_ids and output_ids[-1] in spec.eos_ids:
        reason = "eos"
    elif len(output_ids) >= spec.max_new_tokens:
        reason = "length"
    return Generation(
        prompt_ids=ids.tolist(),
        output_ids=output_ids,
        text=None if executor.tokenizer is None else text.text,
        steps=len(step_lengths),
        step_lengths=step_lengths,
        new_tokens=len(output_ids),
        wall_time=seconds,
        finish_reason=reason,
        seed=seed,
        **_logprobs(now, row, text.used),
    )


# --- the loop over batches --------------------------------------------------------------------------------------------


def _check(executor: Executor, specs: Sequence[DecodeSpec], stop: Sequence[str]) -> None:
    """Refuse stop strings that cannot be used, and more new tokens than the executor has room for."""
    if isinstance(stop, str):
        raise HydrajaxError("stop: must be a list of strings, found one; write [string]")
    growing_text(executor.tokenizer, stop)
    most = min(max(spec.max_new_tokens for spec in specs), executor.model.config.max_positions)
    if most > executor.room:
        raise HydrajaxError(f"max_new_tokens: must be at most {executor.room} with this executor, found {most}")


def _generate(
    executor: Executor,
    encoded: list[np.ndarray],
    specs: list[DecodeSpec],
    stop: tuple[str, ...],
    batch_size: int,
    seed: int | Sequence[int] | None,
    on_status: Callable[[str], None],
) -> Iterator[Generation]:
    one, each = seed, None
    if isinstance(seed, (Sequence, np.ndarray)):
        one, each = 0, _one_per_prompt(seed, len(encoded))
    one = seed_for(specs[0].rule, one)
    kinds = list(dict.fromkeys(specs))
    n_steps = STEPS_PER_BURST if stop else executor.room  # without stop strings all in one
    for start in range(0, len(encoded), batch_size):
        batch, own = encoded[start : start + batch_size], specs[start : start + batch_size]
        filled = [number % len(batch) for number in range(batch_size)]
        if each is None:
            keys = row_keys(jax.random.key(one or 0), batch_size, start)
        else:
            keys = _own_keys(np.array([each[start + row] for row in filled], np.uint32))
        given = _inputs(executor, [batch[row] for row in filled], [own[row] for row in filled], keys, kinds)
        texts = [growing_text(executor.tokenizer, stop) for _ in batch]
        *_, (now, seconds) = _decode(executor, given, texts, n_steps, on_status)
        for row, (ids, spec, text) in enumerate(zip(batch, own, texts, strict=True)):
            drawn = one if each is None or one is None else int(each[start + row])
            yield row_result(executor, spec, ids, now, row, text, seconds, drawn)


def _one_per_prompt(seeds: Sequence[int], count: int) -> Sequence[int]:
    if len(seeds) != count:
        raise HydrajaxError(f"seed: must be one for all prompts or one for each, found {len(seeds)} for {count}")
    return seeds


@jax.jit
def _own_keys(seeds):
    """The key of each seed's first prompt: the one that it has where it is decoded alone."""
    return jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), 0))(seeds)


def _inputs(
    executor: Executor,
    batch: list[np.ndarray],
    specs: Sequence[DecodeSpec],
    keys: jax.Array,
    like: Sequence[DecodeSpec] = (),
) -> Inputs:
    """A batch, padded to its bucket, with how each row samples."""
    config = executor.model.config
    width = bucket(max(map(len, batch)), config.max_positions)
    ((prompt, lengths, _),) = batches(batch, len(batch), width)
    return Inputs(prompt, lengths, sampling_params(specs, keys, config.vocab_size, like))


def _decode(
    executor: Executor,
    given: Inputs,
    texts: list[GrowingText],
    n_steps: int | None,
    on_status: Callable[[str], None],
) -> Iterator[tuple[Snapshot, float]]:
    """Snapshots of a batch, ``texts`` grown to each, and the seconds it took. Rows beyond ``texts`` fill the batch."""
    if not executor.is_compiled(given):
        on_status("compiling")
        executor.compile(given)
    on_status("decoding")
    stopped = np.arange(len(given.prompt)) >= len(texts)
    began = time.perf_counter()
    for now in executor.run(given, stopped, n_steps):
        seconds = time.perf_counter() - began
        for row, text in enumerate(texts):
            text.grow(now.tokens[row, : now.lengths[row]].tolist(), final=bool(now.done[row]))
            stopped[row] = text.stopped
        yield now, seconds


def _logprobs(now: Snapshot, row: int, used: int) -> dict[str, Any]:
    """Of a row's first tokens, as `Generation` has them."""
    if now.logprobs is None:
        return {}
    chosen, top = now.logprobs
    found = {"logprobs": chosen[row, :used].tolist()}
    if top is not None:
        places = zip(top.ids[row, :used].tolist(), top.logprobs[row, :used].tolist(), strict=True)
        found["top_logprobs"] = [list(zip(ids, logprobs, strict=True)) for ids, logprobs in places]
    return found
