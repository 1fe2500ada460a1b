"""Clusters of an lm head's tokens: a row multiplies the tokens of its best clusters alone, as in Gemma 4's assistant.

A cluster's score is the product of its centroid. Clusters have equal sizes, so each is a stretch of memory, or one
expert of a mixture to the kernels. Nothing is trained: `hydrajax.drafters.balanced_means` groups the lm head's own
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hydrajax import ops
from hydrajax.models.arrays import Array
from hydrajax.models.weights import project

CLUSTER = 64  # tokens, the columns of a tile (`hydrajax.lowbit.kernels.tile_layout`)
SHARE, FEWEST = 16, 24  # a row multiplies a 16th of all clusters, at least 24


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChosenLogits:
    """Logits of a row's chosen tokens. They are indexed by rows, and others of all V' tokens are added, as to logits.

    Attributes:
        logits: float32, -inf at places that are filled up.
        tokens: The indices of their tokens among the V', -1 at places that are filled up.
        size: V'.
    """

    logits: Any  # leaves of a pytree, which transformations replace by other things than arrays
    tokens: Any
    size: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.logits.shape

    def __getitem__(self, rows: Any) -> ChosenLogits:
        return ChosenLogits(self.logits[rows], self.tokens[rows], self.size)

    def __add__(self, more: Float[Array, "*rows V_"]) -> ChosenLogits:
        more = jnp.broadcast_to(more, (*jnp.broadcast_shapes(more.shape[:-1], self.tokens.shape[:-1]), self.size))
        tokens = jnp.broadcast_to(self.tokens, (*more.shape[:-1], self.tokens.shape[-1]))
        return ChosenLogits(self.logits + _at(more, tokens), tokens, self.size)

    def tokens_at(self, index: Int[Array, "*rows k"]) -> Int[Array, "*rows k"]:
        """Return the tokens at places of the rows."""
        return _at(self.tokens, index)

    def over_all(self) -> Float[Array, "*rows V_"]:
        """Return logits of all V' tokens, -inf for those that are not chosen."""
        flat, tokens = (x.reshape(-1, x.shape[-1]) for x in (self.logits, self.tokens))
        place = jnp.where(tokens < 0, self.size, tokens)  # out of bounds, which is dropped
        rows = jnp.arange(len(flat))[:, None]
        found = jnp.full((len(flat), self.size), -jnp.inf).at[rows, place].set(flat, mode="drop")
        return found.reshape(*self.logits.shape[:-1], self.size)


def _at(numbers: Array, index: Array) -> Array:
    return jnp.take_along_axis(numbers, jnp.maximum(index, 0), axis=-1)


def over_all(logits: Any) -> Float[Array, "*rows V_"]:
    """Return logits of all V' tokens, -inf for those that are not chosen."""
    return logits.over_all() if isinstance(logits, ChosenLogits) else logits


def numbers(logits: Any) -> Float[Array, "*rows m"]:
    """Return logits as an array, of the chosen tokens if there are such."""
    return logits.logits if isinstance(logits, ChosenLogits) else logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Clusters:
    """C clusters of an lm head's V' tokens.

    Attributes:
        centroids: The weight ``[D, C]`` of the clusters' scores.
        tokens: int32 ``[C, n]`` their tokens, as indices among the V'; -1 fills clusters up.
        kernels: The tokens' part of the lm head by cluster, ``[C, D, n]``, as experts have it; None to read the lm
            head's own rows. Quantised ones need our CPU kernels.
        n_chosen: Number of clusters that a row multiplies.
        size: V'.
    """

    centroids: Any
    tokens: Any
    kernels: Any
    n_chosen: int = field(metadata={"static": True})
    size: int = field(metadata={"static": True})

    def logits(self, hidden: Float[Array, "*rows D"], of_tokens: Callable | None = None) -> ChosenLogits:
        """Return each row's logits of the tokens in its best clusters, float32.

        Args:
            of_tokens: Returns the rows' logits of tokens ``[*rows, m]`` from the lm head's own rows, without `kernels`.
        """
        best = ops.top_tokens(project(hidden, self.centroids, jnp.float32), self.n_chosen)
        tokens = self.tokens[best].reshape(*best.shape[:-1], -1)
        if self.kernels is None:
            logits = of_tokens(hidden, jnp.maximum(tokens, 0))
        else:
            from hydrajax.models.experts import of_pairs  # few drafts have clusters

            rows, chosen = hidden.reshape(-1, hidden.shape[-1]), best.reshape(-1, best.shape[-1])
            found = of_pairs(rows, chosen, self.kernels, jnp.float32)
            if found is None:
                found = jnp.einsum("rd,rkdn->rkn", rows, self.kernels[chosen], preferred_element_type=jnp.float32)
            logits = found.reshape(tokens.shape)
        return ChosenLogits(jnp.where(tokens < 0, -jnp.inf, logits), tokens, self.size)


def clusters_of(
    rows: Float[np.ndarray, "V_ D"], n_chosen: int | None = None, size: int = CLUSTER
) -> tuple[Float[np.ndarray, "D C"], Int[np.ndarray, "C n"], int]:
    """Return the centroids and tokens of `Clusters` of an lm head's rows, and the number of clusters to choose.

    A centroid is its rows' mean, so its product with a hidden state is the mean of their logits.
    """
    from hydrajax.drafters.balanced_means import balanced_clusters

    tokens = balanced_clusters(rows, size)
    centroids = np.stack([rows[each[each >= 0]].mean(axis=0, dtype=np.float32) for each in tokens], axis=1)
    return centroids, tokens, min(n_chosen or max(len(tokens) // SHARE, FEWEST), len(tokens))
