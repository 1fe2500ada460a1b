"""Contests of drafts: the base first, then each draft under its name, with equal outputs."""

from __future__ import annotations

import functools

import pytest

from helpers import letters
from helpers.refusals import assert_refused
from hydrajax.bench.draft_contest import candidate_drafts, measure_drafts


@pytest.fixture(scope="module")
def m():
    return letters.model()


def test_the_base_comes_first_and_outputs_are_equal(m):
    seen = []
    rows = measure_drafts(
        m, ["lookup"], ["abcabc", [1, 2, 3]], tree="chain-2", max_new_tokens=8, repeats=3, on_status=seen.append
    )
    assert [(row.name, row.nodes) for row in rows] == [("autoregressive", 1), ("lookup", 3)]
    plain, lookup = rows
    assert plain.tokens_per_step == plain.speedup == plain.speedup_low == plain.speedup_high == 1
    assert lookup.equal
    assert lookup.tokens_per_step >= 1
    assert lookup.speedup_low <= lookup.speedup <= lookup.speedup_high
    assert seen == [
        "compiling autoregressive, 1 of 2",
        "compiling lookup, 2 of 2",
        *(f"round {number} of 3" for number in (1, 2, 3)),
    ]


def test_a_draft_has_its_own_tree_by_default(m, monkeypatch):
    monkeypatch.setattr("hydrajax.bench.draft_contest.contest", lambda executors, *args, **keywords: executors)
    found = measure_drafts(m, ["lookup", "lookahead-4-3-4"], ["abc"], max_new_tokens=5)
    assert list(found) == ["autoregressive", "lookup", "lookahead-4-3-4"]
    assert found["lookup"].program.tree == m.with_draft("lookup").default_tree()
    assert {executor.request.max_new_tokens for executor in found.values()} == {5}


def test_bad_input_is_refused_before_anything_is_compiled(m):
    assert_refused(
        functools.partial(measure_drafts, on_status=pytest.fail),
        (m, ["lookup"], [], "prompts: got none, expected at least one"),
        (m, ["lookup"], "abc", "prompts: got one text, expected a list"),
        (m, ["no-such-draft"], ["abc"], "draft: no such directory"),
    )


def test_candidates_of_a_base():
    drafts = ["lookup", "medusa", "hydra++", "dspark", "lookup+medusa", "lookup+hydra++", "lookup+dspark"]
    assert candidate_drafts("smollm2") == drafts
    assert candidate_drafts("some/directory") == ["lookup"]
