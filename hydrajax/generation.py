"""Generate text from prompts, in batches or as a stream, up to EOS, a limit or a stop string."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hydrajax.decoding.executor import Executor
from hydrajax.decoding.prompt_batch import encode_prompt, encode_prompts
from hydrajax.decoding.request import Request
from hydrajax.errors import HydrajaxError
from hydrajax.refilled_batch import RefilledBatch, compilation, inputs_of
from hydrajax.sequences import drawn, growing_text, remember, row_result
from hydrajax.text.answers import Generation
from hydrajax.text.prompt import OnePrompt


def generate(
    executor: Executor,
    prompts: Sequence[OnePrompt],
    *,
    requests: Sequence[Request] | None = None,
    stop: Sequence[str] | None = None,
    batch_size: int = 1,
    seed: int | Sequence[int] | None = None,
    executor_for: Callable[[int], Executor] | None = None,
    on_status: Callable[[str], None] = lambda status: None,
) -> Iterator[Generation]:
    """Generate text for a list of prompts, ``batch_size`` sequences at a time.

    A sequence that ends gives its row to the next prompt; equal prompts in a row are prefilled once. When none waits
    and at most half of the rows are live, they move into a smaller batch, a power of two, if its program is compiled
    or will pay for its compilation (`hydrajax.refilled_batch`). With a draft on its own devices, on several processes
    and on a mesh that shards sequences, the next prompts wait until all rows have ended.

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
        executor_for: the executor for a smaller batch size, such as one with a larger tree; its program differs in the
            tree alone. By default ``executor``, always with rules whose output depends on the tree.
        on_status: called with ``"compiling ..."`` before a new shape is compiled, and ``"decoding"`` before decoding
            begins or continues.

    Returns:
        A generator that yields the results in the order of the prompts, each when it and all before it are done.

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
    batch = RefilledBatch(executor, encoded, given, min(batch_size, len(encoded)), executor_for, on_status)
    return batch.results()


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
        shown, text = 0, growing_text(executor.tokenizer, request, ids)
        given, stopped = inputs_of(executor, [ids], [request]), np.zeros(1, bool)
        if not executor.is_compiled(given):
            on_status(compilation(executor, *given.prompt.shape))
        executor.compile(given)
        on_status("decoding")
        began = time.perf_counter()
        for now in executor.run(given, stopped):
            seconds = time.perf_counter() - began
            text.grow(now.tokens[0, : now.lengths[0]].tolist(), final=bool(now.done[0]))
            stopped[0] = text.stopped
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


def _check(executor: Executor, requests: Sequence[Request]) -> None:
    """Raise `HydrajaxError` for requests that the executor cannot serve."""
    kinds = list(dict.fromkeys(requests))
    for request in kinds:
        executor.check(request)
        growing_text(executor.tokenizer, request)
    executor.constraints(kinds)
    room = executor.program.max_new_tokens
    most = min(max((request.max_new_tokens for request in requests), default=0), executor.model.config.max_positions)
    if most > room:
        raise HydrajaxError(f"max_new_tokens: got {most}, expected at most {room} with this executor")
