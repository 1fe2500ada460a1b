"""Trees that are filled under a grammar: every node holds an allowed token, or none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.host_grammars import Table, mask_after
from hydrajax.decoding.constraints import words
from hydrajax.decoding.host_work import AnyText, HostWork, Plan
from hydrajax.decoding.program import Program
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.drafter import Draw
from hydrajax.drafters.filling import fill
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.ops.trace import tracing
from hydrajax.trees import presets
from hydrajax.trees.dynamic import DynamicTree, with_estimates
from hydrajax.trees.static_tree import TreeTopology

VOCAB, ROOTS = 40, np.array([3, 4, 9], np.int32)
TABLE = Table(5, VOCAB, most=2)  # a node has one or two allowed children
HALF = Vocabulary(range(0, VOCAB, 2))
TREES = {"static": presets.cartesian([3, 2]), "dynamic": DynamicTree(8, 1, 3)}
TREES["with estimates"] = with_estimates(TREES["static"])


def masks_of(paths) -> np.ndarray:
    return np.array([[mask_after(TABLE, tuple(path.tolist()), VOCAB) for path in row] for row in np.asarray(paths)])


def filled(tree, vocabulary, draws: bool):
    """Fill a tree with random logits, which depend on the path."""
    head, table = LmHead(vocabulary=vocabulary), jax.random.normal(jax.random.key(0), (VOCAB, VOCAB))

    def guess(nothing, beam):
        logits = table[jnp.maximum(beam.tokens, 0)] * 3
        return nothing, logits if vocabulary is None else logits[..., vocabulary.tokens]

    def allowed(paths):
        shape = jax.ShapeDtypeStruct((*paths.shape[:2], words(VOCAB)), jnp.uint32)
        return jax.pure_callback(masks_of, shape, paths)

    @jax.jit
    def propose(root, keys):
        draw = Draw(keys, 1.0) if draws else None
        with tracing(allowed=allowed):
            return fill(tree, root, guess, None, head, VOCAB, draw)[0]

    return jax.device_get(propose(ROOTS, jax.random.split(jax.random.key(1), (len(ROOTS), 3))))


@pytest.mark.parametrize(
    ("tree", "vocabulary", "draws"),
    [
        ("static", HALF, False),
        ("static", None, True),
        ("with estimates", HALF, False),
        ("dynamic", HALF, False),
        ("dynamic", None, True),
        ("dynamic", HALF, True),
    ],
)
def test_nodes_hold_allowed_tokens(tree, vocabulary, draws):
    proposal = filled(TREES[tree], vocabulary, draws)
    parents = np.broadcast_to(proposal.tree.parents, proposal.tokens.shape)
    n_tokens = missing = 0
    for row, (tokens, above) in enumerate(zip(proposal.tokens.tolist(), parents.tolist(), strict=True)):
        paths = {0: (tokens[0],)}
        for node in range(1, len(tokens)):
            if above[node] not in paths:
                continue  # below a node without a token
            siblings = [tokens[other] for other in range(1, node) if above[other] == above[node]]
            possible = TABLE.after(paths[above[node]]) & (set(range(VOCAB)) if vocabulary is None else set(HALF.tokens))
            if tokens[node] < 0:
                missing += 1
                assert possible <= set(siblings)  # there were no more
                continue
            n_tokens += 1
            assert tokens[node] in possible - set(siblings)
            paths[node] = (*paths[above[node]], tokens[node])
            if draws:  # q is zero for all other tokens
                slot = np.broadcast_to(proposal.tree.parent_slot, parents.shape)[row, node]
                assert set(np.flatnonzero(proposal.log_q[row, slot] > -np.inf)) == possible
    assert n_tokens > 4
    assert missing or tree == "dynamic"
    assert proposal.log_p is None or not np.isnan(proposal.log_p).any()


def test_masks_after_paths_are_those_of_a_tree():
    program = Program(PromptLookup(), presets.chain(3), max_new_tokens=4, forced_nodes=2)
    texts = [(3,), (4, 7)]
    places = [TABLE.start(None, VOCAB, ()) for _ in texts]
    work = HostWork([*places, None], np.zeros(3, bool), program, VOCAB, 5)
    tokens = np.zeros((3, 4), np.int32)
    tokens[1, 0] = 4
    work.follow(np.zeros(3, bool), np.array([0, 1, 0], np.int32), np.array([3, 7, 1], np.int32), tokens)
    for below in ([[]], [[5], [6]], [[5, 8], [5, 9], [6, 8]]):
        paths = np.array([[[root, *path] for path in below] for root in (3, 7, 1)], np.int32)
        found = work.masks_after(paths)
        assert found.shape == (3, len(below), words(VOCAB))
        for row, text in enumerate(texts):
            expected = [mask_after(TABLE, (*text, *path), VOCAB) for path in below]
            np.testing.assert_array_equal(found[row], expected)
        assert (found[2] == 0xFFFFFFFF).all()


def test_forced_tokens_that_a_tree_holds_need_no_branch():
    program, nothing = (
        Program(PromptLookup(), presets.chain(3), max_new_tokens=4, forced_nodes=2),
        np.zeros(2, np.int32),
    )
    for counts, held, plan in (
        ([0, 0], 2, Plan.TREE),
        ([2, 0], 2, Plan.TREE),  # the tree holds them
        ([2, 0], 0, Plan.JOINED),
        ([3, 1], 2, Plan.JOINED),
        ([3, 4], 3, Plan.FORCED),
        ([9, 0], 3, Plan.JOINED),  # one sequence needs a tree, the other more than it holds
        ([9, 9], 3, Plan.FORCED),
    ):
        work = HostWork([AnyText([7] * count) for count in counts], np.zeros(2, bool), program, VOCAB, 5, held)
        work.follow(np.zeros(2, bool), nothing, nothing, np.zeros((2, 4), np.int32))
        assert work.plan is plan, (counts, held)


def test_the_tokens_that_a_tree_holds():
    """Those of the path of best guesses, if the drafter fills it level by level."""
    choices = [[0], [1], [0, 0], [0, 1], [1, 0], [1, 0, 0]]
    heads = MedusaHeads(3, 8, VOCAB)
    for drafter, tree, held in (
        (heads, TreeTopology.from_choices(choices), 2),
        (heads, presets.chain(3), 3),
        (heads, DynamicTree(8, 1, 3), 2),
        (heads, presets.root(), 0),
        (PromptLookup(), presets.chain(3), 0),
    ):
        assert Program(drafter, tree).held_tokens == held
