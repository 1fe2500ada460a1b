"""`generate` and `stream`: from prompts to text, in batches, ended by EOS, limits or stop strings."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from hydrajax.bundle import Bundle
from hydrajax.decoding.acceptance import AcceptanceRule, Greedy
from hydrajax.decoding.loop import Bursts, Snapshot
from hydrajax.decoding.prompts import batches, bucket
from hydrajax.decoding.rules import one_each
from hydrajax.decoding.sampling import Sampling, like_one_another, per_row, row_keys
from hydrajax.errors import HydrajaxError
from hydrajax.text.answers import Generation
from hydrajax.text.prompt import Prompt
from hydrajax.text.stopping import GrowingText
from hydrajax.text.tokenizer import decode_text
from hydrajax.trees.dynamic import CandidateTree

SEED_BITS = 32  # of a JAX key, unless 64-bit mode is on
STEPS_PER_BURST = 8  # between two looks for stop strings in text that nobody watches


def generate(
    loaded: Bundle,
    prompts: Sequence[str | Sequence[int] | Sequence[Mapping[str, str]] | Prompt],
    *,
    tree: CandidateTree | None = None,
    rule: AcceptanceRule | Sequence[AcceptanceRule] | None = None,
    max_new_tokens: int | Sequence[int] = 256,
    stop: Sequence[str] = (),
    batch_size: int = 1,
    seed: int | Sequence[int] | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
    on_status: Callable[[str], None] | None = None,
) -> Iterator[Generation]:
    """Generate for texts, lists of token ids, conversations or `Prompt`s, in order, ``batch_size`` prompts at a time.

    A generator: each batch's results are yielded when it is done. Batches are taken in order, whatever the prompts'
    lengths: a batch is as wide as the bucket of its longest prompt. The last one is padded to full size by repeating
    its prompts, so that it compiles nothing new. What a rule draws for a prompt depends on ``seed`` and on the
    prompt's number, not on the batch size; where no seed is given and the rule draws, one is drawn, and the results say
    which (`Generation.seed`). With a list of seeds every prompt draws what it would draw alone with its own.

    rule, max_new_tokens: for all prompts, or one for each; rules are then of one kind. stop: strings that end a text:
    it is cut before one, see `hydrajax.text.stopping.GrowingText`; ``output_ids`` end with the token that completed
    it. logprobs: whether to report each token's log-probability under the base, see `Generation`. top_logprobs: of how
    many of the base's likeliest tokens to report it besides; then each token's own is reported, too. ``on_status`` is
    called with ``"compiling"`` before a new shape is compiled and with ``"decoding"`` before each batch. Raises
    `HydrajaxError` for every bad prompt before any is run.
    """
    if batch_size < 1:
        raise HydrajaxError(f"batch_size: must be at least 1, found {batch_size}")
    encoded = list(loaded.ids_of_prompts(prompts))
    limits = one_each("max_new_tokens", max_new_tokens, len(encoded))
    rules = one_each("rule", rule or Greedy(), len(encoded))
    if not encoded:
        return iter(())
    own = one_each("seed", seed, len(encoded)) if isinstance(seed, (Sequence, np.ndarray)) else None
    one = seed if own is None else 0
    request = _request(loaded, tree, rules, max(limits), min(limits), stop, one, on_status, logprobs, top_logprobs)
    return _generate(request, encoded, limits, min(batch_size, len(encoded)), own)


def stream(
    loaded: Bundle,
    prompt: str | Sequence[int] | Sequence[Mapping[str, str]] | Prompt,
    *,
    tree: CandidateTree | None = None,
    rule: AcceptanceRule | None = None,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    seed: int | None = None,
    number: int = 0,
    logprobs: bool = False,
    top_logprobs: int = 0,
    on_status: Callable[[str], None] | None = None,
) -> Stream:
    """`generate` for one prompt, piece by piece: iterate over what this returns, then read its ``result``.

    The first piece comes after one step, later ones 10 to 20 times a second (`hydrajax.decoding.loop.next_burst`). None
    ends within a character, none holds a part of a stop string, and together they are the text that `generate` gives
    for the prompt of this ``number``. Arguments and errors: `generate`.
    """
    ids = loaded.prompt_ids(prompt, "prompt")
    rules, most = [rule or Greedy()], max_new_tokens
    request = _request(loaded, tree, rules, most, most, stop, seed, on_status, logprobs, top_logprobs)
    return Stream(request, ids, number)


class Stream:
    """An iterator over pieces of text. ``result``: the `Generation` up to now, whole when the iterator has ended."""

    def __init__(self, request: Request, ids: np.ndarray, number: int):
        self.result: Generation | None = None
        self._pieces = self._run(request, ids, number)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def _run(self, request: Request, ids: np.ndarray, number: int) -> Iterator[str]:
        text, limit, shown = request.growing_text(), request.max_new_tokens, 0
        keys = request.keys(1, number)
        for now, seconds in _decode(request, request.rules, [ids], [limit], 1, keys, [text], None):
            self.result = row_result(request.loaded, ids, limit, now, 0, text, seconds, request.seed)
            if piece := text.text[shown:]:
                shown = len(text.text)
                yield piece


class Request(NamedTuple):
    """How to decode, settled."""

    loaded: Bundle
    tree: CandidateTree
    rules: Sequence[AcceptanceRule]  # one for each prompt
    max_new_tokens: int
    stop: tuple[str, ...]
    seed: int | None  # None for rules that draw nothing
    on_status: Callable[[str], None]
    logprobs: bool
    top_logprobs: int

    def growing_text(self) -> GrowingText:
        return growing_text(self.loaded, self.stop)

    def bursts(self) -> Bursts:
        kept = self.logprobs, self.top_logprobs
        return self.loaded.bursts(self.tree, self.rules[0], self.max_new_tokens, *kept)

    def keys(self, count: int, first: int) -> jax.Array:
        """For so many prompts, of which the first has this number."""
        return row_keys(jax.random.key(self.seed or 0), count, first)


def growing_text(loaded: Bundle, stop: Sequence[str]) -> GrowingText:
    """A row's text, of which nothing is there yet. Without a tokenizer it is the ids."""
    tokenizer = loaded.tokenizer
    decode = (lambda ids: " ".join(map(str, ids))) if tokenizer is None else partial(decode_text, tokenizer)
    return GrowingText(decode, stop)


def seed_for(rule: AcceptanceRule, seed: int | None) -> int | None:
    """The seed, one that is drawn if none is given, or None for a rule that draws nothing."""
    if not isinstance(rule, Sampling):
        return None
    return secrets.randbits(SEED_BITS) if seed is None else seed


def _request(
    loaded: Bundle,
    tree,
    rules: list[AcceptanceRule],
    most: int,
    least: int,
    stop: Sequence[str],
    seed,
    on_status,
    logprobs: bool,
    top_logprobs: int,
) -> Request:
    if least < 1:
        raise HydrajaxError(f"max_new_tokens: must be at least 1, found {least}")
    if isinstance(stop, str):
        raise HydrajaxError("stop: must be a list of strings, found one; write [string]")
    if stop and loaded.tokenizer is None:
        raise HydrajaxError("stop: the base has no tokenizer, so there is no text to stop")
    # More than the context cannot be generated, so it need not be allocated either.
    most = min(most, loaded.model.config.max_positions)
    request = Request(
        loaded, tree or loaded.default_tree(), like_one_another(rules), most, tuple(stop), seed_for(rules[0], seed),
        on_status or (lambda status: None), logprobs, top_logprobs,
    )  # fmt: skip
    request.growing_text()  # refuses an empty stop string
    request.bursts()  # refuses a tree that the drafter cannot fill
    return request


def _generate(
    request: Request, encoded: list[np.ndarray], limits: list[int], batch_size: int, own: list[int] | None
) -> Iterator[Generation]:
    for start in range(0, len(encoded), batch_size):
        batch = encoded[start : start + batch_size]
        texts = [request.growing_text() for _ in batch]
        n_steps = STEPS_PER_BURST if request.stop else request.max_new_tokens  # without stop strings all in one
        some, rules = limits[start : start + batch_size], request.rules[start : start + batch_size]
        if own is None:
            keys = request.keys(batch_size, start)
        else:
            keys = _own_keys(np.resize(np.array(own[start : start + batch_size], np.uint32), batch_size))
        *_, (now, seconds) = _decode(request, rules, batch, some, batch_size, keys, texts, n_steps)
        for row, (ids, limit, text) in enumerate(zip(batch, some, texts, strict=True)):
            drawn = own is not None and request.seed is not None
            seed = int(own[start + row]) if drawn else request.seed
            yield row_result(request.loaded, ids, limit, now, row, text, seconds, seed)


@jax.jit
def _own_keys(seeds):
    """The key of each seed's first prompt: the one that it has where it is decoded alone."""
    return jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), 0))(seeds)


def _decode(
    request: Request,
    rules: Sequence[AcceptanceRule],
    batch: list[np.ndarray],
    limits: list[int],
    batch_size: int,
    keys: jax.Array,
    texts: list[GrowingText],
    n_steps: int | None,
) -> Iterator[tuple[Snapshot, float]]:
    """Snapshots of a batch, ``texts`` grown to each, and the seconds it took; ``keys`` are one for each row."""
    loaded = request.loaded
    width = bucket(max(map(len, batch)), loaded.model.config.max_positions)
    ((prompt, lengths, _),) = batches(batch, batch_size, width)
    most = np.array([min(limit, request.max_new_tokens) for limit in limits], np.int32)
    rule = per_row([rules[row % len(rules)] for row in range(batch_size)], batch_size)
    arguments = loaded.params, prompt, lengths, keys, rule, np.resize(most, batch_size)
    bursts = request.bursts()
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


def row_result(
    loaded: Bundle,
    ids: np.ndarray,
    limit: int,
    now: Snapshot,
    row: int,
    text: GrowingText,
    seconds: float,
    seed: int | None,
) -> Generation:
    """A row of a snapshot, as if it had ended there. What was emitted after a stop string is not counted."""
    output_ids = now.tokens[row, : text.used].tolist()
    step_lengths, left = [], text.used
    for accepted in (now.accept_lengths[row, : now.steps[row]] + 1).tolist():
        if left > 0:
            step_lengths.append(min(accepted, left))
        left -= accepted
    reason = "context"
    if text.stopped:
        reason = "stop"
    elif output_ids and output_ids[-1] in loaded.eos_ids:
        reason = "eos"
    elif len(output_ids) >= limit:
        reason = "length"
    return Generation(
        prompt_ids=ids.tolist(),
        output_ids=output_ids,
        text=None if loaded.tokenizer is None else text.text,
        steps=len(step_lengths),
        step_lengths=step_lengths,
        new_tokens=len(output_ids),
        wall_time=seconds,
        finish_reason=reason,
        seed=seed,
        **_logprobs(now, row, text.used),
    )


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
