"""Contests: executors timed against each other, every round running each of them once on the same prompts.

Whatever else the machine does meets all executors of a round alike, so whole rounds are resampled for an interval. The
second stage of tree search (hydra section 4), which chooses the size that is fastest on this device, is such a contest
of trees.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from hydrajax.decoding.executor import Executor
from hydrajax.decoding.prompt_batch import batches
from hydrajax.trees.dynamic import CandidateTree

AUTOREGRESSIVE = "autoregressive"  # the name of the baseline
RESAMPLES = 2000


@dataclass(frozen=True)
class Measured:
    """The figures of one executor in a contest.

    tokens_per_step: the mean over all steps (τ). tokens_per_second: the median of the rounds, with all rows counted and
    the prompts' forward passes included; low and high are its 95% bootstrap interval. speedup: that rate against the
    baseline's. chance_best: in which share of the bootstrap only the baseline was faster, if any. low, high and
    chance_best are None after a single round, which tells nothing of chance. equal: whether the tokens are the
    baseline's, None where the rule does not promise that.
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
    executors: Mapping[str, Executor],
    prompts: Sequence[np.ndarray],
    *,
    batch_size: int,
    repeats: int,
    seed: int = 0,
    on_status: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """Generate for the prompts with every executor, ``repeats`` rounds long.

    Args:
        executors: by name. The first is the baseline.
        prompts: token ids, int32 ``[P]`` each.
        batch_size: sequences that are decoded together.
        repeats: rounds.
        seed: of the order within the rounds, and of rules that draw.
        on_status: called with a line for every executor that is compiled and for every round.
    """
    filled = list(batches(prompts, batch_size))
    key = jax.random.key(seed)
    outputs = {}
    for name, executor in executors.items():
        on_status(f"compiling {name}")
        outputs[name] = [jax.device_get(executor.decode(prompt, lengths, key)) for prompt, lengths, _ in filled]
    seconds: dict[str, list[float]] = {name: [] for name in executors}
    random, names = np.random.default_rng(seed), list(executors)
    for number in range(repeats):
        on_status(f"round {number + 1} of {repeats}")
        for index in random.permutation(len(names)):
            executor = executors[names[index]]
            began = time.perf_counter()
            for prompt, lengths, _ in filled:
                jax.block_until_ready(executor.decode(prompt, lengths, key))
            seconds[names[index]].append(time.perf_counter() - began)

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
            name=name,
            nodes=executor.spec.verified_nodes,
            tokens_per_step=tokens[name] / sum(int(out.steps.sum()) for out in outputs[name]),
            tokens_per_second=statistics.median(rates[name]),
            **chances(name),
            speedup=statistics.median(rates[name]) / plain,
            equal=same_tokens(outputs[name], outputs[baseline]) if executor.spec.rule.same_output else None,
        )
        for name, executor in executors.items()
    ]


def measure_trees(
    executor: Executor, trees: Mapping[str, CandidateTree], prompts: Sequence[np.ndarray], **arguments: Any
) -> list[Measured]:
    """Return a `contest`, with its arguments, of one executor with several trees; the baseline has no draft."""
    entrants = {name: executor.with_spec(tree=tree) for name, tree in trees.items()}
    return contest({AUTOREGRESSIVE: executor.autoregressive()} | entrants, prompts, **arguments)[1:]


def same_tokens(ours: Sequence, theirs: Sequence) -> bool:
    """Tell whether two lists of decoding results hold the same tokens, whatever stands beyond their lengths."""
    return all(
        np.array_equal(a.lengths, b.lengths)
        and all(np.array_equal(x[:n], y[:n]) for x, y, n in zip(a.tokens, b.tokens, a.lengths, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )
