"""From a run's settings to the task that `hydrajax.train.loop.train` runs: its data read, its base loaded."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console

from hydrajax.checkpoints.base import load_llama, read_config
from hydrajax.checkpoints.hub import resolve
from hydrajax.errors import HydrajaxError
from hydrajax.sharding import placer
from hydrajax.text.tokenizer import load_tokenizer
from hydrajax.train.config import TrainConfig, check_length
from hydrajax.train.data import dataset
from hydrajax.train.data.hidden_cache import hidden_states
from hydrajax.train.tasks.base import BaseTask
from hydrajax.train.tasks.heads import HeadsTask, make_drafter
from hydrajax.train.tasks.joint import JointTask, check_joint


def make_task(config: TrainConfig, mesh: Mesh, console: Console) -> BaseTask | HeadsTask:
    """Read the data and, for heads, load the base onto the mesh; the console is told what was read and how far it is.

    Raises `HydrajaxError` for data or a base that cannot be had, or that do not go together.
    """
    data = dataset.build(config.data, tokenizer_of(config), config.seed, console.print)
    if config.task == "base":
        return BaseTask(config, data, mesh)
    directory = resolve(config.model, "model")
    if config.task == "joint":
        check_joint(config, read_config(directory, "model"))  # before gigabytes are read
    with console.status("loading the base") as line:
        model, base_params = load_llama(
            directory,
            jnp.dtype(config.dtype),
            placer(mesh),
            int8=config.quantize == "int8",
            on_progress=lambda done, total: line.update(f"loading the base {done / total:.0%}"),
        )
    _check_fit(config, data, model)
    if config.task == "joint":
        return JointTask(config, data, model, base_params, mesh)
    reads = make_drafter(config.draft, model.config, config.dtype).reads
    extras = hidden_states(config, reads, model, base_params, data.train, mesh, console)
    return HeadsTask(config, data, model, base_params, mesh, extras)


def tokenizer_of(config: TrainConfig) -> Any | None:
    """The tokenizer that the settings name, which is the base's by default; None where one is to be trained."""
    if config.data.new_tokenizer:
        return None
    name, directory = ("data.tokenizer", config.data.tokenizer) if config.data.tokenizer else ("model", config.model)
    tokenizer = None if directory is None else load_tokenizer(resolve(directory, name), name)
    if tokenizer is None:
        raise HydrajaxError(f"data.tokenizer: found no tokenizer in {directory}; name its directory")
    return tokenizer


def _check_fit(config: TrainConfig, data: dataset.Dataset, model) -> None:
    """Refuse data that the base cannot read: token ids of another model's tokenizer, rows longer than its context."""
    largest = max(int(rows.tokens.max()) for rows in (data.train, data.held_out) if rows is not None)
    if largest >= model.config.vocab_size:
        raise HydrajaxError(
            f"data.tokenizer: gives token id {largest}, the base's vocabulary is 0..{model.config.vocab_size - 1}: "
            "another model's tokenizer"
        )
    check_length(config, model.config)
