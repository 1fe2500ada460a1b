"""vLLM's metrics for Prometheus, which dashboards and benchmark clients read (docs/serving.md)."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hydrajax.serve.batcher import Batcher
from hydrajax.serve.replies import FINISH_REASONS
from hydrajax.serve.requests import RequestHandle

LABELS, ENGINE = ("model_name", "engine"), "0"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time to the first token", SECONDS),
    "inter_token_latency_seconds": ("Time per later token", TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Mean time per later token of a request", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("Time from arrival to end", SECONDS),
    "request_queue_time_seconds": ("Time in the queue", SECONDS),
    "request_inference_time_seconds": ("Time of prefill and decode", SECONDS),
    "request_prefill_time_seconds": ("Time of prefill", SECONDS),
    "request_decode_time_seconds": ("Time of decode", SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request", TOKENS),
    "request_generation_tokens": ("Generated tokens of a request", TOKENS),
    "request_max_num_generation_tokens": ("Limit of generated tokens of a request", TOKENS),
}
COUNTERS = {
    "prompt_tokens": ("Prompt tokens", lambda stats, drafts: stats.prompt_tokens),
    "prompt_tokens_cached": ("Prompt tokens taken from the prefix cache", lambda stats, drafts: stats.cached),
    "prefix_cache_queries": ("Prompt tokens sought in the prefix cache", lambda stats, drafts: stats.prompt_tokens),
    "prefix_cache_hits": ("Prompt tokens taken from the prefix cache", lambda stats, drafts: stats.cached),
    "generation_tokens": ("Generated tokens", lambda stats, drafts: stats.tokens),
    "num_preemptions": ("Preempted sequences: none", lambda stats, drafts: 0),
}
DRAFT_COUNTERS = {
    "spec_decode_num_drafts": ("Speculative steps", lambda stats, drafts: drafts.steps),
    "spec_decode_num_draft_tokens": ("Candidates of speculative steps", lambda stats, drafts: drafts.drafted),
    "spec_decode_num_accepted_tokens": ("Accepted candidates", lambda stats, drafts: drafts.accepted),
}
GAUGES = {
    "num_requests_running": ("Sequences in prefill or decode", lambda stats: stats.running),
    "num_requests_waiting": ("Sequences in the queue", lambda stats: stats.waiting),
    "kv_cache_usage_perc": ("Memory of running sequences, 1 for all", lambda stats: stats.nbytes / stats.limit_nbytes),
}
REASONS = ("stop", "length", "abort", "error")


class VllmMetrics:
    """A collector of a Prometheus registry, with the label ``model_name`` for each served model."""

    def __init__(self, batchers: Mapping[str, Batcher], registry: CollectorRegistry):
        self._batchers = batchers
        self._histograms = {
            name: Histogram(f"vllm:{name}", about, LABELS, buckets=buckets, registry=registry)
            for name, (about, buckets) in HISTOGRAMS.items()
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
        for name, values in _measured(handle).items():
            for value in values:
                self._histograms[name].labels(model, ENGINE).observe(value)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        found = {model: (one.stats(), one.draft_counts()) for model, one in self._batchers.items()}
        drafting = {model: given for model, given in found.items() if len(given[1].histogram) > 1}
        for name, (about, value) in GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", about, labels=LABELS)
            for model, (stats, _) in found.items():
                gauge.add_metric((model, ENGINE), value(stats))
            yield gauge
        for counters, models in ((COUNTERS, found), (DRAFT_COUNTERS, drafting)):
            for name, (about, count) in counters.items():
                counter = CounterMetricFamily(f"vllm:{name}", about, labels=LABELS)
                for model, given in models.items():
                    counter.add_metric((model, ENGINE), count(*given))
                yield counter
        name, about = "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted candidates by depth, 0 for the first"
        positions = CounterMetricFamily(name, about, labels=(*LABELS, "position"))
        for model, (_, drafts) in drafting.items():
            for position, count in enumerate(drafts.accepted_at):
                positions.add_metric((model, ENGINE, str(position)), count)
        yield positions


def _reason(handle: RequestHandle) -> str:
    if handle.error is not None:
        return "error"
    result = handle.result
    if result is None or result.finish_reason is None:
        return "abort"
    return FINISH_REASONS.get(result.finish_reason, "length")


def _measured(handle: RequestHandle) -> dict[str, list[float]]:
    """Return the values of `HISTOGRAMS` for a sequence; none if it ended before its first token."""
    if handle.first is None or handle.ended is None:
        return {}
    new, decode = handle.result.new_tokens, handle.ended - handle.first
    return {
        "time_to_first_token_seconds": [handle.first - handle.arrived],
        "inter_token_latency_seconds": [seconds for seconds, tokens in handle.gaps for _ in range(tokens)],
        "request_time_per_output_token_seconds": [decode / (new - 1)] if new > 1 else [],
        "e2e_request_latency_seconds": [handle.ended - handle.arrived],
        "request_queue_time_seconds": [handle.started - handle.arrived],
        "request_inference_time_seconds": [handle.ended - handle.started],
        "request_prefill_time_seconds": [handle.first - handle.started],
        "request_decode_time_seconds": [decode],
        "request_prompt_tokens": [len(handle.request.ids)],
        "request_generation_tokens": [new],
        "request_max_num_generation_tokens": [handle.request.wanted.max_new_tokens],
    }
