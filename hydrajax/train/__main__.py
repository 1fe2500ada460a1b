"""``python -m hydrajax.train --config FILE.yaml [key.sub=value ...]``: train draft heads, or a base from scratch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

from hydrajax import processes
from hydrajax.cli import run_command
from hydrajax.cli.options import positive
from hydrajax.errors import HydrajaxError
from hydrajax.train.config import TrainConfig, check_length, load_config

PROG = "python -m hydrajax.train"
HELP = "Train draft heads on a frozen base, or a base from scratch. The same command resumes an interrupted run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE.yaml", required=True, help="the settings of the run")
    parser.add_argument(
        "--dry-run", action="store_true", help="load nothing: print parameters, bytes per device and hours"
    )
    parser.add_argument(
        "--device-memory",
        metavar="GB",
        type=positive,
        default=80,
        help="with --dry-run: of a device (default %(default)s)",
    )
    parser.add_argument(
        "--preview", metavar="N", type=positive, help="print N documents with their training targets marked, and stop"
    )
    parser.add_argument("overrides", metavar="key.sub=value", nargs="*", help="settings that replace the file's")


def run(args: argparse.Namespace) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    config = load_config(args.config, args.overrides)
    if args.dry_run:
        from hydrajax.train.dry_run import dry_run

        dry_run(config, console, args.device_memory)
        return
    start_devices(config)
    console.quiet = not processes.is_main()
    if args.preview:
        preview(config, args.preview, console)
        return
    from hydrajax.sharding import make_mesh
    from hydrajax.train.loop import train

    mesh = make_mesh(config.mesh.data, config.mesh.model)
    output = Path(config.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HydrajaxError(f"output: cannot make the directory {output}: {error.strerror}") from None
    train(config, make_task(config, mesh, console), mesh, console)


def start_devices(config: TrainConfig) -> None:
    """Before the first array: a CPU as several devices, and several hosts where JAX's own environment names them."""
    if config.mesh.cpu_devices:
        jax.config.update("jax_num_cpu_devices", config.mesh.cpu_devices)
    processes.start()


def make_task(config: TrainConfig, mesh, console: Console):
    """What `hydrajax.train.loop.train` trains: its data read, its base loaded onto the mesh."""
    from hydrajax.train.data import dataset

    if config.task == "base":
        from hydrajax.train.tasks.base import BaseTask

        data = dataset.build(config.data, tokenizer_of(config), config.seed, console.print)
        return BaseTask(config, data, mesh)

    from hydrajax.checkpoints.base import load_llama
    from hydrajax.checkpoints.hub import resolve
    from hydrajax.sharding import placer
    from hydrajax.train.data.hidden_cache import hidden_states
    from hydrajax.train.tasks.heads import HeadsTask

    data = dataset.build(config.data, tokenizer_of(config), config.seed, console.print)
    directory = resolve(config.model, "model")
    with console.status("loading the base") as line:
        model, base_params = load_llama(
            directory,
            jnp.dtype(config.dtype),
            placer(mesh),
            on_progress=lambda done, total: line.update(f"loading the base {done / total:.0%}"),
        )
    check_fit(config, data, model)
    extras = hidden_states(config, model, base_params, data.train, mesh, console)
    return HeadsTask(config, data, model, base_params, mesh, extras)


def tokenizer_of(config: TrainConfig):
    """The tokenizer that the settings name, by default the base's; None where one is to be trained."""
    from hydrajax.api import load_tokenizer
    from hydrajax.checkpoints.hub import resolve

    if config.data.new_tokenizer:
        return None
    name, directory = ("data.tokenizer", config.data.tokenizer) if config.data.tokenizer else ("model", config.model)
    tokenizer = None if directory is None else load_tokenizer(resolve(directory, name))
    if tokenizer is None:
        raise HydrajaxError(f"data.tokenizer: found no tokenizer in {directory}; name its directory")
    return tokenizer


def check_fit(config: TrainConfig, data, model) -> None:
    """Refuse data that the base cannot read: another tokenizer's ids, rows beyond its context."""
    largest = max(int(rows.tokens.max()) for rows in (data.train, data.held_out) if rows is not None)
    if largest >= model.config.vocab_size:
        raise HydrajaxError(
            f"data.tokenizer: gives token id {largest}, the base's vocabulary is 0..{model.config.vocab_size - 1}: "
            "another model's tokenizer"
        )
    check_length(config, model.config)


def preview(config: TrainConfig, count: int, console: Console) -> None:
    """The first training documents as the heads see them."""
    from hydrajax.train.data import dataset
    from hydrajax.train.data.preview import preview as marked

    found = dataset.documents(config.data, tokenizer_of(config), config.seed, console.print)
    for document in found.train[:count]:
        console.rule()
        console.print(marked(document, found.tokenizer, color=console.is_terminal))


def main(argv: list[str] | None = None) -> int:
    return run_command(PROG, HELP, add_arguments, run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
