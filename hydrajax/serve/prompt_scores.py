"""Log-probabilities of prompts: one forward pass over each text, next to the batcher's steps.

They are the base's own, at temperature 1 and without processors, as vLLM's ``prompt_logprobs``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from anyio import CapacityLimiter, to_thread
from jaxtyping import Int

from hydrajax.decoding.executor import Executor
from hydrajax.decoding.prompt_batch import bucket, right_padded
from hydrajax.decoding.scoring import TOKENS_AT_ONCE, token_scores
from hydrajax.serve.json_objects import MOST_ALTERNATIVES
from hydrajax.sharding import jit_on
from hydrajax.text.continuation import Continuation

FEW = 5  # most likely tokens: texts are scored with this number or with the most, so that few programs compile
LOGITS_AT_ONCE = 1 << 25  # 128 MB


class TextScores(NamedTuple):
    """The scores of a text's tokens, see `hydrajax.decoding.scoring.TokenScores`.

    Attributes:
        ids: the text.
        logprobs, ranks: of each token.
        top: the most likely tokens in its place with their log-probabilities.
    """

    ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    top: list[list[tuple[int, float]]]


class PromptScorer:
    """Scores one text at a time, on a thread that is neither the event loop nor the batcher's."""

    def __init__(self, executor: Executor):
        self._executor, self._config, self._limiter = executor, executor.model.config, CapacityLimiter(1)
        at_once = max(1, min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // self._config.vocab_size))
        score = partial(token_scores, executor.model, tokens_at_once=at_once)
        self._program = jit_on(executor.mesh, lambda params, tokens, k: score(params, tokens, k), static_argnames="k")

    async def score(self, ids: Sequence[int], k: int) -> TextScores:
        """Return the scores of a text that fits the context, with k most likely tokens."""
        return await to_thread.run_sync(self._score, ids, k, limiter=self._limiter)

    def _score(self, ids: Int[np.ndarray, " T"], k: int) -> TextScores:
        padded, _ = right_padded([ids], bucket(len(ids), self._config.max_positions))
        most = min(FEW if k <= FEW else MOST_ALTERNATIVES, self._config.vocab_size)
        scores = jax.device_get(self._program(self._executor.params.base, padded, k=most))
        logprobs, likely, its_own, ranks = (x[0, : len(ids)].tolist() for x in jax.tree.leaves(scores))
        top = [list(zip(*place, strict=True)) for place in zip(likely, its_own, strict=True)]
        return TextScores(list(map(int, ids)), logprobs, ranks, top)


def prompt_logprobs(scores: TextScores, size: int, k: int, read: Continuation) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: scores by token id for each token of the prompt, None for the first.

    Args:
        scores: of a text that begins with the prompt.
        size: the prompt's tokens.
        k: most likely tokens.
        read: of an empty prompt.
    """
    found: list[dict[str, Any] | None] = []
    for token, logprob, rank, top in itertools.islice(zip(*scores, strict=True), size):
        ranked = {token: (logprob, rank)} | {other: (its_own, at) for at, (other, its_own) in enumerate(top[:k], 1)}
        named = {
            str(other): {"logprob": its_own, "rank": its_rank, "decoded_token": read.name(other)}
            for other, (its_own, its_rank) in ranked.items()
        }
        found.append(named if found else None)
        read.read(token)
    return found
