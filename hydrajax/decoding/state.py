"""The state of the decode loop: three pytrees of static shapes, safe to donate.

Every array's first axis is the batch, so a server can insert, remove and move sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from hydrajax.decoding.logprobs import Logprobs
from hydrajax.decoding.processing import TokenCounts
from hydrajax.drafters.drafter import CORPUS, Drafter
from hydrajax.errors import HydrajaxError, one_line
from hydrajax.models.arrays import Array
from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.models.cache import KVCache
from hydrajax.models.init import abstract_base
from hydrajax.models.weights import Quantized
from hydrajax.ops import trace

QUANTIZED = "quantized"


class Params(NamedTuple):
    """Parameters: ``base`` is frozen and shared; ``draft`` belongs to the drafter (an empty dict without a draft)."""

    base: Any
    draft: Any

    @property
    def corpus(self) -> Any | None:
        """The past outputs that the draft reads (`hydrajax.drafters.corpus.Corpus`); None without."""
        found = self.draft.get(CORPUS) if isinstance(self.draft, Mapping) else None
        return found if hasattr(found, "remember") else None

    def __repr__(self) -> str:
        """Count the parameters. The default would fetch and print the weights."""
        return f"Params(base={_summary(self.base)}, draft={_summary(self.draft)})"


class ParamsCheck:
    """Compares parameters with those that a base and its drafter are initialised with.

    Only shapes and dtypes are read, so tracers, arrays of NumPy and any sharding pass.
    """

    def __init__(self, model: BaseModel, drafter: Drafter):
        self._model, self._drafter = model, drafter
        self._passed: Any = None

    def __call__(self, params: Any) -> None:
        """Raise `HydrajaxError` for parameters of another model, drafter or dtype."""
        if not isinstance(params, Params):
            raise HydrajaxError(f"params: got {type(params).__name__}, expected Params(base, draft), such as m.params")
        leaves, structure = jax.tree.flatten(params)
        given = structure, [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves]
        if given != self._passed:
            base, draft = _abstract(self._model, self._drafter, trace.platform(), trace.has_few_bits())
            if (corpus := params.corpus) is not None:
                draft = draft | {CORPUS: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int32), corpus)}
            _compare(_by_path(params), _by_path(Params(base, draft)))
            self._passed = given


@functools.lru_cache(maxsize=64)  # a server has twenty executors of a few drafters
def _abstract(model: BaseModel, drafter: Drafter, traced_for: trace.Platform, in_tiles: bool) -> Params:
    """Return the shapes of the initial parameters. The platform decides how quantised weights are stored."""
    base = nn.unbox(abstract_base(model))
    return Params(base, jax.eval_shape(lambda base: drafter.init(jax.random.key(0), BoundBase(model, base)), base))


def _by_path(params: Params) -> dict[str, str]:
    """Return the dtype and shape of each leaf."""

    def shown(leaf: Any) -> str:
        if isinstance(leaf, Quantized):
            return f"{QUANTIZED} {list(leaf.shape)}"
        array = hasattr(leaf, "dtype")
        return f"{jax.dtypes.canonicalize_dtype(leaf.dtype)} {list(leaf.shape)}" if array else repr(leaf)

    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda x: isinstance(x, Quantized))
    return {jax.tree_util.keystr(path): shown(leaf) for path, leaf in leaves}


def _compare(found: dict[str, str], expected: dict[str, str]) -> None:
    """Raise `HydrajaxError` for the first leaf that differs.

    A quantised kernel may be that of a file or of another device. A draft may have quantised kernels in place of floats
    and copies of the base's.
    """
    for path in [*expected, *found]:
        got, wanted = found.get(path, "nothing"), expected.get(path, "nothing")
        fits = got == wanted
        if path.startswith(".draft"):
            fits |= wanted == "nothing" or got == f"{QUANTIZED} {wanted.partition(' ')[2]}"
        if not fits:
            todo = "pass the parameters that were loaded with this model and draft, in their own dtype"
            raise HydrajaxError(f"params{path}: got {one_line(got, 60)}, expected {wanted}; {todo}")


def _summary(tree: Any) -> str:
    """Describe a pytree of parameters in a few words, from shapes; other small pytrees as they are."""
    leaves = jax.tree.leaves(tree)
    if not leaves or not all(hasattr(leaf, "dtype") and hasattr(leaf, "size") for leaf in leaves):
        return repr(tree)
    dtypes = ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))
    return f"<{sum(leaf.size for leaf in leaves):,} parameters in {len(leaves)} arrays of {dtypes}>"


class TargetState(NamedTuple):
    """The base's part.

    Attributes:
        cache: Keys and values of prompt and emitted tokens.
        root: int32 ``[B]`` the token that the base has chosen and the next step emits.
        root_logprobs: The root's log-probability and its alternatives ``[B]``; None if not requested.
    """

    cache: KVCache
    root: Int[Array, " B"]
    root_logprobs: Logprobs | None = None


class OutputState(NamedTuple):
    """The emitted tokens, and the parameters for the rest.

    Attributes:
        tokens: int32 ``[B, max_new + K + 1]`` emitted tokens, garbage beyond ``lengths``. A finished sequence still
            writes one whole path per step there, which explains the extra room.
        lengths: int32 ``[B]`` emitted tokens.
        limits: int32 ``[B]`` maximum number of tokens.
        done: bool ``[B]``.
        accept_lengths: int32 ``[B, max_new + 1]`` emitted draft tokens of each step (root not counted), -1 for steps
            that a sequence did not take.
        steps: int32 ``[B]`` steps taken.
        keys: ``[B]`` random keys. A draw depends on the key and on the position in the output.
        rule: The acceptance rule, its parameters arrays ``[B]``.
        counts: Token counts of prompt and output; None if no processor reads them.
        logprobs: Log-probabilities of ``tokens``, of the same shape; None if not requested.
        processors: The logits processors, their parameters arrays with the batch first.
        ignore_eos: bool ``[B]`` EOS does not end the sequence; None for no sequence.
    """

    tokens: Int[Array, "B room"]
    lengths: Int[Array, " B"]
    limits: Int[Array, " B"]
    done: Bool[Array, " B"]
    accept_lengths: Int[Array, "B max_steps"]
    steps: Int[Array, " B"]
    keys: Array
    rule: Any
    counts: TokenCounts | None = None
    logprobs: Logprobs | None = None
    processors: tuple[Any, ...] = ()
    ignore_eos: Bool[Array, " B"] | None = None


class DecodeState(NamedTuple):
    """The state of a batch: ``target`` of the base, ``draft`` of the drafter (any pytree), ``output`` of the emitted
    text.
    """

    target: TargetState
    draft: Any
    output: OutputState
