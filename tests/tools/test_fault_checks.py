"""The faults in decoding, `chat` and long-lived processes: each holds for one seed, and each check can fail."""

from __future__ import annotations

import random

import pytest

from helpers.scripts import ROOT
from hydrajax.decoding import acceptance
from hydrajax.decoding.program import Program
from hydrajax.trees import presets

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


@pytest.fixture
def run(tmp_path):
    """``run(name)``: a fault with its first seed."""
    from tools.faults import chat, continuation, devices, process, registry  # noqa: F401 (each registers its faults)

    made: dict = {}

    def run(name: str):
        return registry.run(name, range(1), 600, 300, tmp_path, made)

    return run


def greedy_case():
    from tools.faults.drafts import Case, with_oracle

    case = Case.drawn(random.Random(2), "hydra")
    drafter = case.program.drafter if case.has_oracle else with_oracle(case.program.drafter)
    program = Program(drafter, presets.chain(3), max_new_tokens=20)
    return case._replace(program=program, request=program.request(), batch=3)


def test_every_kind_of_draft_is_covered():
    from hydrajax.formats.draft_registry import KINDS
    from tools.faults.drafts import DRAFTS

    assert {name.removeprefix("lookup+") for name in DRAFTS} == set(KINDS)


def test_correct_decoding_passes_with_long_paths(monkeypatch):
    from tools.faults import drafts

    longest, check = [], drafts.check_bookkeeping

    def watched(case, out, prompts, limits):
        longest.append(out.accept_lengths.max())
        check(case, out, prompts, limits)

    monkeypatch.setattr(drafts, "check_bookkeeping", watched)
    assert drafts.check_case(greedy_case(), random.Random(1), 6) == 18
    assert max(longest) == 3  # of a chain of three, which untrained heads would not find


def test_decoding_that_accepts_too_much_fails(monkeypatch):
    from tools.faults.drafts import check_case
    from tools.faults.registry import Failure

    accepted = acceptance.accepted_nodes
    monkeypatch.setattr(acceptance, "accepted_nodes", lambda agrees, tree: accepted(agrees | True, tree))
    with pytest.raises(Failure, match=r"Greedy.*token .* differs"):
        check_case(greedy_case(), random.Random(1), 6)


def test_faults_have_no_failures(run):
    for name in ("drafts-cached", "stop-strings", "drafts-on-devices", "chat-terminal"):
        found = run(name)
        assert found.trials > 0
        assert not found.failures, found.message


def test_chat_without_standard_input_or_reader(run):
    assert run("chat-no-stdin").message == ""


def test_repeated_calls(run, monkeypatch):
    from tools.faults import process

    monkeypatch.setattr(process, "CALLS", 12)
    found = run("repeated-calls")
    assert (found.trials, found.message) == (12, "")
    monkeypatch.setattr(process, "PROGRAMS", -99)
    assert "new kinds of call" in run("repeated-calls").message
