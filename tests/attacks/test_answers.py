"""The attacks on decoding, `chat` and a process that serves for long: tried once, and that each can fail."""

from __future__ import annotations

import random

import pytest

from helpers.scripts import EXPERIMENTS
from hydrajax.decoding import acceptance
from hydrajax.decoding.spec import DecodeSpec
from hydrajax.trees import presets

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)


@pytest.fixture
def run(tmp_path):
    """``run(name)``: an attack with its first seed."""
    from attacks import going_on, lasting, placed, registry, talking  # noqa: F401 (each registers its attacks)

    made: dict = {}

    def run(name: str):
        return registry.run(name, range(1), 600, 300, tmp_path, made)

    return run


def greedy_case():
    from attacks.drafted import Case
    from attacks.told import told

    case = Case.drawn(random.Random(2), "hydra")
    drafter = case.spec.drafter if case.is_told else told(case.spec.drafter)
    return case._replace(spec=DecodeSpec(drafter, presets.chain(3), max_new_tokens=20), batch=3)


def test_every_kind_of_draft_is_attacked():
    from attacks.drafted import DRAFTS

    from hydrajax.formats.draft_registry import KINDS

    assert {name.removeprefix("lookup+") for name in DRAFTS} == set(KINDS)


def test_decoding_that_is_right_is_found_right_and_paths_are_long(monkeypatch):
    from attacks import drafted

    longest, check = [], drafted.check_bookkeeping

    def watched(case, out, prompts, limits):
        longest.append(out.accept_lengths.max())
        check(case, out, prompts, limits)

    monkeypatch.setattr(drafted, "check_bookkeeping", watched)
    assert drafted.tried(greedy_case(), random.Random(1), 6) == 18
    assert max(longest) == 3  # of a chain of three, which no untrained heads would find


def test_decoding_that_believes_too_much_falls(monkeypatch):
    from attacks.drafted import tried
    from attacks.registry import Fell

    believed = acceptance.accepted_nodes
    monkeypatch.setattr(acceptance, "accepted_nodes", lambda agrees, tree: believed(agrees | True, tree))
    with pytest.raises(Fell, match=r"Greedy.*token .* is another"):
        tried(greedy_case(), random.Random(1), 6)


@pytest.mark.parametrize(
    "name", ["drafted decoding goes on", "stop strings", "drafted decoding on devices", "talking at a terminal"]
)
def test_it_holds(run, name):
    found = run(name)
    assert found.tried > 0
    assert not found.failed, found.said


def test_chat_without_standard_input_or_reader(run):
    assert run("talking to nobody").said == ""


def test_calls_without_end(run, monkeypatch):
    from attacks import lasting

    monkeypatch.setattr(lasting, "CALLS", 12)
    found = run("hundreds of calls")
    assert (found.tried, found.said) == (12, "")
    monkeypatch.setattr(lasting, "PROGRAMS", -99)
    assert "new kinds of call" in run("hundreds of calls").said
