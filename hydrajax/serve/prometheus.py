"""Metrics of a server for Prometheus."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hydrajax.serve.batcher import Batcher
from hydrajax.serve.requests import RequestHandle
from hydrajax.serve.stats import Stats
from hydrajax.serve.vllm_metrics import SECONDS, TOKEN_SECONDS, VllmMetrics


class ServerMetrics:
    """A Prometheus registry; ``stats`` is called at every scrape. batchers: of each model by name."""

    def __init__(self, stats: Callable[[], Stats], batchers: Mapping[str, Batcher]):
        self._stats, self._registry = stats, CollectorRegistry()
        self._registry.register(self)
        self._vllm = VllmMetrics(batchers, self._registry)
        histogram = partial(Histogram, namespace="hydrajax", registry=self._registry)
        self._first = histogram("time_to_first_token_seconds", "Time to the first token", buckets=SECONDS)
        self._token = histogram("time_per_token_seconds", "Mean time per later token", buckets=TOKEN_SECONDS)
        self._request = histogram("request_seconds", "Time from arrival to end", buckets=SECONDS)

    def ended(self, model: str, handle: RequestHandle) -> None:
        """Record a sequence of a model that has ended."""
        self._vllm.ended(model, handle)
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
                case [("counter", name), (_, about), _], value:
                    yield CounterMetricFamily(f"hydrajax_{name}", about, value=value)
                case [("gauge", name), (_, about), _], value:
                    yield GaugeMetricFamily(f"hydrajax_{name}", about, value=value)
                case [("bytes", use)], value:
                    memory.add_metric([use], value)
        tau = stats.tokens / stats.steps if stats.steps else 0.0
        yield GaugeMetricFamily("hydrajax_tokens_per_step", "Tokens per step since the start", value=tau)
        yield memory
