"""`hydrajax certify --server`: planted faults of a fake server are found by name, and nothing else is."""

import json
import threading
import time

import pytest

from helpers.fake_openai import fake_server
from helpers.outputs import write_lines
from hydrajax.certify.servers.answers import Answer
from hydrajax.certify.servers.client import Client
from hydrajax.certify.servers.sides import Settings, Sides, in_parallel
from hydrajax.certify.servers.structured_checks import FUNCTION, _wrong_call, tool_calls

QUICK = ["--requests", 4, "--concurrency", "1,4", "--max-new-tokens", 24]
CHECKS = {
    "greedy text, 1 at once", "greedy text, 4 at once", "log-probabilities", "streams", "stop strings", "prefix cache",
    "seeds", "several choices", "statistics", "structured output", "tool calls",
}  # fmt: skip
# Of each planted fault: the check that finds it, and the kind of its finding.
FAULTS = {
    "accepts a wrong token": ("greedy text, 1 at once", "text"),
    "ends early": ("greedy text, 1 at once", "text ends early"),
    "exceeds the limit": ("greedy text, 1 at once", "text runs past the limit"),
    "wrong finish reason": ("greedy text, 1 at once", "finish reason"),
    "mixes requests": ("greedy text, 4 at once", "another request's text"),
    "draft's log-probabilities": ("log-probabilities", "log-probability"),
    "stream drops the last token": ("streams", "text ends early"),
    "stream without an end": ("streams", "stream"),
    "stop string leaks": ("stop strings", "stop string"),
    "prefix cache": ("prefix cache", "text"),
    "ignores seeds": ("seeds", "seed"),
    "copies": ("several choices", "choices"),
    "mean without the root": ("statistics", "statistics"),
    "counts the drafted": ("statistics", "statistics"),
    "streams are not counted": ("statistics", "statistics"),
    "invalid JSON": ("structured output", "structured output"),
    "invalid JSON under load": ("structured output", "structured output"),
    "JSON beside the schema": ("structured output", "structured output"),
    "other JSON": ("structured output", "text"),
    "crashes on JSON": ("structured output", "no answer"),
    "loses tool calls": ("tool calls", "tool call"),
    "streamed arguments": ("tool calls", "tool call"),
}
# These faults show in one check only.
ALONE = set(FAULTS) - {
    "accepts a wrong token", "ends early", "exceeds the limit", "wrong finish reason", "mixes requests", "prefix cache",
    "stream drops the last token", "stream without an end",
}  # fmt: skip


@pytest.fixture(scope="module")
def reference():
    with fake_server() as url:
        yield url


@pytest.fixture
def certify(program, reference, tmp_path):
    """``certify(url, *flags, code=0)``: the program's result, with the JSON report as ``report``."""

    def run(url, *flags, against=reference, code=0):
        path = tmp_path / "certificate.json"
        flags = ("--reference", against, *QUICK, "--json", path, *flags)
        found = program("certify", "--server", url, *flags, code=code)
        if path.exists():
            found.report = json.loads(path.read_text())
            found.outcomes = {check["name"]: check["outcome"] for check in found.report["checks"]}
            found.findings = [finding for check in found.report["checks"] for finding in check["findings"]]
        return found

    return run


@pytest.fixture
def certify_fake(certify):
    """``certify_fake(fault, *flags, code=0, **options)``: the same for a fake server of its own."""

    def run(fault="", *flags, code=0, **options):
        with fake_server(fault, **options) as url:
            found = certify(url, *flags, code=code)
        found.url = url
        return found

    return run


def faults_of(report) -> set[tuple[str, str]]:
    return {
        (check["name"], finding["kind"])
        for check in report["checks"]
        for finding in check["findings"]
        if finding["verdict"] == "fault"
    }


@pytest.mark.slow
def test_a_planted_fault_is_found(certify_fake):
    for fault, (name, kind) in FAULTS.items():
        found = certify_fake(fault, code=1)
        assert found.out.endswith("NOT CERTIFIED\n")
        faults = faults_of(found.report)
        assert (name, kind) in faults, fault
        assert f"FAILS: {name}\n" in found.out
        assert f"  fault: {kind}: " in found.out
        if fault in ALONE:
            assert {check for check, _ in faults} == {name}


def test_a_server_without_a_fault_is_certified(certify_fake):
    found = certify_fake()
    assert found.err == ""
    assert found.out.endswith("requests\ncertified\n")
    assert found.outcomes == dict.fromkeys(CHECKS, "holds")
    assert found.findings == []
    assert found.report["requests"] > 60


def test_a_tie_is_no_fault(certify_fake):
    found = certify_fake("tie")
    assert {tie["verdict"] for tie in found.findings} == {"tie"}
    assert {round(tie["gap"], 6) for tie in found.findings} == {0.01}
    certify_fake("tie", "--tolerance", 0.001, code=1)


def test_valid_json_that_differs_under_load_only_is_reported(certify_fake):
    """Its gap is unknown here, and asked alone the server gives the reference's text."""
    found = certify_fake("spaced JSON under load")
    assert {finding["verdict"] for finding in found.findings} == {"unjudged"}
    assert " unjudged\n" in found.out


def test_the_report_lets_a_maintainer_act(certify_fake):
    found = certify_fake("accepts a wrong token", code=1)
    finding = found.findings[0]
    assert finding["gap"] == pytest.approx(2.7)
    assert finding["at_least"] is False
    assert finding["judged_by"] == "the reference"
    assert finding["position"] == len(finding["context"])
    chosen, other = finding["tokens"]["chosen"], finding["tokens"]["other"]
    assert finding["expected"].startswith(chosen[1:]) or finding["expected"].startswith(chosen)
    assert chosen != other
    assert finding["path"] in ("/v1/completions", "/v1/chat/completions")
    assert {"max_tokens", "temperature"} < set(finding["request"])
    assert f"character {finding['position']}: expected" in found.out
    assert "gap 2.7 nats" in found.out


def test_what_a_server_does_not_offer_is_skipped(certify):
    refused = ["response_format", "tools", "logprobs", "n"]
    lacking = {"refuses": refused, "counts": False}
    with fake_server(**lacking) as url, fake_server("accepts a wrong token", **lacking) as wrong:
        found = certify(url)
        unjudged = certify(wrong, against=url, code=1)
    skipped = {name for name, outcome in found.outcomes.items() if outcome == "skipped"}
    assert skipped == {"structured output", "tool calls", "log-probabilities", "several choices", "statistics"}
    assert "2 skipped (responses have no metrics.speculative_decoding)" in found.out
    assert "skipped (400: response_format: this field is not supported)" in found.out
    assert "gap unknown" in unjudged.out


def test_a_validation_error_with_status_500_is_a_refusal(certify_fake):
    found = certify_fake(refuses=["response_format"], refusal=(500, "1 validation error: type"))
    assert found.outcomes["structured output"] == "skipped"


def test_the_limit_may_cut_the_last_of_several_calls():
    calls = [(FUNCTION, '{"city": "Oslo"}'), (FUNCTION, '{"')]
    assert not _wrong_call(Answer("", "length", calls=tuple(calls)))
    for cut in (Answer("", "tool_calls", calls=tuple(calls)), Answer("", "length", calls=tuple(calls[1:]))):
        assert _wrong_call(cut) == "arguments that are not JSON: '{\"'"


def test_completions_alone(certify_fake):
    assert set(certify_fake(refuses=["messages"]).outcomes) == CHECKS - {"structured output", "tool calls"}


def test_prompts_of_a_file(certify_fake, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "one"}, {"turns": ["two", "three"]}, {"prompt_ids": [4, 5, 6]}]
    write_lines(prompts, lines)
    found = certify_fake("accepts a wrong token", "--prompts", prompts, code=1)
    findings = found.report["checks"][0]["findings"]
    asked = [finding["request"].get("prompt") or finding["request"]["messages"] for finding in findings]
    for prompt in ("one", [4, 5, 6], [{"role": "user", "content": "two"}]):
        assert prompt in asked


MISTAKES = [
    ({"key": "k"}, [], "--server: URL/v1 refuses the API key (401: no such key); give --api-key or set"),
    ({"models": []}, [], "--server: URL/v1 lists no models; load one"),
    ({"models": ["a", "b"]}, ["--model", "c"], "--model: got 'c', expected one of: a, b"),
    ({"html": True}, [], "--server: URL/v1/models answered with status 200 and no list of models"),
    ({"status": 503}, [], "--server: URL/v1 is busy or not ready (503: internal error); wait, let it"),
    ({"refuses": ["max_tokens"]}, [], "--server: fake at URL/v1 answers neither completions nor chats: 400: max"),
    ({}, ["--tolerance", "-1"], "--tolerance: got -1, expected at least 0"),
    ({}, ["--draft", "lookup"], "--draft: does not apply to --server, which decodes by its own settings"),
    ({}, ["--base", "B"], "--reference: got both of --reference and --base, expected one of them"),
]


def test_mistakes_of_the_user(certify_fake, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for options, flags, said in MISTAKES:
        found = certify_fake("", *flags, code=2, **options)
        assert not found.out.startswith("greedy")
        assert found.err.startswith(f"hydrajax: {said.replace('URL', found.url)}")
        assert found.err.count("\n") == 1


def test_more_mistakes(certify, refused, reference):
    url = "http://127.0.0.1:9"
    for address, message in (
        (url, f"--server: cannot reach {url}/v1: Connection refused\n"),
        ("ftp://x", "--server: got 'ftp://x', expected a URL such as http://"),
        (reference, "--reference: got the server itself, expected one without speculation\n"),
    ):
        assert certify(address, code=2).err.startswith(f"hydrajax: {message}")
    refused("--reference: got neither of --reference and --base", "certify", "--server", reference)


def test_the_key(certify_fake, monkeypatch):
    for variable, flags in (("wrong", ["--api-key", "k"]), ("k", [])):
        monkeypatch.setenv("OPENAI_API_KEY", variable)
        found = certify_fake("", *flags, "--requests", 2, key="k")
        assert '"k"' not in json.dumps(found.report)


class OtherGrammars:
    shares_grammars = False


def test_a_model_that_never_calls_tools_is_no_fault_without_a_server_to_compare_with():
    with fake_server("loses tool calls") as url:
        found = tool_calls(Sides(Client("server", url), OtherGrammars(), Settings(concurrency=(4,))))
    assert (found.compared, found.findings) == (0, [])
    assert found.refusals[0].startswith("no answer is valid, for which the model may be the reason: no tool_calls")
    with fake_server("streamed arguments") as url:
        found = tool_calls(Sides(Client("server", url), OtherGrammars(), Settings(concurrency=(4,))))
    assert {finding.setting for finding in found.findings} == {"streamed"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_ends_all_requests(error):
    never = threading.Event()

    def ask(number: int) -> int:
        if number == 3:
            raise error
        never.wait(60)
        return number

    start = time.monotonic()
    with pytest.raises(error):
        in_parallel(ask, range(32), 8)
    assert time.monotonic() - start < 30  # the other requests are still open
    never.set()
    assert in_parallel(lambda number: number * 2, range(9), 4) == [number * 2 for number in range(9)]
