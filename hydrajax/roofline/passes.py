"""Count the passes of a decode step on abstract arrays: the base's over a tree, and the drafter's phases.

The traced functions are those of decoding (`BaseModel`, `Drafter`). ``base`` gives only its shape and dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hydrajax.drafters.drafter import Drafter, Outcome
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BoundBase, abstract_base
from hydrajax.models.llama import Llama
from hydrajax.models.platforms import traced_for
from hydrajax.roofline.traced import PLAIN, Operator, at_depth, trace
from hydrajax.trees.dynamic import CandidateTree

Operators = tuple[Operator, ...]

cached = functools.lru_cache(maxsize=256)


@cached
def forward(base: Llama, batch: int, tokens: int, slots: int, logits_at: int | None = None) -> Operators:
    """Count one pass of the base over ``tokens`` new tokens per sequence.

    Args:
        base: the model.
        batch: sequences.
        tokens: new tokens per sequence.
        slots: Slots per sequence of the KV cache, which is then read with a given mask; 0 for a prefill.
        logits_at: number of last tokens whose logits are computed; None for all.
    """

    def operators_at(layers: int) -> Iterable[Operator]:
        model = with_layers(base, layers)
        cache = _abstract(lambda: model.init_cache(batch, slots)) if slots else None
        mask = jax.ShapeDtypeStruct((tokens, tokens), bool) if slots else None

        def run(params, rows, mask, cache):
            bound = BoundBase(model, params)
            out = bound.forward(rows, rows, causal_mask(tokens) if mask is None else mask, cache)
            return bound.logits(out.hidden[:, -logits_at:] if logits_at else out.hidden), out.block

        return trace(run, abstract_params(model), _integers(batch, tokens), mask, cache)[0]

    return tuple(at_depth(base.config.n_layers, operators_at))


@cached
def propose(drafter: Drafter, base: Llama, tree: CandidateTree, batch: int, slots: int) -> Operators:
    """Count proposing ``tree`` with caches of ``slots``."""
    return _of_all_layers(drafter, lambda drafter: _proposed(drafter, base, tree, batch, slots)[0])


@cached
def observe(drafter: Drafter, base: Llama, tree: CandidateTree, batch: int, slots: int) -> Operators:
    """Count observing the outcome of a proposal whose longest path was accepted."""
    path, nodes = drafter.spec.longest_path(tree) + 1, drafter.spec.verified_nodes(tree)
    row, along = _integers(batch), _integers(batch, path)
    outcome = Outcome(along, along, row, row, _aux_hidden_states(drafter, base, batch, nodes), _integers(batch, nodes))

    def observed(drafter: Drafter) -> Iterable[Operator]:
        model, params, state = _drafting(drafter, base, batch, slots)
        proposal = _proposed(drafter, base, tree, batch, slots)[1]

        def run(params, state, proposal, outcome):
            return drafter.observe(params[0], state, proposal, outcome, BoundBase(model, params[1]))

        return trace(run, params, state, proposal, outcome)[0]

    return _of_all_layers(drafter, observed)


@cached
def begin(drafter: Drafter, base: Llama, batch: int, tokens: int, slots: int) -> Operators:
    """Count the drafter's prefill of ``tokens`` tokens per sequence."""
    row, prompt = _integers(batch), _integers(batch, tokens)

    def begun(drafter: Drafter) -> Iterable[Operator]:
        model, params, state = _drafting(drafter, base, batch, slots)

        def run(params, state, aux_hidden_states, prompt, counts, root):
            return drafter.begin(params[0], state, aux_hidden_states, prompt, counts, root, BoundBase(model, params[1]))

        return trace(run, params, state, _aux_hidden_states(drafter, base, batch, tokens), prompt, row, row)[0]

    return _of_all_layers(drafter, begun)


def draft_parameters(drafter: Drafter, base: Llama) -> int:
    """Return the number of a drafter's parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(_draft_params(drafter, with_layers(base, 1))))


# --- abstract arrays --------------------------------------------------------------------------------------------------


def with_layers(model: Llama, layers: int) -> Llama:
    """Return the same model with another number of layers."""
    return model.clone(config=model.config.replace(n_layers=layers))


def _of_all_layers(drafter: Drafter, count: Callable[[Drafter], Iterable[Operator]]) -> Operators:
    """Return ``count(drafter)``; for a draft model, extrapolate from one and two layers (`at_depth`)."""
    depth = next((model.config.n_layers for model in _models(drafter)), None)
    return tuple(count(drafter) if depth is None else at_depth(depth, lambda layers: count(_shallow(drafter, layers))))


def _models(drafter: Drafter) -> Iterator[Llama]:
    for field in dataclasses.fields(drafter):
        value = getattr(drafter, field.name)
        yield from [value] if isinstance(value, Llama) else _models(value) if isinstance(value, Drafter) else []


def _shallow(drafter: Drafter, layers: int) -> Drafter:
    """Return the drafter with ``layers`` layers in its model, or in that of a drafter that it wraps."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(drafter):
        value = getattr(drafter, field.name)
        if isinstance(value, Llama):
            changed[field.name] = with_layers(value, layers)
        elif isinstance(value, Drafter):
            changed[field.name] = _shallow(value, layers)
    return dataclasses.replace(drafter, **changed)


@cached
def abstract_params(model: Llama) -> Any:
    """Return the shapes and dtypes of a model's parameters."""
    return nn.unbox(abstract_base(model))


@cached
def _draft_params(drafter: Drafter, model: Llama) -> Any:
    return jax.eval_shape(lambda base: drafter.init(jax.random.key(0), BoundBase(model, base)), abstract_params(model))


def _drafting(drafter: Drafter, base: Llama, batch: int, slots: int):
    """Return ``(base, (draft params, base params), draft state)``; drafters read the base's embedding and lm head."""
    model = with_layers(base, 1)
    params = _draft_params(drafter, model), abstract_params(model)
    return model, params, _abstract(lambda: drafter.init_state(batch, slots))


@cached
def _proposed(drafter: Drafter, base: Llama, tree: CandidateTree, batch: int, slots: int) -> tuple[Operators, Any]:
    """Return the operators of `Drafter.propose` and the abstract proposal."""
    model, params, state = _drafting(drafter, base, batch, slots)

    def run(params, state, root):
        return drafter.propose(params[0], state, root, tree, BoundBase(model, params[1]))

    operators, proposal = trace(run, params, state, _integers(batch))
    return tuple(operators), proposal


def _aux_hidden_states(drafter: Drafter, base: Llama, batch: int, tokens: int) -> jax.ShapeDtypeStruct:
    shape = (batch, tokens, len(drafter.spec.aux_hidden_layers) * base.config.width)
    return jax.ShapeDtypeStruct(shape, base.dtype)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _abstract(make) -> Any:
    with traced_for(PLAIN):
        return jax.eval_shape(make)
