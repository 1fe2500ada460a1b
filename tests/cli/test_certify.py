"""`hydrajax certify`: correct rules pass and wrong ones fail, on a tiny base and (slow) on the shipped model."""

import json
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.recordings import need
from hydrajax import assets, plugins
from hydrajax.certify.certificate import pooled
from hydrajax.decoding.acceptance import Greedy, walk
from hydrajax.decoding.parameters import parameters_as_arrays
from hydrajax.decoding.processing import NodeContext, process
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.sampling import ExactSampling, sample
from hydrajax.decoding.typical import Typical
from hydrajax.ops import best_token
from hydrajax.trees.topology import at_rows

SHIPPED = ["--base", assets.base(), "--draft", assets.path("hydra"), "--tree", "cartesian-3x2"]
QUICK = ["--max-new-tokens", 24, "--samples", 1024, "--limit", 2]


@pytest.fixture
def certify(program):
    """``certify(*flags, code=0)``: the program's output, by default for the shipped model."""

    def run(*flags, code=0):
        return program("certify", *SHIPPED, *QUICK, *flags, code=code).out

    return run


@pytest.fixture
def tiny(base, heads):
    return ["--base", base, "--draft", heads, "--tree", "chain-2", "--max-new-tokens", 12]


WITHOUT_WEIGHTS = ["lookup", "lookahead-5-3-5"]


def test_greedy(certify, tiny, tmp_path):
    path = tmp_path / "certificate.json"
    out = certify(*tiny, "--json", path)
    assert "holds: tokens equal to decoding without a tree" in out
    assert "2 prompts, 24 tokens" in out
    assert out.endswith("certified\n")
    report = json.loads(path.read_text())
    assert report["certified"] is True
    assert report["checks"][0]["details"] == []


@pytest.mark.slow
def test_greedy_on_the_shipped_model(certify):
    for draft in (*map(assets.path, assets.HEADS), *WITHOUT_WEIGHTS):
        certify("--draft", draft)


@pytest.mark.slow
def test_bfloat16_differs_at_ties_only(certify, tmp_path):
    """Ties depend on the machine; each one must be explained."""
    path = tmp_path / "certificate.json"
    certify("--dtype", "bfloat16", "--max-new-tokens", 96, "--limit", 4, "--json", path)
    for found in json.loads(path.read_text())["checks"][0]["details"]:
        assert found["verdict"] == "tie within rounding"
        assert 0 <= found["margin"] <= found["rounding"] < 1


@pytest.mark.slow
def test_exact_sampling(certify):
    for draft in (assets.path("hydra"), *WITHOUT_WEIGHTS):
        out = certify("--draft", draft, "--rule", "exact", "--temperature", 0.8, "--top-p", 0.95)
        assert "holds: tokens equal" in out
        assert "holds: distribution of the first tokens" in out


@pytest.mark.slow
def test_rejection_and_typical(certify):
    for rule in ("rejection", "traversal"):
        assert "holds: distribution" in certify("--rule", rule, "--temperature", 1.2)
    out = certify("--rule", "typical", "--epsilon", 0.05)
    assert "holds: typical acceptance as defined (not the base's distribution)" in out


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["exact", "rejection"])
def test_processors(certify, rule):
    """Processors read the tokens of a tree, and the enumerated distribution includes them."""
    penalties = ["--repetition-penalty", 1.3, "--presence-penalty", 0.5, "--frequency-penalty", 0.2]
    out = certify(*penalties, "--logit-bias", "88:2.5,13:-1", "--rule", rule, "--min-p", 0.05, "--temperature", 1.5)
    assert "(temperature=1.5, top_k=None, top_p=1.0, min_p=0.05" in out
    assert "with LogitBias(logit_bias=((13, -1.0), (88, 2.5)), allowed_token_ids=None) with" in out
    assert "with Penalties(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)" in out
    assert ("holds: tokens equal" in out) == (rule == "exact")
    assert "holds: distribution of the first tokens" in out


PROMISES = {
    "greedy": ["tokens equal"],
    "exact": ["tokens equal", "distribution of the first tokens"],
    "rejection": ["distribution of the first tokens"],
    "traversal": ["distribution of the first tokens"],
    "block": ["distribution of the first tokens"],
    "typical": ["typical acceptance as defined"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "tree", "rule"),
    [
        ("eagle1_mha", "dynamic-16-3-4", "greedy"),
        ("eagle1_mha", "eagle_26", "exact"),
        ("eagle1_mha", "dynamic-16-3-4", "rejection"),
        ("eagle3_mha", "dynamic-8-2-3", "rejection"),
        ("eagle3_mha", "eagle_26", "rejection"),
        ("eagle3_mha", "eagle_26", "traversal"),
        ("eagle3_mha", "dynamic-8-2-3", "traversal"),
        ("eagle3_mha", "dynamic-16-3-4", "typical"),
        ("dflash_a", "best-12", "greedy"),
        ("dflash_a", "cartesian-3x2", "rejection"),
        ("dspark_a", "best-12", "rejection"),
        ("dspark_a", "dynamic-12-3-4", "exact"),
        ("dspark_a", "chain-5", "rejection"),
        ("dspark_a", "chain-5", "block"),
        ("jetspec_a", "fanout-12-3", "typical"),  # fanout trees are not drawn
        ("jetspec_a", "chain-5", "rejection"),
    ],
)
def test_trained_drafts(certify, golden, parallel, draft, tree, rule):
    """Many of their tokens are accepted. Drafts of one pass have a q per position, DSpark's given the token before."""
    flags = [] if rule == "greedy" else ["--temperature", 0.8]
    eagle = draft.startswith("eagle")
    base = golden / "base" / "mha" if eagle else parallel / "base_a"
    folder = need((golden / "eagle" if eagle else parallel) / draft / "draft" / "config.json").parent
    out = certify("--base", base, "--draft", folder, "--tree", tree, "--rule", rule, *flags)
    for promise in PROMISES[rule]:
        assert f"holds: {promise}" in out
    assert out.endswith("\ncertified\n")


def rule(kind):
    return parameters_as_arrays(dataclass(frozen=True)(kind))


@rule
class WrongRoot(Greedy):
    def accept(self, verified, keys):
        accepted = super().accept(verified, keys)
        unlucky = (accepted.bonus_token % 7 == 0) & (verified.proposal.tree.size > 1)
        return accepted._replace(bonus_token=jnp.where(unlucky, accepted.bonus_token + 1, accepted.bonus_token))


@rule
class FavoursDrafts(ExactSampling):
    def accept(self, verified, keys):
        logits, proposal = verified.logits, verified.proposal
        if proposal.tree.size > 1:
            logits = logits.at[:, 0, proposal.tokens[0, 1]].add(1.0)
        return super().accept(verified._replace(logits=logits), keys)


@rule
class ForgetsTheTree(Greedy):
    """Counts prompt and output but not the tokens on the path to a node."""

    def accept(self, verified, keys):
        def choose(node, depth):
            context = NodeContext(node, verified.counts)
            return best_token(process(verified.processors, at_rows(verified.logits, node), context))

        return walk(verified.proposal, choose)


class Unprocessed:
    """Equal tokens with a tree and without, but of another distribution."""

    def accept(self, verified, keys):
        return super().accept(verified._replace(processors=(), counts=None), keys)


KINDS = ExactSampling, RejectionSampling, Typical
UNPROCESSED = [rule(type("Unprocessed", (Unprocessed, kind), {})) for kind in KINDS]


@rule
class NoResidual(RejectionSampling):
    def accept(self, verified, keys):
        accepted = super().accept(verified, keys)
        shaped = self.shape(at_rows(verified.logits, accepted.path[:, -1]))
        return accepted._replace(bonus_token=sample(keys[:, 0], shaped))


@rule
class Lenient(Typical):
    def accept(self, verified, keys):
        quarter = jax.tree.unflatten(jax.tree.structure(Typical()), [self.epsilon / 4, self.temperature])
        return quarter.accept(verified, keys)


@pytest.mark.quick("WrongRoot")
@pytest.mark.parametrize(
    ("wrong", "name", "flags", "failing"),
    [
        (WrongRoot, "greedy", [], ["FAILS: tokens equal", "defect"]),
        (ForgetsTheTree, "greedy", ["--frequency-penalty", 3], ["FAILS: tokens equal", "defect"]),
        (FavoursDrafts, "exact", [], ["FAILS: tokens equal", "FAILS: distribution"]),
        (UNPROCESSED[0], "exact", ["--repetition-penalty", 3], ["holds: tokens equal", "FAILS: distribution"]),
        (UNPROCESSED[1], "rejection", ["--logit-bias", "88:4"], ["FAILS: distribution"]),
        (UNPROCESSED[2], "typical", ["--repetition-penalty", 3], ["FAILS: typical"]),
        (NoResidual, "rejection", [], ["FAILS: distribution"]),
        (Lenient, "typical", [], ["FAILS: typical"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_rule_is_not_certified(certify, tiny, monkeypatch, wrong, name, flags, failing):
    monkeypatch.setitem(plugins.ADDED["rules"], name, wrong)
    out = certify(*(tiny if wrong is WrongRoot else []), "--rule", name, *flags, code=1)
    for line in failing:
        assert line in out
    assert out.endswith("NOT CERTIFIED\n")


def test_rare_sequences_are_counted_together():
    observed, wanted = pooled(np.array([9, 3, 2, 1]), np.array([8.0, 3.0, 2.5, 1.5]))
    assert observed.tolist() == [9, 6]
    assert wanted.tolist() == [8.0, 7.0]
    observed, wanted = pooled(np.array([9, 1]), np.array([9.5, 0.5]))
    assert observed.tolist() == [9]
