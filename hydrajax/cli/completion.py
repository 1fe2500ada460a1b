"""Tab completion with argcomplete: the shell runs the program with ``_ARGCOMPLETE`` in the environment."""

import argparse
import os
from collections.abc import Callable, Sequence

from argcomplete import autocomplete
from argcomplete.completers import DirectoriesCompleter, FilesCompleter

from hydrajax import assets
from hydrajax.formats.draft_registry import without_weights
from hydrajax.formats.known_bases import KNOWN_BASES
from hydrajax.trees import presets


def complete(build_parser: Callable[[list[str]], argparse.ArgumentParser]) -> None:
    """Print the completions of the command line in the environment, and exit."""
    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split()
    parser = build_parser(words[1:])
    add_completers(parser)
    autocomplete(parser)


def add_completers(parser: argparse.ArgumentParser) -> None:
    """Set the completer of each argument: names and directories. By default argcomplete offers files."""
    directories = DirectoriesCompleter()
    for action in parser._actions:  # argparse has no public list; argcomplete reads this one too
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                add_completers(command)
        elif action.dest == "draft":
            action.completer = _names_or([*without_weights(), *assets.DRAFT_NAMES], directories)
        elif action.dest == "base":
            names = [*assets.SHIPPED_BASE, *KNOWN_BASES]
            action.completer = _names_or(names, FilesCompleter("gguf"))  # directories too
        elif action.dest == "tree":
            action.completer = _names_or(["root", *presets.released()], FilesCompleter("json"))
        elif str(action.metavar).startswith("DIR"):
            action.completer = directories


def _names_or(names: Sequence[str], others: Callable) -> Callable:
    return lambda prefix, **rest: [*names, *others(prefix=prefix, **rest)]
