"""`hydrajax certify` on the shipped model: what is right passes, what is wrong does not."""

from __future__ import annotations

import json
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from hydrajax import assets
from hydrajax.cli import options
from hydrajax.decoding.acceptance import ExactSampling, Greedy, RejectionSampling, Typical, _rows
from hydrajax.decoding.sampling import sample
from hydrajax.measure.certificate import pooled

DRAFT = ["--base", assets.base(), "--draft", assets.path("hydra")]
QUICK = ["--tree", "cartesian-3x2", "--max-new-tokens", 24, "--samples", 1024, "--limit", 2]


def certify(program, *flags, code=0):
    result = program("certify", *DRAFT, *QUICK, *flags)
    assert result.code == code, result.out + result.err
    return result.out


@pytest.mark.parametrize(
    "draft", [pytest.param(name, marks=() if name == "hydra" else pytest.mark.slow) for name in assets.DRAFTERS]
)
def test_greedy(program, draft, tmp_path):
    path = tmp_path / "certificate.json"
    out = certify(program, "--draft", assets.path(draft), "--json", path)
    assert "holds: tokens equal to decoding without a tree" in out
    assert out.endswith("certified\n")
    report = json.loads(path.read_text())
    assert report["certified"] is True
    assert report["arguments"]["draft"] == str(assets.path(draft))
    assert report["checks"][0]["details"] == []


@pytest.mark.slow
def test_bfloat16_differs_at_ties_only(program, tmp_path):
    """Whether a tie is met depends on the machine; each one that is met must be explained."""
    path = tmp_path / "certificate.json"
    certify(program, "--dtype", "bfloat16", "--max-new-tokens", 96, "--limit", 4, "--json", path)
    for found in json.loads(path.read_text())["checks"][0]["details"]:
        assert found["verdict"] == "tie within rounding"
        assert 0 <= found["margin"] <= found["rounding"] < 1


@pytest.mark.slow
def test_exact_sampling(program):
    out = certify(program, "--rule", "exact", "--temperature", 0.8, "--top-p", 0.95)
    assert "holds: tokens equal" in out
    assert "holds: distribution of the first tokens" in out


@pytest.mark.slow
def test_rejection_sampling(program):
    assert "holds: distribution" in certify(program, "--rule", "rejection", "--temperature", 1.2)


@pytest.mark.slow
def test_typical(program):
    out = certify(program, "--rule", "typical", "--epsilon", 0.05)
    assert "holds: typical acceptance as defined (not the base's distribution)" in out


@dataclass(frozen=True)
class WrongRoot(Greedy):
    def accept(self, logits, candidates, tree, keys):
        accepted = super().accept(logits, candidates, tree, keys)
        unlucky = accepted.next_root % 7 == 0
        return accepted._replace(next_root=jnp.where(unlucky, accepted.next_root + 1, accepted.next_root))


@dataclass(frozen=True)
class FavoursDrafts(ExactSampling):
    def accept(self, logits, candidates, tree, keys):
        return super().accept(logits.at[:, 0, candidates[0, 1]].add(1.0), candidates, tree, keys)


@dataclass(frozen=True)
class NoResidual(RejectionSampling):
    def accept(self, logits, candidates, tree, keys, draft_logits=None):
        accepted = super().accept(logits, candidates, tree, keys, draft_logits)
        return accepted._replace(next_root=sample(keys[:, 0], self.shape(_rows(logits, accepted.path[:, -1]))))


@dataclass(frozen=True)
class Lenient(Typical):
    def accept(self, logits, candidates, tree, keys):
        return Typical(self.epsilon / 4, None, self.temperature).accept(logits, candidates, tree, keys)


@pytest.mark.parametrize(
    ("name", "rule", "failing"),
    [
        ("greedy", WrongRoot, ["FAILS: tokens equal", "defect"]),
        pytest.param("exact", FavoursDrafts, ["FAILS: tokens equal", "FAILS: distribution"], marks=pytest.mark.slow),
        pytest.param("rejection", NoResidual, ["FAILS: distribution"], marks=pytest.mark.slow),
        pytest.param("typical", Lenient, ["FAILS: typical"], marks=pytest.mark.slow),
    ],
)
def test_a_wrong_rule_is_not_certified(program, monkeypatch, name, rule, failing):
    monkeypatch.setitem(options.RULES, name, (rule, options.RULES[name][1]))
    out = certify(program, "--rule", name, code=1)
    for line in failing:
        assert line in out
    assert out.endswith("NOT CERTIFIED\n")


def test_without_a_draft_there_is_nothing_to_certify(program):
    result = program("certify", "--base", assets.base())
    assert result.code == 2
    assert "--draft: there is nothing to certify without draft heads" in result.err


def test_rare_sequences_are_counted_together():
    observed, wanted = pooled(np.array([9, 3, 2, 1]), np.array([8.0, 3.0, 2.5, 1.5]))
    assert observed.tolist() == [9, 6]
    assert wanted.tolist() == [8.0, 7.0]
    observed, wanted = pooled(np.array([9, 1]), np.array([9.5, 0.5]))
    assert observed.tolist() == [9]
