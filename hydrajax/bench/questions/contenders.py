"""Contenders of an evaluation: the base alone, and every draft with every tree."""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hydrajax.bench.contests.contest import AUTOREGRESSIVE
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.request import Request
from hydrajax.formats.draft_ref import DraftRef
from hydrajax.generation import generate
from hydrajax.language_model import LanguageModel
from hydrajax.processes import fetch
from hydrajax.text.answers import Generation
from hydrajax.trees.dynamic import CandidateTree, DynamicTree


@dataclass(frozen=True)
class Answerer:
    """An executor that answers questions; ``model_id`` is the name of its answer file."""

    model_id: str
    executor: Executor

    def decode(self, ids: list[int], seed: int) -> Generation:
        """Return the answer to one prompt of token ids; its time excludes compilation."""
        return next(generate(self.executor, [ids], seed=seed))

    def identity(self) -> dict[str, str]:
        """Return a hash of the draft's parameters and the tree, which differ between contenders of one name."""
        tree = self.executor.program.tree
        grown = isinstance(tree, DynamicTree)
        name = tree.name if grown else " ".join(".".join(map(str, path)) for path in tree.choices)
        return {"heads": digest(self.executor.params.draft), "tree": name}


def contenders(
    model: LanguageModel,
    base: str,
    drafts: Sequence[str],
    trees: Sequence[tuple[str, CandidateTree]],
    request: Request,
    *,
    base_directory: Path | None = None,
) -> list[Answerer]:
    """Return the base alone first, then every draft with every named tree, or with its own tree.

    Args:
        model: the base; all contenders share its parameters.
        base, drafts: directories or names, as the user gave them.
        base_directory: refuse draft heads that record another base; None to accept them.
    """
    names: set[str] = set()

    def unique(*parts: str) -> str:
        wanted = re.sub(r"[^\w.+-]+", "_", "-".join(filter(None, parts)))
        name, count = wanted, 1
        while name in names:  # two directories of one name
            count += 1
            name = f"{wanted}-{count}"
        names.add(name)
        return name

    base = folder_name(base)
    program = model.program(request).autoregressive()
    plain = model.executor(program, program.fitting(request))
    found = [Answerer(unique(base, AUTOREGRESSIVE), plain)]
    for draft in drafts:
        drafted = model.with_draft(draft, base_directory=base_directory)
        for name, tree in trees or [("", drafted.default_tree())]:
            program = drafted.program(request, tree=tree)
            executor = drafted.executor(program, request)  # raises for a tree that does not fit
            found.append(Answerer(unique(base, folder_name(draft), name), executor))
    return found


def folder_name(name: str) -> str:
    """Return the last part of a directory's or repository's name, keeping a leading ``lookup+`` or ``corpus+``."""
    ref = DraftRef.parse(name)
    if ref.sources and ref.name:
        return name.removesuffix(ref.name) + folder_name(ref.name)
    return Path(os.path.realpath(name)).name if os.path.isdir(name) else name.rpartition("/")[2]


def digest(params: Any) -> str:
    """Return a hash of one row of every array, which changes when heads are retrained under the same name."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(fetch(leaf[(0,) * (leaf.ndim - 1)]), np.float32).tobytes())
    return found.hexdigest()
