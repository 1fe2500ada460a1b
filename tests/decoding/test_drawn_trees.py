"""Trees of sampled tokens: rules that judge them preserve the base's distribution, and that of the next step.

Base and draft depend on the last token only, so a hundred thousand steps take a second.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from helpers.how import per_row
from helpers.lab import quick_jit
from hydrajax.decoding.acceptance import VerifyResult
from hydrajax.decoding.random_keys import position_keys, row_keys
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.traversal import BlockVerification, TraversalVerification
from hydrajax.drafters import growing
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.filling import fill
from hydrajax.trees import presets
from hydrajax.trees.dynamic import CandidateTree, DynamicTree

VOCAB, ROWS, P_VALUE = 4, 50_000, 0.001
TREE = DynamicTree(4, 1, 3)
GROWN, PAIRS = [TREE, DynamicTree(7, 2, 3), DynamicTree(9, 3, 2), DynamicTree(13, 2, 4)], presets.cartesian([2, 2, 1])
# Probabilities of the next token. The draft is often wrong after token 0, so steps end there; after the other tokens it
# is right, so invalid samples would be accepted.
BASE = np.array([[0.2, 0.1, 0.4, 0.3], [0.05, 0.8, 0.1, 0.05], [0.1, 0.75, 0.05, 0.1], [0.8, 0.05, 0.05, 0.1]])
DRAFT = np.array([[0.02, 0.7, 0.15, 0.13], *BASE[1:]])


def test_rows_at_temperature_0_take_the_most_likely_token_only():
    rule = per_row([RejectionSampling(temperature) for temperature in (0.0, 1.0)], 2)
    p = rule._probabilities(jnp.log(jnp.asarray(BASE[:1].repeat(2, 0), jnp.float32)))
    np.testing.assert_allclose(p, [[0, 0, 1, 0], BASE[0]], atol=1e-6)


def steps(tree: CandidateTree, draft_temperature: float | None = None, kind=RejectionSampling):
    """Run two steps of `ROWS` sequences, the first from token 0.

    Returns the root of each step, the token that followed it and the number of accepted tokens.
    """
    rule, rows = per_row(kind(1.0, draft_temperature=draft_temperature), ROWS), jnp.arange(ROWS)
    keys = row_keys(jax.random.key(3), ROWS)
    base, draft = (jnp.log(jnp.asarray(table, jnp.float32)) for table in (BASE, DRAFT))

    def guess(carry, beam):
        return carry, draft[beam.tokens]

    @quick_jit
    def step(root, emitted):
        below = position_keys(keys, emitted[:, None] + 1 + jnp.arange(tree.depth + 1))
        proposal, _ = fill(tree, root, guess, None, LmHead(), VOCAB, rule.draw(below))
        accepted = rule.accept(VerifyResult(base[proposal.tokens], proposal), below)
        child = proposal.tokens[rows, accepted.path[:, 1]]
        follows = jnp.where(accepted.accept_length > 0, child, accepted.bonus_token)
        return (root, follows, accepted.accept_length), accepted.bonus_token, emitted + accepted.accept_length + 1

    first, root, emitted = step(jnp.zeros(ROWS, jnp.int32), jnp.zeros(ROWS, jnp.int32))
    second, _, _ = step(root, emitted)
    return jax.device_get((first, second))


def p_values(found) -> tuple[float, float]:
    """Test the token after each root, given everything before: for the second step also the first accept length."""
    (root, follows, length), (bonus_token, next_follows, _) = found
    before = np.stack([root, bonus_token]), np.stack([np.zeros_like(length), length])
    return tuple(
        given(then, group * VOCAB + token) for then, token, group in zip((follows, next_follows), *before, strict=True)
    )


def given(tokens: np.ndarray, context: np.ndarray) -> float:
    """Return chi-square p-values of tokens within each context, whose last digit is the previous token."""
    statistic = freedom = 0.0
    for each in np.unique(context):
        here = tokens[context == each]
        wanted = BASE[each % VOCAB] * len(here)
        if wanted.min() >= 10:
            statistic += ((np.bincount(here, minlength=VOCAB) - wanted) ** 2 / wanted).sum()
            freedom += VOCAB - 1
    return float(stats.chi2.sf(statistic, freedom))


@pytest.mark.parametrize(
    ("kind", "tree", "draft_temperature"),
    [
        (RejectionSampling, TREE, None),
        (TraversalVerification, DynamicTree(7, 2, 3), None),
        *(
            pytest.param(kind, tree, temperature, marks=pytest.mark.slow)
            for kind, trees in {
                RejectionSampling: GROWN,
                TraversalVerification: [*GROWN, PAIRS],
                BlockVerification: [presets.chain(3)],
            }.items()
            for tree in trees
            for temperature in (0.6, 1.0, 1.7)
        ),
    ],
    ids=lambda x: getattr(x, "__name__", None) or getattr(x, "name", str(x)),
)
def test_every_token_has_the_conditional_distribution_of_the_base(kind, tree, draft_temperature):
    found = steps(tree, draft_temperature, kind)
    assert min(p_values(found)) > P_VALUE
    assert {0, 1, 2} <= set(found[0][2])  # the first step ended at all depths


@pytest.mark.slow
def test_nodes_chosen_by_their_tokens_fail(monkeypatch):
    """Control: choose nodes by the probability of their tokens, as in a tree of best guesses."""
    monkeypatch.setattr(growing, "_prospects", lambda log_p: (log_p, jnp.zeros_like(log_p)))
    assert p_values(steps(TREE))[0] < 1e-9


@pytest.mark.slow
def test_reusing_the_samples_of_the_previous_step_fails(monkeypatch):
    """Control: one key per position, as in a static tree; accept lengths then correlate with later samples."""
    monkeypatch.setattr(growing, "_keys_of_level", lambda draw, depth: draw.keys[:, depth])
    first, second = p_values(steps(TREE))
    assert first > P_VALUE
    assert second < 1e-9


@pytest.mark.slow
def test_reusing_rejected_samples_of_a_chain_fails(monkeypatch):
    """Control: traversal reads draws below the accepted path, so the next step must not repeat them."""
    monkeypatch.setitem(globals(), "DRAFT", 0.5 * BASE + 0.5 * BASE[[2, 3, 0, 1]])  # wrong after every token
    assert min(p_values(steps(presets.chain(3), kind=BlockVerification))) > P_VALUE
    monkeypatch.setattr(BlockVerification, "draw", RejectionSampling.draw)
    first, second = p_values(steps(presets.chain(3), kind=BlockVerification))
    assert first > P_VALUE
    assert second < 1e-9
