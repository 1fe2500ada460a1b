"""Decode specs and sampling parameters for the methods of an engine."""

from __future__ import annotations

import jax
import numpy as np

from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.numbers import batched, broadcast
from hydrajax.decoding.spec import DecodeSpec, SamplingParams, sampling_params


def per_row(rule, batch: int):
    """Return the rule with arrays ``[batch]``; a list has one rule per sequence."""
    return batched(rule) if isinstance(rule, list) else broadcast(rule, batch)


def how(what=None, **fields) -> DecodeSpec:
    """Return the spec of a rule, by default greedy; a spec is returned unchanged."""
    return what if isinstance(what, DecodeSpec) else DecodeSpec(rule=what or Greedy(), **fields)


def sampling(what, batch: int, vocab: int, rng=0, limits=None) -> SamplingParams:
    """Return the sampling parameters of a batch. what: a rule or a spec, or one per sequence. rng: a seed or keys."""
    specs = [how(one) for one in (what if isinstance(what, list) else [what] * batch)]
    found = sampling_params(specs, jax.random.key(rng) if isinstance(rng, int) else rng, vocab)
    return found if limits is None else found._replace(limits=np.array(limits, np.int32))
