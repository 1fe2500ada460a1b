"""Generate text from prompts, in batches or as a stream, up to EOS, a limit or a stop string."""

from __future__ import annotations

import operator
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.decode import Inputs
from hydrajax.decoding.decode_loop import Snapshot
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.keywords import RULES
from hydrajax.decoding.prompt_batch import batches, bucket, encode_prompt, encode_prompts
from hydrajax.decoding.sampling import row_keys
from hydrajax.decoding.spec import DecodeSpec, sampling_params
from hydrajax.drafters.corpus import corpus_of
from hydrajax.errors import HydrajaxError, one_line
from hydrajax.processes import agreed
from hydrajax.text.answers import Generation
from hydrajax.text.continuation import Continuation
from hydrajax.text.prompt import OnePrompt
from hydrajax.text.stopping import GrowingText

SEED_BITS = 32  # of a JAX key without 64-bit mode
STEPS_PER_BURST = 8  # between two checks for stop strings


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

    Batches keep the order of the prompts and are padded to the bucket of their longest prompt. The last batch repeats
    its prompts to fill up, so that it compiles nothing new.

    Args:
        executor: decodes, with its spec unless ``specs`` are given.
        prompts: texts, lists of token ids, conversations or `Prompt`s.
        specs: one per prompt, for its rule (all of one kind), processors and limit; the rest is the executor's.
        stop: strings that end a text. The text ends before the string; ``output_ids`` end with the token that completes
            it (`hydrajax.text.stopping.GrowingText`).
        batch_size: sequences decoded together.
        seed: for sampling rules; None draws one, which the results report. A prompt's sample depends on the seed and
            the prompt's number, not on the batch size. With a list, each prompt is sampled as if decoded alone.
        on_status: called with ``"compiling ..."`` before a new shape is compiled, and ``"decoding"`` before each batch.

    Returns:
        A generator that yields the results of each batch when the batch is done.

    Raises:
        HydrajaxError: for any bad prompt or grammar, before decoding starts.

    Example:
        ```python
        executor = hydrajax.make_executor(m, m.spec(tree="chain-2"))
        for result in hydrajax.generate(executor, ["def area(", "class Stack:"], batch_size=2):
            print(result.text)
        ```
    """
    if batch_size < 1:
        raise HydrajaxError(f"batch_size: got {batch_size}, expected at least 1")
    _check(executor, specs or [executor.spec], stop)
    encoded = list(encode_prompts(prompts, executor.tokenizer, executor.model.config))
    specs = [executor.spec] * len(encoded) if specs is None else list(specs)
    if len(specs) != len(encoded):
        raise HydrajaxError(f"specs: got {len(specs)} for {len(encoded)} prompts, expected one per prompt")
    if isinstance(seed, (Sequence, np.ndarray)) and len(seed) != len(encoded):
        raise HydrajaxError(f"seed: got {len(seed)} for {len(encoded)} prompts, expected one, or one per prompt")
    if isinstance(seed, (Sequence, np.ndarray)):
        seed = [checked_seed(one) for one in seed]
    else:
        seed = _drawn_seed(executor, specs[0].rule if specs else executor.spec.rule, seed)
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
    """Generate text for one prompt as a stream.

    The first piece comes after one step, later ones 10 to 20 times per second
    (`hydrajax.decoding.decode_loop.next_burst`). No piece ends within a character or contains a part of a stop string.
    Together they are the text that `generate` returns for prompt ``number``.

    Args:
        executor: decodes, with its spec.
        prompt: a text, a list of token ids, a conversation or a `Prompt`.
        stop: as in `generate`.
        seed: as in `generate`.
        number: the prompt's number, which its sample depends on.
        on_status: as in `generate`.

    Returns:
        An iterator over pieces of text, with the complete `Generation` in ``result`` at the end.

    Raises:
        HydrajaxError: for a bad prompt.
    """
    _check(executor, [executor.spec], stop)
    ids = encode_prompt(prompt, "prompt", executor.tokenizer, executor.model.config)
    return Stream(executor, ids, tuple(stop), _drawn_seed(executor, executor.spec.rule, seed), number, on_status)


class Stream:
    """An iterator over pieces of text. ``result`` is the `Generation` so far, complete after the last piece."""

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
        text = growing_text(executor.tokenizer, stop, ids)
        given = _inputs(executor, [ids], [spec], row_keys(jax.random.key(seed or 0), 1, number))
        for now, seconds in _decode(executor, given, [text], None, on_status):
            self.result = row_result(executor, spec, ids, now, 0, text, seconds, seed)
            if now.done[0] or text.stopped:
                remember(executor, self.result)
            if piece := text.text[shown:]:
                shown = len(text.text)
                yield piece


def growing_text(tokenizer: Any, stop: Sequence[str], prompt: Sequence[int] = ()) -> GrowingText:
    """Return an empty text that continues a prompt, to append tokens to. Without a tokenizer the text is the ids.

    Raises `HydrajaxError` for an empty stop string, and for any stop string without a tokenizer.
    """
    if stop and tokenizer is None:
        raise HydrajaxError("stop: requires a tokenizer, which the base does not have")
    return GrowingText(Continuation(tokenizer, prompt), stop)


def seed_for(rule: AcceptanceRule, seed: int | None) -> int | None:
    """Return the seed, a new one for None, and None for a rule without randomness. Raises `HydrajaxError`."""
    seed = None if seed is None else checked_seed(seed)
    if not rule.draws:
        return None
    return secrets.randbits(SEED_BITS) if seed is None else seed


def _drawn_seed(executor: Executor, rule: AcceptanceRule, seed: int | None) -> int | None:
    """Return `seed_for`, the same for all processes that decode together."""
    return seed_for(rule, seed) if seed is not None else agreed(executor.mesh, lambda: seed_for(rule, None))


def checked_seed(seed: Any) -> int:
    """Return a seed as an int; raises `HydrajaxError` for one that `jax.random.key` would wrap or refuse."""
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 2**SEED_BITS:
        raise HydrajaxError(f"seed: got {one_line(repr(seed), 40)}, expected an integer from 0 to {2**SEED_BITS - 1}")
    return number


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
    """Return the result of a row of a snapshot. Tokens after a stop string are not counted."""
    output_ids = now.tokens[row, : text.used].tolist()
    emitted_per_step, left = [], text.used
    for emitted in (now.accept_lengths[row, : now.steps[row]] + 1).tolist():
        if left > 0:
            emitted_per_step.append(min(emitted, left))
        left -= emitted
    reason = "context"
    if text.stopped:
        reason = "stop"
    elif output_ids and output_ids[-1] in spec.eos_ids:
        reason = "eos"
    elif len(output_ids) >= spec.max_new_tokens:
        reason = "length"
    elif spec.grammar is not None and len(ids) + len(output_ids) < executor.model.config.max_positions:
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
        seed=seed,
        **_logprobs(now, row, text.used),
    )


def remember(executor: Executor, result: Generation) -> None:
    """Add an output to the corpus that the executor's draft reads, if it reads one."""
    if (corpus := corpus_of(executor.params.draft)) is not None:
        corpus.remember(result.output_ids, result.prompt_ids)


# --- the loop over batches --------------------------------------------------------------------------------------------


def _check(executor: Executor, specs: Sequence[DecodeSpec], stop: Sequence[str]) -> None:
    """Raise `HydrajaxError` for invalid stop strings and grammars, and for more new tokens than the executor has room
    for.
    """
    if isinstance(stop, str):
        raise HydrajaxError("stop: got one string, expected a list; write [string]")
    growing_text(executor.tokenizer, stop)
    executor.constraints(list(dict.fromkeys(specs)))
    most = min(max(spec.max_new_tokens for spec in specs), executor.model.config.max_positions)
    if most > executor.room:
        raise HydrajaxError(f"max_new_tokens: got {most}, expected at most {executor.room} with this executor")


def _generate(
    executor: Executor,
    encoded: list[np.ndarray],
    specs: list[DecodeSpec],
    stop: tuple[str, ...],
    batch_size: int,
    seed: int | list[int] | None,
    on_status: Callable[[str], None],
) -> Iterator[Generation]:
    one, each = (seed_for(specs[0].rule, 0), seed) if isinstance(seed, list) else (seed, None)
    kinds = list(dict.fromkeys(specs))
    n_steps = STEPS_PER_BURST if stop else executor.room  # without stop strings in one burst
    for start in range(0, len(encoded), batch_size):
        batch, own = encoded[start : start + batch_size], specs[start : start + batch_size]
        filled = [number % len(batch) for number in range(batch_size)]
        if each is None:
            keys = row_keys(jax.random.key(one or 0), batch_size, start)
        else:
            keys = _own_keys(np.array([each[start + row] for row in filled], np.uint32))
        given = _inputs(executor, [batch[row] for row in filled], [own[row] for row in filled], keys, kinds)
        texts = [growing_text(executor.tokenizer, stop, ids) for ids in batch]
        *_, (now, seconds) = _decode(executor, given, texts, n_steps, on_status)
        for row, (ids, spec, text) in enumerate(zip(batch, own, texts, strict=True)):
            drawn = one if each is None or one is None else int(each[start + row])
            result = row_result(executor, spec, ids, now, row, text, seconds, drawn)
            remember(executor, result)
            yield result


@jax.jit
def _own_keys(seeds):
    """Return the key that each seed gives the first prompt, as if the prompt were decoded alone."""
    return jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), 0))(seeds)


def _inputs(
    executor: Executor,
    batch: list[np.ndarray],
    specs: Sequence[DecodeSpec],
    keys: jax.Array,
    like: Sequence[DecodeSpec] = (),
) -> Inputs:
    """Return a batch, padded to its bucket, with the sampling parameters of each row."""
    config = executor.model.config
    width = bucket(max(map(len, batch)), config.max_positions)
    ((prompt, lengths, _),) = batches(batch, len(batch), width)
    sampling = sampling_params(specs, keys, config.vocab_size, like)
    return Inputs(prompt, lengths, sampling._replace(constraints=executor.constraints(specs)))


def _decode(
    executor: Executor, given: Inputs, texts: list[GrowingText], n_steps: int | None, on_status: Callable[[str], None]
) -> Iterator[tuple[Snapshot, float]]:
    """Yield snapshots of a batch and the seconds so far; append to ``texts``. Rows beyond ``texts`` fill the batch."""
    if not executor.is_compiled(given):
        on_status(_compilation(executor, given))
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


def _compilation(executor: Executor, given: Inputs) -> str:
    """Describe the programs that these inputs need."""
    spec, (batch, width) = executor.spec, given.prompt.shape
    rule = next((name for name, kind in RULES.items() if type(spec.rule) is kind), type(spec.rule).__name__)
    tree = f"a tree of {spec.verified_nodes} nodes" if spec.longest_path else "no tree"
    return f"compiling the rule {rule} with {tree} for {batch} x {width} prompt tokens"


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
