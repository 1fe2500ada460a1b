"""The interface between the decode step and whatever proposes tokens.

A drafter is a frozen dataclass. It owns the shapes of its parameters and of its state but holds no array; parameters
and state are passed in and returned. Adding a drafter is one new file and no edit to the decode loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hydrajax.models.config import LlamaConfig
from hydrajax.models.llama import Llama, abstract_base
from hydrajax.trees.tree import TreeTopology

DraftParams = Any  # a nested dict of arrays
DraftState = Any  # a pytree of arrays with leading batch axis


@dataclass(frozen=True)
class BoundBase:
    """The parts of the frozen base that a drafter may read instead of keeping a copy."""

    model: Llama
    params: Any

    @property
    def config(self) -> LlamaConfig:
        return self.model.config

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        """Raw input embeddings E(x)."""
        return self.model.apply({"params": self.params}, tokens, method="embed")

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """The base's own next-token logits, float32."""
        return self.model.apply({"params": self.params}, hidden, method="logits")

    def head_kernel(self) -> Float[Array, "D V"]:
        """The base's lm head, at which draft lm heads start (medusa 2.1.1)."""
        return self.model.apply({"params": self.params}, method="head_kernel")


class Drafter(Protocol):
    """What the decode step and the trainer need of a drafter.

    depth:               K, how many tokens ahead it can propose.
    hidden_state_offset: which base layer it reads, see `Llama.__call__`.
    """

    depth: int
    hidden_state_offset: int

    def init_boxed(self, rng: Array, base: BoundBase) -> Any:
        """Fresh parameters with their logical axes attached (`flax.core.meta` boxes, `hydrajax.sharding`)."""

    def init(self, rng: Array, base: BoundBase) -> DraftParams:
        """Fresh parameters for this base."""

    def init_state(self, batch: int, slots: int) -> DraftState:
        """The state before any token, for sequences that fit ``slots`` cache slots."""

    def observe(
        self,
        params: DraftParams,
        state: DraftState,
        features: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        counts: Int[Array, " B"],
        base: BoundBase,
    ) -> DraftState:
        """Take in the first ``counts[b]`` of T newly committed tokens of row b and the base's features there.

        Called once with the whole prompt and once per step with root and accepted tokens. A row with count 0 has
        finished: its state no longer matters.
        """

    def propose(
        self, params: DraftParams, state: DraftState, root: Int[Array, " B"], tree: TreeTopology, base: BoundBase
    ) -> Int[Array, "B N"]:
        """Fill the tree: int32 tokens in node order, node 0 being ``root``."""

    def teacher_hidden(
        self,
        params: DraftParams,
        features: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        base: BoundBase,
        rng: Array | None = None,
        positions: Int[Array, "B T"] | None = None,
        mask: Bool[Array, "B 1 1 T T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], ...]:
        """First half of the training forward: what the lm head of each of the K heads reads.

        With an ``rng`` key dropout is applied, everywhere but at the lm head. Where several documents share a row,
        ``positions`` are those inside each document and ``mask[b, 0, 0, i, j]`` says whether token i sees token j; by
        default a row is one document. Only drafters with attention need the two.
        """

    def head_logits(
        self, params: DraftParams, k: int, hidden: Float[Array, "*rows D"], base: BoundBase, rng: Array | None = None
    ) -> Float[Array, "*rows V"]:
        """Second half: float32 logits of head k from any rows of ``teacher_hidden(...)[k]``, so it can be chunked.

        With an ``rng`` key the dropout before the lm head is applied.
        """

    def teacher_forced(
        self, params: DraftParams, features: Float[Array, "B T D"], tokens: Int[Array, "B T"], base: BoundBase
    ) -> Float[Array, "K B T V"]:
        """Both halves: logits of head k at position t, which predict token t + 2 + k. For tests and small inputs."""


class SamplingDrafter(Drafter, Protocol):
    """A drafter that can also draw its proposals, for `hydrajax.decoding.acceptance.RejectionSampling`."""

    def sample(
        self,
        params: DraftParams,
        state: DraftState,
        root: Int[Array, " B"],
        tree: TreeTopology,
        base: BoundBase,
        keys: Array,
        temperature: float,
    ) -> tuple[Int[Array, "B N"], Float[Array, "B P V"]]:
        """Fill the tree with draws: the children of a node without replacement, rank 0 first.

        keys: ``[B, K+1]``, of the places after a node of depth 0 .. K. Returns tokens in node order and, for the P
        nodes with children, in node order too, float32 logits of the distribution the children were drawn from.
        """


class Trainable:
    """What follows from the rest of the interface, for drafters with parameters to inherit."""

    def init(self, rng, base):
        return nn.unbox(self.init_boxed(rng, base))

    def teacher_forced(self, params, features, tokens, base):
        hidden = self.teacher_hidden(params, features, tokens, base)
        return jnp.stack([self.head_logits(params, k, rows, base) for k, rows in enumerate(hidden)])


def abstract_draft(drafter: Drafter, model: Llama):
    """Boxed `ShapeDtypeStruct` leaves: shapes, dtypes and logical axes of the drafter, nothing allocated."""
    return jax.eval_shape(
        lambda base: drafter.init_boxed(jax.random.key(0), BoundBase(model, base)), nn.unbox(abstract_base(model))
    )


def last_observed(features: Float[Array, "B T D"], counts: Int[Array, " B"]) -> Float[Array, "B D"]:
    """The features of the last valid token of each row."""
    index = jnp.maximum(counts - 1, 0)[:, None, None]
    return jnp.take_along_axis(features, index, axis=1)[:, 0]
