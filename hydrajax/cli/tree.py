"""``hydrajax tree``: search the tree that fits a drafter and this machine, or draw a tree."""

import argparse

from hydrajax.cli import tree_search_command, tree_show

VERBS = {"search": tree_search_command, "show": tree_show}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module in VERBS.items():
        module.add_arguments(verbs.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False))


def run(args: argparse.Namespace) -> None:
    VERBS[args.verb].run(args)
