"""Draft lm heads: from a head's last hidden state to logits over the base's tokens, or over some of them.

Four full lm heads are 1 GB of a 7B base's draft (docs/design.md 7). Smaller kinds are the base's own lm head, a
product of two narrow matrices, and a vocabulary of the most frequent tokens. Of the base's own, decoding may multiply
clusters of tokens alone (`hydrajax.drafters.clusters`). Indices into a reduced vocabulary stay inside this module: its
results are token ids, or logits over all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from hydrajax import plugins
from hydrajax.drafters.clusters import ChosenLogits, Clusters, clusters_of, numbers, over_all
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.models.weights import Quantized, declare, project
from hydrajax.ops import likeliest_tokens, log_probabilities, sampled_tokens, top_tokens, trace

WORD = 32  # tokens per word of a mask
# Parameters that decoding may add (`LmHead.with_copy`, `LmHead.with_clusters`); no file holds them.
COPIED_LM_HEAD, CLUSTERED_LM_HEAD = "copied_lm_head", "clustered_lm_head"


@dataclass(frozen=True)
class LmHead:
    """A kind of lm head.

    Its parameters, in the head it belongs to, are ``lm_kernel [D, V']``, or ``lm_down [D, r]`` and ``lm_up [r, V']``,
    and ``lm_bias [V']`` with ``bias``.

    Attributes:
        shared: Use the base's own lm head, or its part for the vocabulary; no parameters but the bias.
        rank: r of a low-rank product in place of one matrix.
        vocabulary: The V' tokens; None for all V.
        clustered: Decoding multiplies clusters of tokens of a shared lm head alone; training, all tokens.

    Raises:
        HydrajaxError: For settings that exclude each other.
    """

    bias: bool = False
    shared: bool = False
    rank: int | None = None
    vocabulary: Vocabulary | None = None
    clustered: bool = False

    def __post_init__(self):
        if self.clustered and not self.shared:
            raise HydrajaxError("lm_head.clustered: got true, expected false: the lm head is not the base's")
        if self.shared and self.rank is not None:
            raise HydrajaxError(f"lm_head: got shared and a rank of {self.rank}, expected one of them")
        if self.rank is not None and self.rank < 1:
            raise HydrajaxError(f"lm_head.rank: got {self.rank}, expected at least 1")

    def size(self, vocab_size: int) -> int:
        """Return V', the number of tokens."""
        return vocab_size if self.vocabulary is None else len(self.vocabulary)

    def declare(self, module: nn.Module, width: int, vocab_size: int) -> dict[str, Array | Quantized]:
        """Declare the parameters in a Flax module; pass the result to `logits`."""
        normal, zeros, size = nn.initializers.normal(0.02), nn.initializers.zeros, self.size(vocab_size)
        params = {}
        if self.rank is not None:
            params["lm_down"] = declare(module, "lm_down", (width, self.rank), ("width", None), normal)
            params["lm_up"] = declare(module, "lm_up", (self.rank, size), (None, "vocab"), normal)
        elif not self.shared:
            params["lm_kernel"] = declare(module, "lm_kernel", (width, size), ("width", "vocab"), normal)
        if self.bias:
            params["lm_bias"] = declare(module, "lm_bias", (size,), ("vocab",), zeros)
        return params

    def like_base(self, kernel: Float[Array, "D V"], dtype) -> dict[str, Array]:
        """Return parameters that start as a copy of the base's lm head (medusa 2.1.1), or as close as this kind allows.

        The nearest product of rank r is the projection onto the r leading directions of the kernel.
        """
        if self.vocabulary is not None:
            kernel = kernel[:, self.vocabulary.tokens]
        if self.rank is None:
            return {"lm_kernel": kernel.astype(dtype)}
        wide = kernel.astype(jnp.float32)
        directions = jnp.linalg.eigh(wide @ wide.T)[1][:, -self.rank :]  # ascending by weight
        return {"lm_down": directions.astype(dtype), "lm_up": (directions.T @ wide).astype(dtype)}

    def started(self, fresh: dict[str, Any], base, dtype) -> dict[str, Any]:
        """Return boxed parameters of which those of `like_base` start so."""
        own = {} if self.shared else self.like_base(base.head_kernel(), dtype)
        return fresh | {name: fresh[name].replace_boxed(value) for name, value in own.items()}

    def logits(
        self, params: Mapping[str, Array | Quantized], hidden: Float[Array, "*rows D"], base_logits
    ) -> Float[Array, "*rows V_"] | ChosenLogits:
        """Return float32 logits over the V' tokens; ``base_logits`` is the base's `BoundBase.logits`."""
        if self.shared:
            out = self.of_base(hidden, base_logits)
        elif self.rank is not None:
            out = project(project(hidden, params["lm_down"]), params["lm_up"], jnp.float32)
        else:
            out = project(hidden, params["lm_kernel"], jnp.float32)
        return out + params["lm_bias"].astype(jnp.float32) if self.bias else out

    def of_base(self, hidden: Float[Array, "*rows D"], base_logits) -> Float[Array, "*rows V_"] | ChosenLogits:
        """Return the base's logits over the V' tokens."""
        return base_logits(hidden) if self.vocabulary is None else base_logits(hidden, self.vocabulary.tokens)

    def with_copy(self, params, base):
        """Return a draft's parameters with a copy of what a shared lm head reads of the base's, ``[D, V']``.

        In fewer bits than the base's own it is read faster, and a draft need not be exact.
        """
        if not self.shared or self.vocabulary is None:
            return params
        return {**params, COPIED_LM_HEAD: self._part(base)}

    def with_clusters(self, params, base, n_chosen: int | None = None):
        """Return a draft's parameters with `Clusters` of the base's lm head.

        They hold a copy of it, in 8 bits, where our CPU kernels multiply a row's clusters as a token's experts.
        """
        kernel, kernels = self._part(base), None
        centroids, tokens, n_chosen = clusters_of(kernel.T, n_chosen)
        if trace.has_few_bits():
            kind = plugins.find("weights", "int8").stores(CLUSTERED_LM_HEAD)
            kernels = kind.of(kernel[:, np.maximum(tokens, 0).reshape(-1)]).split(len(tokens))
            centroids = kind.of(centroids)
        found = Clusters(centroids, tokens, kernels, n_chosen, self.size(base.config.vocab_size))
        return {**params, CLUSTERED_LM_HEAD: jax.device_put(found)}

    def base_logits(self, params, base) -> Callable:
        """Return `BoundBase.logits`, or what computes it from the copy or the clusters among a draft's parameters."""
        if CLUSTERED_LM_HEAD in params:
            return lambda hidden, *_: params[CLUSTERED_LM_HEAD].logits(hidden, partial(self._of_rows, base))
        if COPIED_LM_HEAD not in params:
            return base.logits
        return lambda hidden, tokens: project(hidden, params[COPIED_LM_HEAD], jnp.float32)

    def _part(self, base) -> Float[np.ndarray, "D V_"]:
        return np.asarray(base.head_kernel(None if self.vocabulary is None else self.vocabulary.tokens))

    def _of_rows(self, base, hidden: Float[Array, "*rows D"], index: Int[Array, "*rows m"]) -> Float[Array, "*rows m"]:
        return base.logits(hidden, index if self.vocabulary is None else jnp.asarray(self.vocabulary.tokens)[index])

    # --- token ids from here on -----------------------------------------------------------------------------------

    def over_all_tokens(self, logits: Float[Array, "*rows V_"], vocab_size: int) -> Float[Array, "*rows V"]:
        """Return the logits over all tokens, -inf outside the vocabulary."""
        if self.vocabulary is None:
            return logits
        return jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf).at[..., self.vocabulary.tokens].set(logits)

    def top(self, logits: Float[Array, "*rows V_"] | ChosenLogits, k: int) -> Int[Array, "*rows k"]:
        """Return the ids of the k best tokens; -1 if the vocabulary has fewer."""
        return self._ids(logits, top_tokens(numbers(logits), min(k, logits.shape[-1])), k)

    def likeliest(
        self, logits: Float[Array, "*rows V_"] | ChosenLogits, k: int
    ) -> tuple[Int[Array, "*rows k"], Float[Array, "*rows k"]]:
        """Return `top` and the natural log-probabilities of its tokens, float32; -inf if the vocabulary has fewer."""
        return self._with_likelihood(logits, *likeliest_tokens(numbers(logits), min(k, logits.shape[-1])), k)

    def sampled(self, keys: Array, logits: Float[Array, "B *n V_"] | ChosenLogits, k: int) -> Int[Array, "B *n k"]:
        """Return the ids of k tokens drawn without replacement, in order; -1 if the vocabulary has fewer."""
        return self._ids(logits, sampled_tokens(keys, logits, min(k, logits.shape[-1])), k)

    def drawn(
        self, keys: Array, logits: Float[Array, "B *n V_"] | ChosenLogits, k: int
    ) -> tuple[Int[Array, "B *n k"], Float[Array, "B *n k"]]:
        """Return `sampled` and the natural log-probabilities of its tokens before any draw, float32; -inf if there are
        fewer.
        """
        index = sampled_tokens(keys, logits, min(k, logits.shape[-1]))
        return self._with_likelihood(logits, index, log_probabilities(numbers(logits), index), k)

    def _with_likelihood(
        self,
        logits: Float[Array, "*rows V_"] | ChosenLogits,
        index: Int[Array, "*rows k_"],
        log_p: Float[Array, "*rows k_"],
        k: int,
    ) -> tuple[Int[Array, "*rows k"], Float[Array, "*rows k"]]:
        missing = [(0, 0)] * (index.ndim - 1) + [(0, k - index.shape[-1])]
        return self._ids(logits, index, k), jnp.pad(log_p, missing, constant_values=-jnp.inf)

    def _ids(self, logits: Any, index: Int[Array, "*rows k_"], k: int) -> Int[Array, "*rows k"]:
        if isinstance(logits, ChosenLogits):
            index = logits.tokens_at(index)
        if self.vocabulary is not None:
            ids = jnp.asarray(self.vocabulary.tokens)[index]
            index = jnp.where(index < 0, -1, ids) if isinstance(logits, ChosenLogits) else ids
        missing = k - index.shape[-1]
        return (
            jax.lax.pad(index, jnp.int32(-1), [(0, 0, 0)] * (index.ndim - 1) + [(0, missing, 0)]) if missing else index
        )


def is_allowed(words: UInt32[Array, "*rows W"], vocab_size: int) -> Bool[Array, "*rows V"]:
    """Return the bits of a mask."""
    bits = (words[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :vocab_size] > 0


@dataclass(frozen=True)
class Mask:
    """The tokens that may follow the nodes of a beam.

    Attributes:
        lm_head: The draft's, whose logits are masked.
        words: uint32 ``[B, n, W]`` of `hydrajax.ops.trace.Allowed`; None for all tokens.
    """

    lm_head: LmHead
    words: UInt32[Array, "B n W"] | None

    @classmethod
    def after(cls, paths: Int[Array, "B n d"], lm_head: LmHead) -> Mask:
        """Return the mask after these paths, of the trace (`Trace.allowed`)."""
        allowed = trace.current().allowed
        return cls(lm_head, None if allowed is None else allowed(paths))

    def over(self, logits: Float[Array, "B n_ V_"] | ChosenLogits) -> Float[Array, "B n V_"] | ChosenLogits:
        """Return the logits, -inf for forbidden tokens. They are unchanged after a node that no token of the draft
        follows, so that its likelihoods are numbers.
        """
        if self.words is None:
            return logits
        chosen = isinstance(logits, ChosenLogits)
        logits = over_all(logits)
        if self.lm_head.vocabulary is None:
            allowed = is_allowed(self.words, logits.shape[-1])
        else:
            tokens = self.lm_head.vocabulary.tokens
            allowed = (self.words[..., tokens // WORD] >> (tokens % WORD).astype(np.uint32)) & 1 > 0
        allowed = allowed & (logits > -jnp.inf) if chosen else allowed
        return jnp.where(allowed | ~jnp.any(allowed, axis=-1, keepdims=True), logits, -jnp.inf)

    def keep(self, tokens: Int[Array, "B n k"]) -> Int[Array, "B n k"]:
        """Return the tokens chosen from `over`, -1 for forbidden ones: fewer than k are allowed."""
        if self.words is None:
            return tokens
        place = jnp.maximum(tokens, 0)
        words = jnp.take_along_axis(self.words, place // WORD, axis=-1)
        allowed = (words >> (place % WORD).astype(jnp.uint32)) & 1 > 0
        return jnp.where(allowed & (tokens >= 0), tokens, -1)

    def keep_likely(
        self, tokens: Int[Array, "B n k"], log_p: Float[Array, "B n k"]
    ) -> tuple[Int[Array, "B n k"], Float[Array, "B n k"]]:
        """Return `keep` and the log-probabilities, -inf for tokens that are not kept."""
        if self.words is None:
            return tokens, log_p
        tokens = self.keep(tokens)
        return tokens, jnp.where(tokens < 0, -jnp.inf, log_p)
