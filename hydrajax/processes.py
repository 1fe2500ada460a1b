"""Coordination of a run on several hosts.

Every process runs the same program and holds its devices' shards of every array. With one process these functions do
nothing. All except `is_main` must be called by every process, in the same order, from the main thread.
"""

import hashlib
import itertools
import os
import pickle
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed  # the only access to the store of the coordinator; orbax takes it too
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hydrajax.errors import HydrajaxError, integer_in

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
LOST = "another process of this run has ended or cannot be reached"
# How long a process waits for the others at its end, which may be in the middle of a step.
SHUTDOWN_SECONDS = 30
WAIT_SECONDS = 1  # at a time, so that signals are handled
_said = itertools.count()  # numbers the values of `from_main`


def start() -> None:
    """Join the other processes if the environment names a coordinator; call it before making the first array.

    ``JAX_COORDINATOR_ADDRESS`` is ``host:port`` of process 0. ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` are optional
    on SLURM, Open MPI and TPU pods, where JAX detects them.
    """
    if ADDRESS not in os.environ:
        return
    address, count, index = os.environ[ADDRESS], _number(COUNT), _number(INDEX)
    try:
        host, _, port = address.rpartition(":")
        if not host or not 0 < integer_in(port) < 2**16:
            raise ValueError
    except ValueError:
        raise HydrajaxError(f"{ADDRESS}: got {address!r}, expected host:port") from None
    if count is not None and index is not None and index >= count:
        raise HydrajaxError(f"{INDEX}: got {index}, expected less than {COUNT} = {count}")
    try:
        jax.distributed.initialize(address, count, index, shutdown_timeout_seconds=SHUTDOWN_SECONDS)
    except (ValueError, RuntimeError) as error:
        raise HydrajaxError(f"{ADDRESS}, {COUNT}, {INDEX}: {str(error).splitlines()[0]}") from None


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is not None and not (text.isascii() and text.isdecimal()):
        raise HydrajaxError(f"{name}: got {text!r}, expected an integer from 0 up")
    return None if text is None else int(text)


def is_main() -> bool:
    """Return whether this process writes metrics, messages and exported files."""
    return jax.process_index() == 0


def store() -> Any:
    """Return the client of the coordinator's key-value store, which needs no devices."""
    return distributed.global_state.client


def spans(mesh: Mesh | None) -> bool:
    """Return whether a mesh has devices of other processes."""
    return mesh is not None and mesh.is_multi_process


def from_main(find: Callable[[], Any]) -> Any:
    """Return what ``find`` returns in the main process, in which alone it is called. It uses no devices.

    Raises:
        HydrajaxError: in every process, if ``find`` raises it.
    """
    if jax.process_count() == 1:
        return find()
    key = f"hydrajax/said/{next(_said)}"
    if not is_main():
        found, error = pickle.loads(_awaited(key))  # the processes of one run trust each other
    else:
        found = error = None
        try:
            found = find()
        except HydrajaxError as raised:
            error = raised
        store().key_value_set_bytes(key, pickle.dumps((found, error)))
    if error is not None:
        raise error
    return found


def agreed(mesh: Mesh | None, find: Callable[[], Any]) -> Any:
    """Return what ``find`` returns, in the main process if the mesh spans processes: for what differs between hosts,
    such as times, random numbers and cached files.
    """
    return from_main(find) if spans(mesh) else find()


def _awaited(key: str) -> bytes:
    """Return a value of the store as soon as it is set: the main process may load a model from a slower disk."""
    while True:
        try:
            return store().blocking_key_value_get_bytes(key, WAIT_SECONDS * 1000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def check_same(what: str, *described: Any) -> None:
    """Raise `HydrajaxError` if this process and the main one differ in ``what``, which the values describe.

    Processes that compute different things would wait for each other.
    """
    text = hashlib.sha256(repr(described).encode()).hexdigest()
    if from_main(lambda: text) != text:
        raise HydrajaxError(f"{what}: got others than process 0, expected the same in all processes")


def refuse_several(field: str) -> None:
    """Raise `HydrajaxError` if there are several processes, which this argument does not support."""
    if jax.process_count() > 1:
        raise HydrajaxError(f"{field}: got {jax.process_count()} processes, expected 1")


def fetch(tree: Any) -> Any:
    """Fetch arrays from the devices, like `jax.device_get`. Arrays that are sharded over processes are gathered in one
    program.
    """
    leaves, treedef = jax.tree.flatten(tree)
    sharded = {i: leaf for i, leaf in enumerate(leaves) if not _readable(leaf)}
    if sharded:
        homes = {i: NamedSharding(leaf.sharding.mesh, PartitionSpec()) for i, leaf in sharded.items()}
        gathered = jax.jit(_same, out_shardings=homes)(sharded)
        leaves = [gathered.get(i, leaf) for i, leaf in enumerate(leaves)]
    return jax.device_get(jax.tree.unflatten(treedef, leaves))


def _same(x: Any) -> Any:  # not a lambda, which would be compiled at every call
    return x


def _readable(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
