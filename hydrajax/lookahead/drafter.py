"""Lookahead decoding (Fu et al. 2024): the base guesses its own future in a window and learns n-grams from the guesses.

A step feeds two branches next to the root. The *lookahead branch* (section 3.1) is a window of guessed tokens, W
columns and N - 1 levels, the guesses of the last N - 1 steps: Jacobi iteration. The base's choices after the newest
level are the next guesses. Along a column, the levels and the new guess form an n-gram, which enters a pool under its
first token. The *verification branch* (section 3.2) holds n-grams of the pool that begin with the root, as a tree.

Details that the paper leaves open follow the released code (``lade/decoding.py`` of hao-ai-lab/LookaheadDecoding,
eed010d):

- Column 0 of level 0 is the root. Column i of level l stands l + i positions after the root. It sees the root, level 0
  up to column i, and in its own column levels 1 up to its own (the paper's figure of the mask; `sees` here).
- The window moves by one position per step, however many tokens were accepted (``ALWAYS_FWD_ONE``).
- Guesses are the base's best tokens, also if the output is sampled.
- For each first token the pool keeps the G most recent n-grams; an n-gram that occurs again counts as new.
- N-grams enter once all tokens but the first are guesses of the base: N - 2 steps after the window's beginning.
- With ``from_text``, prompt and output contribute n-grams too (``POOL_FROM_PROMPT``, off there), as soon as they are
  emitted.

Differences from that code, none of which affects the text: the window is full from the first step, with the prompt's
tokens in order, repeated (there: levels filled one by one with random prompt tokens); candidates are verified in these
first steps too; candidates with a common prefix share nodes, so that rules which walk down a tree find all of them; and
a fully correct candidate counts completely (there: without its last token).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from hydrajax.drafters.drafter import DrafterSpec, Proposal
from hydrajax.drafters.kind import DrafterKind
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.trees.built_trees import from_parents
from hydrajax.trees.choices import MAX_NODES
from hydrajax.trees.static_tree import TreeTopology
from hydrajax.trees.topology import Topology

NO_TOKEN = -1
MOST_GUESSES = 999  # the largest number in a tree's name


class LookaheadState(NamedTuple):
    """The guesses and n-grams of a sequence, all int32.

    Attributes:
        window: ``[B, N-1, W]`` guessed tokens, oldest level first; the next root takes the place of the first token.
        pool: ``[B, buckets, G, N]`` n-grams in the bucket of their first token, most recent first; -1 for none.
        tail: ``[B, N-1]`` the last tokens of the text, -1 before its beginning. All -1 without ``from_text``.
        steps: ``[B]`` steps since the window began.
    """

    window: Int[Array, "B levels W"]
    pool: Int[Array, "B buckets G N"]
    tail: Int[Array, "B levels"]
    steps: Int[Array, " B"]


@dataclass(frozen=True)
class Lookahead:
    """Propose n-grams that begin with the root, from a pool which the base fills by guessing ahead.

    The nodes ``[r], [r, 0], [r, 0, 0] ...`` of a tree hold the r-th candidate, most recent first. Other nodes stay
    empty. So do the nodes of a candidate's beginning that an earlier candidate shares; the earlier nodes serve both.
    Candidates are given, not drawn, so the rules are greedy, exact sampling and typical.

    Attributes:
        window: W, the columns of the window. The defaults of the first three are the paper's for a base of 7B
            parameters on an A100 (section 5: W = G = 15, N = 5).
        ngram: N, the length of an n-gram.
        guesses: G, n-grams kept per first token, and verified in the default tree.
        from_text: Keep n-grams of prompt and output too.
        buckets: Number of first tokens that the pool has room for. A token's bucket is its id modulo this number.
            Tokens in one bucket share its G places and evict each other's n-grams; the output stays exact. A sequence
            takes ``4 * buckets * G * N`` bytes, 1.2 MB by default.

    Raises:
        HydrajaxError: For numbers out of range, or more nodes than a tree may have.
    """

    window: int = 15
    ngram: int = 5
    guesses: int = 15
    from_text: bool = True
    buckets: int = 4096

    def __post_init__(self):
        if self.window < 1 or self.ngram < 2 or not 1 <= self.guesses <= MOST_GUESSES or self.buckets < 1:
            raise HydrajaxError(
                f"draft: got {self.name}, expected lookahead-W-N-G with a window W of at least 1, n-grams of N "
                f"tokens, at least 2, and 1 to {MOST_GUESSES} guesses G"
            )
        nodes = (self.ngram - 1) * (self.window + self.guesses)
        if nodes > MAX_NODES:
            raise HydrajaxError(
                f"draft: got (N - 1) * (W + G) = {nodes} nodes per step for {self.name}, expected at most {MAX_NODES}"
            )

    @property
    def name(self) -> str:
        """The name for ``--draft``."""
        return f"lookahead-{self.window}-{self.ngram}-{self.guesses}"

    @cached_property
    def spec(self) -> DrafterSpec:
        depth = self.ngram - 1
        return DrafterSpec(
            depth=depth,
            default_tree="cartesian-" + "x".join(map(str, [self.guesses] + [1] * (depth - 1))),
            window_nodes=depth * self.window - 1,
            reach=max(self.window + self.ngram - 3, depth),
        )

    def init(self, rng, base):
        return {}

    def init_state(self, batch, slots):
        return LookaheadState(
            jnp.zeros((batch, self.ngram - 1, self.window), jnp.int32),
            jnp.full((batch, self.buckets, self.guesses, self.ngram), NO_TOKEN, jnp.int32),
            jnp.full((batch, self.ngram - 1), NO_TOKEN, jnp.int32),
            jnp.zeros(batch, jnp.int32),
        )

    def begin(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        cells = (self.ngram - 1) * self.window
        places = jnp.arange(cells) % jnp.maximum(counts, 1)[:, None]
        window = jnp.take_along_axis(tokens, places, axis=1).reshape(state.window.shape)
        state = state._replace(window=window, steps=jnp.zeros_like(state.steps))
        if not self.from_text:
            return state
        ngrams, whole, tail = self._of_text(state.tail, tokens, counts)
        return state._replace(pool=remember(state.pool, ngrams, whole), tail=tail)

    def rewind(self, state, lengths):
        """Keep the n-grams in the pool; drop the tail, whose n-grams would span the cut."""
        return state._replace(tail=jnp.full_like(state.tail, NO_TOKEN))

    def propose(self, params, state, root, tree, base, draw=None):
        tokens, parents = as_nodes(candidates(state.pool, root), tree)
        window = _with_root(state.window, root).reshape(len(root), -1)[:, 1:]
        topology = self._beside_window(parents, tree)
        return Proposal(jnp.concatenate([root[:, None], tokens, window], axis=1), topology)

    def observe(self, params, state, proposal, outcome, base):
        root, window = proposal.tokens[:, 0], proposal.tokens.shape[1] - self.spec.window_nodes
        # The root is a cell of the window too, on its newest level if N = 2.
        of_window = jnp.concatenate([outcome.chosen[:, :1], outcome.chosen[:, window:]], axis=1)
        guessed = of_window[:, -self.window :]
        columns = jnp.concatenate([_with_root(state.window, root), guessed[:, None]], axis=1)  # [B, N, W]
        ngrams = jnp.swapaxes(columns, 1, 2)
        kept = jnp.broadcast_to((state.steps >= self.ngram - 2)[:, None], ngrams.shape[:2])
        tail = state.tail
        if self.from_text:
            of_text, whole, tail = self._of_text(tail, outcome.tokens, outcome.counts)
            ngrams, kept = jnp.concatenate([ngrams, of_text], axis=1), jnp.concatenate([kept, whole], axis=1)
        return LookaheadState(columns[:, 1:], remember(state.pool, ngrams, kept), tail, state.steps + 1)

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        raise HydrajaxError(f"draft: got {self.name}, expected another draft: its guesses depend on earlier steps")

    def _of_text(
        self, tail: Int[Array, "B levels"], tokens: Int[Array, "B T"], counts: Int[Array, " B"]
    ) -> tuple[Int[Array, "B T N"], Bool[Array, "B T"], Int[Array, "B levels"]]:
        """Return the n-grams that end with one of the first ``counts[b]`` tokens after ``tail``, which of them are
        complete, and the tail after these tokens.
        """
        text, each = jnp.concatenate([tail, tokens], axis=1), np.arange(tokens.shape[1])
        ngrams = text[:, each[:, None] + np.arange(self.ngram)]
        whole = (each < counts[:, None]) & (ngrams[:, :, 0] >= 0)
        tail = jnp.take_along_axis(text, counts[:, None] + np.arange(self.ngram - 1), axis=1)
        return ngrams, whole, tail

    def _beside_window(self, parents: Int[Array, "B nodes"], tree: TreeTopology) -> Topology:
        """Return the trees with these parents, then the window, equal for all sequences and without parents."""
        batch, n_nodes = parents.shape
        window_nodes = self.spec.window_nodes
        alone = jnp.full((batch, window_nodes), -1, jnp.int32)
        # A node has the children of all candidates that go along it, and its own that no candidate has a place in.
        branches = any(any(path[1:]) for path in tree.choices)
        most_children = max((tree.max_rank + 1) * (1 + branches), 1)
        found = from_parents(jnp.concatenate([parents, alone], axis=1), tree.depth, most_children)
        of_window = sees(self.window, self.ngram - 1)[1:]
        mask = np.zeros((window_nodes, n_nodes + window_nodes), bool)
        mask[:, 0], mask[:, n_nodes:] = of_window[:, 0], of_window[:, 1:]
        level, column = np.divmod(np.arange(1, window_nodes + 1), self.window)
        return found._replace(
            depths=found.depths.at[:, n_nodes:].set((level + column).astype(np.int32)),
            mask=found.mask.at[:, n_nodes:].set(mask),
            inner=found.inner[:, :n_nodes],
        )


def sees(columns: int, levels: int) -> Bool[np.ndarray, "cells cells"]:
    """Return which cells of the window see which; cells level by level, the first is the root."""
    level, column = np.divmod(np.arange(columns * levels), columns)
    oldest = (level == 0) & (column <= column[:, None])
    above = (level > 0) & (level <= level[:, None]) & (column == column[:, None])
    return oldest | above


def _with_root(window: Int[Array, "B levels W"], root: Int[Array, " B"]) -> Int[Array, "B levels W"]:
    return window.at[:, 0, 0].set(root)


def remember(
    pool: Int[Array, "B buckets G N"], ngrams: Int[Array, "B M N"], kept: Bool[Array, "B M"]
) -> Int[Array, "B buckets G N"]:
    """Return the pool after these n-grams occurred one after the other, those of each sequence that are ``kept``."""
    rows, places = jnp.arange(len(pool)), jnp.arange(pool.shape[2])

    def meet(m, pool):
        ngram = ngrams[:, m]
        bucket = ngram[:, 0] % pool.shape[1]
        known = pool[rows, bucket]  # [B, G, N]
        same = jnp.all(known == ngram[:, None], axis=-1)
        # It moves to the front; those before its old place move back by one. A new one displaces the oldest.
        last = jnp.where(jnp.any(same, axis=1), jnp.argmax(same, axis=1), len(places) - 1)
        moved = jnp.concatenate([ngram[:, None], known[:, :-1]], axis=1)
        moves = kept[:, m, None] & (places <= last[:, None])
        return pool.at[rows, bucket].set(jnp.where(moves[:, :, None], moved, known))

    many = jnp.max(jnp.where(kept, jnp.arange(ngrams.shape[1]) + 1, 0))  # none beyond in any sequence
    return jax.lax.fori_loop(0, many, meet, pool)


def candidates(pool: Int[Array, "B buckets G N"], root: Int[Array, " B"]) -> Int[Array, "B G depth"]:
    """Return the continuations of the root in the n-grams that begin with it, most recent first; then -1."""
    known = pool[jnp.arange(len(pool)), root % pool.shape[1]]
    begins = known[:, :, 0] == root[:, None]
    found = jnp.where(begins[:, :, None], known[:, :, 1:], NO_TOKEN)
    first = jnp.argsort(~begins, axis=1, stable=True)  # a bucket may hold n-grams of other tokens in between
    return jnp.take_along_axis(found, first[:, :, None], axis=1)


def as_nodes(found: Int[Array, "B G depth"], tree: TreeTopology) -> tuple[Int[Array, "B below"], Int[Array, "B nodes"]]:
    """Return the tokens of a tree's nodes below the root, and all nodes' parents.

    Candidate r lies along ``[r], [r, 0] ...``, but shares the nodes of an earlier one as far as the two agree.
    """
    n_chains = min(found.shape[1], tree.max_rank + 1)
    if not tree.depth or not n_chains:
        return jnp.full((len(found), tree.size - 1), NO_TOKEN), jnp.broadcast_to(tree.parents, (len(found), tree.size))
    holds = np.array([path[0] < n_chains and not any(path[1:]) for path in tree.choices])
    chain = np.array([path[0] if held else 0 for path, held in zip(tree.choices, holds, strict=True)])
    depth = tree.depths[1:]
    place = np.full((n_chains, tree.depth + 1), -1, np.int32)  # of a candidate's node at each depth; -1 for none
    place[:, 0] = 0
    place[chain[holds], depth[holds]] = 1 + np.flatnonzero(holds)
    tokens = found[:, :n_chains, : tree.depth]
    alike = jnp.cumprod(tokens[:, :, None] == tokens[:, None], axis=-1).astype(bool) & (place[:, 1:] >= 0)
    # The first candidate with the same prefix and a node there: [B, chains, depth + 1]; at the root all of them.
    leader = jnp.pad(jnp.argmax(alike, axis=2).astype(jnp.int32), ((0, 0), (0, 0), (1, 0)))
    parents = jnp.where(holds, jnp.asarray(place)[leader[:, chain, depth - 1], depth - 1], tree.parents[1:])
    own = holds & (leader[:, chain, depth] == chain)
    return (
        jnp.where(own, tokens[:, chain, depth - 1], NO_TOKEN),
        jnp.pad(parents, ((0, 0), (1, 0)), constant_values=-1),
    )


KIND = DrafterKind(
    "Lookahead",
    Lookahead,
    about="n-grams that the base guesses ahead; lookahead-W-N-G: window, length, guesses; default 15-5-15",
    numbers=("W", "N", "G"),
)
