"""Hidden-state cache: the base's hidden states of the training sequences on disk, to run the base only once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import track

from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile, sync
from hydrajax.models.base_model import BaseModel
from hydrajax.models.packed_forward import run_base
from hydrajax.sharding import replicated
from hydrajax.text.records import read_record
from hydrajax.train.data.packing import Rows, digest
from hydrajax.train.run_config import TrainConfig
from hydrajax.train.train_step import batch_sharding

FILE, RECORD = "hidden.bin", "hidden.json"


def hidden_states(
    config: TrainConfig,
    aux_hidden_layers: tuple[int, ...],
    model: BaseModel,
    base_params: Any,
    rows: Rows,
    mesh,
    console: Console,
) -> dict[str, np.ndarray]:
    """Return the post-norm hidden states of the training sequences, from ``output`` or computed and stored there.

    The size is printed before anything is written. The dtype is bfloat16, or float32 for a float32 run.

    Returns:
        ``{"hidden": memmap [n, T, D]}``, or {} if ``data.hidden_cache_gb`` is 0.

    Raises:
        HydrajaxError: the cache exceeds ``data.hidden_cache_gb`` or the free disk, the drafter reads other
            ``aux_hidden_layers``, or the run has several processes.
    """
    limit = config.data.hidden_cache_gb
    if not limit:
        return {}
    if jax.process_count() > 1:
        raise HydrajaxError(f"data.hidden_cache_gb: got {limit}, expected 0 with several processes")
    if aux_hidden_layers != (0,):
        raise HydrajaxError(
            f"data.hidden_cache_gb: got {limit}, expected 0 for heads that read aux_hidden_layers "
            f"{list(aux_hidden_layers)}: the cache holds the last layer's hidden states"
        )
    shape = (*rows.tokens.shape, model.config.width)
    dtype = np.dtype(np.float32) if config.dtype == "float32" else np.dtype(ml_dtypes.bfloat16)
    size = int(np.prod(shape)) * dtype.itemsize
    folder = Path(config.output)
    wanted = {"shape": list(shape), "dtype": dtype.name, "rows": fingerprint(rows, base_params)}
    path, record = folder / FILE, folder / RECORD
    if _known(record) == wanted and path.exists() and path.stat().st_size == size:
        console.print(f"hidden states: {size / 1e9:.2f} GB, found in {path}")
        return {"hidden": np.memmap(path, dtype, "r", shape=shape)}
    console.print(f"hidden states: {size / 1e9:.2f} GB to write to {path} (limit {limit} GB)")
    free = shutil.disk_usage(folder).free
    if size > min(limit * 1e9, free):
        raise HydrajaxError(
            f"data.hidden_cache_gb: got {limit} (free disk {free / 1e9:.2f} GB), expected at least {size / 1e9:.2f}"
        )
    record.unlink(missing_ok=True)  # written last: it marks the file as complete
    try:
        write(path, dtype, config, model, base_params, rows, mesh)
        with WholeFile(record, "data.hidden_cache_gb") as file:
            file.write_text(json.dumps(wanted))
    except (OSError, HydrajaxError) as error:
        path.unlink(missing_ok=True)
        if isinstance(error, HydrajaxError):
            raise
        raise HydrajaxError(f"data.hidden_cache_gb: cannot write {path}: {error.strerror}") from None
    return {"hidden": np.memmap(path, dtype, "r", shape=shape)}


def _known(record: Path) -> dict | None:
    try:
        return read_record(record, {}, "data.hidden_cache_gb")
    except HydrajaxError:
        return None


def write(path: Path, dtype: np.dtype, config: TrainConfig, model: BaseModel, base_params, rows: Rows, mesh) -> None:
    """Write with ordinary writes: on a full disk, writing to a memory map kills the process."""

    @jax.jit
    def forward(params, tokens, segments):
        return run_base(model, params, tokens, segments=segments).hidden.astype(dtype)

    batch, n_rows = config.batch_size, len(rows.tokens)
    sharding = batch_sharding(mesh)
    with path.open("wb") as file:
        for start in track(range(0, n_rows, batch), "hidden states", transient=True, console=Console(stderr=True)):
            indices = np.arange(start, start + batch) % n_rows  # all batches have one shape; the overlap is dropped
            tokens, segments = (
                None if x is None else jax.device_put(x[indices], sharding) for x in (rows.tokens, rows.segments)
            )
            hidden = jax.device_put(forward(base_params, tokens, segments), replicated(mesh))
            file.write(np.asarray(hidden)[: n_rows - start].tobytes())
        file.flush()
        sync(file.fileno())


def fingerprint(rows: Rows, base_params) -> str:
    """A hash of the tokens and of a sample of every tensor of the base."""
    samples = [np.asarray(jnp.ravel(leaf)[:64].astype(jnp.float32)) for leaf in jax.tree.leaves(base_params)]
    return digest(rows.tokens, rows.segments, *samples)
