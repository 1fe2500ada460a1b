"""Ways to decode, timed against each other: every round takes each once, in random order, on the same prompts.

What else the machine does hits all of a round's ways alike, so rounds are what is resampled for an interval. The second
stage of tree search (hydra section 4), where the size is chosen that is fastest on this device, is such a contest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.decoding.decode import make_autoregressive_fn, make_decode_fn, right_padded
from hydrajax.decoding.step import Params
from hydrajax.measure.benchmark import time_round
from hydrajax.models.llama import Llama
from hydrajax.trees.tree import TreeTopology

RESAMPLES = 2000
AUTOREGRESSIVE = "autoregressive"


class Way(NamedTuple):
    """A decode function (`hydrajax.make_decode_fn`), its parameters, and the nodes of its tree."""

    decode: Callable
    params: Params
    nodes: int = 1


@dataclass(frozen=True)
class Measured:
    """One way. tokens_per_second: median of the rounds, all rows counted, prefill included; low, high: its 95%
    bootstrap interval. speedup: against the baseline in the same rounds. chance_best: share of the bootstrap in which
    none but the baseline was faster. equal: whether it gave the baseline's tokens.
    """

    name: str
    nodes: int
    tokens_per_step: float
    tokens_per_second: float
    low: float
    high: float
    chance_best: float
    speedup: float
    equal: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def contest(
    ways: Mapping[str, Way],
    prompts: Sequence[np.ndarray],
    *,
    batch_size: int,
    repeats: int,
    seed: int = 0,
    on_status: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """Generate for the prompts in every way, ``repeats`` rounds long; the first way is the baseline."""
    batches = list(_batches(prompts, batch_size))
    baseline, *others = ways
    outputs = {}
    for name, way in ways.items():  # this compiles, too
        on_status(f"compiling {name}")
        outputs[name] = [jax.device_get(way.decode(way.params, *batch, jax.random.key(seed))) for batch in batches]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    random = np.random.default_rng(seed)
    for number in range(repeats):
        on_status(f"round {number + 1} of {repeats}")
        order = random.permutation(list(ways)).tolist()
        time_round({name: ways[name][:2] for name in order}, batches, seconds, jax.random.key(seed))
    tokens = {name: sum(int(out.lengths.sum()) for out in outs) for name, outs in outputs.items()}
    steps = {name: sum(int(out.steps.sum()) for out in outs) for name, outs in outputs.items()}
    rates = {name: tokens[name] / np.array(seconds[name]) for name in ways}
    picked = random.integers(0, repeats, (RESAMPLES, repeats))  # whole rounds, in which all had the same neighbours
    medians = {name: np.median(rates[name][picked], axis=1) for name in ways}
    best = np.max([medians[name] for name in others or ways], axis=0)
    plain = statistics.median(rates[baseline])
    return [
        Measured(
            name,
            way.nodes,
            tokens[name] / steps[name],
            statistics.median(rates[name]),
            *np.percentile(medians[name], [2.5, 97.5]).tolist(),
            float(np.mean(medians[name] >= best)),
            statistics.median(rates[name]) / plain,
            _equal(outputs[name], outputs[baseline]),
        )
        for name, way in ways.items()
    ]


def measure_trees(
    model: Llama,
    drafter,
    params: Params,
    trees: Mapping[str, TreeTopology],
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
    """A `contest` of trees against decoding without one."""
    settings = {"max_new_tokens": new_tokens, "eos_ids": eos_ids}
    ways = {AUTOREGRESSIVE: Way(make_autoregressive_fn(model, rule, **settings), Params(params.base, {}))}
    for name, tree in trees.items():
        ways[name] = Way(make_decode_fn(model, drafter, tree, rule, **settings), params, tree.size)
    return contest(ways, prompts, batch_size=batch_size, repeats=repeats, seed=seed, on_status=on_status)[1:]


def _batches(prompts: Sequence[np.ndarray], size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Full batches of one width, so that each program is compiled once; the first prompts fill up the last."""
    rows = [prompts[i % len(prompts)] for i in range(-(-len(prompts) // size) * size)]
    width = max(map(len, prompts))
    for start in range(0, len(rows), size):
        yield right_padded(rows[start : start + size], width)


def _equal(ours: Sequence, theirs: Sequence) -> bool:
    return all(
        np.array_equal(a.lengths, b.lengths)
        and all(np.array_equal(x[:n], y[:n]) for x, y, n in zip(a.tokens, b.tokens, a.lengths, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )
