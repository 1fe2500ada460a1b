"""Tab completion by argcomplete. The shell starts the program with ``_ARGCOMPLETE`` in the environment to ask."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

from argcomplete import autocomplete
from argcomplete.completers import DirectoriesCompleter, FilesCompleter

from hydrajax import assets
from hydrajax.formats.draft_registry import WITHOUT_WEIGHTS
from hydrajax.trees import presets


def complete(build_parser: Callable[[list[str]], argparse.ArgumentParser]) -> None:
    """Answer the shell, and leave the program. build_parser: for the words of a command line, its own name left out."""
    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split()
    parser = build_parser(words[1:])
    add_completers(parser)
    autocomplete(parser)


def add_completers(parser: argparse.ArgumentParser) -> None:
    """Say for every argument what may stand there; argcomplete offers files where nothing is said."""
    directories = DirectoriesCompleter()
    for action in parser._actions:  # argparse has no other list of them, and argcomplete reads this one too
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                add_completers(inner)
        elif action.dest == "draft":
            action.completer = _names_and([*WITHOUT_WEIGHTS, *assets.SHIPPED_DRAFTS], directories)
        elif action.dest == "base":
            action.completer = _names_and(list(assets.SHIPPED_BASE), directories)
        elif action.dest == "tree":
            action.completer = _names_and(["root", *presets.released()], FilesCompleter("json"))
        elif str(action.metavar).startswith("DIR"):
            action.completer = directories


def _names_and(names: Sequence[str], others: Callable) -> Callable:
    return lambda prefix, **rest: [*names, *others(prefix=prefix, **rest)]
