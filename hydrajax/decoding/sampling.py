"""The distribution that sampling draws from: the base's, at a temperature, cut to its likeliest tokens.

One place for every rule and for the autoregressive baseline, so that they agree to the bit. The numbers of a rule may
be Python numbers, which hold for all rows, or arrays with one number per row (`per_row`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from hydrajax.errors import HydrajaxError
from hydrajax.models.arrays import Array
from hydrajax.models.ranking import over_rows

Rule = TypeVar("Rule")


def numbers_as_arrays(cls: type[Rule]) -> type[Rule]:
    """Make a rule, a frozen dataclass of numbers, a pytree whose leaves are these numbers.

    So a rule is part of the decode state, with numbers of its own for every row, and another temperature is another
    argument of the same compiled program. A number that is None is no leaf: whether top-k or top-p is used at all is
    part of the program; so is a number that has no effect (`effective`). Leaves may be arrays or anything else that JAX
    puts in their place, and are not validated.
    """
    names = [field.name for field in dataclasses.fields(cls)]

    def flatten(rule):
        return [(jax.tree_util.GetAttrKey(name), effective(rule, name)) for name in names], None

    def unflatten(_, leaves):
        rule = object.__new__(cls)  # not __init__, which would compare tracers with 0
        for name, leaf in zip(names, leaves, strict=True):
            object.__setattr__(rule, name, leaf)
        return rule

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    cls.__repr__ = _shown
    return cls


def _shown(rule: Any) -> str:
    """As a dataclass shows itself, but for those numbers given by name alone that have no effect.

    Result files name rules in this way, and must go on to name one the same when rules learn to do more.
    """
    numbers = [
        f"{each.name}={getattr(rule, each.name)!r}"
        for each in dataclasses.fields(rule)
        if not each.kw_only or effective(rule, each.name) is not None
    ]
    return f"{type(rule).__name__}({', '.join(numbers)})"


def effective(rule: Any, name: str) -> Any:
    """A number of a rule, or None where it has the value that ``rule.NEUTRAL`` gives for no effect."""
    value = getattr(rule, name)
    return None if isinstance(value, (int, float)) and value == getattr(rule, "NEUTRAL", {}).get(name) else value


def per_row(rules: Rule | Sequence[Rule], batch: int) -> Rule:
    """One rule, or one rule per row, as a rule of arrays ``[batch]``: float32, or int32 where the number is an integer.

    Raises `HydrajaxError` where the rules are not one per row, or not all of one kind with the same numbers given.
    """
    if not isinstance(rules, Sequence):
        return jax.tree.map(lambda x: _xp(x).broadcast_to(_number(x), (batch,)), rules)
    if len(rules) != batch:
        raise HydrajaxError(f"rule: must be one or one per row, found {len(rules)} for {batch} rows")
    rules = like_one_another(rules)
    return jax.tree.map(lambda *xs: _xp(xs[0]).stack([_number(x) for x in xs]), *rules)


def like_one_another(rules: Sequence[Rule]) -> Sequence[Rule]:
    """The rules as pytrees of one structure: a neutral number is written out where that of another has an effect.

    Raises `HydrajaxError` for rules of several kinds, and for a number that some leave out and that has no neutral
    value.
    """
    neutral = getattr(rules[0], "NEUTRAL", {}) if rules else {}
    used = [name for name in neutral if any(effective(rule, name) is not None for rule in rules)]

    def written_out(rule):
        found = copy.copy(rule)
        for name in used:  # an array is a leaf whatever its value is
            object.__setattr__(found, name, np.asarray(getattr(rule, name), np.float32))
        return found

    rules = [written_out(rule) for rule in rules] if used else rules
    if len({jax.tree.structure(rule) for rule in rules}) > 1:
        raise HydrajaxError("rule: those of one batch must be of one kind and give the same numbers")
    return rules


def _xp(x: Any):
    """NumPy for numbers on the host, so that a call of a compiled function dispatches nothing besides."""
    return jnp if isinstance(x, jax.Array) else np


def _number(x: Any) -> Array:
    xp = _xp(x)
    return xp.asarray(x, np.int32 if xp.issubdtype(xp.result_type(x), np.integer) else np.float32)


def check_temperature(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise HydrajaxError(f"{name}: must be positive, found {value}")


@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, then top-p, then min-p, in the order of transformers' warpers.

    temperature: positive. top_k: keep the k likeliest tokens, None for all. top_p: of what is left keep the fewest
    likeliest tokens that hold this share of the probability, 1.0 for all. min_p: of what is left keep the tokens that
    are at least this many times as likely as the likeliest, 0.0 for all (Nguyen et al. 2024). Equally likely tokens
    stay or go together.

    Raises `HydrajaxError` for a value that is none of these.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = field(default=0.0, kw_only=True)
    NEUTRAL: ClassVar[dict[str, float]] = {"top_p": 1.0, "min_p": 0.0}

    def __post_init__(self):
        check_temperature("temperature", self.temperature)
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise HydrajaxError(f"top_k: must be an integer from 1 up, found {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise HydrajaxError(f"top_p: must be above 0 and at most 1, found {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise HydrajaxError(f"min_p: must be from 0 to 1, found {self.min_p}")

    def shape(self, logits: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
        """Logits of the distribution that is sampled from; -inf for the tokens that were cut off.

        Where the numbers are arrays ``[B]``, the logits' first axis is B.
        """
        logits = logits / over_rows(self.temperature, logits)
        if self.top_k is not None:
            kept = _among_largest(logits, jnp.ones_like(logits), over_rows(self.top_k, logits))
            logits = jnp.where(kept, logits, -jnp.inf)
        top_p = effective(self, "top_p")
        if top_p is not None:
            probs = jax.nn.softmax(logits, axis=-1)
            logits = jnp.where(_among_largest(probs, probs, over_rows(top_p, logits)), logits, -jnp.inf)
        min_p = effective(self, "min_p")
        if min_p is not None:
            # A ratio of probabilities is a difference of logits, whatever the others sum to.
            least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(over_rows(min_p, logits))
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        return logits


def _among_largest(
    values: Float[Array, "*rows V"], weights: Float[Array, "*rows V"], wanted: Array
) -> Bool[Array, "*rows V"]:
    """The fewest largest values whose weights sum to at least ``wanted``, and those equal to the least of them.

    With weights of one these are the k largest, with probabilities that weigh what they are the nucleus of top-p.

    Floats are ordered as their bits are, once those of negative ones are turned round, so the least of them is found
    bit by bit, in 32 sums. For the nucleus of one row of 32,000 tokens that takes 0.3 ms, sorting it took 6.8 (jax
    0.10, CPU); and `jax.lax.top_k` wants one k that is known when the program is compiled.
    """
    weights = weights.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32) + 0.0, jnp.uint32)  # -0.0 becomes 0.0
    ordered = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    def try_bit(i, least):
        higher = least | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        held = jnp.sum(jnp.where(ordered >= higher, weights, 0), axis=-1, keepdims=True)
        return jnp.where(held >= wanted, higher, least)

    return ordered >= jax.lax.fori_loop(0, 32, try_bit, jnp.zeros_like(ordered[..., :1]))


def sample(keys: Array, logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """One token per row, int32, each row from its own key ``[B]``."""
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


# --- random keys ------------------------------------------------------------------------------------------------------


def row_keys(rng: Array, batch: int, first: int = 0) -> Array:
    """Keys ``[batch]``: the given ones, or of a single key one for each row number, from ``first`` on.

    Keys of `jax.random.PRNGKey`, uint32 ``[2]`` or ``[batch, 2]``, are taken too.
    """
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        if rng.dtype != jnp.uint32 or rng.ndim not in (1, 2):
            raise HydrajaxError(f"rng: must be a jax.random.key, or one per row, found {rng.dtype} {list(rng.shape)}")
        rng = jax.random.wrap_key_data(rng)
    if rng.ndim == 1:
        if rng.shape != (batch,):
            raise HydrajaxError(f"rng: must be one key or one per row, found {rng.shape[0]} for {batch} rows")
        return rng
    return jax.vmap(jax.random.fold_in, (None, 0))(rng, first + jnp.arange(batch))


def position_keys(keys: Array, positions: Int[Array, " B *n"]) -> Array:
    """The keys for the tokens at these places in each row's output. What a row samples there depends on nothing else:
    neither on its batch, nor on the tree and the drafter that found the tokens before it.
    """
    fold = jax.random.fold_in
    for _ in positions.shape[1:]:
        fold = jax.vmap(fold, (None, 0))
    return jax.vmap(fold)(keys, positions)
