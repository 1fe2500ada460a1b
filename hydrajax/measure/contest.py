"""Ways to decode, timed against each other: every round takes each of them once, in random order, on the same prompts.

Whatever else the machine does hits all ways of a round alike, so whole rounds are what is resampled for an interval.
The second stage of tree search (hydra section 4), which chooses the size that is fastest on this device, is such a
contest of trees.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from hydrajax.decoding.prompts import batches
from hydrajax.measure.way import Way
from hydrajax.trees.dynamic import CandidateTree

RESAMPLES = 2000


@dataclass(frozen=True)
class Measured:
    """What a contest found of one way.

    tokens_per_step: the mean over all steps (τ). tokens_per_second: the median of the rounds, with all rows counted and
    the prompts' forward passes included; low and high are its 95% bootstrap interval. speedup: that rate against the
    baseline's. chance_best: in which share of the bootstrap none but the baseline was faster. low, high and chance_best
    are None of a single round, which says nothing of chance. equal: whether the way gave the baseline's tokens, None
    where its rule does not promise them.
    """

    name: str
    nodes: int
    tokens_per_step: float
    tokens_per_second: float
    low: float | None
    high: float | None
    chance_best: float | None
    speedup: float
    equal: bool | None

    @property
    def step_seconds(self) -> float:
        """Seconds per decode step, with the prompts' forward passes counted in, as they are in every speed-up."""
        return self.tokens_per_step / self.tokens_per_second

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def contest(
    ways: Sequence[Way],
    prompts: Sequence[np.ndarray],
    *,
    batch_size: int,
    repeats: int,
    seed: int = 0,
    on_status: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """Generate for the prompts in every way, ``repeats`` rounds long. The first way is the baseline.

    ``on_status`` is told of every way that is compiled and of every round.
    """
    filled = list(batches(prompts, batch_size))
    key = jax.random.key(seed)
    outputs = {}
    for way in ways:
        on_status(f"compiling {way.name}")
        outputs[way.name] = [jax.device_get(way.decode(prompt, lengths, key)) for prompt, lengths, _ in filled]
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    random = np.random.default_rng(seed)
    for number in range(repeats):
        on_status(f"round {number + 1} of {repeats}")
        for index in random.permutation(len(ways)):
            began = time.perf_counter()
            for prompt, lengths, _ in filled:
                jax.block_until_ready(ways[index].decode(prompt, lengths, key))
            seconds[ways[index].name].append(time.perf_counter() - began)

    tokens = {name: sum(int(out.lengths.sum()) for out in outs) for name, outs in outputs.items()}
    rates = {name: tokens[name] / np.array(seconds[name]) for name in outputs}
    picked = random.integers(0, repeats, (RESAMPLES, repeats))  # whole rounds, in which all had the same neighbours
    medians = {name: np.median(rates[name][picked], axis=1) for name in outputs}
    baseline, *others = outputs
    best = np.max([medians[name] for name in others or [baseline]], axis=0)
    plain = statistics.median(rates[baseline])

    def chances(name: str) -> dict[str, float | None]:
        if repeats == 1:
            return {"low": None, "high": None, "chance_best": None}
        low, high = np.percentile(medians[name], (2.5, 97.5)).tolist()
        return {"low": low, "high": high, "chance_best": float(np.mean(medians[name] >= best))}

    return [
        Measured(
            name=way.name,
            nodes=way.nodes,
            tokens_per_step=tokens[way.name] / sum(int(out.steps.sum()) for out in outputs[way.name]),
            tokens_per_second=statistics.median(rates[way.name]),
            **chances(way.name),
            speedup=statistics.median(rates[way.name]) / plain,
            equal=same_tokens(outputs[way.name], outputs[baseline]) if way.promises_same_output else None,
        )
        for way in ways
    ]


def measure_trees(
    way: Way, trees: Mapping[str, CandidateTree], prompts: Sequence[np.ndarray], **settings
) -> list[Measured]:
    """A `contest`, with its settings, of one way with several trees against the same without a draft."""
    ways = [way.autoregressive(), *(way.with_tree(tree, name) for name, tree in trees.items())]
    return contest(ways, prompts, **settings)[1:]


def same_tokens(ours: Sequence, theirs: Sequence) -> bool:
    """Whether two lists of decoding results hold the same tokens, whatever stands beyond their lengths."""
    return all(
        np.array_equal(a.lengths, b.lengths)
        and all(np.array_equal(x[:n], y[:n]) for x, y, n in zip(a.tokens, b.tokens, a.lengths, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )
