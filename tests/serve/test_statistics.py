"""Counts of speculation in responses and in ``/metrics``, against the outputs of `generate`; vLLM's names."""

import json
from collections import Counter

import httpx
import numpy as np
import pytest

from helpers.letters import TREE
from helpers.serving import SECONDS, expected, running
from hydrajax.serve.draft_counts import DraftCounts
from hydrajax.serve.executor_pool import PoolSizes
from hydrajax.serve.replies import ReplyChoice, statistics
from hydrajax.serve.requests import RequestHandle, Submission
from hydrajax.serve.served_models import pool_for
from hydrajax.serve.vllm_metrics import HISTOGRAMS
from hydrajax.text.continuation import Continuation

PROMPTS = ["abc", "a bad cafe", "deaf"]
SPECULATION = "vllm:spec_decode_num_"


@pytest.fixture(scope="module")
def address(small):
    with running(small, model="letters", others={"letters:other": small}) as (at, _):
        yield at


def post(address: str, **body) -> dict:
    body = {"max_tokens": 30} | body
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def series(address: str, model: str = "letters") -> Counter:
    """The values of vLLM's metrics of a model by name; those with a further label by name and its value."""
    found = Counter()
    for line in httpx.get(f"{address}/metrics").text.splitlines():
        name, _, labels = line.rpartition(" ")[0].partition("{")
        if name.startswith("vllm:") and f'model_name="{model}"' in labels and 'engine="0"' in labels:
            own = [label for label in labels.rstrip("}").split(",") if not label.startswith(("model_name", "engine"))]
            found[name + "".join(label.partition("=")[2].strip('"') for label in own)] = float(line.rpartition(" ")[2])
    return found


def summary_of(emitted: list[int]) -> dict:
    """The fields that steps with these emitted tokens must have, counted in another way than the server does."""
    accepted, drafted = sum(emitted) - len(emitted), len(emitted) * (TREE.size - 1)
    return {
        "mean_acceptance_length": pytest.approx(sum(emitted) / len(emitted)),
        "draft_acceptance_rate": pytest.approx(accepted / drafted),
        "acceptance_histogram": [emitted.count(count) for count in (1, 2, 3)],
        "num_spec_steps": len(emitted),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": 2,
    }


def test_responses_count_the_steps_of_generate_and_the_metrics_add_them_up(served, address):
    wanted, before = expected(served, PROMPTS, limit=30), series(address)
    reasons, other = Counter(), series(address, "letters:other")
    for prompt, result in zip(PROMPTS, wanted, strict=True):
        found = post(address, model="letters", prompt=prompt)
        summary = summary_of(result.emitted_per_step)
        assert found["metrics"] == {"speculative_decoding": summary}
        accepted = summary["num_accepted_draft_tokens"]
        details = found["usage"]["completion_tokens_details"]
        rejected = summary["num_draft_tokens"] - accepted
        assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (accepted, rejected)
        reasons[found["choices"][0]["finish_reason"]] += 1
    moved = series(address)
    moved.subtract(before)
    steps = [count for result in wanted for count in result.emitted_per_step]
    tokens, prompts = sum(steps), sum(map(len, PROMPTS))
    assert {name.removeprefix(SPECULATION): moved[name] for name in moved if name.startswith(SPECULATION)} == {
        "drafts_total": len(steps),
        "draft_tokens_total": len(steps) * (TREE.size - 1),
        "accepted_tokens_total": tokens - len(steps),
        "accepted_tokens_per_pos_total0": sum(count > 1 for count in steps),
        "accepted_tokens_per_pos_total1": sum(count > 2 for count in steps),
    }
    assert (moved["vllm:generation_tokens_total"], moved["vllm:prompt_tokens_total"]) == (tokens, prompts)
    assert moved["vllm:request_prompt_tokens_sum"] == moved["vllm:prefix_cache_queries_total"] == prompts
    assert moved["vllm:request_generation_tokens_sum"] == tokens
    assert {reason: moved[f"vllm:request_success_total{reason}"] for reason in reasons} == reasons
    later = {"inter_token_latency_seconds", "request_time_per_output_token_seconds"}
    assert {moved[f"vllm:{name}_count"] for name in HISTOGRAMS.keys() - later} == {3}
    assert 0 < moved["vllm:inter_token_latency_seconds_count"] < tokens
    assert 0 < moved["vllm:inter_token_latency_seconds_sum"] <= moved["vllm:request_decode_time_seconds_sum"]
    whole = sum(moved[f"vllm:request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode"))
    assert whole == pytest.approx(moved["vllm:e2e_request_latency_seconds_sum"])
    assert series(address, "letters:other") == other
    assert 0 == moved["vllm:num_requests_running"] == moved["vllm:num_requests_waiting"]


def test_streams_count_too_and_several_choices_do_not(served, address):
    (wanted,) = expected(served, ["a bad cafe"], limit=30)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a bad cafe", "max_tokens": 30, "stream": True, "stream_options": options}
    events = httpx.post(f"{address}/v1/completions", json=body, timeout=SECONDS).text.split("\n\n")
    *pieces, last = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    assert last["metrics"] == {"speculative_decoding": summary_of(wanted.emitted_per_step)}
    assert not any("metrics" in piece for piece in pieces)
    so_far = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert so_far == sorted(so_far)
    assert pieces[-1]["usage"] == {name: last["usage"][name] for name in pieces[-1]["usage"]}
    several = post(address, prompt="a bad cafe", n=2)
    assert several["metrics"] is None
    assert several["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 2 * (
        wanted.steps * TREE.size - wanted.new_tokens
    )
    assert post(address, prompt=["abc", "deaf"])["metrics"] is None


def test_a_stop_string_cuts_the_counts_with_the_text(served, address):
    (full,) = expected(served, ["abc"], limit=30)
    before = series(address)
    found = post(address, prompt="abc", stop=full.text[7:9])
    counts, tokens = found["metrics"]["speculative_decoding"], found["usage"]["completion_tokens"]
    assert counts["num_spec_steps"] + counts["num_accepted_draft_tokens"] == tokens < full.new_tokens
    moved = series(address)
    moved.subtract(before)
    assert moved[f"{SPECULATION}accepted_tokens_total"] == counts["num_accepted_draft_tokens"]
    assert moved["vllm:request_success_totalstop"] == 1


def test_without_a_draft_nothing_is_speculative(served):
    model = served.with_draft("none")
    plain = pool_for(model, None, PoolSizes(slots=1, chunk=16, cache_len=128))
    assert plain.candidates(1, constrained=True) == plain.longest_path() - 1 == 0
    handle = RequestHandle(Submission(np.zeros(1, np.int32), plain.neutral))
    assert (
        statistics([ReplyChoice(0, handle, lambda ids: Continuation(model.tokenizer, ids), False)])["metrics"] is None
    )


def test_a_step_under_a_grammar_may_accept_more_than_the_tree_is_deep():
    counts = DraftCounts(2)
    counts.add(17, [6, 1])
    counts.add(9, [3])
    assert counts.histogram == [1, 0, 1, 0, 0, 1]
    assert counts.accepted_at == [2, 2, 1, 1, 1]
    assert (counts.steps, counts.accepted, counts.drafted) == (3, 7, 43)
    assert counts.summary()["num_spec_tokens"] == 5
