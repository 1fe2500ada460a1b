"""Chi-square tests of the joint distribution of three sampled tokens, which must fail for wrong rules.

The base is small enough to enumerate all sequences. Their probabilities come from full passes, shaped by logits
processors, temperature, top-k, top-p and min-p in NumPy.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from helpers.how import per_row
from helpers.lab import DELTA, Scripted
from helpers.lab import QUICK as QUICK_COMPILE
from hydrajax.amphista.heads import AmphistaHeads
from hydrajax.api import make_decode_fn
from hydrajax.decoding.acceptance import walk
from hydrajax.decoding.parameters import parameters_as_arrays
from hydrajax.decoding.processors import LogitBias, Penalties
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.sampling import ExactSampling, sample
from hydrajax.decoding.state import Params
from hydrajax.decoding.traversal import BlockVerification, TraversalVerification
from hydrajax.decoding.typical import Typical
from hydrajax.drafters import growing
from hydrajax.drafters.clusters import Clusters, clusters_of
from hydrajax.drafters.corpus import Corpus
from hydrajax.drafters.draft_lm_head import CLUSTERED_LM_HEAD, LmHead
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.drafters.drafter import CORPUS, Proposal
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3
from hydrajax.drafters.gemma4_assistant import Gemma4Assistant
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.mtp import MTP
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.several import Several, with_lookup
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BoundBase
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.ops import over_rows, sampled_tokens
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree, DynamicTree
from hydrajax.trees.static_tree import TreeTopology
from hydrajax.trees.topology import at_rows

VOCAB, WIDTH, LENGTH = 5, 16, 3
# Decodings in slow tests and in the others; the least number shows every wrong rule.
MANY, FEWER, LEAST = 102_400, 25_600, 12_800
CONFIG = LlamaConfig(VOCAB, WIDTH, 24, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, max_positions=16)
MODEL = Llama(CONFIG)
PROMPT = [3, 1, 4]
SEQUENCES = list(itertools.product(range(VOCAB), repeat=LENGTH))
TREE = TreeTopology.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
GROWN = DynamicTree(6, 1, 3)
TREES = {"chain": presets.chain(2), "tree": TREE, "grown": GROWN}  # and "root", of no other node
P_VALUE = 0.001


def random_leaves(shapes, seed: int, scale: float):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(random.standard_normal(x.shape).astype(np.float32) * scale + (x.ndim == 1)), shapes
    )


BASE = random_leaves(jax.eval_shape(lambda: init_base(MODEL, jax.random.key(0))), 0, 0.45)


@dataclass(frozen=True)
class Bigram(Scripted):
    """A miniature draft model: its logits are those of the base without its layer, with small or large noise."""

    astray: float
    depth: int = 3
    can: ClassVar[dict[str, bool]] = {"supports_sampling": True, "supports_dynamic_tree": True}

    def logits(self, tokens, base):
        table = jnp.asarray(np.random.default_rng(5).standard_normal((VOCAB, VOCAB)).astype(np.float32))
        x = base.embed(tokens)
        x = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + CONFIG.norm_eps) * base.params["norm"]["scale"]
        return base.logits(x) + self.astray * table[tokens]

    def propose(self, params, state, root, tree, base, draw=None):
        if isinstance(tree, DynamicTree):

            def guess(carry, beam):
                return carry, self.logits(beam.tokens, base)

            return growing.grow(tree, root, guess, None, LmHead(), VOCAB, draw)[0]
        candidates, drawn_from = root[:, None], []
        for k, level in enumerate(tree.levels):
            logits = self.logits(candidates[:, level.parents], base)
            logits = logits / over_rows(draw.temperature, logits)
            drawn = sampled_tokens(draw.keys[:, k], logits, level.width)[:, level.parent_slot, level.ranks]
            candidates = jnp.concatenate([candidates, drawn], axis=1)
            drawn_from.append(logits)
        log_q = jnp.concatenate(drawn_from, axis=1) if drawn_from else None  # the root alone draws nothing
        return Proposal(candidates, tree.topology, log_q)


FOUR = Vocabulary([0, 1, 3, 4])
DRAFTERS = {
    "none": NoDrafter(),
    "medusa": MedusaHeads(2, WIDTH, VOCAB),
    "hydra": HydraHeads(2, WIDTH, VOCAB),
    "hydra++": HydraHeads(2, WIDTH, VOCAB, n_layers=2).with_prefix(CONFIG),
    "amphista, 4 tokens, rank 3": AmphistaHeads(2, CONFIG, small_lm_head=LmHead(rank=3, vocabulary=FOUR)),
    "eagle": Eagle.for_base(CONFIG, jnp.float32),
    "eagle3": Eagle3.for_base(CONFIG, jnp.float32),
    "eagle3, 4 tokens": dataclasses.replace(Eagle3.for_base(CONFIG, jnp.float32), vocabulary=FOUR),
    "mtp": MTP.for_base(CONFIG, jnp.float32),
    "gemma4 assistant": Gemma4Assistant.for_base(CONFIG, jnp.float32),
    "model": DraftModel(Llama(CONFIG), VOCAB),
    "sure model, 4 tokens": DraftModel(Llama(CONFIG.replace(vocab_size=4)), VOCAB, confidence=0.3),
    "padded model": DraftModel(Llama(CONFIG.replace(vocab_size=8, width=8)), VOCAB),
    "hydra, clusters": HydraHeads(2, WIDTH, VOCAB, small_lm_head=LmHead(shared=True)),
    "near": Bigram(0.0),
    "far": Bigram(4.0),
    "lookup with near": with_lookup(Bigram(0.0), 2),
    "lookup with far": with_lookup(Bigram(4.0), 2),
    "corpus with far": Several(Bigram(4.0), branch_nodes=2),
}


def draft_params(name: str):
    if name == "corpus with far":
        corpus = Corpus(400)
        corpus.remember(np.random.default_rng(0).integers(0, VOCAB, 300))
        return {CORPUS: corpus}
    if name == "none" or name.endswith(("near", "far")):
        return {}
    drafter = DRAFTERS[name]
    found = random_leaves(jax.eval_shape(lambda: drafter.init(jax.random.key(0), BoundBase(MODEL, BASE))), 1, 0.3)
    if name == "hydra, clusters":  # three of the five tokens, or four
        centroids, tokens, _ = clusters_of(np.asarray(BASE["lm_head"]).T, size=2)
        found |= {CLUSTERED_LM_HEAD: Clusters(jnp.asarray(centroids), jnp.asarray(tokens), None, 2, VOCAB)}
    return found


def probabilities(rule, processors=()) -> np.ndarray:
    """Return the probability of each of `SEQUENCES` after the prompt."""
    texts = np.array([[*PROMPT, *sequence] for sequence in SEQUENCES])
    positions = np.broadcast_to(np.arange(texts.shape[1]), texts.shape)

    @jax.jit
    def full_pass(params):
        hidden = MODEL.apply({"params": params}, texts, positions, causal_mask(texts.shape[1])).hidden
        return MODEL.apply({"params": params}, hidden, method="logits")

    logits = np.asarray(full_pass(BASE), np.float64)
    found = np.ones(len(SEQUENCES))
    for row, sequence in enumerate(SEQUENCES):
        for place, token in enumerate(sequence):
            here = logits[row, len(PROMPT) - 1 + place]
            here = processed(here, processors, sequence[:place])
            found[row] *= shaped(here, rule)[token]
    return found


def processed(logits: np.ndarray, processors, output) -> np.ndarray:
    """Return logits after `PROMPT` and the generated tokens; biases are added first."""
    found = logits.copy()
    for token, bias in dict(each for one in processors for each in getattr(one, "logit_bias", ())).items():
        found[token] += bias
    for one in processors:
        if isinstance(one, Penalties):
            for token in {*PROMPT, *output}:
                found[token] *= one.repetition_penalty if found[token] < 0 else 1 / one.repetition_penalty
                found[token] -= one.frequency_penalty * output.count(token) + one.presence_penalty * (token in output)
    return found


def shaped(logits: np.ndarray, rule) -> np.ndarray:
    p = np.exp((logits - logits.max()) / rule.temperature)
    order = np.argsort(-p)
    if rule.top_k is not None:
        p[order[rule.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= rule.top_p]] = 0
    p[p < rule.min_p * p.max()] = 0
    return p / p.sum()


def draws(rule, drafter: str, tree: CandidateTree, batch: int, samples: int, processors=()) -> np.ndarray:
    """Return tokens ``[samples, LENGTH]`` from batches of the same prompt."""
    decode = make_decode_fn(MODEL, DRAFTERS[drafter], tree, rule, processors=processors, max_new_tokens=LENGTH)
    params, prompt = Params(BASE, draft_params(drafter)), np.array([PROMPT] * batch)
    # LLVM's optimisation would take longer than these few decodings.
    many = jax.jit(
        lambda keys: jax.lax.map(lambda some: jax.vmap(lambda key: decode(params, prompt, rng=key))(some), keys),
        compiler_options=QUICK_COMPILE if samples < MANY else None,
    )
    out = many(jax.random.split(jax.random.key(7), (8, samples // batch // 8)))
    assert (out.lengths == LENGTH).all()
    return np.asarray(out.tokens).reshape(samples, LENGTH)


def p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Return the p-value of the chi-square test. Rare sequences are pooled; impossible ones must not occur."""
    counts = np.bincount(tokens @ VOCAB ** np.arange(LENGTH)[::-1], minlength=VOCAB**LENGTH)
    if counts[expected == 0].any():
        return 0.0
    rare = expected * len(tokens) < 10
    counts, wanted = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected * len(tokens)))
    keep = wanted > 0
    return float(stats.chisquare(counts[keep], wanted[keep] * counts[keep].sum() / wanted[keep].sum()).pvalue)


CUTS = {"whole": {}, "cut": {"top_k": 4, "top_p": 0.8}}
GRID = [(0.7, "whole", "medusa", 1), (1.0, "cut", "hydra", 8), (1.5, "cut", "hydra++", 8), (1.5, "whole", "hydra", 1)]


@pytest.mark.slow  # comparing tokens with plain sampling is stronger and faster
@pytest.mark.parametrize(("temperature", "cut", "drafter", "batch"), GRID)
def test_exact_sampling(temperature, cut, drafter, batch):
    rule = ExactSampling(temperature, **CUTS[cut])
    assert p_value(draws(rule, drafter, TREE, batch, MANY), probabilities(rule)) > P_VALUE


EAGLES = ("eagle", "eagle3", "eagle3, 4 tokens", "mtp", "gemma4 assistant")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [*EAGLES, "model", "sure model, 4 tokens"])
@pytest.mark.parametrize("tree", ["tree", "grown"])
def test_exact_sampling_with_drafts_that_have_a_cache(drafter, tree):
    rule = ExactSampling(0.7, top_p=0.9)
    assert p_value(draws(rule, drafter, TREES[tree], 8, FEWER), probabilities(rule)) > P_VALUE


PROCESSORS = (
    LogitBias({1: 0.7, 3: -0.5}),
    Penalties(repetition_penalty=1.5, presence_penalty=-0.4, frequency_penalty=0.9),
)


@pytest.mark.parametrize(
    ("rule", "drafter", "tree"),
    [
        pytest.param(ExactSampling(0.9, min_p=0.05), "hydra", "tree", marks=pytest.mark.slow),
        pytest.param(RejectionSampling(0.9, min_p=0.05, draft_temperature=1.2), "far", "tree", marks=pytest.mark.slow),
        pytest.param(RejectionSampling(0.9, min_p=0.05), "lookup with far", "grown", marks=pytest.mark.slow),
        pytest.param(RejectionSampling(0.9, min_p=0.05), "near", "chain", marks=pytest.mark.slow),
        pytest.param(TraversalVerification(0.9, min_p=0.05), "lookup with far", "tree", marks=pytest.mark.slow),
        pytest.param(BlockVerification(0.9, min_p=0.05), "near", "chain", marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_processors_and_min_p(rule, drafter, tree):
    found = draws(rule, drafter, TREES[tree], 8, FEWER, PROCESSORS)
    assert p_value(found, probabilities(rule, PROCESSORS)) > P_VALUE
    # Every number matters: without it the expected distribution differs.
    bias, penalties = PROCESSORS
    assert p_value(found, probabilities(dataclasses.replace(rule, min_p=0.0), PROCESSORS)) < 1e-9
    assert p_value(found, probabilities(rule, [penalties])) < 1e-9
    for name, neutral in penalties.NEUTRAL.items():
        fewer = [bias, dataclasses.replace(penalties, **{name: neutral})]
        assert p_value(found, probabilities(rule, fewer)) < 1e-9


def test_plain_sampling():
    rule = ExactSampling(1.0, top_p=0.9)
    assert p_value(draws(rule, "none", presets.root(), 8, LEAST), probabilities(rule)) > P_VALUE


# Every drafter with every kind of tree, and every temperature and cut with a near and a far draft.
REJECTION = [
    *((0.7, "whole", drafter, tree) for drafter in ("near", "far", "hydra") for tree in TREES),
    *((1.5, "cut", drafter, tree) for drafter in ("near", "far", "medusa") for tree in TREES),
    *((1.0, "cut", drafter, tree) for drafter in EAGLES for tree in ("tree", "grown")),
    *((1.0, "cut", "amphista, 4 tokens, rank 3", tree) for tree in ("tree", "grown")),
    *((1.5, "whole", f"lookup with {draft}", tree) for draft in ("near", "far") for tree in TREES),
    *((0.7, "whole", "corpus with far", tree) for tree in TREES),
    *((1.0, "cut", "hydra, clusters", tree) for tree in ("tree", "grown")),
    (1.0, "cut", "lookup with far", "root"),
    (1.0, "cut", "model", "grown"),
    (1.0, "cut", "sure model, 4 tokens", "tree"),
    (1.0, "cut", "padded model", "chain"),
]


TRAVERSAL = [case for case in REJECTION if case[3] != "chain" and case[2] not in ("medusa", "eagle", "mtp")]
BLOCK = [case for case in REJECTION if case[3] == "chain"]


@pytest.mark.parametrize(
    ("kind", "temperature", "cut", "drafter", "tree", "samples"),
    [
        (RejectionSampling, 0.7, "whole", "far", "tree", LEAST),
        *(
            pytest.param(kind, *case, MANY, marks=pytest.mark.slow)
            for kind, cases in (
                (RejectionSampling, REJECTION),
                (TraversalVerification, TRAVERSAL),
                (BlockVerification, BLOCK),
            )
            for case in cases
        ),
    ],
)
def test_rules_that_judge_draws(kind, temperature, cut, drafter, tree, samples):
    rule = kind(temperature, **CUTS[cut], draft_temperature=1.2)
    assert p_value(draws(rule, drafter, TREES.get(tree) or presets.root(), 8, samples), probabilities(rule)) > P_VALUE


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES)
def test_rejection_sampling_from_a_base_with_recurrent_layers(tree, monkeypatch):
    model = Llama(CONFIG.replace(n_layers=2, layer_kinds=(DELTA, CONFIG.kinds[0])))
    monkeypatch.setitem(globals(), "MODEL", model)
    base = random_leaves(jax.eval_shape(lambda: init_base(model, jax.random.key(0))), 0, 0.45)
    monkeypatch.setitem(globals(), "BASE", base)
    rule = RejectionSampling(0.7, draft_temperature=1.2)
    assert p_value(draws(rule, "near", TREES[tree], 8, LEAST), probabilities(rule)) > P_VALUE


@parameters_as_arrays
@dataclass(frozen=True)
class TwoChances(ExactSampling):
    """Wrong rule: samples again if no child has the sample."""

    def accept(self, verify_result, keys):
        proposal = verify_result.proposal
        parents = jnp.asarray(proposal.tree.parents)

        def choose(node, depth):
            shaped = self.shape(verify_result.at(node, depth))
            token = sample(keys[:, depth], shaped)
            held = jnp.any((parents == node[:, None]) & (proposal.tokens == token[:, None]), axis=1)
            return jnp.where(held, token, sample(keys[:, depth + 1], shaped))

        return walk(proposal, choose)


@parameters_as_arrays
@dataclass(frozen=True)
class Uncut(ExactSampling):
    """Wrong rule: ignores top-k and top-p after the first token."""

    def accept(self, verify_result, keys):
        return per_row(ExactSampling(1.0), len(verify_result.logits)).accept(verify_result, keys)


@parameters_as_arrays
@dataclass(frozen=True)
class NoResidual(RejectionSampling):
    """Wrong rule: samples from p after a rejection, not from norm(max(0, p - q))."""

    def accept(self, verify_result, keys):
        accepted = super().accept(verify_result, keys)
        again = sample(keys[:, 0], self.shape(at_rows(verify_result.logits, accepted.path[:, -1])))
        return accepted._replace(bonus_token=again)


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        pytest.param(TwoChances(1.0), "hydra", marks=pytest.mark.slow),
        pytest.param(Uncut(1.0, top_k=4, top_p=0.8), "hydra", marks=pytest.mark.slow),
        pytest.param(NoResidual(1.0), "far", marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_the_test_fails_for_a_wrong_rule(rule, drafter):
    assert p_value(draws(rule, drafter, TREE, 8, LEAST), probabilities(rule)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("drafter", EAGLES)
def test_the_test_fails_for_nodes_chosen_by_their_tokens(drafter, monkeypatch):
    monkeypatch.setattr(growing, "_prospects", lambda log_p: (log_p, jnp.zeros_like(log_p)))
    rule = RejectionSampling(1.0)
    assert p_value(draws(rule, drafter, GROWN, 8, FEWER), probabilities(rule)) < 1e-9


@pytest.mark.slow
def test_typical_acceptance_is_not_the_bases_distribution():
    rule = ExactSampling(0.7)
    assert p_value(draws(Typical(0.1, temperature=0.7), "hydra", TREE, 8, FEWER), probabilities(rule)) < 1e-9
