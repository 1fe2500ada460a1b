"""Certificates of our own server, against a base that is loaded here and (slow) against itself without a draft."""

import json

import pytest

from helpers.serving import running, serving
from hydrajax.certify.servers.answers import Answer, Token, placed, streamed_answers
from hydrajax.certify.servers.client import Client
from hydrajax.certify.servers.comparison import gap_of, gap_of_chosen
from hydrajax.certify.servers.local_reference import LocalReference
from hydrajax.certify.servers.questions import Question
from hydrajax.certify.servers.sides import Settings, Sides
from hydrajax.certify.servers.statistics_checks import statistics
from hydrajax.cli import main

TEXTS = ("abcabc", "nod a lamb", "feel ", "mama did")
QUESTIONS = [Question(text, chat, 12) for chat, text in zip((False, True) * 2, TEXTS, strict=True)]


@pytest.fixture(scope="module")
def local(served):
    return LocalReference(served, "letters")


def test_our_server_equals_the_base(small, local):
    with running(small) as (url, _):
        sides = Sides(Client("server", url), local, Settings())
        found, counted = sides.compare(QUESTIONS, 4, "4 at once"), statistics(sides, QUESTIONS)
    assert (counted.compared, counted.findings, counted.refusals) == (5, [], [])
    assert (found.compared, found.findings, found.refusals) == (4, [], [])


def test_a_base_judges_a_difference(local):
    """A text with the second likeliest token has the gap of the two, wherever it differs."""
    for question in QUESTIONS:
        (answer,) = local.ask(question)
        for at in (0, len(answer.text) - 1):
            token = local.tokens_near(question, answer, at)[-1]
            assert (token.text, token.start) == (answer.text[at], at)
            ((_, best), (second, its_own)) = sorted(token.top.items(), key=lambda each: -each[1])[:2]
            assert token.logprob == best
            text = answer.text[:at] + second
            other = Answer(text, "stop" if second == "" else "length")
            gap = gap_of(local.tokens_near(question, answer, at), other, at)
            assert gap.value == pytest.approx(best - its_own, abs=1e-6)
            assert not gap.at_least


def test_tokens_that_are_parts_of_a_character():
    pieces = [("é", -0.1), ("\ufffd", -0.2), ("\ufffd🙂", -0.3), ("!", -0.4)]
    tokens = [Token(text, logprob, {text: logprob, "\ufffd": -0.21, "x": -3.0}) for text, logprob in pieces]
    found = placed("é🙂!", tokens)
    assert [token.start for token in found] == [0, 1, 1, 2]
    assert gap_of(found[:1], Answer("ü", "stop"), 0).value == pytest.approx(0.11)  # its first byte
    assert gap_of(found[:1], Answer("xy", "stop"), 0).value == pytest.approx(2.9)
    missing = gap_of(found[:1], Answer("yx", "stop"), 0)
    assert missing.at_least
    assert missing.value >= 2.9


def test_a_first_token_whose_space_the_text_lacks():
    found = placed("one two", [Token(" one", -1.0, {" one": -1.0, " to": -1.1}), Token(" two", -1.0, {})])
    assert [(token.text, token.start) for token in found] == [("one", 0), (" two", 3)]
    assert gap_of(found, Answer("to", "stop"), 0).value == pytest.approx(0.1)


def test_a_tie_under_a_grammar():
    """The grammar forbids the most likely tokens, which therefore bound no gap; the chosen tokens decide."""
    likely = {"<": -0.2, "The": -1.0}
    one = placed('{"a"', [Token("\n", -4.0, likely), Token("{", -5.0, likely), Token('"a"', -6.0, likely)])
    other = placed("{\n", [Token("{", -5.0, likely), Token("\n", -6.01, likely)])
    assert [token.start for token in one] == [0, 1]
    assert gap_of(one, Answer("{\n", "stop"), 1).value is None
    assert gap_of_chosen(one, other, 1).value == pytest.approx(0.01)
    assert gap_of_chosen(one, other[:1], 1).value is None


def test_a_text_that_ends_at_a_tie():
    for end in ["</s>", "", "<|im_end|>", "[EOS]"]:
        tokens = placed("ab", [Token("a", -0.1, {}), Token("b", -0.7, {"b": -0.7, end: -0.72, "c": -3.0})])
        assert gap_of(tokens, Answer("a", "stop"), 1).value == pytest.approx(0.02)
        cut = gap_of(tokens, Answer("a", "length"), 1)
        assert cut.value is None or cut.at_least


def test_streams_of_tool_calls():
    parts = [{"name": "f", "arguments": ""}, {"arguments": '{"a"'}, {"arguments": ": 1}"}]
    events = [{"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": part}]}}]} for part in parts]
    events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}, {"choices": [], "usage": {}}]
    (answer,) = streamed_answers(events, ended=True)
    assert (answer.calls, answer.finish_reason, answer.text) == ((("f", '{"a": 1}'),), "tool_calls", "")


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["lookup", "hydra++"])
def test_no_false_alarm_of_the_shipped_model(draft, tmp_path, capsys):
    """The same server without a draft, then the base; more than 300 requests."""
    options = ("--base", "shipped", "--draft", draft, "--also", "none", "--top-logprobs", 5, "--no-warm-up")
    path = tmp_path / "certificate.json"
    with serving(*options) as (_, url, _):
        for reference in (["--reference", url, "--reference-model", "hydrajax:none"], ["--base", "shipped"]):
            flags = [*reference, "--requests", "24", "--timeout", "600", "--json", str(path)]
            code = main(["certify", "--server", url, *flags])
            report = json.loads(path.read_text())
            assert code == 0, capsys.readouterr().out
            assert [each["findings"] for each in report["checks"] if each["findings"]] == []
            assert report["requests"] > 150
