"""DSpark's Markov head: a low-rank correction of a block's logits by the token before (arXiv 2607.05147)."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hydrajax import ops
from hydrajax.drafters.settings import at_least, one_of
from hydrajax.models.arrays import Array, DType
from hydrajax.models.weights import declare, project

KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class MarkovHead:
    """The shape of a Markov head.

    With the embedding e of the token before and the draft's hidden state h of the slot, it adds ``e W2`` to the slot's
    logits (``vanilla``), ``(sigmoid(gate([h, e])) * e) W2`` (``gated``), or ``tanh(o) W2`` with a recurrent state
    (``rnn``, see `MarkovNetwork`).

    Attributes:
        rank: r, the width of e.
        kind: One of `KINDS`.
    """

    rank: int
    kind: str = "vanilla"

    def __post_init__(self):
        at_least("draft.markov_rank", self.rank, 1)
        one_of("draft.markov", self.kind, KINDS)


class MarkovNetwork(nn.Module):
    """The parameters of a `MarkovHead`, for V tokens before and V' tokens after."""

    head: MarkovHead
    width: int
    sizes: tuple[int, int]
    dtype: DType

    def setup(self):
        rank, normal = self.head.rank, nn.initializers.normal(0.02)
        self.embedding = declare(self, "embedding", (self.sizes[0], rank), ("vocab", None), normal)
        # The correction starts at zero.
        self.out = declare(self, "out", (rank, self.sizes[1]), (None, "vocab"), nn.initializers.zeros)
        inputs = {"gated": (self.width + rank, rank), "rnn": (2 * rank + self.width, 3 * rank)}
        if shape := inputs.get(self.head.kind):
            self.kernel = declare(self, "kernel", shape, (None, None), normal)
            self.bias = declare(self, "bias", shape[1:], (None,), nn.initializers.zeros)

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows r"]:
        """Return the embeddings e of tokens."""
        return ops.take_rows(self.embedding, tokens)

    def __call__(
        self, state: Float[Array, "*rows r"], before: Int[Array, "*rows"], hidden: Float[Array, "*rows D"]
    ) -> tuple[Float[Array, "*rows r"], Float[Array, "*rows V_"]]:
        """Return the state for the next slot and the float32 correction of this slot's logits.

        In a recurrent head ``g, c, o`` are the thirds of ``joint([state, e, h])``, the next state is
        ``sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c)``, and the correction ``tanh(o) W2``.

        Args:
            state: Zeros at a block's first slot.
            before: The token before each slot.
            hidden: The draft's hidden state of each slot.
        """
        e = self.embed(before)
        if self.head.kind == "gated":
            gate = project(jnp.concatenate([hidden, e], axis=-1), self.kernel) + self.bias
            e = jax.nn.sigmoid(gate) * e
        elif self.head.kind == "rnn":
            joint = project(jnp.concatenate([state, e, hidden], axis=-1), self.kernel) + self.bias
            gate, candidate, out = jnp.split(joint, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            state, e = gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(out)
        return state, project(e, self.out, jnp.float32)

    def along(self, before: Int[Array, "*rows S"], hidden: Float[Array, "*rows S D"]) -> Float[Array, "*rows S V_"]:
        """Return the corrections of all S slots, given the tokens before them."""
        state = jnp.zeros((*before.shape, self.head.rank), self.dtype)
        if self.head.kind != "rnn":
            return self(state, before, hidden)[1]
        state, corrections = state[..., 0, :], []
        for slot in range(before.shape[-1]):
            state, correction = self(state, before[..., slot], hidden[..., slot, :])
            corrections.append(correction)
        return jnp.stack(corrections, axis=-2)
