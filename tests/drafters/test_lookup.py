"""Compare prompt lookup with a plain search."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from helpers.lab import quick_jit
from helpers.refusals import refusal
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.trees import presets
from hydrajax.trees.static_tree import TreeTopology

SLOTS, BATCH = 24, 16
TREES = {
    "chain": presets.chain(6),
    "wide": presets.cartesian([3, 2, 1]),
    "skips ranks": TreeTopology.from_choices([[0], [2], [0, 1], [2, 0], [2, 2], [0, 1, 0], [2, 0, 1], [2, 0, 1, 0]]),
    "root": presets.root(),
}
DRAFTERS = {
    "default": PromptLookup(),
    "short": PromptLookup(depth=6, longest=2, shortest=2, matches=3),
    "one match": PromptLookup(depth=6, longest=3, matches=1),
}


def matches(text: list[int], drafter: PromptLookup, depth: int, most: int) -> list[list[int]]:
    """Return the continuations of earlier occurrences of the last tokens: longest match first, then the latest."""
    end, found = len(text) - 1, []
    for place in range(end):
        length = 0
        while length < drafter.longest and length <= place and text[place - length] == text[end - length]:
            length += 1
        if length >= drafter.shortest:
            found.append((-length, -place))
    followed = []
    for _, minus_place in sorted(found)[:most]:
        repeating = text[-minus_place + 1 :] * depth  # a match near the end repeats
        followed.append(repeating[:depth])
    return followed


def fill(tree: TreeTopology, text: list[int], drafter: PromptLookup) -> list[int]:
    """Return the tokens of the nodes below the last token; -1 without a match."""
    agreeing = {(): matches(text, drafter, tree.depth, drafter.matches if tree.max_rank > 0 else 1)}
    tokens = [text[-1]]
    for path in tree.choices:
        *_, rank = path
        place = len(path) - 1
        different = list(dict.fromkeys(match[place] for match in agreeing[path[:-1]]))
        tokens.append(different[rank] if rank < len(different) else -1)
        agreeing[path] = [match for match in agreeing[path[:-1]] if match[place] == tokens[-1]]
    return tokens


def random_texts(seed: int, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw ``BATCH`` texts over few tokens, so that n-grams repeat, and their lengths; the padding is random."""
    random = np.random.default_rng(seed)
    return random.integers(0, n_tokens, (BATCH, SLOTS), dtype=np.int32), random.integers(1, SLOTS - 1, BATCH)


@pytest.mark.parametrize(
    ("name", "tree"),
    [("default", "skips ranks"), ("one match", "chain"), ("default", "root")]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in (("short", "wide"), ("one match", "wide"))],
)
def test_proposals_match_a_plain_search(name, tree):
    """Feed each text in two parts, a prompt and the tokens of a step, as in decoding."""
    drafter, tree = DRAFTERS[name], TREES[tree]

    @quick_jit
    def propose(prompt, first, more, counts, root):
        state = drafter.advance({}, drafter.init_state(BATCH, SLOTS + 8), None, prompt, first, None, None)
        state = drafter.advance({}, state, None, more, counts, None, None)
        return drafter.propose({}, state, root, tree, None).tokens

    n_proposed = 0
    for seed, n_tokens in enumerate((1, 2, 3, 5)):
        texts, lengths = random_texts(seed, n_tokens)
        counts = np.minimum(np.random.default_rng(seed).integers(0, 5, BATCH), lengths - 1)
        more = np.full((BATCH, 5), 9, np.int32)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            more[row, :count] = texts[row, length - count : length]
        root = np.array([texts[row, length] for row, length in enumerate(lengths)])
        found = np.asarray(propose(texts, (lengths - counts).astype(np.int32), more, counts.astype(np.int32), root))
        for row, length in enumerate(lengths):
            expected = fill(tree, texts[row, : length + 1].tolist(), drafter)
            assert found[row].tolist() == expected
            n_proposed += sum(token >= 0 for token in expected[1:])
    assert n_proposed > 40 or tree.depth == 0


@pytest.mark.parametrize("name", ["default", "one match"])
def test_ranks_equal_the_positions_of_true_tokens_in_proposals(name):
    drafter, (texts, _) = DRAFTERS[name], random_texts(7, 3)
    ranks = np.asarray(
        quick_jit(lambda tokens: drafter.ranks({}, None, {"tokens": tokens}, None, 64, drafter.depth))(texts)
    )
    assert ranks.shape == (drafter.depth, BATCH, SLOTS)
    seen = []
    for row, text in enumerate(texts.tolist()):
        for t in range(SLOTS - 2):
            agreeing = matches(text[: t + 2], drafter, drafter.depth, drafter.matches)
            for k in range(min(drafter.depth, SLOTS - 2 - t)):
                true, different = text[t + 2 + k], list(dict.fromkeys(match[k] for match in agreeing))
                if true in different:
                    assert ranks[k, row, t] == different.index(true)
                    seen.append(ranks[k, row, t])
                else:
                    assert ranks[k, row, t] >= drafter.matches  # in no tree
                agreeing = [match for match in agreeing if match[k] == true]
    assert {0, 1} <= set(seen) or drafter.matches == 1


def largest_by_operation(jaxpr) -> dict[str, int]:
    """Return the largest result of each primitive in elements, including loops and calls."""
    largest: dict[str, int] = {}
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        for found in map(largest_by_operation, inner):
            largest = {name: max(largest.get(name, 0), found.get(name, 0)) for name in largest | found}
        if not inner:
            size = max(variable.aval.size for variable in equation.outvars)
            largest[equation.primitive.name] = max(largest.get(equation.primitive.name, 0), size)
    return largest


def test_operations_do_not_grow_with_the_text():
    """Only in-place writes of a few slots touch long arrays, so the cost of a step does not grow with the context."""
    drafter, tree, slots, (small, large) = PromptLookup(), TREES["wide"], 50_000, (2_000, 50_000)
    state = jax.eval_shape(lambda: drafter.init_state(2, slots))
    rows, tokens = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((2, 5), jnp.int32)
    proposing = jax.make_jaxpr(lambda state, root: drafter.propose({}, state, root, tree, None).tokens)(state, rows)
    adding = jax.make_jaxpr(lambda state, *new: drafter.advance({}, state, None, *new, None, None))(state, tokens, rows)
    assert max(largest_by_operation(proposing.jaxpr).values()) < small
    made = largest_by_operation(adding.jaxpr)
    assert {name for name, size in made.items() if size >= small} == {"scatter"}
    assert made["scatter"] >= large  # a count without such writes would test nothing


@pytest.mark.parametrize("batch", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_history_is_written_in_place(batch):
    """XLA copies none of the four arrays in a loop that looks up and appends, as in decoding."""
    drafter, tree = PromptLookup(), TREES["chain"]

    def step(_, carry):
        state, root = carry
        tokens = drafter.propose({}, state, root, tree, None).tokens
        state = drafter.advance({}, state, None, tokens, jnp.full(batch, 3), None, None)
        return state, jnp.abs(tokens[:, 1]) % 7

    start = jax.eval_shape(lambda: (drafter.init_state(batch, 4000), jnp.zeros(batch, jnp.int32)))
    loop = jax.jit(lambda carry: jax.lax.fori_loop(0, 9, step, carry), donate_argnums=0)
    hlo = loop.lower(start).compile({"xla_backend_optimization_level": 0}).as_text()
    made = re.findall(r"= s32\[([\d,]*)\]\S* ([a-z][\w\-]*)\(", hlo)
    large = {name for dims, name in made if dims and math.prod(map(int, dims.split(","))) >= 4000}
    assert large & {"scatter", "dynamic-update-slice"}
    assert large <= {"scatter", "dynamic-update-slice", "fusion", "parameter", "get-tuple-element", "bitcast"}


def test_rewind_removes_the_later_tokens():
    """This includes arrays padded to more slots, which have other hashes."""
    drafter, tree = DRAFTERS["default"], TREES["wide"]
    texts, lengths = random_texts(1, 3)
    others, other_lengths = random_texts(2, 3)
    cuts = np.random.default_rng(3).integers(0, lengths + 1)
    shapes = jax.eval_shape(lambda: drafter.init_state(BATCH, 3 * SLOTS))

    @quick_jit
    def propose(texts, lengths, cuts, others, counts, root):
        state = drafter.advance({}, drafter.init_state(BATCH, 2 * SLOTS), None, texts, lengths, None, None)
        state = jax.tree.map(
            lambda x, like: jnp.pad(x, [(0, b - a) for a, b in zip(x.shape, like.shape, strict=True)]), state, shapes
        )
        state = drafter.rewind(state, cuts)
        state = drafter.advance({}, state, None, others, counts, None, None)
        return drafter.propose({}, state, root, tree, None).tokens

    counts = np.minimum(other_lengths, SLOTS - cuts) - 1  # root last
    roots = others[np.arange(BATCH), counts]
    found = propose(texts, lengths, cuts, others, counts, roots)
    for row in range(BATCH):
        whole = [*texts[row, : cuts[row]].tolist(), *others[row, : counts[row] + 1].tolist()]
        assert found[row].tolist() == fill(tree, whole, drafter), row


def test_bad_settings_are_rejected():
    for settings in ({"depth": 0}, {"shortest": 0}, {"matches": 0}):
        refusal(
            lambda settings=settings: PromptLookup(**settings), "lookup: got depth ", "expected at least 1 for each"
        )
    refusal(lambda: PromptLookup(longest=2, shortest=3), "lookup: longest: got 2, expected at least shortest, 3")
