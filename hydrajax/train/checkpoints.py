"""Training checkpoints: orbax directories ``<step>/``, written while training continues.

A checkpoint is complete or absent: orbax writes to a temporary directory and renames it. `RECORD`, next to orbax's
``state/``, holds the metadata and the size and checksum of every file, because orbax loads an array of which a byte has
changed without an error. Several processes share the directory: each writes its shards, the main process the rest.
"""

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
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.files import checksums, size_and_checksum, sync_all
from hydrajax.models.layout import named_leaves
from hydrajax.processes import from_main, is_main
from hydrajax.text.records import FLOAT, INTEGER, OBJECT, TEXT, Kind, checked, list_of, object_of, or_null, read_record
from hydrajax.train.several_processes import anywhere

WHAT = "checkpoint"
RECORD = "hydrajax.json"
STATE, UNFINISHED = "state", ".orbax-checkpoint-tmp"  # orbax's names
FIELDS = {"meta": OBJECT, "metric": or_null(FLOAT), "tree": object_of(TEXT), "files": object_of(list_of(INTEGER, 2))}
QUIET_SECONDS = 0.2  # after a failed save, how long no new file may appear
MOST_ERRORS = 16  # more than the files that orbax writes in threads of their own

# Orbax logs every failure with its traceback through absl; here it becomes a one-line HydrajaxError.
logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)


class Damaged(Exception):
    """A checkpoint is incomplete or changed; the message says how."""


class TrainCheckpoints:
    """A directory of checkpoints: the newest ``keep`` and the best are kept, older ones are deleted.

    A context manager; leaving it waits for the save in progress. Opening the directory removes what a killed run left
    unfinished, so only one run may use it at a time.

    Args:
        higher_is_better: direction of the metric by which the best is kept.
        meta_fields: fields that every ``meta`` must have; a checkpoint without them counts as damaged.

    Raises:
        HydrajaxError: the directory cannot be used. `save`, `wait` and `close` raise it for a save that failed, also in
            the background; earlier checkpoints stay intact.
    """

    def __init__(
        self, directory: str | Path, *, keep: int, higher_is_better: bool, meta_fields: Mapping[str, Kind] | None = None
    ):
        self.directory = Path(os.path.abspath(directory))
        self._saving: int | None = None
        self._record: dict = {}  # of the step being saved
        self._meta_fields = meta_fields or {}
        self._damaged: set[int] = set()
        self._metrics: dict[int, float | None] = {}
        policies = ocp.training.preservation_policies
        kept = [policies.LatestN(keep), _Best(higher_is_better, self._metrics)]
        context = ocp.Context()
        # A lambda: the context is deep-copied, and a bound method would copy this object with it.
        context.asynchronous.post_finalization_callback = lambda: self._write_record()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            from_main(self._remove_unfinished)
            self._checkpointer = ocp.training.Checkpointer(
                self.directory,
                context=context,
                save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
                preservation_policy=policies.AnyPreservationPolicy(kept),
            )
        except OSError as error:
            raise HydrajaxError(f"{WHAT}: cannot use directory {directory}: {error.strerror}") from None
        for step in self.steps():
            with suppress(Damaged):  # reported when the checkpoint is needed
                self._metrics[step] = self._read_record(step)["metric"]

    def save(self, step: int, state: Any, meta: dict, metric: float | None = None, *, wait: bool = False) -> None:
        """Copy the state, then write it in the background.

        Args:
            state: a pytree of jax Arrays, sharded or not. The caller may donate them to the next step at once: orbax
                has copied accelerator memory by then, and XLA does not reuse host memory that NumPy still reads.
            meta: what JSON can hold (settings, data position); tuples come back as lists.
            metric: the checkpoint with the best one is kept; None or NaN is never the best.
            wait: return only when the checkpoint is on disk. An earlier save in progress is always waited for.
        """
        self.wait()
        self._set_damaged_aside()
        if step in self.steps():
            raise HydrajaxError(f"{WHAT}: step {step} is already saved in {self.directory}")
        leaves = named_leaves(state)
        self._record = {
            "meta": checked(json.loads(json.dumps(meta)), self._meta_fields, "meta"),
            "metric": None if metric is None else float(metric),
            "tree": {name: _describe(leaf) for name, leaf in leaves.items()},
        }
        self._metrics[step] = self._record["metric"]
        self._saving = step
        try:
            self._checkpointer.save_async(step, leaves, force=True)
        except Exception as error:
            raise self._failed(error) from None
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in progress."""
        try:
            self._checkpointer.wait()
        except Exception as error:
            raise self._failed(error) from None
        self._saving = None

    def steps(self) -> list[int]:
        """Return the steps on disk, oldest first, damaged ones included, the one being saved not."""
        return [found.step for found in self._checkpointer.checkpoints if found.step != self._saving]

    def latest(self) -> int | None:
        """Return the newest of `steps`."""
        return max(self.steps(), default=None)

    def meta(self) -> dict | None:
        """Return the ``meta`` of the newest checkpoint with a readable record, without checking its arrays."""
        for step in reversed(self.steps()):
            with suppress(Damaged):
                return self._read_record(step)["meta"]
        return None

    def restore(
        self, abstract_state: Any, *, on_warning: Callable[[str], None] = lambda line: None
    ) -> tuple[int, Any, dict]:
        """Load the newest undamaged checkpoint.

        Args:
            abstract_state: arrays or ShapeDtypeStructs whose shardings place the result, whatever mesh it was saved
                from (without a sharding: on the default device).
            on_warning: called with a line for every damaged checkpoint that is skipped. The next `save` renames these
                to ``<step>.damaged``.

        Returns:
            ``(step, state, meta)``.

        Raises:
            HydrajaxError: all checkpoints are damaged, or the newest undamaged one has other names, shapes or dtypes.
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
                on_warning(f"{WHAT}: {self.directory}: {reasons[-1]}; skipping it")
        raise HydrajaxError(f"{WHAT}: every checkpoint in {self.directory} is damaged: {reasons[0]}")

    def close(self) -> None:
        """Wait for the save in progress and stop orbax's threads."""
        try:
            self.wait()
        finally:
            error = _first_error(self._checkpointer.close)
        if error is not None:
            raise HydrajaxError(f"{WHAT}: writing in {self.directory} failed: {one_line(error)}")

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
        record = self._verified_record(step)
        wanted = named_leaves(abstract_state)
        saved, expected = record["tree"], {name: _describe(leaf) for name, leaf in wanted.items()}
        for name in sorted(saved.keys() | expected.keys()):
            if saved.get(name) != expected.get(name):
                raise HydrajaxError(
                    f"{WHAT}: {self.directory}: step {step} was saved by another configuration: {name}: "
                    f"got {saved.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}"
                )
        default = SingleDeviceSharding(jax.devices()[0])
        target = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or default)
            for name, leaf in wanted.items()
        }
        try:
            leaves = self._checkpointer.load(step, target)
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # the machine's fault, not the file's
        except Exception as error:
            raise Damaged(one_line(error)) from None
        return jax.tree.unflatten(jax.tree.structure(abstract_state), [leaves[name] for name in wanted]), record["meta"]

    def _verified_record(self, step: int) -> dict:
        """The record of a checkpoint that every process can read and whose files match their checksums."""
        reason = None
        try:
            record = self._read_record(step)
            for name, expected in record["files"].items() if is_main() else ():
                try:
                    found = size_and_checksum(self.directory / str(step) / name)
                except OSError as error:
                    raise Damaged(f"cannot read {name}: {error.strerror}") from None
                if found != expected:
                    raise Damaged(f"{name} does not match its checksum")
        except Damaged as found:
            reason = found
        if anywhere(reason is not None):
            raise reason or Damaged("another process cannot read it")
        return record

    def _write_record(self) -> None:
        """Called in orbax's thread once every array is written, before the directory gets its final name."""
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
            raise Damaged(f"{RECORD} does not match its checksum")
        return record

    # --- the directory ---------------------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> HydrajaxError:
        """Forget the step whose save failed and remove what was written, as the disk may be full."""
        step, self._saving = self._saving, None
        _first_error(self._checkpointer.wait)  # an error left over would fail the next save
        for thread in threading.enumerate():
            if type(thread).__module__.startswith("orbax."):
                with suppress(Exception):  # its own error, which `join` raises
                    thread.join()
        if is_main():  # TensorStore's threads cannot be joined and may create files later
            deadline = time.monotonic() + QUIET_SECONDS
            while time.monotonic() < deadline:
                if self._remove_unfinished():
                    deadline = time.monotonic() + QUIET_SECONDS
                time.sleep(QUIET_SECONDS / 20)
        self._checkpointer.reload()
        return HydrajaxError(f"{WHAT}: saving step {step} in {self.directory} failed: {one_line(error)}")

    def _remove_unfinished(self) -> bool:
        """Return True if there was something to remove."""
        found = list(self.directory.glob(f"*{UNFINISHED}*"))
        for path in found:
            shutil.rmtree(path, ignore_errors=True)
        return bool(found)

    def _set_damaged_aside(self) -> None:
        """Rename damaged checkpoints, so that they do not count among the newest ones; nothing is deleted."""
        if self._damaged:
            from_main(self._rename_damaged)
            self._damaged.clear()
            self._checkpointer.reload()

    def _rename_damaged(self) -> None:
        for step in self._damaged:
            target = self.directory / f"{step}.damaged"
            shutil.rmtree(target, ignore_errors=True)
            (self.directory / str(step)).rename(target)


class _Best:
    """An orbax preservation policy: keep the checkpoint with the best metric, the newest of equal ones."""

    def __init__(self, higher_is_better: bool, metrics: Mapping[int, float | None]):
        self._sign, self._metrics = (1 if higher_is_better else -1), metrics

    def should_preserve(self, checkpoints, *, context):
        metrics = {c.step: self._metrics.get(c.step) for c in checkpoints}
        ranked = [
            (self._sign * value, step) for step, value in metrics.items() if not (value is None or math.isnan(value))
        ]
        best = max(ranked, default=(0, None))[1]
        return [step == best for step in metrics]


def _first_error(call: Callable[[], None]) -> Exception | None:
    """Call until it succeeds and return the first error: each call raises the error of one of orbax's writers."""
    first = None
    for _ in range(MOST_ERRORS):
        try:
            call()
            break
        except Exception as error:
            first = first or error
    return first


def _checksum(record: dict) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _describe(leaf) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
