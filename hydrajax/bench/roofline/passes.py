"""Count the passes of a decode step on abstract arrays: the base's over a tree, and the drafter's phases.

The traced functions are those of decoding (`BaseModel`, `Drafter`). ``base`` gives only its shape and dtypes. With a
`Division` the counts are those of one device of a mesh, for its share of the batch.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hydrajax.bench.device_memory import nbytes
from hydrajax.bench.roofline.division import ONE_DEVICE, Division
from hydrajax.bench.roofline.operators import Operator, at_depth
from hydrajax.bench.roofline.traced import PLAIN, trace
from hydrajax.drafters.drafter import Drafter, Outcome
from hydrajax.drafters.trainable import Trainable, abstract_draft
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BoundBase
from hydrajax.models.init import abstract_base
from hydrajax.models.llama import Llama
from hydrajax.models.recurrent_cache import RecurrentCache
from hydrajax.ops.trace import tracing
from hydrajax.trees.dynamic import CandidateTree

Operators = tuple[Operator, ...]

cached = functools.lru_cache(maxsize=256)


@cached
def forward(
    base: Llama, batch: int, tokens: int, slots: int, logits_at: int | None = None, division: Division = ONE_DEVICE
) -> Operators:
    """Count one pass of the base over ``tokens`` new tokens per sequence.

    Args:
        slots: Slots per sequence of the KV cache, which is then read with a given mask; 0 for a prefill.
        logits_at: number of last tokens whose logits are computed; None for all.
    """
    batch = division.rows(batch)

    def operators_of(model: Llama) -> Iterable[Operator]:
        cache = _abstract(lambda: model.init_cache(batch, slots)) if slots else None
        mask = jax.ShapeDtypeStruct((tokens, tokens), bool) if slots else None

        def run(params, rows, mask, cache):
            bound = BoundBase(model, params)
            out = bound.forward(rows, rows, causal_mask(tokens) if mask is None else mask, cache)
            return bound.logits(out.hidden[:, -logits_at:] if logits_at else out.hidden), out.block

        boxed = boxed_base(model)
        inputs = _integers(batch, tokens), mask, cache
        return trace(run, nn.unbox(boxed), *inputs, boxed=boxed, division=division)[0]

    return tuple(of_all_kinds(base, operators_of))


@cached
def propose(
    drafter: Drafter, base: Llama, tree: CandidateTree, batch: int, slots: int, division: Division = ONE_DEVICE
) -> Operators:
    """Count proposing ``tree`` with caches of ``slots``."""
    rows = division.rows(batch)
    return _of_all_layers(drafter, lambda drafter: _proposed(drafter, base, tree, rows, slots, division)[0])


@cached
def observe(
    drafter: Drafter, base: Llama, tree: CandidateTree, batch: int, slots: int, division: Division = ONE_DEVICE
) -> Operators:
    """Count observing the outcome of a proposal whose longest path was accepted."""
    batch = division.rows(batch)
    path, nodes = drafter.spec.longest_path(tree) + 1, drafter.spec.verified_nodes(tree)
    row, along = _integers(batch), _integers(batch, path)
    outcome = Outcome(along, along, row, row, _aux_hidden_states(drafter, base, batch, nodes), _integers(batch, nodes))

    def observed(drafter: Drafter) -> Iterable[Operator]:
        model, boxed, state = _drafting(drafter, base, batch, slots)
        proposal = _proposed(drafter, base, tree, batch, slots, division)[1]

        def run(params, state, proposal, outcome):
            return drafter.observe(params[0], state, proposal, outcome, BoundBase(model, params[1]))

        return trace(run, nn.unbox(boxed), state, proposal, outcome, boxed=boxed, division=division)[0]

    return _of_all_layers(drafter, observed)


@cached
def begin(
    drafter: Drafter, base: Llama, batch: int, tokens: int, slots: int, division: Division = ONE_DEVICE
) -> Operators:
    """Count the drafter's prefill of ``tokens`` tokens per sequence."""
    batch = division.rows(batch)
    row, prompt = _integers(batch), _integers(batch, tokens)

    def begun(drafter: Drafter) -> Iterable[Operator]:
        model, boxed, state = _drafting(drafter, base, batch, slots)

        def run(params, state, aux_hidden_states, prompt, counts, root):
            return drafter.begin(params[0], state, aux_hidden_states, prompt, counts, root, BoundBase(model, params[1]))

        inputs = state, _aux_hidden_states(drafter, base, batch, tokens), prompt, row, row
        return trace(run, nn.unbox(boxed), *inputs, boxed=boxed, division=division)[0]

    return _of_all_layers(drafter, begun)


def weight_bytes(base: Llama, division: Division = ONE_DEVICE) -> int:
    """Return the bytes of the base's weights on a device."""
    return division.nbytes(boxed_base(base))


def draft_bytes(drafter: Drafter, base: Llama, division: Division = ONE_DEVICE) -> int:
    """Return the bytes of the drafter's weights on a device."""
    return division.nbytes(boxed_draft(drafter, with_layers(base, 1)))


def cache_bytes(drafter: Drafter, base: Llama, batch: int, slots: int, division: Division = ONE_DEVICE) -> int:
    """Return the bytes of the KV caches of base and drafter on a device, which shard key-value heads."""
    batch = division.rows(batch)
    heads = division.model if base.config.n_kv_heads % division.model == 0 else 1
    of_base = nbytes(_abstract(lambda: base.init_cache(batch, slots)))
    of_draft = nbytes(_abstract(lambda: drafter.init_state(batch, slots)))
    # A draft model is copied to every device, and so is its cache.
    return of_base // heads + of_draft // (heads if isinstance(drafter, Trainable) else 1)


def state_bytes(base: Llama, batch: int) -> int:
    """Return the bytes of the states of recurrent layers, with the inputs of their convolutions."""
    caches = _abstract(lambda: base.init_cache(batch, 1)).layers
    return nbytes([cache for cache in caches if isinstance(cache, RecurrentCache)])


def draft_parameters(drafter: Drafter, base: Llama) -> int:
    """Return the number of a drafter's parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(nn.unbox(boxed_draft(drafter, with_layers(base, 1)))))


# --- abstract arrays --------------------------------------------------------------------------------------------------


def with_layers(model: Llama, layers: int) -> Llama:
    """Return the same model with another number of layers."""
    return model.clone(config=model.config.replace(n_layers=layers))


def of_all_kinds(model: Llama, operators_of: Callable[[Llama], Iterable[Operator]]) -> list[Operator]:
    """Extrapolate the operators of a model from those of one and of two layers of each kind (`at_depth`)."""
    if not model.config.separable:
        return list(operators_of(model))
    total: Counter[Operator] = Counter()
    for i, (kind, n_layers) in enumerate(Counter(model.config.kinds).items()):
        alike = model.clone(config=model.config.of_kind(kind))
        # What is not in a layer is counted with the first kind.
        for depth, sign in ((n_layers, 1),) if i == 0 else ((n_layers + 1, 1), (1, -1)):
            for op in at_depth(depth, lambda layers, alike=alike: operators_of(with_layers(alike, layers))):
                total[dataclasses.replace(op, count=1)] += sign * op.count
    return [dataclasses.replace(op, count=count) for op, count in total.items() if count]


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
def boxed_base(model: Llama) -> Any:
    """Return the shapes, dtypes and logical axes of a model's parameters."""
    with tracing(platform=PLAIN):  # int8 weights keep their shapes there
        return abstract_base(model)


def abstract_params(model: Llama) -> Any:
    """Return the shapes and dtypes of a model's parameters."""
    return nn.unbox(boxed_base(model))


@cached
def boxed_draft(drafter: Drafter, base: Llama) -> Any:
    """Return the shapes and dtypes of a drafter's parameters, with the logical axes of those that are sharded."""
    with tracing(platform=PLAIN):
        if isinstance(drafter, Trainable):
            return abstract_draft(drafter, base)
        return jax.eval_shape(
            lambda params: drafter.init(jax.random.key(0), BoundBase(base, params)), abstract_params(base)
        )


def _drafting(drafter: Drafter, base: Llama, batch: int, slots: int):
    """Return ``(base, (draft params, base params), draft state)``; drafters read the base's embedding and lm head.

    The parameters are boxed with their logical axes.
    """
    model = base if drafter.spec.reads_cache else with_layers(base, 1)
    params = boxed_draft(drafter, model), boxed_base(model)
    return model, params, _abstract(lambda: drafter.init_state(batch, slots))


@cached
def _proposed(
    drafter: Drafter, base: Llama, tree: CandidateTree, batch: int, slots: int, division: Division
) -> tuple[Operators, Any]:
    """Return the operators of `Drafter.propose` and the abstract proposal."""
    model, boxed, state = _drafting(drafter, base, batch, slots)

    def run(params, state, root, cache):
        return drafter.propose(params[0], state, root, tree, BoundBase(model, params[1], cache=cache))

    cache = _abstract(lambda: model.init_cache(batch, slots)) if drafter.spec.reads_cache else None
    inputs = state, _integers(batch), cache
    operators, proposal = trace(run, nn.unbox(boxed), *inputs, boxed=boxed, division=division)
    return tuple(operators), proposal


def _aux_hidden_states(drafter: Drafter, base: Llama, batch: int, tokens: int) -> jax.ShapeDtypeStruct:
    shape = (batch, tokens, len(drafter.spec.aux_hidden_layers) * base.config.width)
    return jax.ShapeDtypeStruct(shape, base.dtype)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _abstract(make) -> Any:
    with tracing(platform=PLAIN):
        return jax.eval_shape(make)
