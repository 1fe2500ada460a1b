"""The base's hidden states of the training rows on disk, so that many epochs run the base once."""

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
    """``{"hidden": memmap [n, T, D]}`` of post-norm hidden states, computed if ``output`` has none; {} if not wanted.

    The size is printed before anything is written. Raises `HydrajaxError` where it exceeds ``data.hidden_cache_gb`` or
    the free disk, and for drafters whose ``aux_hidden_layers`` are other layers. The file holds bfloat16, or float32
    if the run is.
    """
    limit = config.data.hidden_cache_gb
    if not limit:
        return {}
    if jax.process_count() > 1:
        raise HydrajaxError("data.hidden_cache_gb: the cache is for one process; set it to 0 with several")
    if aux_hidden_layers != (0,):
        raise HydrajaxError(
            "data.hidden_cache_gb: the cache holds the base's last hidden states, these heads read "
            f"aux_hidden_layers {list(aux_hidden_layers)}"
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
            f"data.hidden_cache_gb: {size / 1e9:.2f} GB are needed, allowed are {limit} and free {free / 1e9:.2f}"
        )
    record.unlink(missing_ok=True)  # the record says that the file is whole
    try:
        write(path, dtype, config, model, base_params, rows, mesh)
        with WholeFile(record, "data.hidden_cache_gb") as file:
            file.write_text(json.dumps(wanted))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise HydrajaxError(f"data.hidden_cache_gb: cannot write {path}: {error.strerror}") from None
    except HydrajaxError:
        path.unlink(missing_ok=True)
        raise
    return {"hidden": np.memmap(path, dtype, "r", shape=shape)}


def _known(record: Path) -> dict | None:
    try:
        return read_record(record, {}, "data.hidden_cache_gb")
    except HydrajaxError:
        return None


def write(path: Path, dtype: np.dtype, config: TrainConfig, model: BaseModel, base_params, rows: Rows, mesh) -> None:
    """In order and not through a map: on a disk that fills up, writing to a map kills the process."""

    @jax.jit
    def forward(params, tokens, segments):
        return run_base(model, params, tokens, segments=segments).hidden.astype(dtype)

    batch, n_rows = config.batch_size, len(rows.tokens)
    sharding = batch_sharding(mesh)
    with path.open("wb") as file:
        for start in track(range(0, n_rows, batch), "hidden states", transient=True, console=Console(stderr=True)):
            indices = np.arange(start, start + batch) % n_rows  # one shape; the overlap is not kept
            tokens, segments = (
                None if x is None else jax.device_put(x[indices], sharding) for x in (rows.tokens, rows.segments)
            )
            hidden = jax.device_put(forward(base_params, tokens, segments), replicated(mesh))
            file.write(np.asarray(hidden)[: n_rows - start].tobytes())
        file.flush()
        sync(file.fileno())


def fingerprint(rows: Rows, base_params) -> str:
    """Of the tokens, and of the base by a sample of every tensor."""
    samples = [np.asarray(jnp.ravel(leaf)[:64].astype(jnp.float32)) for leaf in jax.tree.leaves(base_params)]
    return digest(rows.tokens, rows.segments, *samples)
