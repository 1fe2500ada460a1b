"""The interface between the decode step and drafters.

A drafter is a frozen dataclass. It defines the shapes of its parameters and its state but holds no arrays: parameters
and state are passed in and returned. `Drafter` is the interface for decoding;
`hydrajax.drafters.trainable` adds those for training.
docs/adding_a_drafter.md explains how to write one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax.drafters.clusters import ChosenLogits
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BoundBase
from hydrajax.models.cache import cut_caches
from hydrajax.ops.sharded import replicate_features
from hydrajax.trees.dynamic import CandidateTree
from hydrajax.trees.topology import Topology

DraftParams = Any  # a nested dict of arrays
DraftState = Any  # a pytree of arrays with leading batch axis
CORPUS = "corpus"  # the parameter of a draft that remembers: its `hydrajax.drafters.corpus.Corpus`


class Draw(NamedTuple):
    """How to draw candidates, for rules that need draws.

    Attributes:
        keys: Random keys ``[B, K+1]`` for the positions after a node of depth 0 .. K.
        temperature: Temperature of the draft's distribution, a number or ``[B]``.
    """

    keys: Array
    temperature: Float[Array, " B"]


class Proposal(NamedTuple):
    """A filled candidate tree, or one per sequence.

    Attributes:
        tokens: int32 ``[B, N]`` in node order, node 0 the root; -1 for a node without a guess, which no rule accepts. N
            is the size of the requested tree plus `DrafterSpec.window_nodes` and `DrafterSpec.branch_nodes`.
        tree: The relations of the nodes: `TreeTopology.topology`, or arrays made on the device with the same N.
        log_q: float32 ``[B, P, V]`` logits of the distribution from which the children of ``tree.inner[p]`` were drawn
            without replacement, in order of draws; None without draws. P may be smaller than the tree's: the children
            of the remaining ``inner`` nodes were given, not drawn.
        scratch: Anything the drafter computed and needs again in `Drafter.observe`, such as keys and values for its own
            cache.
        log_p: float32 ``[B, N]`` natural logarithm of the estimated probability that the path to each node is accepted,
            if the tree asks for it (`hydrajax.trees.dynamic.with_estimates`).
    """

    tokens: Int[Array, "B N"]
    tree: Topology
    log_q: Float[Array, "B P V"] | None = None
    scratch: Any = ()
    log_p: Float[Array, "B N"] | None = None


class Beam(NamedTuple):
    """The n nodes of one depth whose children are predicted next; at depth 0 the root.

    In a dynamic tree they are the expanded nodes, most likely first; in a static one those with children, in node
    order.

    Attributes:
        paths: int32 ``[B, n, depth + 1]`` the tokens from the root to each.
        parents: int32 ``[B, n]`` each node's parent in the previous beam; NumPy ``[n]`` if it is the same for all
            sequences.
    """

    depth: int
    tokens: Int[Array, "B n"]
    paths: Int[Array, "B n depth"]
    parents: Int[Array, "*B n"]


# guess(carry, beam) -> carry, float32 logits [B, n, V'] after each node of the beam, or [B, 1, V'] if one prediction
# serves them all. carry: anything the drafter needs at the next level.
Guess = Callable[[Any, Beam], tuple[Any, Float[Array, "B n V_"] | ChosenLogits]]


class Outcome(NamedTuple):
    """The result of a proposal.

    Attributes:
        path: int32 ``[B, K+1]`` the nodes from the root to the last accepted one, which then repeats.
        tokens: int32 ``[B, K+1]`` the tokens of these nodes.
        counts: int32 ``[B]`` how many of them were emitted, root included; 0 for a finished sequence, whose state no
            longer matters.
        bonus_token: int32 ``[B]`` the base's token after the path.
        aux_hidden_states: ``[B, N, D]`` the base's hidden states that the drafter reads
            (`DrafterSpec.aux_hidden_layers`), at *every* node.
        chosen: int32 ``[B, N]`` the base's best token at every node: n-gram drafters learn from rejected nodes too.
    """

    path: Int[Array, "B path"]
    tokens: Int[Array, "B path"]
    counts: Int[Array, " B"]
    bonus_token: Int[Array, " B"]
    aux_hidden_states: Float[Array, "B N D"]
    chosen: Int[Array, "B N"]

    def along_path(self) -> Float[Array, "B path D"]:
        """Return ``aux_hidden_states`` at the nodes of ``path``; ignore them beyond the first ``counts[b]``."""
        return jnp.take_along_axis(self.aux_hidden_states, self.path[:, :, None], axis=1)

    def as_text(self) -> tuple[Array, Array, Array, Array]:
        """Return the emitted tokens as `Drafter.begin` reads text: hidden states, tokens, counts, bonus token."""
        return self.along_path(), self.tokens, self.counts, self.bonus_token


@dataclass(frozen=True)
class DrafterSpec:
    """The capabilities of a drafter. The decode step, tree search and the commands read these instead of classes.

    A wrapper replaces fields: ``replace(inner.spec, branch_nodes=5)``.

    Attributes:
        depth: K, the maximum number of tokens after the root that it proposes.
        default_tree: The name of the tree to use if the user names none.
        aux_hidden_layers: The hidden states of the base that it reads (`BaseModel.__call__`).
        supports_sampling: It can draw candidates from its own distribution, which fills `Proposal.log_q`.
        supports_dynamic_tree: It can fill a `hydrajax.trees.dynamic.DynamicTree`.
        one_pass: It predicts all levels at once, and no level depends on the tokens of another.
        has_distribution: It defines a distribution over all tokens after any text and has the method
            ``next_logits(params, tokens [B, T]) -> float32 [B, T, V]``, -inf for tokens that it cannot propose.
        independent: It never reads the base, so it can run on devices of its own (`hydrajax.ssd`).
        num_draft_heads: Heads that training updates; 0 for a drafter that is not `Trainable`.
        window_nodes: Nodes appended to the tree that are verified but never accepted: the base's choices there
            (`Outcome.chosen`) are its next guesses (`hydrajax.lookahead.drafter`).
        reach: With ``window_nodes``, the distance of the furthest node from the root, in positions.
        branch_nodes: Nodes appended to the tree as one more branch. They can be accepted, and paths can become longer
            by this number.
        shared_lm_head: Its logits are those of the base's lm head.
        prefix_layer: Its heads read a prefix layer (`hydrajax.drafters.prefix`).
        fills_levels: It fills a tree level by level from logits (`hydrajax.drafters.filling.fill`) and leaves no node
            out, so under a grammar the nodes hold allowed tokens, those that must follow among them.
        reads_cache: It reads the base's keys and values: `BoundBase.cache` in `Drafter.propose`, `BoundBase.block` in
            training.
        remembers: It drafts from past outputs (`hydrajax.drafters.corpus`), so it gets better with use.
        chooses_nodes: The nodes of a static tree are replaced by likelier ones, so its shape changes with the text
            (`hydrajax.drafters.several`).
    """

    depth: int
    default_tree: str
    aux_hidden_layers: tuple[int, ...] = (0,)
    supports_sampling: bool = False
    supports_dynamic_tree: bool = False
    one_pass: bool = False
    has_distribution: bool = False
    independent: bool = False
    num_draft_heads: int = 0
    window_nodes: int = 0
    reach: int = 0
    branch_nodes: int = 0
    shared_lm_head: bool = False
    prefix_layer: bool = False
    fills_levels: bool = False
    reads_cache: bool = False
    remembers: bool = False
    chooses_nodes: bool = False

    def candidate_nodes(self, tree: CandidateTree) -> int:
        """Return the number of nodes that a step may accept, root included."""
        return tree.size + self.branch_nodes

    def verified_nodes(self, tree: CandidateTree) -> int:
        """Return the number of nodes that a step feeds to the base: candidates and window."""
        return self.candidate_nodes(tree) + self.window_nodes

    def longest_path(self, tree: CandidateTree) -> int:
        """Return the maximum number of accepted draft tokens per step."""
        return tree.depth + self.branch_nodes


@runtime_checkable
class Drafter(Protocol):
    """A drafter as decoding uses it: its spec, and methods that are pure functions of parameters and state."""

    @property
    def spec(self) -> DrafterSpec: ...

    def init(self, rng: Array, base: BoundBase) -> DraftParams:
        """Return fresh parameters for this base; an empty dict if the drafter has none."""

    def init_state(self, batch: int, slots: int) -> DraftState:
        """Return the empty state for texts of at most ``slots`` tokens. Every array has a leading batch axis."""

    def begin(
        self,
        params: DraftParams,
        state: DraftState,
        aux_hidden_states: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        counts: Int[Array, " B"],
        bonus_token: Int[Array, " B"],
        base: BoundBase,
    ) -> DraftState:
        """Prefill text that was not drafted: a prompt, or the next message of a conversation.

        Args:
            aux_hidden_states: ``[B, T, D]`` the base's hidden states at these tokens.
            tokens: int32 ``[B, T]``; the first ``counts[b]`` of sequence b are text.
            counts: int32 ``[B]``. `SeesAcceptedOnly` passes 0 for a finished sequence.
            bonus_token: int32 ``[B]`` the base's token after the text.
        """

    def rewind(self, state: DraftState, lengths: Int[Array, " B"]) -> DraftState:
        """Return the state of the first ``lengths[b]`` tokens of sequence b, so that `begin` can continue from there.

        It may differ from the state at that time: traces of removed tokens can make the next guesses worse. The arrays
        may have been cut, or padded with zeros, to the shapes of `init_state` for another number of slots in which the
        text fits; update here whatever depends on that number.
        """

    def propose(
        self,
        params: DraftParams,
        state: DraftState,
        root: Int[Array, " B"],
        tree: CandidateTree,
        base: BoundBase,
        draw: Draw | None = None,
    ) -> Proposal:
        """Fill the tree below ``root`` with the best guesses, or by drawing if ``draw`` is given, which fills
        ``log_q``.
        """

    def observe(
        self, params: DraftParams, state: DraftState, proposal: Proposal, outcome: Outcome, base: BoundBase
    ) -> DraftState:
        """Update the state with the outcome of the proposal."""

    def ranks(
        self,
        params: DraftParams,
        aux_hidden_states: Float[Array, "B T D"],
        batch: dict[str, Array],
        base: BoundBase,
        chunk_tokens: int,
        depth: int,
    ) -> Int[Array, "K B T"]:
        """Return the rank (0: the best guess) of the text's token t + 2 + k among the guesses for it at position t,
        int32.

        Tree search uses these ranks. Positions without such a token hold garbage. A token outside the draft's
        vocabulary ranks after the whole vocabulary.

        Args:
            aux_hidden_states: ``[B, T, D]`` the base's hidden states at the tokens.
            batch: ``tokens`` int32 ``[B, T]`` and optionally ``segments`` (`hydrajax.models.packed_forward`).
            chunk_tokens: Maximum number of positions whose logits exist at once.
            depth: K, at most the drafter's.
        """


class SeesAcceptedOnly:
    """Base of drafters that learn from a step what they would learn from the same tokens in a prompt.

    They implement one method, ``advance``, with the arguments of `Drafter.begin`; and ``rewind`` if their state holds
    more than caches (`hydrajax.models.cache.KVCache`) and values of the last token.
    """

    def begin(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        return self.advance(params, state, aux_hidden_states, tokens, counts, bonus_token, base)

    def observe(self, params, state, proposal, outcome, base):
        return self.advance(
            params, state, outcome.along_path(), outcome.tokens, outcome.counts, outcome.bonus_token, base
        )

    def rewind(self, state, lengths):
        return cut_caches(state, lengths)  # everything else belongs to the last token and is replaced with it


def following_tokens(
    tokens: Int[Array, "B T"], counts: Int[Array, " B"], bonus_token: Int[Array, " B"]
) -> Int[Array, "B T"]:
    """Return the token after each valid one of a sequence (`Drafter.begin`); after the last it is the bonus token.

    If more text follows a conversation's answer, a drafter that caches a function of these tokens keeps the base's
    choice at the answer's last position, which affects only the quality of guesses.
    """
    places = jnp.arange(tokens.shape[1])
    return jnp.where(places == counts[:, None] - 1, bonus_token[:, None], jnp.roll(tokens, -1, axis=1))


def last_observed(aux_hidden_states: Float[Array, "B T D"], counts: Int[Array, " B"]) -> Float[Array, "B D"]:
    """Return the hidden states of the last valid token of each sequence."""
    index = jnp.maximum(counts - 1, 0)[:, None, None]
    return replicate_features(jnp.take_along_axis(aux_hidden_states, index, axis=1)[:, 0])
