"""vLLM's metrics for Prometheus, which dashboards and benchmark clients read (docs/serving.md)."""

from collections.abc import Iterator, Mapping
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hydrajax.serve.batcher import Batcher
from hydrajax.serve.replies import FINISH_REASONS
from hydrajax.serve.requests import RequestHandle
from hydrajax.serve.stats import Stats

LABELS, ENGINE = ("model_name", "engine"), "0"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
# Buckets and values of a sequence that has ended, and has a token.
HISTOGRAMS = {
    "time_to_first_token_seconds": (SECONDS, lambda one: [one.first - one.arrived]),
    "inter_token_latency_seconds": (
        TOKEN_SECONDS,
        lambda one: [each for each, count in one.gaps for _ in range(count)],
    ),
    "request_time_per_output_token_seconds": (
        TOKEN_SECONDS,
        lambda one: [(one.ended - one.first) / (one.result.new_tokens - 1)] if one.result.new_tokens > 1 else [],
    ),
    "e2e_request_latency_seconds": (SECONDS, lambda one: [one.ended - one.arrived]),
    "request_queue_time_seconds": (SECONDS, lambda one: [one.started - one.arrived]),
    "request_inference_time_seconds": (SECONDS, lambda one: [one.ended - one.started]),
    "request_prefill_time_seconds": (SECONDS, lambda one: [one.first - one.started]),
    "request_decode_time_seconds": (SECONDS, lambda one: [one.ended - one.first]),
    "request_prompt_tokens": (TOKENS, lambda one: [len(one.request.ids)]),
    "request_generation_tokens": (TOKENS, lambda one: [one.result.new_tokens]),
    "request_max_num_generation_tokens": (TOKENS, lambda one: [one.request.wanted.max_new_tokens]),
}
DRAFT_COUNTERS = {"drafts": "steps", "draft_tokens": "drafted", "accepted_tokens": "accepted"}
REASONS = ("stop", "length", "abort", "error")


class VllmMetrics:
    """A collector of a Prometheus registry, with the label ``model_name`` for each served model."""

    def __init__(self, batchers: Mapping[str, Batcher], registry: CollectorRegistry):
        self._batchers = batchers
        self._histograms = {
            name: Histogram(f"vllm:{name}", name.replace("_", " "), LABELS, buckets=buckets, registry=registry)
            for name, (buckets, _) in HISTOGRAMS.items()
        }
        about = "Sequences that have ended"
        self._success = Counter("vllm:request_success", about, (*LABELS, "finished_reason"), registry=registry)
        for model in batchers:  # series begin at 0
            for histogram in self._histograms.values():
                histogram.labels(model, ENGINE)
            for reason in REASONS:
                self._success.labels(model, ENGINE, reason)
        registry.register(self)

    def ended(self, model: str, handle: RequestHandle) -> None:
        """Record a sequence that has ended."""
        self._success.labels(model, ENGINE, _reason(handle)).inc()
        if handle.first is not None and handle.ended is not None:
            for name, (_, values) in HISTOGRAMS.items():
                histogram = self._histograms[name].labels(model, ENGINE)
                for value in values(handle):
                    histogram.observe(value)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        found = {model: batcher.stats() for model, batcher in self._batchers.items()}
        drafts = {model: batcher.draft_counts() for model, batcher in self._batchers.items()}
        drafts = {model: counts for model, counts in drafts.items() if len(counts.histogram) > 1}
        for field in fields(Stats):
            kind = CounterMetricFamily if "counter" in field.metadata else GaugeMetricFamily
            for name in field.metadata.get("vllm", ()):
                values = {(model,): getattr(stats, field.name) for model, stats in found.items()}
                yield _metric(kind, name, field.metadata["about"], values)
        usage = {(model,): stats.nbytes / stats.limit_nbytes for model, stats in found.items()}
        yield _metric(GaugeMetricFamily, "kv_cache_usage_perc", "Memory of running sequences, 1 for all", usage)
        for name, attribute in DRAFT_COUNTERS.items():
            values = {(model,): getattr(counts, attribute) for model, counts in drafts.items()}
            yield _metric(CounterMetricFamily, f"spec_decode_num_{name}", "Of speculative steps", values)
        name, about = "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by depth, 0 below the root"
        places = {(m, str(at)): n for m, counts in drafts.items() for at, n in enumerate(counts.accepted_at)}
        yield _metric(CounterMetricFamily, name, about, places, "position")


def _metric(kind: type[Metric], name: str, about: str, values: Mapping[tuple[str, ...], float], *more: str) -> Metric:
    """Return a metric with values by model and further labels."""
    metric = kind(f"vllm:{name}", about, labels=(*LABELS, *more))
    for (model, *labels), value in values.items():
        metric.add_metric((model, ENGINE, *labels), value)
    return metric


def _reason(handle: RequestHandle) -> str:
    if handle.error is not None:
        return "error"
    reason = None if handle.result is None else handle.result.finish_reason
    return "abort" if reason is None else FINISH_REASONS.get(reason, "length")
