"""Parts of the program by group and name: built-in ones, and those of installed packages.

A package adds a drafter, a draft format or another part with an entry point in its ``pyproject.toml``:

    [project.entry-points."hydrajax.drafters"]
    mine = "my_package.my_module:KIND"

Nothing is imported before it is named, and installed packages are searched only for names that are not built in
(docs/adding_a_drafter.md).
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError, not_allowed, one_line

# By group: "module:attribute" of each name, in the order of listings. A part without entries here has plug-ins alone.
BUILT_IN: dict[str, dict[str, str]] = {
    "drafters": {},
    "formats": {},
    "weights": {},
    "families": {},
    "rules": {
        "greedy": "hydrajax.decoding.acceptance:Greedy",
        "typical": "hydrajax.decoding.acceptance:Typical",
        "exact": "hydrajax.decoding.acceptance:ExactSampling",
        "rejection": "hydrajax.decoding.rejection:RejectionSampling",
    },
    "processors": {
        "logit_bias": "hydrajax.decoding.processors:LogitBias",
        "penalties": "hydrajax.decoding.processors:Penalties",
    },
    "executors": {},
    "tuners": {"trees": "hydrajax.bench.contests.fastest:measure"},
    "commands": {},
}


def find(group: str, name: str) -> Any:
    """Import and return a part.

    Args:
        group: a key of `BUILT_IN`.
        name: one of `names`.

    Raises:
        HydrajaxError: no part has this name, two packages have it, or the package that has it cannot be imported.
    """
    if value := BUILT_IN[group].get(name):
        return EntryPoint(name, value, group).load()
    entries = declared(group).get(name, ())
    if not entries:
        raise not_allowed(group, name, names(group), outdated())
    packages = [entry.dist.name for entry in entries]
    if len(entries) > 1:
        raise HydrajaxError(f"{group}: got '{name}' of the packages {' and '.join(packages)}; uninstall one of them")
    try:
        return entries[0].load()
    except HydrajaxError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise HydrajaxError(
            f"{group}: '{name}' of the package {packages[0]} cannot be imported ({entries[0].value}): {reason}"
        ) from error


def names(group: str) -> list[str]:
    """Return the names of a group: the built-in ones, then those of installed packages, sorted."""
    return [*BUILT_IN[group], *declared(group)]


def has(group: str, name: str) -> bool:
    """Return True if a group has this name; nothing is imported."""
    return name in BUILT_IN[group] or name in declared(group)


def imported(group: str) -> Iterator[str]:
    """Yield the names whose modules are imported, which a part in use must be."""
    yield from (name for name, value in BUILT_IN[group].items() if value.partition(":")[0] in sys.modules)
    yield from (name for name, (entry, *_) in declared(group).items() if entry.module in sys.modules)


@functools.cache
def declared(group: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of installed packages by name. One with a built-in name is ignored with a warning."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=f"hydrajax.{group}"), key=lambda entry: entry.name):
        if entry.name in BUILT_IN[group]:
            warnings.warn(
                f"hydrajax: {group}: '{entry.name}' of the package {entry.dist.name} is ignored: the name is built in",
                stacklevel=2,
            )
        else:
            found.setdefault(entry.name, []).append(entry)
    return found


def outdated() -> str:
    """Return the end of an error message if the installed metadata lack our own entry points, which names parts."""
    import tomllib

    source = Path(__file__).parents[1] / "pyproject.toml"
    try:
        installed = {(entry.group, entry.name) for entry in distribution("hydrajax").entry_points}
    except PackageNotFoundError:
        return "; hydrajax is not installed, so that its plug-ins are missing: run 'pip install -e .' in its folder"
    wanted = tomllib.loads(source.read_text(encoding="utf-8")) if source.is_file() else {}
    ours = wanted.get("project", {}).get("entry-points", {})
    if all((group, name) in installed for group, entries in ours.items() for name in entries):
        return ""
    return "; the installation of hydrajax is older than its code: run 'pip install -e .' in its folder again"
