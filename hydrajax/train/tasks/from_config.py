"""Make the task of a run from its settings: read the data and load the base."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console

from hydrajax.errors import HydrajaxError
from hydrajax.formats.hub import resolve
from hydrajax.formats.huggingface import load_llama, read_config
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.weights import described
from hydrajax.sharding import placer
from hydrajax.text.tokenizer import load_tokenizer
from hydrajax.train.data import dataset
from hydrajax.train.data.hidden_cache import hidden_states
from hydrajax.train.run_config import TrainConfig, check_length
from hydrajax.train.tasks.base_task import BaseTask
from hydrajax.train.tasks.heads_task import HeadsTask, make_drafter
from hydrajax.train.tasks.joint_task import JointTask, check_joint


def make_task(config: TrainConfig, mesh: Mesh, console: Console) -> BaseTask | HeadsTask:
    """Read the data and load the models onto the mesh; print what was read.

    Raises `HydrajaxError` if data or models cannot be read or do not fit.
    """
    data = dataset.build(config.data, tokenizer_of(config), config.seed, console.print)
    if config.task == "base":
        return _base_task(config, data, mesh, console)
    directory = resolve(config.model, "model")
    if config.task == "joint":
        check_joint(config, read_config(directory, "model"))  # before loading
    model, base_params = _load("the base", directory, config.dtype, mesh, console, config.quantize)
    console.print(f"base: {described(model.dtype.name, config.quantize)}")
    _check_fit(config, data, model.config)
    if config.task == "joint":
        return JointTask(config, data, model, base_params, mesh)
    spec = make_drafter(config.draft, model.config, config.dtype).spec
    extras = hidden_states(config, spec, model, base_params, data.train, mesh, console)
    return HeadsTask(config, data, model, base_params, mesh, extras)


def _base_task(config: TrainConfig, data: dataset.Dataset, mesh: Mesh, console: Console) -> BaseTask:
    model = resolve(config.model, "model") if config.model else None
    teacher = resolve(config.teacher, "teacher") if config.teacher else None
    shape = read_config(model, "model") if model else config.scratch
    teacher_shape = read_config(teacher, "teacher") if teacher else None
    for given in (shape if model else None, teacher_shape):
        if given:
            _check_fit(config, data, given)
    # The vocabulary of a model or teacher is often padded to more than the tokenizer's.
    expected, whose = (teacher_shape.vocab_size, "teacher") if teacher else (len(data.tokenizer), "tokenizer")
    if (teacher or not model) and shape.vocab_size != expected:
        name = "model" if model else "scratch.vocab_size"
        raise HydrajaxError(f"{name}: got {shape.vocab_size} token ids, expected {expected}, those of the {whose}")
    start = _load("the model", model, "float32", mesh, console)[1] if model else None
    taught = _load("the teacher", teacher, config.dtype, mesh, console) if teacher else None
    return BaseTask(config, data, mesh, shape, start, taught)


def _load(
    what: str, directory: Path, dtype: str, mesh: Mesh, console: Console, quantize: str | None = None
) -> tuple[Llama, Any]:
    with console.status(f"loading {what}") as line:
        return load_llama(
            directory,
            jnp.dtype(dtype),
            placer(mesh),
            quantize=quantize,
            on_progress=lambda done, total: line.update(f"loading {what} {done / total:.0%}"),
        )


def tokenizer_of(config: TrainConfig) -> Any | None:
    """Return the tokenizer that the settings name, by default the base's; None if one is to be trained."""
    if config.data.new_tokenizer:
        return None
    named = {"data.tokenizer": config.data.tokenizer, "model": config.model, "teacher": config.teacher}
    name, directory = next(((name, found) for name, found in named.items() if found), ("data.tokenizer", None))
    tokenizer = None if directory is None else load_tokenizer(resolve(directory, name), name)
    if tokenizer is None:
        raise HydrajaxError(f"data.tokenizer: found no tokenizer in {directory}; set its directory")
    return tokenizer


def _check_fit(config: TrainConfig, data: dataset.Dataset, base: LlamaConfig) -> None:
    """Refuse token ids outside the base's vocabulary and sequences longer than its context."""
    largest = max(int(rows.tokens.max()) for rows in (data.train, data.held_out) if rows is not None)
    if largest >= base.vocab_size:
        raise HydrajaxError(
            f"data.tokenizer: got token id {largest}, expected 0 to {base.vocab_size - 1}, the base's vocabulary; "
            "use the base's tokenizer"
        )
    check_length(config, base)
