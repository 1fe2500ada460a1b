"""Tree files: JSON with the choices of a static tree or the sizes of a dynamic one, and optional other fields."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.trees.dynamic import BestFirstTree, CandidateTree, DynamicTree
from hydrajax.trees.static_tree import TreeTopology

BEST_FIRST = "best_first"  # field of `BestFirstTree`
NUMBERS = {"nodes": "size", "expansions": "expansions", "top_k": "top_k"}  # field in files: field of `DynamicTree`
ALLOWED = (
    "a JSON list of choices such as [[0], [0, 0], [1]], or an object with such a list under choices or with "
    '{"nodes": 60, "expansions": 7, "top_k": 10} under dynamic or {"nodes": 64} under best_first'
)


def content_of(tree: CandidateTree) -> dict[str, Any]:
    """Return the fields that describe a tree; `tree_from` parses them."""
    if isinstance(tree, BestFirstTree):
        return {BEST_FIRST: {"nodes": tree.size, "fanout": tree.top_k or None}}
    if isinstance(tree, DynamicTree):
        return {"dynamic": {name: getattr(tree, field) for name, field in NUMBERS.items()}}
    return {"choices": [list(path) for path in tree.choices]}


def read_tree(path: str | Path) -> CandidateTree:
    """Return the tree of a file, of either kind.

    Raises `HydrajaxError` for a file that is missing or not JSON, and as `tree_from`.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HydrajaxError(f"tree: no such file: {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise HydrajaxError(f"tree: {path} is not a JSON tree file: {error}") from None
    return tree_from(content, str(path))


def tree_from(content: Any, where: str) -> CandidateTree:
    """Return the tree of parsed JSON. ``where`` names it in messages.

    Raises:
        HydrajaxError: For anything other than a list of choices or an object with one of ``choices``, ``dynamic`` and
            ``best_first``, and for an invalid tree.
    """
    if isinstance(content, dict) and BEST_FIRST in content:
        return _best_first(content, where)
    if isinstance(content, dict) and "dynamic" in content:
        if "choices" in content:
            raise HydrajaxError(f"tree: {where}: got choices and dynamic, expected one of them")
        return _dynamic(content["dynamic"], where)
    choices = content.get("choices") if isinstance(content, dict) else content
    if not isinstance(choices, list):
        raise HydrajaxError(f"tree: {where}: expected {ALLOWED}")
    with _named(where):
        return TreeTopology.from_choices(choices)


def _dynamic(numbers: Any, where: str) -> DynamicTree:
    found = numbers if isinstance(numbers, dict) else {}
    if set(found) != set(NUMBERS):
        raise HydrajaxError(f"tree: {where}: dynamic: expected the fields {', '.join(NUMBERS)} and no other")
    for name, number in found.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise HydrajaxError(f"tree: {where}: dynamic.{name}: got {str(number)[:60]!r}, expected an integer")
    with _named(where):
        return DynamicTree(**{field: found[name] for name, field in NUMBERS.items()})


def _best_first(content: dict[str, Any], where: str) -> BestFirstTree:
    numbers = content[BEST_FIRST]
    known = {"nodes", "fanout"}
    if "choices" in content or "dynamic" in content or not isinstance(numbers, dict) or not set(numbers) <= known:
        raise HydrajaxError(
            f"tree: {where}: {BEST_FIRST}: got {str(numbers)[:60]}, expected the fields nodes and fanout and no other"
        )
    nodes, fanout = numbers.get("nodes"), numbers.get("fanout")
    if type(nodes) is not int or not (fanout is None or (type(fanout) is int and fanout > 0)):
        raise HydrajaxError(f"tree: {where}: {BEST_FIRST}: got {str(numbers)[:60]}, expected positive integers")
    with _named(where):
        return BestFirstTree(nodes, top_k=fanout or 0)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Add the location ``where`` to errors about a tree."""
    try:
        yield
    except HydrajaxError as error:
        raise HydrajaxError(f"tree: {where}: {str(error).removeprefix('tree: ')}") from None
