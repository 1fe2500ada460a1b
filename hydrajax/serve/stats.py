"""Counts of a batcher, for its metrics."""

from dataclasses import dataclass, field, fields


def _counter(metric: str, about: str, *vllm: str) -> int:
    return field(default=0, metadata={"counter": metric, "about": about, "vllm": vllm})


def _gauge(metric: str, about: str, *vllm: str) -> int:
    return field(default=0, metadata={"gauge": metric, "about": about, "vllm": vllm})


def _bytes(use: str) -> int:
    return field(default=0, metadata={"bytes": use})


@dataclass(frozen=True)
class Stats:
    """Counts since the start and present values, with their name in Prometheus, help text, and vLLM's names.

    ``tokens`` and ``steps`` are sums over sequences, so that their quotient is tau.
    """

    requests: int = _counter("requests", "Sequences accepted")
    ended: int = _counter("ended", "Sequences finished")
    cancelled: int = _counter("cancelled", "Sequences cancelled")
    refused: int = _counter("refused", "Sequences refused because the queue was full")
    prompt_tokens: int = _counter("prompt_tokens", "Prompt tokens", "prompt_tokens", "prefix_cache_queries")
    cached: int = _counter(
        "cached", "Prompt tokens taken from the prefix cache", "prompt_tokens_cached", "prefix_cache_hits"
    )
    tokens: int = _counter("tokens", "Generated tokens", "generation_tokens")
    steps: int = _counter("steps", "Decode steps, summed over sequences")
    speculative_steps: int = _counter("drafted", "Speculative decode steps, summed over sequences")
    waiting: int = _gauge("waiting", "Sequences in the queue", "num_requests_waiting")
    running: int = _gauge("running", "Sequences in prefill or decode", "num_requests_running")
    groups: int = _gauge("groups", "Groups of slots with different cache lengths")
    slots: int = _gauge("rows", "Slots of all groups in their present shapes")
    cache_len: int = _gauge("places", "Cache length of the longest group")
    prefix_cache_entries: int = _gauge("kept_texts", "Entries of the prefix cache")
    nbytes: int = _bytes("running")  # of the groups in their present shapes and of the prompt in prefill
    prefix_cache_nbytes: int = _bytes("kept")
    limit_nbytes: int = _bytes("limit")
    failed: bool = False


COUNTS = tuple(one.name for one in fields(Stats) if "counter" in one.metadata)
