"""Counts of a batcher, for its metrics."""

from __future__ import annotations

from dataclasses import dataclass

N_COUNTS = 9


@dataclass(frozen=True)
class Stats:
    """Counts since the start (the first `N_COUNTS`) and present values; bytes are those of KV caches.

    Attributes:
        cached: of ``prompt_tokens``, those from the prefix cache.
        tokens, steps: sums over sequences, so that their quotient is tau.
        speculative_steps: of ``steps``.
        running: sequences in prefill or decode.
        slots: of all groups in their present shapes.
        cache_len: of the longest group.
        nbytes: of the groups in their present shapes and of the prompt in prefill.
    """

    requests: int = 0
    ended: int = 0
    cancelled: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    tokens: int = 0
    steps: int = 0
    speculative_steps: int = 0
    waiting: int = 0
    running: int = 0
    groups: int = 0
    slots: int = 0
    cache_len: int = 0
    nbytes: int = 0
    prefix_cache_nbytes: int = 0
    prefix_cache_entries: int = 0
    limit_nbytes: int = 0
    failed: bool = False
