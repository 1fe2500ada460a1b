"""Compare the split executor with the same base and draft in one program and in turn."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hydrajax.bench.contests.contest import AUTOREGRESSIVE, Measured, contest
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.decoding.prompt_batch import batches
from hydrajax.decoding.state import Params
from hydrajax.ssd.fan_out import FanOut
from hydrajax.ssd.record import SpeculationRecord
from hydrajax.ssd.speculator import MISS
from hydrajax.ssd.split_executor import SplitExecutor

IN_TURN, ONE_PROGRAM = "in turn", "one program"


@dataclasses.dataclass(frozen=True)
class SplitRow:
    """The measurements of one executor.

    Attributes:
        fan_out: Counts of `FanOut`; None if base and draft are not split.
        hit_rate, ready_rate: Of `SpeculationRecord`, over all prompts; None if nothing is prepared ahead.
    """

    measured: Measured
    fan_out: tuple[int, ...] | None = None
    hit_rate: float | None = None
    ready_rate: float | None = None

    def as_dict(self) -> dict[str, Any]:
        own = {"fan_out": self.fan_out, "hit_rate": self.hit_rate, "ready_rate": self.ready_rate}
        return dataclasses.asdict(self.measured) | own


def split_contest(
    executor: SplitExecutor,
    fan_outs: Sequence[int | FanOut],
    prompts: Sequence[np.ndarray],
    *,
    batch_size: int,
    repeats: int,
    on_status: Callable[[str], None] = lambda text: None,
) -> list[SplitRow]:
    """Time decoding without a draft (the first row), in one program, in turn, and ahead with each of ``fan_outs``.

    The arguments after ``fan_outs`` are those of `hydrajax.bench.contests.contest.contest`.
    """
    draft = jax.device_put(executor.params.draft, executor.placement.homes()[0])
    together = FusedExecutor(executor.model, Params(executor.params.base, draft), executor.program, executor.request)
    split = {IN_TURN: executor.with_fan_out(0)}
    for fan_out in fan_outs:
        total = fan_out.total if isinstance(fan_out, FanOut) else fan_out
        split[f"ahead, {total} outcomes"] = executor.with_fan_out(fan_out)
    others = {AUTOREGRESSIVE: executor.autoregressive(), ONE_PROGRAM: together}
    found = contest(others | split, prompts, batch_size=batch_size, repeats=repeats, on_status=on_status)
    rows = [SplitRow(each) for each in found[:2]]
    for each, measured in zip(split.values(), found[2:], strict=True):
        record = joined(recorded(each, prompts, batch_size))
        rates = (record.hit_rate, record.ready_rate) if each.fan_out.total else (None, None)
        rows.append(SplitRow(measured, each.fan_out.counts, *rates))
    return rows


def recorded(
    executor: SplitExecutor, prompts: Sequence[np.ndarray], batch_size: int, seed: int = 0
) -> list[SpeculationRecord]:
    """Decode the prompts and return the record of each batch."""
    key = jax.random.key(seed)
    found = []
    for prompt, lengths, n_real in batches(prompts, batch_size):
        record = executor.recorded(prompt, lengths, key)[1]
        found.append(SpeculationRecord(record.numbers[:n_real], record.accept_lengths[:n_real], record.fan_out))
    return found


def joined(records: Sequence[SpeculationRecord]) -> SpeculationRecord:
    """Concatenate the rounds of several batches."""
    n_sequences = max(len(record.numbers) for record in records)

    def concatenated(name: str, fill: int) -> np.ndarray:
        arrays = [getattr(record, name) for record in records]
        missing = [((0, n_sequences - len(array)), (0, 0)) for array in arrays]
        return np.concatenate(
            [np.pad(array, pad, constant_values=fill) for array, pad in zip(arrays, missing, strict=True)], axis=1
        )

    return SpeculationRecord(concatenated("numbers", MISS - 1), concatenated("accept_lengths", -1), records[0].fan_out)
