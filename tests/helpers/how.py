"""Requests and sampling parameters for the methods of an engine."""

import jax
import numpy as np

from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.batching import batched, broadcast
from hydrajax.decoding.request import Request, SamplingParams, sampling_params


def per_row(rule, batch: int):
    """Return the rule with arrays ``[batch]``; a list has one rule per sequence."""
    return batched(rule) if isinstance(rule, list) else broadcast(rule, batch)


def how(what=None, **fields) -> Request:
    """Return the request for a rule, by default greedy; a request is returned unchanged."""
    return what if isinstance(what, Request) else Request(rule=what or Greedy(), **fields)


def sampling(what, batch: int, vocab: int, rng=0, limits=None) -> SamplingParams:
    """Return the sampling parameters of a batch. what: a rule or request, or one per sequence. rng: a seed or keys."""
    requests = [how(one) for one in (what if isinstance(what, list) else [what] * batch)]
    found = sampling_params(requests, jax.random.key(rng) if isinstance(rng, int) else rng, vocab)
    return found if limits is None else found._replace(limits=np.array(limits, np.int32))
