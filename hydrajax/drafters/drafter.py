"""The interface between the decode step and whatever proposes tokens.

A drafter is a frozen dataclass. It owns the shapes of its parameters and of its state but holds no array: parameters
and state are passed in and returned. What it needs to decode (`Drafter`) and what it needs to be trained
(`Trainable`) are two interfaces. docs/adding_a_drafter.md walks through writing one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.drafters.draft_lm_head import Vocabulary
from hydrajax.drafters.settings import Settings
from hydrajax.models.arrays import Array, DType
from hydrajax.models.base_model import BaseModel, BoundBase, abstract_base
from hydrajax.models.cache import cut_caches
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.trees.dynamic import CandidateTree
from hydrajax.trees.topology import Topology

DraftParams = Any  # a nested dict of arrays
DraftState = Any  # a pytree of arrays with leading batch axis


class Draw(NamedTuple):
    """How candidates are to be drawn, where the best guesses will not do.

    keys: random keys ``[B, K+1]``, of the places after a node of depth 0 .. K. temperature: of the draft's
    distribution, a number or ``[B]``.
    """

    keys: Array
    temperature: Float[Array, " B"]


class Proposal(NamedTuple):
    """A filled candidate tree, or one for each row.

    tokens:  int32 ``[B, N]`` in node order, node 0 being the root; -1 where the drafter has nothing to offer, which no
             rule accepts. N is the wanted tree's, and more where the drafter `LooksAhead` or `AddsBranch`.
    tree:    the nodes' relations: `TreeTopology.topology`, or arrays made on the device with the same N.
    log_q:   float32 ``[B, P, V]`` logits of the distribution from which the children of ``tree.inner[p]`` were drawn,
             without replacement, the first child first; None where nothing was drawn. P may be less than the tree's:
             the children of what is left in ``inner`` were given, without a draw.
    scratch: whatever the drafter computed and wants back in `Drafter.observe`, such as keys and values for a cache of
             its own.
    """

    tokens: Int[Array, "B N"]
    tree: Topology
    log_q: Float[Array, "B P V"] | None = None
    scratch: Any = ()


class Outcome(NamedTuple):
    """What the base made of a proposal.

    path:      int32 ``[B, K+1]`` the nodes from the root to the last accepted one, which then repeats.
    tokens:    int32 ``[B, K+1]`` the tokens of these nodes.
    counts:    int32 ``[B]`` how many of them were emitted, the root counted; 0 in a row that has finished, whose state
               no longer matters.
    next_root: int32 ``[B]`` the token that the base has chosen to follow.
    features:  ``[B, N, D]`` what the drafter reads of the base (`DrafterSpec.aux_hidden_layers`), at *every* node.
    chosen:    int32 ``[B, N]`` the base's best token at every node: rejected nodes teach n-gram drafters, too.
    """

    path: Int[Array, "B path"]
    tokens: Int[Array, "B path"]
    counts: Int[Array, " B"]
    bonus_token: Int[Array, " B"]
    aux_hidden_states: Float[Array, "B N D"]
    chosen: Int[Array, "B N"]

    def along_path(self) -> Float[Array, "B path D"]:
        """``aux_hidden_states`` at the nodes of ``path``; beyond the first ``counts[b]`` they are to be ignored."""
        return jnp.take_along_axis(self.aux_hidden_states, self.path[:, :, None], axis=1)


@dataclass(frozen=True)
class DrafterSpec:
    """What a drafter can do. The decode step, tree search and the commands ask this and never for a class.

    A wrapper changes what it changes: ``replace(inner.spec, branch_nodes=5)``.

    depth:                 K, the most tokens after the root that it can propose.
    default_tree:          the name of the tree that it is used with where the user names none.
    aux_hidden_layers:     the hidden states of the base that it reads (`BaseModel.__call__`).
    supports_sampling:     it can draw candidates from distributions of its own, which fills `Proposal.log_q`.
    supports_dynamic_tree: it can fill a `hydrajax.trees.dynamic.DynamicTree`; otherwise it is handed none.
    has_distribution:      it defines a distribution over all tokens after any text, as a model does, and has the method
                           ``next_logits(params, tokens [B, T]) -> float32 [B, T, V]``, -inf for tokens that it cannot
                           propose.
    independent:           it never reads the base, so it can run on devices of its own (`hydrajax.ssd`).
    num_draft_heads:       heads that training updates; 0 for a drafter that is not `Trainable`.
    window_nodes:          nodes that it appends behind the tree which are verified and never accepted: the base's
                           choices there (`Outcome.chosen`) are its next guesses (`hydrajax.drafters.lookahead`).
    reach:                 with ``window_nodes``, how many positions after the root the furthest node stands.
    branch_nodes:          nodes that it appends behind the tree as one more branch. They can be accepted, and paths may
                           become longer by as many nodes.
    shared_lm_head:        its logits are those of the base's lm head.
    prefix_layer:          a prefix layer stands in front of its heads (`hydrajax.drafters.prefix`).
    """

    depth: int
    default_tree: str
    aux_hidden_layers: tuple[int, ...] = (0,)
    supports_sampling: bool = False
    supports_dynamic_tree: bool = False
    has_distribution: bool = False
    independent: bool = False
    num_draft_heads: int = 0
    window_nodes: int = 0
    reach: int = 0
    branch_nodes: int = 0
    shared_lm_head: bool = False
    prefix_layer: bool = False

    def candidate_nodes(self, tree: CandidateTree) -> int:
        """Count the nodes that a step may accept, root included."""
        return tree.size + self.branch_nodes

    def verified_nodes(self, tree: CandidateTree) -> int:
        """Count the nodes that a step feeds to the base: the candidates and the window."""
        return self.candidate_nodes(tree) + self.window_nodes

    def longest_path(self, tree: CandidateTree) -> int:
        """Count the tokens after the root that a step may accept: the K of its proposals."""
        return tree.depth + self.branch_nodes


@runtime_checkable
class Drafter(Protocol):
    """What decoding needs of a drafter: its spec, and methods that are pure functions of parameters and state."""

    @property
    def spec(self) -> DrafterSpec: ...

    def init(self, rng: Array, base: BoundBase) -> DraftParams:
        """Fresh parameters for this base; an empty dict where the drafter has none."""

    def init_state(self, batch: int, slots: int) -> DraftState:
        """The state before any token, for texts of at most ``slots`` tokens. Every array has a leading batch axis."""

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
        """Take in text that was not drafted: a prompt, or the next message of a conversation.

        Of the T tokens of row b the first ``counts[b]`` are text, with the base's ``aux_hidden_states`` there.
        """

    def rewind(self, state: DraftState, lengths: Int[Array, " B"]) -> DraftState:
        """Back to the first ``lengths[b]`` tokens of row b's text, to take in another text from there on (`begin`).

        It need not be what it was there: what a token that is gone has left behind may make the next guesses worse.
        The arrays may have been cut, or filled up with zeros, to the shapes that `init_state` gives for another number
        of slots, in which the text has room: what depends on that number is mended here.
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
        """Fill the tree below ``root``: with the best guesses, or with ``draw`` by drawing, which fills ``log_q``."""

    def observe(
        self, params: DraftParams, state: DraftState, proposal: Proposal, outcome: Outcome, base: BoundBase
    ) -> DraftState:
        """Take in what became of the proposal."""

    def ranks(
        self,
        params: DraftParams,
        aux_hidden_states: Float[Array, "B T D"],
        batch: dict[str, Array],
        base: BoundBase,
        chunk_tokens: int,
        depth: int,
    ) -> Int[Array, "K B T"]:
        """The rank that the guess for token t + 2 + k, made at position t with the text up to there known, gives to the
        text's token (0: the best guess), int32. From these trees are searched (`hydrajax.trees.search`).

        batch: ``tokens`` int32 ``[B, T]`` and perhaps ``segments`` (`hydrajax.models.packed_forward`). At most
        ``chunk_tokens`` positions' logits exist at once. depth: K, at most the drafter's. Positions without such a
        token hold garbage; a token that the draft cannot say ranks behind the whole vocabulary.
        """


@runtime_checkable
class Trainable(Drafter, Protocol):
    """What training needs in addition: a drafter with parameters.

    A frozen dataclass. Head k < `DrafterSpec.num_draft_heads` predicts token t + 2 + k. Settings: the choices of a user
    who trains it. dtype: of the computation, a field. vocabulary: the tokens that the heads can propose, None for all.
    """

    Settings: ClassVar[type[Settings]]

    @property
    def dtype(self) -> DType: ...

    @classmethod
    def for_base(
        cls, base: LlamaConfig, dtype, settings: Any = None, target_counts: Int[np.ndarray, " V"] | None = None
    ) -> Trainable:
        """Return the drafter for a base of this shape. Raises `HydrajaxError` for settings that do not fit it.

        settings: of the class ``Settings``; None for its defaults. target_counts: see
        `hydrajax.drafters.settings.vocabulary_of`.
        """

    @property
    def vocabulary(self) -> Vocabulary | None: ...

    def reaching(self, depth: int) -> Trainable:
        """The same drafter with at least ``depth`` heads, where it is to be asked for more than it is trained for.

        depth: at most `DrafterSpec.depth`.
        """

    def trained_on(self, found: Drafter) -> Trainable:
        """The drafter with which training goes on from one that was read from files, ``found``.

        What files do not hold, such as dropout, is as it is here. Raises `HydrajaxError` where the two do not agree in
        what they do.
        """

    def init_boxed(self, rng: Array, base: BoundBase) -> Any:
        """Fresh parameters with their logical axes attached (`flax.core.meta` boxes, `hydrajax.sharding`)."""

    def teacher_hidden(
        self,
        params: DraftParams,
        aux_hidden_states: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        base: BoundBase,
        rng: Array | None = None,
        positions: Int[Array, "B T"] | None = None,
        mask: Bool[Array, "B 1 1 T T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], ...]:
        """First half of the training forward: what the lm head of each draft head reads.

        With an ``rng`` key dropout is applied, everywhere but at the lm head. Where several documents share a row,
        ``positions`` are those inside each document and ``mask[b, 0, 0, i, j]`` says whether token i sees token j; by
        default a row is one document. The two are given together, and only drafters with attention need them.
        """

    def head_logits(
        self, params: DraftParams, k: int, hidden: Float[Array, "*rows D"], base: BoundBase, rng: Array | None = None
    ) -> Float[Array, "*rows V_"]:
        """Second half: float32 logits of head k from any rows of ``teacher_hidden(...)[k]``, so it can be chunked.

        Over the tokens that it knows. With an ``rng`` key the dropout before the lm head is applied.
        """


class SeesAcceptedOnly:
    """For drafters that learn from a step what they would learn from the same tokens in a prompt.

    They write one method, ``advance``, with the arguments of `Drafter.begin`; and ``rewind`` where they hold more of
    the text than caches (`hydrajax.models.cache.KVCache`) and what belongs to its last token.
    """

    def begin(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        return self.advance(params, state, aux_hidden_states, tokens, counts, bonus_token, base)

    def observe(self, params, state, proposal, outcome, base):
        return self.advance(
            params, state, outcome.along_path(), outcome.tokens, outcome.counts, outcome.bonus_token, base
        )

    def rewind(self, state, lengths):
        return cut_caches(state, lengths)  # whatever else there is belongs to the last token, and is replaced with it


def abstract_draft(drafter: Trainable, model: BaseModel):
    """Boxed `ShapeDtypeStruct` leaves: shapes, dtypes and logical axes of the drafter, nothing allocated."""
    return jax.eval_shape(
        lambda base: drafter.init_boxed(jax.random.key(0), BoundBase(model, base)), nn.unbox(abstract_base(model))
    )


def following_tokens(
    tokens: Int[Array, "B T"], counts: Int[Array, " B"], bonus_token: Int[Array, " B"]
) -> Int[Array, "B T"]:
    """The token after each valid one of a row (`Drafter.begin`): after the last it is the next root.

    Where more text follows a conversation's answer, a drafter that keeps what it makes of these tokens keeps for the
    answer's last one what the base would have gone on with, in one place that only a guess depends on.
    """
    places = jnp.arange(tokens.shape[1])
    return jnp.where(places == counts[:, None] - 1, bonus_token[:, None], jnp.roll(tokens, -1, axis=1))


def last_observed(aux_hidden_states: Float[Array, "B T D"], counts: Int[Array, " B"]) -> Float[Array, "B D"]:
    """The features of the last valid token of each row."""
    index = jnp.maximum(counts - 1, 0)[:, None, None]
    return jnp.take_along_axis(aux_hidden_states, index, axis=1)[:, 0]
