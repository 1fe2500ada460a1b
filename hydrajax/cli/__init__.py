"""The ``hydrajax`` program: one module per command, each a thin layer over the library.

A command module has ``HELP`` (one line), ``add_arguments(parser)`` and ``run(args)``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from hydrajax.errors import HydrajaxError

COMMANDS = ("demo", "generate", "bench")


class _Parser(argparse.ArgumentParser):
    """argparse with errors in the house form: one line, exit code 2."""

    def error(self, message: str):
        raise HydrajaxError(message)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hydrajax", description="Tree speculative decoding in JAX.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"hydrajax.cli.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, under the user's cache directory unless JAX was told another place."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache_home / "hydrajax" / "xla"))


def main(argv: list[str] | None = None) -> int:
    """Run one command. Bad input prints one line and returns 2; Ctrl-C returns 130."""
    try:
        args = build_parser().parse_args(argv)
        use_compilation_cache()
        args.run(args)
    except HydrajaxError as error:
        print(f"hydrajax: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hydrajax: interrupted", file=sys.stderr)
        return 130
    return 0
