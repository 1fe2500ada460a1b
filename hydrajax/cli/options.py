"""Arguments that several commands share, and what they mean to the library."""

from __future__ import annotations

import argparse

from hydrajax import api
from hydrajax.errors import HydrajaxError
from hydrajax.trees import TreeTopology, presets

NO_DRAFT = "none"
LARGEST_SEED = 2**32 - 1  # a JAX key holds 32 bits of seed unless 64-bit mode is on


def add_model_arguments(parser: argparse.ArgumentParser, *, base_required: bool = True) -> None:
    """``--base, --draft, --tree, --dtype``: see `load_from` and `tree_from`."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--base", metavar="DIR", required=base_required, help="LLaMA-family model in Hugging Face layout"
    )
    group.add_argument(
        "--draft", metavar="DIR", help=f"Hydra or Medusa heads as released; '{NO_DRAFT}' or absent: autoregressive"
    )
    group.add_argument(
        "--tree",
        metavar="NAME|FILE.json",
        help=f"candidate tree: {', '.join(presets.names())} or a JSON list of choices "
        "(default: mc_sim_7b_63, or a chain if the heads are fewer)",
    )
    group.add_argument(
        "--dtype",
        choices=list(api.DTYPES),
        default="float32",
        help="of parameters and computation (default %(default)s)",
    )


def add_decoding_arguments(parser: argparse.ArgumentParser, *, max_new_tokens: int = 256) -> argparse._ArgumentGroup:
    """``--max-new-tokens, --batch-size, --seed``. Returns the group, for a command's own decoding flags."""
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--max-new-tokens", metavar="N", type=positive, default=max_new_tokens, help="default %(default)s"
    )
    group.add_argument("--batch-size", metavar="B", type=positive, default=1, help="default %(default)s")
    group.add_argument("--seed", metavar="S", type=seed, default=0, help="default %(default)s")
    return group


def positive(text: str) -> int:
    """An argparse type: an integer from 1 up."""
    return _integer(text, 1, None)


def seed(text: str) -> int:
    """An argparse type: a seed for `jax.random.key`."""
    return _integer(text, 0, LARGEST_SEED)


def _integer(text: str, least: int, most: int | None) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < least or (most is not None and value > most):
        allowed = f"from {least} up" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"must be an integer {allowed}, found '{text}'")
    return value


def draft_of(args: argparse.Namespace) -> str | None:
    """The draft directory, None for autoregressive decoding."""
    return None if args.draft == NO_DRAFT else args.draft


def tree_from(args: argparse.Namespace) -> TreeTopology | None:
    """The tree asked for, None to take `Loaded.default_tree`. Needs no model, so a mistake shows before one is loaded.

    Raises `HydrajaxError` for an unknown or bad tree, and for any but the root alone without a draft.
    """
    if args.tree is None:
        return None
    tree = presets.by_name(args.tree)
    if draft_of(args) is None and tree.depth > 0:
        raise HydrajaxError(f"--tree: found '{args.tree}', but without --draft only 'root' is allowed")
    return tree


def load_from(args: argparse.Namespace) -> api.Loaded:
    """The base and the draft heads that the arguments name."""
    return api.load(args.base, draft_of(args), dtype=args.dtype)
