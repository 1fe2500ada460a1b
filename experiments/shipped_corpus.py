"""Write the training text of the shipped model: the Python source code in an installation of this package.

    python experiments/shipped_corpus.py --output runs/shipped/corpus
    python experiments/shipped_corpus.py --output runs/shipped/corpus --without-held-out  # for its drafts

The text is the standard library and every installed dependency (including the extras') with a permissive licence,
without tests, generated code and near-duplicates. Files go to ``standard_library/`` and ``packages/NAME/``, versions
and licences to ``SOURCES.json`` next to the folder. Another environment gives another corpus and model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hydrajax import assets
from hydrajax.train.data import corpus

# Limit of a package, so that the largest two (PyTorch, transformers) are not half of the text.
CHARS_PER_PACKAGE = 12_000_000
EXTRAS = ("test", "plots", "notebooks")
SKIPPED_FOLDERS = corpus.SKIPPED_FOLDERS | {"testing"}
GENERATED = ("_pb2.py", "_gen.py", "_pb2_grpc.py")
# A file is a near-duplicate if more than half of its runs of this many lines occur in earlier files.
SHINGLE_LINES = 5
# Names of permissive licences, and words that exclude a licence.
PERMISSIVE = re.compile(r"\b(apache|mit|(0|new )?bsd|isc|psf|python software foundation|zlib|cc0)\b", re.IGNORECASE)
RESTRICTED = re.compile(r"\b[al]?gpl|gnu|mozilla|\bmpl|\bafl|academic|\beupl|commercial|proprietary", re.IGNORECASE)


class Package(NamedTuple):
    """An installed distribution: its licence's name, and its Python files relative to ``folder``."""

    name: str
    version: str
    licence: str
    folder: Path
    files: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/shipped/corpus"))
    parser.add_argument(
        "--without-held-out", action="store_true", help="leave out the files on which the shipped base is evaluated"
    )
    args = parser.parse_args()

    files = [file._replace(name=f"standard_library/{file.name}") for file in corpus.standard_library(10**12)]
    packages = list(permissive_dependencies("hydrajax", EXTRAS))
    for package in packages:
        found = corpus.as_many_as_fit(package.files, package.folder, CHARS_PER_PACKAGE, seed=0)
        files += [file._replace(name=f"packages/{package.name}/{file.name}") for file in found]
    files = list(without_near_duplicates(files))
    if args.without_held_out:
        held_out = set(assets.about()["held_out"])
        files = [file for file in files if installed_name(file.name) not in held_out]

    shutil.rmtree(args.output, ignore_errors=True)
    for file in files:
        path = args.output / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text, encoding="utf-8")
    kept = {file.name.split("/")[1] for file in files if file.name.startswith("packages/")}
    sources = {
        "python": platform.python_version(),
        "files": len(files),
        "characters": sum(len(file.text) for file in files),
        "packages": [f"{one.name} {one.version}: {one.licence}" for one in packages if one.name in kept],
    }
    args.output.with_name("SOURCES.json").write_text(json.dumps(sources, indent=1) + "\n")
    print(f"{args.output}: {sources['files']} files, {sources['characters']:,} characters, of {len(kept)} packages")


def installed_name(name: str) -> str:
    """Return the name in ``ABOUT.json`` of a file of the corpus: files of packages have their installed names."""
    return "packages/" + name.split("/", 2)[2] if name.startswith("packages/") else name


def without_near_duplicates(files: Iterable[corpus.Text]) -> Iterator[corpus.Text]:
    """Yield the files that are not near-duplicates of earlier ones."""
    seen: set[int] = set()
    for file in files:
        lines = [line.strip() for line in file.text.splitlines() if line.strip()]
        runs = {hash(tuple(lines[i : i + SHINGLE_LINES])) for i in range(max(len(lines) - SHINGLE_LINES + 1, 1))}
        if len(runs & seen) <= len(runs) / 2:
            seen |= runs
            yield file


def permissive_dependencies(root: str, extras: Iterable[str] = ()) -> Iterator[Package]:
    """Yield the permissively licensed distributions that ``root`` with ``extras`` needs, sorted by name."""
    for name, distribution in sorted(needed_by(root, extras).items()):
        licence = licence_name(distribution.metadata)
        if is_permissive(licence):
            files = sorted(path.as_posix() for path in distribution.files or [] if is_source(path.as_posix()))
            yield Package(name, distribution.version, licence, Path(str(distribution.locate_file(""))), files)


def is_source(name: str) -> bool:
    *folders, file = name.split("/")
    is_test = file.startswith(("test_", "conftest")) or file.endswith("_test.py")
    outside = ".." in folders  # a script in the environment's bin
    return (
        file.endswith(".py")
        and not is_test
        and not file.endswith(GENERATED)
        and not outside
        and SKIPPED_FOLDERS.isdisjoint(folders)
    )


def licence_name(metadata) -> str:
    """Return the SPDX expression, else the classifiers, else the first line of the free text, else ""."""
    if expression := metadata.get("License-Expression"):
        return expression
    kinds = [line.split(" :: ")[-1] for line in metadata.get_all("Classifier") or [] if line.startswith("License ::")]
    return ", ".join(kinds) or (metadata.get("License") or "").strip().partition("\n")[0][:80]


def is_permissive(licence: str) -> bool:
    return bool(PERMISSIVE.search(licence)) and not RESTRICTED.search(licence)


def needed_by(root: str, extras: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """Return the dependencies of ``root`` by canonical name, with its extras but without those of dependencies."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [(root, ("", *extras))]
    while waiting:
        name, wanted_extras = waiting.pop()
        name = canonicalize_name(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # needed on other platforms, or an extra that is not installed
        found[name] = distribution
        for requirement in map(Requirement, distribution.requires or []):
            marker = requirement.marker
            wanted = marker is None or any(marker.evaluate({"extra": extra}) for extra in wanted_extras)
            if wanted and canonicalize_name(requirement.name) not in found:
                waiting.append((requirement.name, ("",)))
    found.pop(canonicalize_name(root), None)
    return found


if __name__ == "__main__":
    main()
