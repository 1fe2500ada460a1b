"""`generate` and `stream`: from prompts to text, in batches, ended by EOS, limits or stop strings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from hydrajax.api import Loaded, encode
from hydrajax.decoding.acceptance import AcceptanceRule, Greedy
from hydrajax.decoding.loop import Snapshot
from hydrajax.decoding.prompts import batches, bucket
from hydrajax.decoding.sampling import row_keys
from hydrajax.errors import HydrajaxError
from hydrajax.text.answers import Generation
from hydrajax.text.prompt import Prompt
from hydrajax.text.stopping import GrowingText
from hydrajax.text.tokenizer import decode_text
from hydrajax.trees.tree import TreeTopology

STEPS_PER_BURST = 8  # between two looks at the text


def generate(
    loaded: Loaded,
    prompts: Sequence[str | Sequence[int] | Prompt],
    *,
    tree: TreeTopology | None = None,
    rule: AcceptanceRule | None = None,
    max_new_tokens: int | Sequence[int] = 256,
    stop: Sequence[str] = (),
    batch_size: int = 1,
    seed: int = 0,
    on_status: Callable[[str], None] | None = None,
) -> Iterator[Generation]:
    """Generate for texts, lists of token ids or `Prompt`s, in order, ``batch_size`` prompts at a time.

    A generator: each batch's results are yielded when it is done. Batches are taken in order, whatever the prompts'
    lengths: a batch is as wide as the bucket of its longest prompt. The last one is padded to full size by repeating
    its prompts, so that it compiles nothing new. What a rule draws for a prompt depends on ``seed`` and on the
    prompt's number, not on the batch size.

    max_new_tokens: for all prompts, or one for each. stop: strings that end a text: it is cut before one, see
    `hydrajax.text.stopping.GrowingText`; ``output_ids`` end with the token that completed it. ``on_status`` is called
    with ``"compiling"`` before a new shape is compiled and with ``"decoding"`` before each batch. Raises
    `HydrajaxError` for every bad prompt before any is run.
    """
    if batch_size < 1:
        raise HydrajaxError(f"batch_size: must be at least 1, found {batch_size}")
    if isinstance(prompts, str):
        raise HydrajaxError("prompts: must be a list of prompts, found one text; write [text]")
    encoded = [encode(loaded, prompt, f"prompt {row}") for row, prompt in enumerate(prompts)]
    limits = [max_new_tokens] * len(encoded) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != len(encoded):
        raise HydrajaxError(f"max_new_tokens: found {len(limits)} numbers for {len(encoded)} prompts")
    request = _request(loaded, tree, rule, max(limits, default=1), min(limits, default=1), stop, on_status)
    return _generate(request, encoded, limits, min(batch_size, len(encoded)), seed)


def stream(
    loaded: Loaded,
    prompt: str | Sequence[int] | Prompt,
    *,
    tree: TreeTopology | None = None,
    rule: AcceptanceRule | None = None,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    seed: int = 0,
    number: int = 0,
    on_status: Callable[[str], None] | None = None,
) -> Stream:
    """`generate` for one prompt, piece by piece: iterate over what this returns, then read its ``result``.

    A piece comes every few steps. None ends within a character, none holds a part of a stop string, and together they
    are the text that `generate` gives for the prompt of this ``number``. Arguments and errors: `generate`.
    """
    ids = encode(loaded, prompt, "prompt")
    return Stream(_request(loaded, tree, rule, max_new_tokens, max_new_tokens, stop, on_status), ids, seed, number)


class Stream:
    """An iterator over pieces of text. ``result``: the `Generation` up to now, whole when the iterator has ended."""

    def __init__(self, request: Request, ids: np.ndarray, seed: int, number: int):
        self.result: Generation | None = None
        self._pieces = self._run(request, ids, seed, number)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def _run(self, request: Request, ids: np.ndarray, seed: int, number: int) -> Iterator[str]:
        text, limit, shown = request.growing_text(), request.max_new_tokens, 0
        for now, seconds in _decode(request, [ids], [limit], 1, seed, number, [text], STEPS_PER_BURST):
            self.result = _result(request, ids, limit, now, 0, text, seconds)
            if piece := text.text[shown:]:
                shown = len(text.text)
                yield piece


class Request(NamedTuple):
    """How to decode, settled."""

    loaded: Loaded
    tree: TreeTopology
    rule: AcceptanceRule
    max_new_tokens: int
    stop: tuple[str, ...]
    on_status: Callable[[str], None]

    def growing_text(self) -> GrowingText:
        tokenizer = self.loaded.tokenizer
        decode = (lambda ids: " ".join(map(str, ids))) if tokenizer is None else partial(decode_text, tokenizer)
        return GrowingText(decode, self.stop)


def _request(loaded: Loaded, tree, rule, most: int, least: int, stop: Sequence[str], on_status) -> Request:
    if least < 1:
        raise HydrajaxError(f"max_new_tokens: must be at least 1, found {least}")
    if isinstance(stop, str):
        raise HydrajaxError("stop: must be a list of strings, found one; write [string]")
    if stop and loaded.tokenizer is None:
        raise HydrajaxError("stop: the base has no tokenizer, so there is no text to stop")
    # More than the context cannot be generated, so it need not be allocated either.
    most = min(most, loaded.model.config.max_positions)
    request = Request(
        loaded, tree or loaded.default_tree(), rule or Greedy(), most, tuple(stop), on_status or (lambda status: None)
    )
    request.growing_text()  # refuses an empty stop string
    loaded.bursts(request.tree, request.rule, most)  # refuses a tree that the drafter cannot fill
    return request


def _generate(
    request: Request, encoded: list[np.ndarray], limits: list[int], batch_size: int, seed: int
) -> Iterator[Generation]:
    for start in range(0, len(encoded), batch_size):
        batch = encoded[start : start + batch_size]
        texts = [request.growing_text() for _ in batch]
        n_steps = STEPS_PER_BURST if request.stop else request.max_new_tokens  # without stop strings all in one
        some = limits[start : start + batch_size]
        *_, (now, seconds) = _decode(request, batch, some, batch_size, seed, start, texts, n_steps)
        for row, (ids, limit, text) in enumerate(zip(batch, some, texts, strict=True)):
            yield _result(request, ids, limit, now, row, text, seconds)


def _decode(
    request: Request,
    batch: list[np.ndarray],
    limits: list[int],
    batch_size: int,
    seed: int,
    number: int,
    texts: list[GrowingText],
    n_steps: int,
) -> Iterator[tuple[Snapshot, float]]:
    """Snapshots of a batch, ``texts`` grown to each, and the seconds it took; ``number`` is its first prompt's."""
    loaded = request.loaded
    width = bucket(max(map(len, batch)), loaded.model.config.max_positions)
    ((prompt, lengths, _),) = batches(batch, batch_size, width)
    keys = row_keys(jax.random.key(seed), batch_size, number)
    most = np.array([min(limit, request.max_new_tokens) for limit in limits], np.int32)
    arguments = loaded.params, prompt, lengths, keys, request.rule, np.resize(most, batch_size)
    bursts = loaded.bursts(request.tree, request.rule, request.max_new_tokens)
    if (bursts, prompt.shape) not in loaded.compiled:
        request.on_status("compiling")
        bursts.compile(*arguments)
        loaded.compiled.add((bursts, prompt.shape))
    request.on_status("decoding")
    stopped = np.arange(batch_size) >= len(batch)  # what fills the last batch up need not be generated
    began = time.perf_counter()
    for now in bursts.run(*arguments, n_steps=n_steps, stopped=stopped):
        seconds = time.perf_counter() - began
        for row, text in enumerate(texts):
            text.grow(now.tokens[row, : now.lengths[row]].tolist(), final=bool(now.done[row]))
            stopped[row] = text.stopped
        yield now, seconds


def _result(
    request: Request, ids: np.ndarray, limit: int, now: Snapshot, row: int, text: GrowingText, seconds: float
) -> Generation:
    """A row of a snapshot. What was emitted after a stop string is not counted."""
    output_ids = now.tokens[row, : text.used].tolist()
    step_lengths, left = [], text.used
    for accepted in (now.accept_lengths[row, : now.steps[row]] + 1).tolist():
        if left > 0:
            step_lengths.append(min(accepted, left))
        left -= accepted
    reason = "context"
    if text.stopped:
        reason = "stop"
    elif output_ids and output_ids[-1] in request.loaded.eos_ids:
        reason = "eos"
    elif len(output_ids) >= limit:
        reason = "length"
    return Generation(
        prompt_ids=ids.tolist(),
        output_ids=output_ids,
        text=None if request.loaded.tokenizer is None else text.text,
        steps=len(step_lengths),
        step_lengths=step_lengths,
        new_tokens=len(output_ids),
        wall_time=seconds,
        finish_reason=reason,
    )
