"""Tree files: JSON with the choices of a static tree or the numbers of a dynamic one, and perhaps other fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.trees.dynamic import CandidateTree, DynamicTree
from hydrajax.trees.static_tree import TreeTopology, named, read_json

NUMBERS = {"nodes": "size", "expansions": "expansions", "top_k": "top_k"}  # in files: in a `DynamicTree`
ALLOWED = (
    "a JSON list of choices such as [[0], [0, 0], [1]], or an object with such a list under choices or with "
    '{"nodes": 60, "expansions": 7, "top_k": 10} under dynamic'
)


def content_of(tree: CandidateTree) -> dict[str, Any]:
    """The fields that say which tree it is; `tree_from` reads them."""
    if isinstance(tree, DynamicTree):
        return {"dynamic": {name: getattr(tree, field) for name, field in NUMBERS.items()}}
    return {"choices": [list(path) for path in tree.choices]}


def read_tree(path: str | Path) -> CandidateTree:
    """The tree of a file, of either kind. Raises `HydrajaxError` for a file that holds none."""
    return tree_from(read_json(path), str(path))


def tree_from(content: Any, where: str) -> CandidateTree:
    """The tree that was read as JSON. ``where`` names it in messages.

    Raises `HydrajaxError` for anything else than a list of choices or an object with one of ``choices`` and
    ``dynamic``, and for a tree that is none.
    """
    if isinstance(content, dict) and "dynamic" in content:
        if "choices" in content:
            raise HydrajaxError(f"tree: {where} has both choices and dynamic, only one of them is allowed")
        return _dynamic(content["dynamic"], where)
    choices = content.get("choices") if isinstance(content, dict) else content
    if not isinstance(choices, list):
        raise HydrajaxError(f"tree: {where} must hold {ALLOWED}")
    with named(where):
        return TreeTopology.from_choices(choices)


def _dynamic(numbers: Any, where: str) -> DynamicTree:
    found = numbers if isinstance(numbers, dict) else {}
    if set(found) != set(NUMBERS):
        raise HydrajaxError(f"tree: {where}: dynamic must have the fields {', '.join(NUMBERS)} and no other")
    for name, number in found.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise HydrajaxError(f"tree: {where}: dynamic.{name} must be an integer, found {str(number)[:60]!r}")
    with named(where):
        return DynamicTree(**{field: found[name] for name, field in NUMBERS.items()})
