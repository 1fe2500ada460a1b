"""Trained drafters: what stacks of heads and other kinds share beyond drafting, and the training of stacks."""

import dataclasses
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.drafter import SeesAcceptedOnly
from hydrajax.drafters.prefix import Prefix
from hydrajax.drafters.settings import HeadSettings, at_least, below, within_base
from hydrajax.errors import HydrajaxError


class Trained(SeesAcceptedOnly):
    """Base of trained drafters: fresh parameters and ranks."""

    def init(self, rng, base):
        return nn.unbox(self.init_boxed(rng, base))

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        from hydrajax.drafters.ranks import head_ranks  # for tree search alone

        return head_ranks(self.reaching(depth), params, aux_hidden_states, batch, base, chunk_tokens, depth)

    def reaching(self, depth):
        return self


class OneNetwork(Trained):
    """Base of drafters with one ``network``, which reads the base's hidden states of ``aux_hidden_layers``."""

    shares_lm_head = True  # the base's

    @property
    def lm_head(self) -> LmHead:
        return LmHead(shared=self.shares_lm_head, vocabulary=self.vocabulary)

    def _apply(self, params, *inputs, method: str = "__call__"):
        return self.network.apply({"params": params}, *inputs, method=method)

    def init_boxed(self, rng, base):
        """Return fresh parameters with their logical axes (`flax.core.meta` boxes, `hydrajax.sharding`); an lm head
        starts as a copy of the base's.
        """
        vector = jnp.zeros((1, 1, self.config.width), self.dtype)
        aux_hidden_states = jnp.zeros((1, 1, len(self.aux_hidden_layers) * self.config.width), self.dtype)
        example = aux_hidden_states, vector, jnp.zeros((1, 1), jnp.int32), base.logits
        fresh = dict(self.network.init(rng, *example, method="everything")["params"])
        return self.lm_head.started(fresh, base, self.dtype)

    def trained_on(self, found):
        """Return the draft that was read, which must be of this kind, in the settings' dtype."""
        if type(found) is not type(self):
            raise HydrajaxError(
                f"draft: got {type(found).__name__} heads, expected {type(self).__name__} by the settings"
            )
        return dataclasses.replace(found, dtype=self.dtype)


@dataclass(frozen=True)
class StackSettings(HeadSettings):
    """Settings of Medusa and Hydra heads.

    Attributes:
        share_blocks: Blocks 2..n are one block applied repeatedly, as in the released code (docs/design.md 4).
        prefix: Put a prefix layer in front of the heads, see `hydrajax.drafters.prefix.Prefix`.
        prefix_window: Number of tokens that the prefix layer attends to, None for all; use the length of the training
            rows if texts will be longer.
        hidden_state_offset: Read the input of the n-th layer from the end; 0 for the base's last hidden states.
    """

    share_blocks: bool = True
    prefix: bool = False
    prefix_window: int | None = None
    dropout: float = 0.0
    hidden_state_offset: int = 0

    def __post_init__(self):
        super().__post_init__()
        at_least("draft.prefix_window", self.prefix_window, 1)
        if self.prefix_window is not None and not self.prefix:
            raise HydrajaxError("draft.prefix_window: got a value, expected none without draft.prefix=true")
        at_least("draft.hidden_state_offset", self.hidden_state_offset, 0)
        below("draft.dropout", self.dropout, 1)


class TrainedStack(Trained):
    """The training of `hydrajax.drafters.head_stack.HeadStack`."""

    Settings = StackSettings
    prefix: Prefix | None

    @classmethod
    def for_base(cls, base, dtype, settings=None, target_counts=None):
        s = settings or StackSettings()
        within_base("draft.hidden_state_offset", s.hidden_state_offset, base.n_layers, "layers")
        heads = cls(
            s.num_draft_heads, base.width, base.vocab_size, n_layers=s.n_layers, share_blocks=s.share_blocks,
            dropout=s.dropout,
            hidden_state_offset=s.hidden_state_offset, dtype=jnp.dtype(dtype),
            small_lm_head=s.small_lm_head(base, target_counts),
        )  # fmt: skip
        return heads.with_prefix(base, s.prefix_window) if s.prefix else heads

    def init_boxed(self, rng, base):
        """Return fresh parameters; every lm head starts as a copy of the base's (medusa 2.1.1)."""
        if self.prefix is None:
            return self._init_heads(rng, base)
        prefix = self.prefix.init_boxed(jax.random.fold_in(rng, 1), self.dtype)
        return {"prefix": prefix, "heads": self._init_heads(jax.random.fold_in(rng, 2), base)}

    def _init_heads(self, rng, base):
        params = {}
        for k in range(self.num_draft_heads):
            head = self.head(k)
            conditioned = head.path_length is not None
            example = jnp.zeros((1, head.width * (1 + conditioned)), head.dtype)
            path = jnp.zeros((1, head.width * (head.path_length or 0)), head.dtype)
            fresh = dict(head.init(jax.random.fold_in(rng, k), example, path, base.logits)["params"])
            params[f"head_{k}"] = head.lm_head.started(fresh, base, head.dtype)
        return params

    def teacher_hidden(self, params, aux_hidden_states, tokens, base, rng=None, positions=None, mask=None):
        if self.prefix is not None:
            aux_hidden_states = self.prefix.refine_rows(
                params["prefix"], aux_hidden_states, tokens, self.dtype, positions, mask
            )
        inputs = self.teacher_inputs(aux_hidden_states, tokens, base)
        keys = [None if rng is None else jax.random.fold_in(rng, k) for k in range(self.num_draft_heads)]
        return tuple(
            self.apply_head(params, k, *inputs[k], rng=keys[k], method="hidden") for k in range(self.num_draft_heads)
        )

    def trained_on(self, found):
        """Return the drafter for continuing training; the vocabulary of the heads that were read stays."""
        wanted = self
        if type(found) is type(self):
            known, asked = found.vocabulary, self.vocabulary
            if known is not None and asked is not None and len(known) == len(asked):
                lm_head = dataclasses.replace(self.lm_head, vocabulary=known)
                wanted = dataclasses.replace(self, small_lm_head=lm_head)
            if found.dropout != self.dropout:
                found = dataclasses.replace(found, dropout=self.dropout)
            if found.prefix and self.prefix and found.prefix.config == self.prefix.config:
                found = dataclasses.replace(found, prefix=self.prefix)  # files may lack the window
        if found != wanted:
            raise HydrajaxError(f"draft: got heads {found}, expected {self} by the settings")
        return wanted

    def first_heads(self, params, n: int):
        """Return the first n heads and their parameters. They propose what they did: no head reads a later one."""
        heads = {f"head_{k}": (params if self.prefix is None else params["heads"])[f"head_{k}"] for k in range(n)}
        kept = heads if self.prefix is None else {"prefix": params["prefix"], "heads": heads}
        return dataclasses.replace(self, num_draft_heads=n), kept
