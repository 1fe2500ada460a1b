"""The contenders of an evaluation: the base alone, and every draft with every tree, each named as its answer file."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hydrajax.api import Loaded
from hydrajax.decoding.acceptance import AcceptanceRule
from hydrajax.drafters.registry import beside_lookup
from hydrajax.generation import generate
from hydrajax.measure.way import AUTOREGRESSIVE, Way
from hydrajax.text.answers import Generation
from hydrajax.trees.dynamic import CandidateTree, DynamicTree


@dataclass(frozen=True)
class TextWay:
    """A way to decode with the loaded model that it is of, which brings the tokenizer and keeps what is compiled."""

    way: Way
    loaded: Loaded

    @property
    def model_id(self) -> str:
        return self.way.name

    def decode(self, ids: list[int], seed: int) -> Generation:
        """The answer to one prompt of token ids, its time without compilation."""
        settings = {"tree": self.way.tree, "rule": self.way.rule, "max_new_tokens": self.way.max_new_tokens}
        return next(generate(self.loaded, [ids], seed=seed, **settings))

    def identity(self) -> dict[str, str]:
        """What tells it from others of the same name: a hash of the draft's parameters, and the tree."""
        tree = self.way.tree
        grown = isinstance(tree, DynamicTree)
        name = tree.name if grown else " ".join(".".join(map(str, path)) for path in tree.choices)
        return {"heads": digest(self.way.params.draft), "tree": name}


def contenders(
    loaded: Loaded,
    base: str,
    drafts: Sequence[str],
    trees: Sequence[tuple[str, CandidateTree]],
    rule: AcceptanceRule,
    max_new_tokens: int,
    *,
    base_directory: Path | None = None,
) -> list[TextWay]:
    """The base alone first, then every draft with every named tree, or with its own tree where there is none.

    loaded: the base, whose parameters all share. base, drafts: as the user names them. base_directory: where given,
    heads that say they were made for another base are refused.
    """
    names: set[str] = set()

    def unique(*parts: str) -> str:
        wanted = re.sub(r"[^\w.+-]+", "_", "-".join(filter(None, parts)))
        name, count = wanted, 1
        while name in names:  # heads of one name in two places
            count += 1
            name = f"{wanted}-{count}"
        names.add(name)
        return name

    def text_way(way: Way, loaded: Loaded) -> TextWay:
        most = min(max_new_tokens, loaded.model.config.max_positions)
        loaded.bursts(way.tree, way.rule, most)  # refuses a tree that does not fit before the first question is asked
        return TextWay(way, loaded)

    base = folder_name(base)
    plain = Way.of(loaded, unique(base, AUTOREGRESSIVE), rule=rule, max_new_tokens=max_new_tokens)
    found = [text_way(plain.autoregressive(plain.name), loaded)]
    for draft in drafts:
        drafted = loaded.with_draft(draft, base_directory=base_directory)
        for name, tree in trees or [("", drafted.default_tree())]:
            name = unique(base, folder_name(draft), name)
            way = Way.of(drafted, name, tree, rule, max_new_tokens=max_new_tokens)
            found.append(text_way(way, drafted))
    return found


def folder_name(name: str) -> str:
    """The last part of a directory's or repository's name, behind ``lookup+`` where that stands before it."""
    if beside := beside_lookup(name):
        return name.removesuffix(beside.draft) + folder_name(beside.draft)
    return Path(os.path.realpath(name)).name if os.path.isdir(name) else name.rpartition("/")[2]


def digest(params: Any) -> str:
    """A hash of a row of every array: it tells heads of one name that were trained anew from the old ones."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(leaf[(0,) * (leaf.ndim - 1)], np.float32).tobytes())
    return found.hexdigest()
