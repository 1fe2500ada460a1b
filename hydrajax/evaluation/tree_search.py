"""The second stage of tree search: the size that is fastest on this device (hydra section 4)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.decode import make_autoregressive_fn, make_decode_fn, right_padded
from hydrajax.decoding.step import Params
from hydrajax.evaluation.benchmark import time_round
from hydrajax.models.llama import Llama
from hydrajax.trees.tree import TreeTopology

RESAMPLES = 2000


@dataclass(frozen=True)
class Measured:
    """One tree. tokens_per_second: median of the rounds, all rows counted, prefill included; low, high: its 95%
    bootstrap interval. chance_best: share of the bootstrap in which no other tree was faster.
    """

    name: str
    nodes: int
    tokens_per_step: float
    tokens_per_second: float
    low: float
    high: float
    chance_best: float
    speedup: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_trees(
    model: Llama,
    drafter,
    params: Params,
    trees: dict[str, TreeTopology],
    prompts: Sequence[np.ndarray],
    rule: AcceptanceRule,
    *,
    batch_size: int,
    new_tokens: int,
    repeats: int,
    eos_ids: tuple[int, ...] = (),
    seed: int = 0,
    on_status: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """Generate for the prompts with every tree and without one, in rounds that take each once, in random order.

    speedup is against autoregressive decoding in the same rounds.
    """
    settings = {"max_new_tokens": new_tokens, "eos_ids": eos_ids}
    ways = {"": (make_autoregressive_fn(model, rule, **settings), Params(params.base, {}))}
    ways |= {name: (make_decode_fn(model, drafter, tree, rule, **settings), params) for name, tree in trees.items()}
    batches = list(_batches(prompts, batch_size))
    tokens, steps = {}, {}
    for name, (decode, way_params) in ways.items():
        on_status(f"compiling {name or 'autoregressive'}")
        outs = [jax.device_get(decode(way_params, *batch, jax.random.key(seed))) for batch in batches]
        tokens[name] = sum(int(out.lengths.sum()) for out in outs)
        steps[name] = sum(int(out.steps.sum()) for out in outs)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    random = np.random.default_rng(seed)
    for number in range(repeats):
        on_status(f"round {number + 1} of {repeats}")
        order = random.permutation(list(ways)).tolist()
        time_round({name: ways[name] for name in order}, batches, seconds, jax.random.key(seed))
    rates = {name: tokens[name] / np.array(seconds[name]) for name in ways}
    picked = random.integers(0, repeats, (RESAMPLES, repeats))  # whole rounds, in which all had the same neighbours
    medians = {name: np.median(rates[name][picked], axis=1) for name in trees}
    best = np.max(list(medians.values()), axis=0)
    plain = statistics.median(rates[""])
    return [
        Measured(
            name,
            tree.size,
            tokens[name] / steps[name],
            statistics.median(rates[name]),
            *np.percentile(medians[name], [2.5, 97.5]).tolist(),
            float(np.mean(medians[name] == best)),
            statistics.median(rates[name]) / plain,
        )
        for name, tree in trees.items()
    ]


def _batches(prompts: Sequence[np.ndarray], size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Full batches of one width, so that each program is compiled once; the first prompts fill up the last."""
    rows = [prompts[i % len(prompts)] for i in range(-(-len(prompts) // size) * size)]
    width = max(map(len, prompts))
    for start in range(0, len(rows), size):
        yield right_padded(rows[start : start + size], width)
