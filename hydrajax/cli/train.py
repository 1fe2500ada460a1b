"""``hydrajax train --config FILE.yaml [key.sub=value ...]``: train draft heads or a whole model.

``python -m hydrajax.train`` is the same command.
"""

import argparse
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

from hydrajax import processes
from hydrajax.cli import COMMANDS, run_command
from hydrajax.cli.options import positive
from hydrajax.errors import HydrajaxError
from hydrajax.host_memory import keep_freed_memory
from hydrajax.locking import in_use
from hydrajax.train.data.packing import Document
from hydrajax.train.run_config import TrainConfig, load_config, recipes

PROG = "python -m hydrajax.train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE.yaml|NAME", required=True,
        help=f"read the settings of the run from this file, or from a recipe in the package: {', '.join(recipes())}",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true", help="print parameters, bytes per device and time without running"
    )
    parser.add_argument(
        "--device-memory", metavar="GB", type=positive,
        help="check that the --dry-run fits into this memory per device (default: on a CPU the machine's, else 80)",
    )  # fmt: skip
    parser.add_argument(
        "--preview", metavar="N", type=positive, help="print N training documents with their targets marked, and stop"
    )
    parser.add_argument("overrides", metavar="key.sub=value", nargs="*", help="replace settings of the file")


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    config = load_config(args.config, args.overrides)
    if args.dry_run:
        from hydrajax.train.dry_run import dry_run

        dry_run(config, console, args.device_memory)
        return 0
    keep_freed_memory()
    if config.mesh.cpu_devices:  # before JAX's first array
        jax.config.update("jax_num_cpu_devices", config.mesh.cpu_devices)
    processes.start()
    console.quiet = not processes.is_main()
    if args.preview:
        preview(config, args.preview, console)
        return 0
    from hydrajax.sharding import make_mesh
    from hydrajax.train.several_processes import or_end
    from hydrajax.train.tasks.from_config import make_task
    from hydrajax.train.train_loop import train

    mesh = make_mesh(config.mesh.data, config.mesh.model)
    output = Path(config.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HydrajaxError(f"output: cannot make the directory {output}: {error.strerror}") from None
    with ExitStack() as held:
        processes.from_main(lambda: held.enter_context(in_use(output)))  # once for all processes of the run
        with or_end():
            return train(config, make_task(config, mesh, console), mesh, console)


def preview(config: TrainConfig, count: int, console: Console) -> None:
    """Print the first training documents with their targets marked."""
    from hydrajax.train.data import dataset
    from hydrajax.train.tasks.from_config import tokenizer_of

    found = dataset.documents(config.data, tokenizer_of(config), config.seed, console.print)
    for document in found.train[:count]:
        console.rule()
        console.print(marked(document, found.tokenizer, color=console.is_terminal))


def runs(document: Document, tokenizer: Any) -> list[tuple[str, bool]]:
    """The text split where targets begin and end: ``(text, is a target)``, special tokens included."""
    pairs = zip(document.ids.tolist(), document.targets.tolist(), strict=True)
    groups = [([token for token, _ in group], target) for target, group in groupby(pairs, key=lambda pair: pair[1])]
    # All tokens up to a run's end are decoded, because decoders drop a leading space.
    texts, ids, before = [], [], ""
    for group, target in groups:
        ids += group
        after = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        texts.append((after[len(before) :], target))
        before = after
    return texts


def marked(document: Document, tokenizer: Any, color: bool = True) -> Text:
    """Return the text for a rich console, with targets bold and green; without ``color`` in ⟦brackets⟧."""
    if color:
        return Text.assemble(*((text, "bold green" if target else "dim") for text, target in runs(document, tokenizer)))
    return Text("".join(f"⟦{text}⟧" if target else text for text, target in runs(document, tokenizer)))


def main(argv: list[str] | None = None) -> int:
    return run_command(PROG, COMMANDS["train"], add_arguments, run, argv)
