"""Metrics of a server for Prometheus."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hydrajax.serve.requests import RequestHandle
from hydrajax.serve.stats import Stats

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class ServerMetrics:
    """A Prometheus registry; ``stats`` is called at every scrape."""

    def __init__(self, stats: Callable[[], Stats]):
        self._stats, self._registry = stats, CollectorRegistry()
        self._registry.register(self)
        histogram = partial(Histogram, namespace="hydrajax", registry=self._registry)
        self._first = histogram("time_to_first_token_seconds", "Time to the first token", buckets=SECONDS)
        self._token = histogram("time_per_token_seconds", "Mean time per later token", buckets=TOKEN_SECONDS)
        self._request = histogram("request_seconds", "Time from arrival to end", buckets=SECONDS)

    def ended(self, handle: RequestHandle) -> None:
        """Record the times of a request that has ended."""
        if handle.first is None or handle.ended is None:
            return
        self._first.observe(handle.first - handle.arrived)
        self._request.observe(handle.ended - handle.arrived)
        if later := handle.result.new_tokens - handle.first_tokens:
            self._token.observe((handle.ended - handle.first) / later)

    def text(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        stats = self._stats()
        memory = GaugeMetricFamily("hydrajax_cache_bytes", "Bytes of KV caches", labels=["use"])
        for field in fields(stats):
            match [*field.metadata.items()], getattr(stats, field.name):
                case [("counter", name), (_, about)], value:
                    yield CounterMetricFamily(f"hydrajax_{name}", about, value=value)
                case [("gauge", name), (_, about)], value:
                    yield GaugeMetricFamily(f"hydrajax_{name}", about, value=value)
                case [("bytes", use)], value:
                    memory.add_metric([use], value)
        tau = stats.tokens / stats.steps if stats.steps else 0.0
        yield GaugeMetricFamily("hydrajax_tokens_per_step", "Tokens per step since the start", value=tau)
        yield memory
