"""Hidden-state cache: the base's outputs for the training sequences on disk, to run the base only once.

Runs on the same data and base can share a cache (``data.hidden_cache``).
"""

import json
import math
import shutil
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from hydrajax import ops
from hydrajax.drafters.drafter import DrafterSpec
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile, sync
from hydrajax.locking import in_use
from hydrajax.models.base_model import BaseModel, BoundBase
from hydrajax.models.packed_forward import chunk_width, into_chunks, run_base
from hydrajax.sharding import replicated
from hydrajax.text.records import read_record
from hydrajax.train.data.packing import Rows, digest
from hydrajax.train.run_config import TrainConfig
from hydrajax.train.train_step import at_precision, batch_sharding

VERSION = 3
HIDDEN, BEST, AUX, RECORD = "hidden.bin", "best.bin", "aux.bin", "hidden.json"


def hidden_states(
    config: TrainConfig, spec: DrafterSpec, model: BaseModel, base_params: Any, rows: Rows, mesh, console: Console
) -> dict[str, np.ndarray]:
    """Return the base's outputs for the training sequences, from the cache or computed and stored there.

    The size is printed before anything is written.

    Returns:
        ``hidden`` ``[n, T, D]``, the post-norm hidden states in bfloat16, or float32 for a run whose matmuls are in
        float32, ``best`` int32 ``[n, T]``, the most likely next tokens, and for drafts that read other layers ``aux``
        ``[n, T, layers D]``; memory-mapped. {} if ``data.hidden_cache_gb`` is 0.

    Raises:
        HydrajaxError: the cache exceeds ``data.hidden_cache_gb`` or the free disk, the drafter reads the base's keys
            and values, or the run has several processes.
    """
    limit = config.data.hidden_cache_gb
    if not limit:
        return {}
    if jax.process_count() > 1:
        raise HydrajaxError(f"data.hidden_cache_gb: got {limit}, expected 0 with several processes")
    if spec.reads_cache:
        raise HydrajaxError(
            f"data.hidden_cache_gb: got {limit}, expected 0 for heads that read the base's keys and values"
        )
    shape = (*rows.tokens.shape, model.config.width)
    rounded = "bfloat16" in (config.dtype, config.matmul_precision)
    dtype = np.dtype(jnp.bfloat16 if rounded else np.float32)
    folder = Path(config.data.hidden_cache or config.output)
    record = folder / RECORD
    files = {"hidden": (folder / HIDDEN, dtype, shape), "best": (folder / BEST, np.dtype(np.int32), shape[:-1])}
    layers = spec.aux_hidden_layers
    if layers != (0,):
        files["aux"] = (folder / AUX, dtype, (*shape[:-1], len(layers) * shape[-1]))
    sizes = {path: math.prod(shape) * dtype.itemsize for path, dtype, shape in files.values()}
    size = sum(sizes.values())
    wanted = {
        "shape": list(shape),
        "dtype": dtype.name,
        "matmul_precision": config.matmul_precision,
        "rows": fingerprint(rows, base_params),
        "version": VERSION,
    } | ({"layers": list(layers)} if layers != (0,) else {})

    def opened() -> dict[str, np.ndarray]:
        return {name: np.memmap(path, dtype, "r", shape=shape) for name, (path, dtype, shape) in files.items()}

    if _known(record) == wanted and all(path.exists() and path.stat().st_size == sizes[path] for path in sizes):
        console.print(f"hidden states: {size / 1e9:.2f} GB, found in {folder}")
        return opened()
    console.print(f"hidden states: {size / 1e9:.2f} GB to write to {folder} (limit {limit} GB)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HydrajaxError(f"data.hidden_cache: cannot make the directory {folder}: {error.strerror}") from None
    free = shutil.disk_usage(folder).free
    if size > min(limit * 1e9, free):
        raise HydrajaxError(
            f"data.hidden_cache_gb: got {limit} (free disk {free / 1e9:.2f} GB), expected at least {size / 1e9:.2f}"
        )
    with nullcontext() if folder == Path(config.output) else in_use(folder, "data.hidden_cache"):
        record.unlink(missing_ok=True)  # written last: it marks the files as complete
        try:
            write(files, layers, config, model, base_params, rows, mesh)
            with WholeFile(record, "data.hidden_cache_gb") as file:
                file.write_text(json.dumps(wanted))
        except (OSError, HydrajaxError) as error:
            for path in sizes:
                path.unlink(missing_ok=True)
            if isinstance(error, HydrajaxError):
                raise
            raise HydrajaxError(f"data.hidden_cache_gb: cannot write to {folder}: {error.strerror}") from None
    return opened()


def _known(record: Path) -> dict | None:
    try:
        return read_record(record, {}, "data.hidden_cache_gb")
    except HydrajaxError:
        return None


def write(
    files: dict[str, tuple[Path, np.dtype, tuple[int, ...]]],
    layers: tuple[int, ...],
    config: TrainConfig,
    model: BaseModel,
    base_params,
    rows: Rows,
    mesh,
) -> None:
    """Write with ordinary writes: on a full disk, writing to a memory map kills the process."""

    @jax.jit
    def forward(params, tokens, segments):
        read = run_base(model, params, tokens, layers, segments)
        hidden = read.hidden
        width = chunk_width(config.objective.chunk_tokens, tokens.shape)  # logits exist for one chunk at a time
        chunks = jax.lax.map(
            lambda x: ops.here().argmax(BoundBase(model, params).logits(x)), into_chunks(hidden, width)
        )
        best = jnp.moveaxis(chunks, 0, 1).reshape(len(tokens), -1)[:, : tokens.shape[1]]
        found = {"hidden": hidden, "best": best, "aux": read.aux_hidden_states}
        return {name: found[name].astype(dtype) for name, (_, dtype, _) in files.items()}

    batch, n_rows = config.batch_size, len(rows.tokens)
    sharding = batch_sharding(mesh)
    with ExitStack() as stack:
        opened = {name: stack.enter_context(path.open("wb")) for name, (path, _, _) in files.items()}
        for start in track(range(0, n_rows, batch), "hidden states", transient=True, console=Console(stderr=True)):
            indices = np.arange(start, start + batch) % n_rows  # all batches have one shape; the overlap is dropped
            tokens, segments = (
                None if x is None else jax.device_put(x[indices], sharding) for x in (rows.tokens, rows.segments)
            )
            with at_precision(config.precision):  # as in the steps of a run without a cache
                outputs = jax.device_put(forward(base_params, tokens, segments), replicated(mesh))
            for name, output in outputs.items():
                opened[name].write(np.asarray(output)[: n_rows - start].tobytes())
        for file in opened.values():
            file.flush()
            sync(file.fileno())


def fingerprint(rows: Rows, base_params) -> str:
    """A hash of the tokens and of a sample of every tensor of the base."""
    samples = [np.asarray(jnp.ravel(leaf)[:64].astype(jnp.float32)) for leaf in jax.tree.leaves(base_params)]
    return digest(rows.tokens, rows.segments, *samples)
