"""Generate text from prompts, in batches or as a stream, up to EOS, a limit or a stop string."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hydrajax.decoding.decode_loop import Snapshot
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.inputs import Inputs
from hydrajax.decoding.keywords import rule_name
from hydrajax.decoding.prompt_batch import batches, bucket, encode_prompt, encode_prompts
from hydrajax.decoding.request import Request, sampling_params
from hydrajax.errors import HydrajaxError
from hydrajax.sequences import drawn, growing_text, keys_of, remember, row_result
from hydrajax.text.answers import Generation
from hydrajax.text.prompt import OnePrompt
from hydrajax.text.stopping import GrowingText

STEPS_PER_BURST = 8  # between two checks for stop strings


def generate(
    executor: Executor,
    prompts: Sequence[OnePrompt],
    *,
    requests: Sequence[Request] | None = None,
    stop: Sequence[str] | None = None,
    batch_size: int = 1,
    seed: int | Sequence[int] | None = None,
    on_status: Callable[[str], None] = lambda status: None,
) -> Iterator[Generation]:
    """Generate text for a list of prompts, ``batch_size`` prompts at a time.

    Batches keep the order of the prompts and are padded to the bucket of their longest prompt. The last batch repeats
    its prompts to fill up, so that it compiles nothing new.

    Args:
        executor: decodes.
        prompts: texts, lists of token ids, conversations or `Prompt`s.
        requests: one per prompt, by default the executor's for each. The rules are of the executor's kind.
        stop: replaces ``stop`` of the requests. The text ends before the string; ``output_ids`` end with the token that
            completes it (`hydrajax.text.stopping.GrowingText`).
        batch_size: sequences decoded together.
        seed: replaces the requests' seeds and numbers: one seed, under which each prompt has its number, or a list with
            one per prompt, each of which is sampled as if decoded alone. A prompt's sample depends on seed and number,
            not on the batch size. Sampling rules without a seed draw one for all, which the results report.
        on_status: called with ``"compiling ..."`` before a new shape is compiled, and ``"decoding"`` before each batch.

    Returns:
        A generator that yields the results of each batch when the batch is done.

    Raises:
        HydrajaxError: for any bad prompt or grammar, before decoding starts.

    Example:
        ```python
        executor = hydrajax.make_executor(m, m.program(tree="chain-2"))
        for result in hydrajax.generate(executor, ["def area(", "class Stack:"], batch_size=2):
            print(result.text)
        ```
    """
    if batch_size < 1:
        raise HydrajaxError(f"batch_size: got {batch_size}, expected at least 1")
    changes = {} if stop is None else {"stop": stop}
    given = [one.replace(**changes) for one in ([executor.request] if requests is None else requests)]
    _check(executor, given)
    encoded = list(encode_prompts(prompts, executor.tokenizer, executor.model.config))
    if requests is None:
        given *= len(encoded)
    for name, values in (("requests", given), ("seed", seed)):
        if isinstance(values, (Sequence, np.ndarray)) and len(values) != len(encoded):
            raise HydrajaxError(f"{name}: got {len(values)} for {len(encoded)} prompts, expected one per prompt")
    if not encoded:
        _ = given or _seeded(executor, [executor.request], seed)  # refuses an invalid seed
        return iter(())
    given = _seeded(executor, given, seed)
    return _generate(executor, encoded, given, min(batch_size, len(encoded)), on_status)


def stream(
    executor: Executor,
    prompt: OnePrompt,
    request: Request | None = None,
    *,
    on_status: Callable[[str], None] = lambda status: None,
) -> Stream:
    """Generate text for one prompt as a stream.

    The first piece comes after one step, later ones 10 to 20 times per second
    (`hydrajax.decoding.decode_loop.next_burst`). No piece ends within a character or contains a part of a stop string.
    Together they are the text that `generate` returns for the same request.

    Args:
        executor: decodes.
        prompt: a text, a list of token ids, a conversation or a `Prompt`.
        request: by default the executor's.
        on_status: as in `generate`.

    Returns:
        An iterator over pieces of text, with the complete `Generation` in ``result`` at the end.

    Raises:
        HydrajaxError: for a bad prompt.
    """
    request = request or executor.request
    _check(executor, [request])
    ids = encode_prompt(prompt, "prompt", executor.tokenizer, executor.model.config)
    return Stream(executor, ids, drawn(executor, request), on_status)


class Stream:
    """An iterator over pieces of text. ``result`` is the `Generation` so far, complete after the last piece."""

    def __init__(self, executor: Executor, ids: np.ndarray, request: Request, on_status: Callable[[str], None]):
        self.result: Generation | None = None
        self._pieces = self._run(executor, ids, request, on_status)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def _run(self, executor, ids, request, on_status) -> Iterator[str]:
        shown, text = 0, growing_text(executor.tokenizer, request.stop, ids)
        given = _inputs(executor, [ids], [request])
        for now, seconds in _decode(executor, given, [text], None, on_status):
            self.result = row_result(executor, request, ids, now, 0, text, seconds)
            if now.done[0] or text.stopped:
                remember(executor, self.result)
            if piece := text.text[shown:]:
                shown = len(text.text)
                yield piece


def _seeded(executor: Executor, requests: list[Request], seed: int | Sequence[int] | None) -> list[Request]:
    """Return the requests with the seeds of `generate`."""
    if isinstance(seed, (Sequence, np.ndarray)):
        return [drawn(executor, one.replace(seed=own, number=0)) for one, own in zip(requests, seed, strict=True)]
    if seed is not None or all(one.seed is None for one in requests):
        one = drawn(executor, requests[0].replace(seed=seed))
        return [each.replace(seed=one.seed, number=number) for number, each in enumerate(requests)]
    return [drawn(executor, one) for one in requests]


# --- the loop over batches --------------------------------------------------------------------------------------------


def _check(executor: Executor, requests: Sequence[Request]) -> None:
    """Raise `HydrajaxError` for requests that the executor cannot serve."""
    kinds = list(dict.fromkeys(requests))
    for request in kinds:
        executor.check(request)
        growing_text(executor.tokenizer, request.stop)
    executor.constraints(kinds)
    room = executor.program.max_new_tokens
    most = min(max((request.max_new_tokens for request in requests), default=0), executor.model.config.max_positions)
    if most > room:
        raise HydrajaxError(f"max_new_tokens: got {most}, expected at most {room} with this executor")


def _generate(
    executor: Executor,
    encoded: list[np.ndarray],
    requests: list[Request],
    batch_size: int,
    on_status: Callable[[str], None],
) -> Iterator[Generation]:
    kinds = list(dict.fromkeys(one.replace(seed=None, number=0) for one in requests))
    stops = any(request.stop for request in requests)
    n_steps = STEPS_PER_BURST if stops else executor.program.max_new_tokens  # without stop strings in one burst
    for start in range(0, len(encoded), batch_size):
        batch, own = encoded[start : start + batch_size], requests[start : start + batch_size]
        filled = [row % len(batch) for row in range(batch_size)]
        given = _inputs(executor, [batch[row] for row in filled], [own[row] for row in filled], kinds)
        texts = [growing_text(executor.tokenizer, one.stop, ids) for ids, one in zip(batch, own, strict=True)]
        *_, (now, seconds) = _decode(executor, given, texts, n_steps, on_status)
        for row, (ids, request, text) in enumerate(zip(batch, own, texts, strict=True)):
            result = row_result(executor, request, ids, now, row, text, seconds)
            remember(executor, result)
            yield result


def _inputs(
    executor: Executor, batch: list[np.ndarray], requests: Sequence[Request], like: Sequence[Request] = ()
) -> Inputs:
    """Return a batch, padded to its bucket, with the sampling parameters of each row."""
    config = executor.model.config
    width = bucket(max(map(len, batch)), config.max_positions)
    ((prompt, lengths, _),) = batches(batch, len(batch), width)
    sampling = sampling_params(requests, keys_of(requests), config.vocab_size, like)
    return Inputs(prompt, lengths, sampling._replace(constraints=executor.constraints(requests)))


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
    program, (batch, width) = executor.program, given.prompt.shape
    tree = f"a tree of {program.verified_nodes} nodes" if program.longest_path else "no tree"
    return f"compiling the rule {rule_name(program.rule)} with {tree} for {batch} x {width} prompt tokens"
