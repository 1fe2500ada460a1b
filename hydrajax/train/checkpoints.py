"""Training checkpoints in our own format: orbax directories ``<step>/``, saved while the training goes on.

A checkpoint is whole or absent: orbax writes to a temporary directory and renames it. Beside orbax's ``state/`` lies
our `RECORD` with the meta data and the size and checksum of every file: orbax alone would load an array of which a
byte has changed. Several processes share the directory: each writes its part of the arrays, the main one the rest.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.files import checksums, size_and_checksum, sync_all
from hydrajax.models.layout import named_leaves
from hydrajax.processes import anywhere, is_main, main_does
from hydrajax.text.records import FLOAT, INTEGER, OBJECT, TEXT, Kind, checked, list_of, object_of, or_null, read_record

WHAT = "checkpoint"
RECORD = "hydrajax.json"
STATE, UNFINISHED = "state", ".orbax-checkpoint-tmp"  # orbax's names
FIELDS = {"meta": OBJECT, "metric": or_null(FLOAT), "tree": object_of(TEXT), "files": object_of(list_of(INTEGER, 2))}
QUIET = 0.2  # seconds for which nothing new may appear after a failed save
MOST_ERRORS_OF_A_SAVE = 16  # more than the files that orbax writes with threads of their own

# Orbax logs every failure with its traceback through absl; here it becomes one line of a HydrajaxError.
logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)


class Damaged(Exception):
    """A checkpoint is not whole; the message says why."""


class TrainCheckpoints:
    """A directory of checkpoints, of which the newest ``keep`` and the best stay and the others are deleted.

    The best is the one with the highest metric, or with the lowest if ``higher_is_better`` is False; one that was saved
    with metric None (or NaN) is never the best. Use the class as a context manager: leaving it waits for the save under
    way. What a killed run left unfinished is removed at the start, so only one run may use a directory at a time.

    meta_fields: what every ``meta`` holds besides what may be in it; a checkpoint with another is damaged.

    `save`, `wait` and `close` raise `HydrajaxError` for a save that failed, also when it did so in the background; the
    checkpoints before it stay intact.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int,
        higher_is_better: bool,
        meta_fields: Mapping[str, Kind] = MappingProxyType({}),
    ):
        if type(keep) is not int or keep < 1:
            raise HydrajaxError(f"{WHAT}: keep is {keep!r}, allowed is an integer from 1 up")
        self.directory = Path(os.path.abspath(directory))
        self._saving: int | None = None
        self._record: dict = {}  # of the step being saved
        self._meta_fields = meta_fields
        self._damaged: set[int] = set()
        self._metrics: dict[int, float] = {}
        policies = ocp.training.preservation_policies
        kept = [policies.LatestN(keep), _Best(higher_is_better, self._metrics)]
        context = ocp.Context()
        # A lambda: the context is deep-copied, and a bound method would take a copy of this object with it.
        context.asynchronous.post_finalization_callback = lambda: self._write_record()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            main_does(self._remove_unfinished)
            self._checkpointer = ocp.training.Checkpointer(
                self.directory,
                context=context,
                save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
                preservation_policy=policies.AnyPreservationPolicy(kept),
            )
        except OSError as error:
            raise HydrajaxError(f"{WHAT}: cannot use directory {directory}: {error.strerror}") from None
        for step in self.steps():
            try:
                self._remember_metric(step, self._read_record(step)["metric"])
            except Damaged:
                continue  # reported if it is ever needed

    def save(self, step: int, state: Any, meta: dict, metric: float | None = None, *, wait: bool = False) -> None:
        """Start saving; returns once the values are safe, while they are written in the background.

        state: a pytree of jax Arrays, sharded or not; a random key as its uint32 data (`jax.random.key_data`). The
            caller may donate them to the next training step at once: orbax has copied accelerator memory to the host by
            then, and XLA leaves host memory alone that NumPy still reads.
        meta: what JSON can hold (data position, configuration); lists come back for tuples.
        wait: return only when the checkpoint is on disk. A save still under way is waited for in any case.
        """
        self.wait()
        self._set_damaged_aside()
        if step in self.steps():
            raise HydrajaxError(f"{WHAT}: step {step} is already saved in {self.directory}")
        leaves = named_leaves(state)
        for name, leaf in leaves.items():
            if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                found = leaf.dtype if isinstance(leaf, jax.Array) else type(leaf).__name__
                raise HydrajaxError(f"{WHAT}: {name} is of type {found}, allowed are jax Arrays of plain numbers")
        tree = {name: _describe(leaf) for name, leaf in leaves.items()}
        metric = None if metric is None else float(metric)
        self._record = {"meta": checked(json.loads(json.dumps(meta)), self._meta_fields, "meta")}
        self._record |= {"metric": metric, "tree": tree}
        self._remember_metric(step, metric)
        self._saving = step
        try:
            self._checkpointer.save_async(step, leaves, force=True)
        except Exception as error:
            raise self._failed(error) from None
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until no save is under way."""
        try:
            self._checkpointer.wait()
        except Exception as error:
            raise self._failed(error) from None
        self._saving = None

    def steps(self) -> list[int]:
        """The steps on disk, oldest first, whole or damaged. One that is still being saved is not among them."""
        return [found.step for found in self._checkpointer.checkpoints if found.step != self._saving]

    def latest(self) -> int | None:
        """The newest of `steps`."""
        return max(self.steps(), default=None)

    def meta(self) -> dict | None:
        """The ``meta`` of the newest checkpoint in which it can be read. The arrays are not looked at."""
        for step in reversed(self.steps()):
            try:
                return self._read_record(step)["meta"]
            except Damaged:
                continue
        return None

    def restore(
        self, abstract_state: Any, *, on_warning: Callable[[str], None] = lambda line: None
    ) -> tuple[int, Any, dict]:
        """Load ``(step, state, meta)`` of the newest whole checkpoint; ``on_warning`` hears of damaged newer ones.

        abstract_state: arrays or ShapeDtypeStructs; their shardings say where each array goes, whatever mesh it was
            saved from (without one: the default device).

        Raises `HydrajaxError` if no checkpoint is whole, and if the newest whole one holds a state of other names,
        shapes or dtypes. Damaged checkpoints are renamed to ``<step>.damaged`` by the next `save`.
        """
        self.wait()
        if not self.steps():
            raise HydrajaxError(f"{WHAT}: no checkpoint in {self.directory}")
        reasons = []
        for step in reversed(self.steps()):
            try:
                return step, *self._restore(step, abstract_state)
            except Damaged as reason:
                self._damaged.add(step)
                reasons.append(f"step {step} is damaged: {reason}")
                on_warning(f"{WHAT}: {self.directory}: {reasons[-1]}; it is skipped")
        raise HydrajaxError(f"{WHAT}: no checkpoint in {self.directory} is whole: {reasons[0]}")

    def close(self) -> None:
        """Wait for a save under way and stop orbax's threads."""
        try:
            self.wait()
        except HydrajaxError:
            self._close()
            raise
        if (error := self._close()) is not None:
            raise HydrajaxError(f"{WHAT}: writing in {self.directory} failed: {one_line(error)}")

    def _close(self) -> Exception | None:
        """The first error that orbax had left over, if there was one: it raises each before it closes."""
        first = None
        for _ in range(MOST_ERRORS_OF_A_SAVE):
            try:
                self._checkpointer.close()
                break
            except Exception as error:
                first = first or error
        return first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type, *_) -> None:
        try:
            self.close()
        except HydrajaxError:
            if error_type is None:  # else the first error is the one to show
                raise

    # --- one checkpoint --------------------------------------------------------------------------------------------

    def _restore(self, step: int, abstract_state: Any) -> tuple[Any, dict]:
        record = self._whole_record(step)
        wanted = named_leaves(abstract_state)
        self._check_tree(step, record["tree"], {name: _describe(leaf) for name, leaf in wanted.items()})
        default = SingleDeviceSharding(jax.devices()[0])
        target = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or default)
            for name, leaf in wanted.items()
        }
        try:
            leaves = self._checkpointer.load(step, target)
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # this machine's trouble, not the file's
        except Exception as error:
            raise Damaged(one_line(error)) from None
        return jax.tree.unflatten(jax.tree.structure(abstract_state), [leaves[name] for name in wanted]), record["meta"]

    def _whole_record(self, step: int) -> dict:
        """The record of a checkpoint that every process can read and whose files the main one has found whole."""
        reason = None
        try:
            record = self._read_record(step)
            if is_main():
                self._check_files(step, record["files"])
        except Damaged as found:
            reason = found
        if anywhere(reason is not None):
            raise reason or Damaged("another process cannot read it")
        return record

    def _write_record(self) -> None:
        """Called by orbax's thread when every array is written, before the directory gets its final name."""
        if not is_main():
            return
        directory = self.directory / f"{self._saving}{UNFINISHED}"
        record = self._record | {"files": checksums(directory, STATE)}
        (directory / RECORD).write_text(json.dumps(record | {"checksum": _checksum(record)}), encoding="utf-8")
        sync_all(directory)  # an older checkpoint is deleted once this one has its name

    def _read_record(self, step: int) -> dict:
        path = self.directory / str(step) / RECORD
        try:
            record = read_record(path, FIELDS, WHAT)
            checked(record["meta"], self._meta_fields, f"{WHAT}: {path}: meta")
        except HydrajaxError as error:
            raise Damaged(str(error).removeprefix(f"{WHAT}: ").replace(str(path), RECORD)) from None
        checksum = record.pop("checksum", None)  # older versions wrote none
        if checksum is not None and checksum != _checksum(record):
            raise Damaged(f"{RECORD} is not what was written")
        return record

    def _check_tree(self, step: int, saved: dict[str, str], wanted: dict[str, str]) -> None:
        what = f"{WHAT}: {self.directory}: step {step} was saved by another configuration"
        for name in sorted(saved.keys() | wanted.keys()):
            if saved.get(name) != wanted.get(name):
                found, expected = saved.get(name, "missing"), wanted.get(name, "nothing of that name")
                raise HydrajaxError(f"{what}: {name} is {found}, expected {expected}")

    def _check_files(self, step: int, files: dict[str, list[int]]) -> None:
        for name, expected in files.items():
            try:
                found = size_and_checksum(self.directory / str(step) / name)
            except OSError as error:
                raise Damaged(f"cannot read {name}: {error.strerror}") from None
            if found != expected:
                raise Damaged(f"{name} is not what was written")

    # --- the directory ---------------------------------------------------------------------------------------------

    def _remember_metric(self, step: int, metric: float | None) -> None:
        self._metrics.pop(step, None)
        if metric is not None and not math.isnan(metric):
            self._metrics[step] = metric

    def _failed(self, error: Exception) -> HydrajaxError:
        """What to do after a failed save: free what it wrote, as the disk may be full, and forget the step."""
        step, self._saving = self._saving, None
        self._metrics.pop(step, None)
        self._let_other_errors_pass()
        if is_main():
            self._remove_until_quiet()
        self._checkpointer.reload()
        return HydrajaxError(f"{WHAT}: saving step {step} in {self.directory} failed: {one_line(error)}")

    def _let_other_errors_pass(self) -> None:
        """Wait until orbax writes nothing any more: its threads write several files, and each may fail on its own.

        Each call to ``wait`` raises the error of one of them. One left over would fail the next save or the closing.
        """
        for _ in range(MOST_ERRORS_OF_A_SAVE):
            with suppress(Exception):
                self._checkpointer.wait()
                break
        for thread in threading.enumerate():
            if type(thread).__module__.startswith("orbax."):
                with suppress(Exception):  # its own error, which `join` raises
                    thread.join()

    def _remove_until_quiet(self) -> None:
        """Remove what a failed save left. TensorStore's threads cannot be joined: they may create files later."""
        deadline = time.monotonic() + QUIET
        while time.monotonic() < deadline:
            if self._remove_unfinished():
                deadline = time.monotonic() + QUIET
            time.sleep(QUIET / 20)

    def _remove_unfinished(self) -> bool:
        """Return whether there was something to remove."""
        found = list(self.directory.glob(f"*{UNFINISHED}*"))
        for path in found:
            shutil.rmtree(path, ignore_errors=True)
        return bool(found)

    def _set_damaged_aside(self) -> None:
        """Rename damaged checkpoints, so that new ones are counted without them; nothing is deleted."""
        if not self._damaged:
            return
        main_does(self._rename_damaged)
        for step in self._damaged:
            self._metrics.pop(step, None)
        self._damaged.clear()
        self._checkpointer.reload()

    def _rename_damaged(self) -> None:
        for step in self._damaged:
            target = self.directory / f"{step}.damaged"
            shutil.rmtree(target, ignore_errors=True)
            (self.directory / str(step)).rename(target)


class _Best:
    """An orbax preservation policy: keep the checkpoint of the best metric, of equals the newest."""

    def __init__(self, higher_is_better: bool, metrics: dict[int, float]):
        self._sign, self._metrics = (1 if higher_is_better else -1), metrics

    def should_preserve(self, checkpoints, *, context):
        ranked = [(self._sign * self._metrics[c.step], c.step) for c in checkpoints if c.step in self._metrics]
        best = max(ranked, default=(0, None))[1]
        return [c.step == best for c in checkpoints]


def _checksum(record: dict) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _describe(leaf) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
