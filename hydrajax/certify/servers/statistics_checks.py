"""Check the statistics of a server: vLLM's counts of speculation in responses, and its counters in ``/metrics``."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydrajax.certify.servers.answers import Answer
from hydrajax.certify.servers.comparison import FAULT, Finding
from hydrajax.certify.servers.questions import Question
from hydrajax.certify.servers.sides import Compared, Sides

ENDED = "vllm:request_success_total"
# Counters, and the fields of responses whose sums they move by.
COUNTERS = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "completion_tokens",
    "vllm:spec_decode_num_drafts_total": "num_spec_steps",
    "vllm:spec_decode_num_draft_tokens_total": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "num_accepted_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "num_accepted_draft_tokens",
}
LOOKS, PAUSE = 20, 0.1  # seconds: a server may count a request after its response
USAGE = {"stream_options": {"include_usage": True}}


def statistics(sides: Sides, questions: Sequence[Question]) -> Compared:
    """Check the counts of whole and streamed responses against each other and against the counters' moves."""
    found, setting, sums = Compared(), "counted", Counter[str]()
    every = [
        one.but(stream=True, more=USAGE) if number % 2 else one.but(logprobs=sides.server.most_logprobs(one))
        for number, one in enumerate(questions)
    ]
    before, whole = sides.server.counters(), True
    for asked, outcome in zip(every, sides.served(every, ask=sides.server.described), strict=True):
        if (described := found.reply(asked, outcome, setting)) is None:
            continue
        answers, usage, counts = described
        messages = [] if counts is None else list(_wrong(counts, usage, asked, answers[0]))
        found.findings += [Finding("statistics", FAULT, setting, asked, message) for message in messages]
        found.compared += counts is not None
        whole &= bool(usage) and not messages
        fields = usage | (counts or {})
        sums.update({ENDED: 1} | {name: fields[field] for name, field in COUNTERS.items() if whole and field in fields})
    if not found.compared:
        found.refusals.append("responses have no metrics.speculative_decoding")
    if not before:
        found.refusals.append("/metrics has no counters of vLLM")
    elif whole and sums:  # else the sums are not known
        found.compared += 1
        found.findings += [
            Finding("statistics", FAULT, setting, questions[-1], f"/metrics: {message}")
            for message in _unmoved(sides, before, {name: count for name, count in sums.items() if name in before})
        ]
    return found


def _wrong(counts: Mapping[str, Any], usage: Mapping[str, Any], asked: Question, answer: Answer) -> Iterator[str]:
    """Yield how a response's counts contradict each other, its usage or its end."""
    try:
        histogram, drafted = counts["acceptance_histogram"], counts["num_draft_tokens"]
        steps, accepted = sum(histogram), sum(number * many for number, many in enumerate(histogram))
        expected = {
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_spec_tokens": len(histogram) - 1,
            "mean_acceptance_length": 1 + accepted / max(steps, 1),
            "draft_acceptance_rate": accepted / max(drafted, 1),
        }
        for name, value in expected.items():
            if abs(counts[name] - value) > 1e-6:
                yield f"{name}: expected {value:g}, found {counts[name]:g}"
    except (KeyError, TypeError, ValueError) as error:
        yield f"metrics.speculative_decoding: malformed: {error!r}"
        return
    if accepted > drafted:
        yield f"num_draft_tokens: expected at least {accepted}, found {drafted}"
    tokens = usage.get("completion_tokens", 0)
    if tokens < (least := steps + accepted - counts["num_spec_tokens"]):  # the end may cut the last step
        yield f"usage.completion_tokens: expected at least {least}, found {tokens}"
    if answer.tokens is not None and abs(len(answer.tokens) - tokens) > 1:  # it may lack white space or the end
        yield f"usage.completion_tokens: expected the {len(answer.tokens)} tokens of the answer, found {tokens}"
    if answer.finish_reason == "length" and tokens != asked.max_tokens:
        yield f"usage.completion_tokens: expected the limit of {asked.max_tokens}, found {tokens}"
    rejected = (usage.get("completion_tokens_details") or {}).get("rejected_prediction_tokens")
    if rejected is not None and rejected != drafted - accepted:
        yield f"usage's rejected_prediction_tokens: expected {drafted - accepted}, found {rejected}"


def _unmoved(sides: Sides, before: Mapping[str, float], sums: Mapping[str, float]) -> list[str]:
    """Return which counters did not move by these sums; more is allowed if others have asked the server too."""
    for _ in range(LOOKS):
        after = sides.server.counters()
        moved = {name: after.get(name, 0.0) - before[name] for name in sums}
        alone = moved.get(ENDED, 0.0) <= sums.get(ENDED, 0)
        wrong = [name for name in sums if moved[name] != sums[name] and (alone or moved[name] < sums[name])]
        if not wrong:
            break
        time.sleep(PAUSE)
    return [f"{name}: expected a move of {sums[name]:g}, found {moved[name]:g}" for name in wrong]
