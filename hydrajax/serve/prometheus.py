"""What a server has done and is doing, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hydrajax.serve.batcher import Stats
from hydrajax.serve.requests import RequestHandle

COUNTERS = {
    "requests": "Texts that were taken to be continued",
    "ended": "Texts that were continued to their end",
    "cancelled": "Texts that were broken off",
    "refused": "Texts that the queue had no room for",
    "prompt_tokens": "Tokens of prompts",
    "cached": "Tokens of prompts that were kept from before",
    "tokens": "Tokens that were generated",
    "steps": "Decode steps, of all rows together",
    "drafted": "Decode steps that had a draft",
}
GAUGES = {
    "waiting": "Texts that wait",
    "running": "Texts that are being read or continued",
    "groups": "Groups in which texts of different lengths run",
    "rows": "Rows of all groups in their present shapes",
    "places": "Places of the longest cache in its present shape",
    "kept_texts": "Texts whose caches are kept",
}
BYTES = {"nbytes": "running", "kept_nbytes": "kept", "limit_nbytes": "limit"}
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """stats: is asked at every scrape."""

    def __init__(self, stats: Callable[[], Stats]):
        self._stats, self._registry = stats, CollectorRegistry()
        self._registry.register(self)
        made = partial(Histogram, namespace="hydrajax", registry=self._registry)
        self._first = made("time_to_first_token_seconds", "From a request's arrival", buckets=SECONDS)
        self._each = made("time_per_token_seconds", "Mean of each text, after its first tokens", buckets=TOKEN_SECONDS)
        self._whole = made("request_seconds", "From a request's arrival to its end", buckets=SECONDS)

    def ended(self, ticket: RequestHandle) -> None:
        """A text is over."""
        if ticket.first is None or ticket.ended is None:
            return
        self._first.observe(ticket.first - ticket.arrived)
        self._whole.observe(ticket.ended - ticket.arrived)
        if later := ticket.result.new_tokens - ticket.first_tokens:
            self._each.observe((ticket.ended - ticket.first) / later)

    def text(self) -> bytes:
        """The page that is scraped."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        now = self._stats()
        for name, what in COUNTERS.items():
            yield CounterMetricFamily(f"hydrajax_{name}", what, value=getattr(now, name))
        for name, what in GAUGES.items():
            yield GaugeMetricFamily(f"hydrajax_{name}", what, value=getattr(now, name))
        tau = now.tokens / now.steps if now.steps else 0.0
        yield GaugeMetricFamily("hydrajax_tokens_per_step", "Tau, since the beginning", value=tau)
        memory = GaugeMetricFamily("hydrajax_cache_bytes", "Memory of caches", labels=["use"])
        for name, use in BYTES.items():
            memory.add_metric([use], getattr(now, name))
        yield memory
