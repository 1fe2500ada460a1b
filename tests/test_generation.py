"""`generate` and `stream` on the shipped model: stop strings, finish reasons, limits per prompt, and streamed text."""

from __future__ import annotations

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hydrajax
from helpers.log_probabilities import check_answer
from hydrajax import assets
from hydrajax.decoding import executor as executors
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.errors import HydrajaxError
from hydrajax.text.stopping import first_stop

PROMPTS = ["def quicksort(items):\n", "import os\n\nclass Walker:\n    def __init__(self", "# a comment\nfor line in "]
NEW = 24


@pytest.fixture(scope="module")
def loaded():
    return hydrajax.load(assets.base(), assets.path("hydra"))


def of(loaded, rule=None, limit: int = NEW, **fields):
    """Return the model's executor with a chain."""
    request = hydrajax.Request(rule or hydrajax.Greedy(), max_new_tokens=limit)
    return loaded.executor(loaded.program(request, tree="chain-2", **fields), request)


@pytest.fixture(scope="module")
def executor(loaded):
    return of(loaded)


def with_limits(executor, limits) -> list:
    return [executor.request.replace(max_new_tokens=limit) for limit in limits]


@pytest.fixture(scope="module")
def whole(executor):
    """The texts without stop strings."""
    found = list(hydrajax.generate(executor, PROMPTS, batch_size=2))
    assert [(result.finish_reason, result.new_tokens) for result in found] == [("length", NEW)] * 3
    return found


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_stop_strings_cut_streamed_and_whole_text_alike(executor, whole, data):
    """Stop strings are parts of the text, some span steps or tokens."""
    number = data.draw(st.integers(0, len(PROMPTS) - 1))
    full = whole[number]
    places = st.tuples(st.integers(0, len(full.text) - 1), st.integers(1, 12))
    stop = [full.text[at : at + size] for at, size in data.draw(st.lists(places, min_size=1, max_size=2))]
    stop += data.draw(st.lists(st.just("never said"), max_size=1))
    stopped = list(hydrajax.generate(executor, PROMPTS, stop=stop, batch_size=2))
    for result, without in zip(stopped, whole, strict=True):
        found = first_stop(without.text, stop)
        cut = None if found is None else without.text.find(found)
        assert result.text == without.text[:cut]
        assert (result.finish_reason, result.stop_reason) == ("length" if cut is None else "stop", found)
        assert result.output_ids == without.output_ids[: result.new_tokens]
        assert sum(result.emitted_per_step) == result.new_tokens
        steps = result.steps
        assert result.emitted_per_step[:-1] == without.emitted_per_step[: steps - 1]
        assert result.emitted_per_step[-1] <= without.emitted_per_step[steps - 1]
    pieces = hydrajax.stream(executor, PROMPTS[number], executor.request.replace(stop=stop))
    assert "".join(pieces) == stopped[number].text
    streamed, whole_one = pieces.result, stopped[number]
    assert (streamed.output_ids, streamed.emitted_per_step) == (whole_one.output_ids, whole_one.emitted_per_step)
    assert streamed.finish_reason == "stop"


def test_a_stream_begins_after_one_step_and_compiles_no_burst_of_its_own(executor, whole, monkeypatch):
    """Tokens do not depend on the length of bursts; here each burst is twice as long as the last."""
    asked, compiled = [], []
    advance = FusedExecutor.advance

    def watched(self, state, stopped, n_steps):
        asked.append(n_steps)
        return advance(self, state, stopped, n_steps)

    monkeypatch.setattr(FusedExecutor, "advance", watched)
    monkeypatch.setattr(executors, "next_burst", lambda steps, seconds: 2 * steps)
    pieces = hydrajax.stream(executor, PROMPTS[0])
    assert pieces.result is None
    first = next(pieces)
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    assert (asked, pieces.result.steps) == ([1], 1)
    assert first + "".join(pieces) == whole[0].text
    found = pieces.result
    assert (found.output_ids, found.emitted_per_step) == (whole[0].output_ids, whole[0].emitted_per_step)
    assert found.finish_reason == "length"
    assert asked == [2**number for number in range(len(asked))]
    assert len(asked) > 3
    assert not [event for event in compiled if event.endswith("backend_compile_duration")]


@pytest.mark.slow
def test_logprobs_of_the_tokens_that_are_left(loaded, whole):
    """Texts cut by a stop string, by limits and by an unfinished stream, compared with a plain forward pass."""
    stop = [whole[0].text[40:48]]
    executor = of(loaded, logprobs=3)
    requests = with_limits(executor, [NEW, NEW, 7])
    found = list(hydrajax.generate(executor, PROMPTS, requests=requests, stop=stop, batch_size=2))
    assert found[0].finish_reason == "stop"
    stream = hydrajax.stream(executor, PROMPTS[1], executor.request.replace(stop=stop, number=1))
    next(stream)
    for result, without in zip((*found, stream.result), (*whole, whole[1]), strict=True):
        assert len(result.logprobs) == result.new_tokens <= NEW
        assert result.output_ids == without.output_ids[: result.new_tokens]
        check_answer(loaded.model, loaded.params.base, result, top=3)
    assert {result.logprobs for result in whole} == {result.top_logprobs for result in whole} == {None}


def test_every_prompt_may_have_its_own_limit(executor, whole):
    limits = [5, NEW, 17]
    results = list(hydrajax.generate(executor, PROMPTS, requests=with_limits(executor, limits), batch_size=2))
    assert [result.new_tokens for result in results] == limits
    for result, without in zip(results, whole, strict=True):
        assert result.output_ids == without.output_ids[: result.new_tokens]
        assert result.finish_reason == "length"


def test_end_of_text_is_a_reason(loaded, whole):
    """Any token can be EOS: here the tenth of the first text."""
    ends = of(loaded, eos_ids=(whole[0].output_ids[9], whole[1].output_ids[15]))
    first, second = hydrajax.generate(ends, PROMPTS[:2], batch_size=2)
    assert first.finish_reason == "eos"
    assert first.output_ids == whole[0].output_ids[: first.new_tokens]
    assert first.output_ids[-1] in ends.program.eos_ids
    assert not set(first.output_ids[:-1]) & set(ends.program.eos_ids)
    assert second.finish_reason == "eos"


def test_bad_requests_are_refused(loaded, executor):
    for arguments, message in [
        ({"stop": "\n"}, "stop: got one string, expected a list"),
        ({"stop": [""]}, "stop: got an empty string"),
        ({"seed": [5, 0]}, "seed: got 2 for 3 prompts, expected one per prompt"),
        ({"requests": [executor.request]}, "requests: got 1 for 3 prompts, expected one per prompt"),
        ({"requests": with_limits(executor, [3, 33, 1])}, "max_new_tokens: got 33, expected at most 32"),
    ]:
        with pytest.raises(HydrajaxError, match=message):
            hydrajax.generate(executor, PROMPTS, **arguments)
    for limits, message in [
        ([3], "max_new_tokens: got 1 values for 3 prompts, expected one or one per prompt"),
        ([3, 0, 1], "max_new_tokens: got 0, expected at least 1"),
    ]:
        with pytest.raises(HydrajaxError, match=message):
            loaded.generate(PROMPTS, tree="chain-2", max_new_tokens=limits)
    without = hydrajax.load(assets.base())
    without.tokenizer = None
    with pytest.raises(HydrajaxError, match="stop: requires a tokenizer"):
        hydrajax.generate(without.executor(), [[1, 2]], stop=["a"])
