"""A draft's name, parsed once: ``lookahead-15-5-15``, ``lookup+DRAFT``, ``lookup+corpus``, ``mtp`` or a directory."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.kind import DrafterKind
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import KINDS

LOOKUP, CORPUS, NONE = "lookup", "corpus", "none"
OWN = "mtp"  # the module in the base's own files
NODES_OF = {LOOKUP: 5, CORPUS: 8}  # L without a number; the sources of text
SOURCE = rf"(?:{LOOKUP}|{CORPUS})(?:-[0-9]{{1,6}})?"


@dataclass(frozen=True)
class DraftRef:
    """A parsed draft: at most one drafter, and the sources of text that draft next to it.

    Attributes:
        text: the whole name; empty for an object.
        name: a directory, a repository, a bundled draft or `OWN`; None for a drafter without weights.
        kind: of a drafter without weights; None if it has weights, or with sources alone.
        drafter: an object that was given instead of a name.
        sources: keys of `NODES_OF`, in the order of the name.
        nodes: L, the nodes of the sources in addition to the tree's.
    """

    text: str = ""
    name: str | None = None
    kind: DrafterKind | None = None
    drafter: Drafter | None = None
    sources: tuple[str, ...] = ()
    nodes: int = 0

    @staticmethod
    def parse(draft: Any, *, corpus: bool = False) -> DraftRef:
        """Parse a draft of `hydrajax.load`.

        Args:
            draft: a name, a directory, a `Drafter`, a parsed draft, or None for no draft.
            corpus: add the source ``corpus`` if it is not there.

        Raises:
            HydrajaxError: the name has numbers that are not allowed, or joins what cannot draft together.
        """
        if isinstance(draft, DraftRef):
            return DraftRef.parse(draft.text or draft.drafter, corpus=True) if corpus else draft
        if not isinstance(draft, (str, Path)) and draft is not None:
            if corpus:
                raise HydrajaxError(
                    f"corpus: got a {type(draft).__name__} as the draft, expected a name or a directory"
                )
            return DraftRef(drafter=draft)
        text = NONE if draft is None else str(draft)
        if corpus:
            text = CORPUS if text == NONE else text if _names_corpus(text) else f"{CORPUS}+{text}"
        found = re.fullmatch(rf"((?:{SOURCE}\+)*)(.*)", text, re.DOTALL)
        sources, inner = found[1].split("+")[:-1], found[2]
        if not sources and not re.fullmatch(rf"{CORPUS}-[0-9]{{1,6}}", inner):
            kind = weightless(text)
            return DraftRef(text, None if kind else text, kind)
        return _joined(text, sources, inner)

    @property
    def is_none(self) -> bool:
        """True for no draft at all."""
        return self.kind is not None and self.kind is KINDS[NONE]

    @property
    def is_own(self) -> bool:
        """True for the module in the base's own files."""
        return self.name == OWN and not os.path.isdir(OWN)

    def at(self, directory: Path) -> DraftRef:
        """Return the draft with its name resolved to a directory."""
        return replace(self, name=str(directory))

    def wrap(self, drafter: Drafter) -> Drafter:
        """Return the drafter of all, from the loaded one; `hydrajax.drafters.none.NoDrafter` if there is no other."""
        if not self.sources:
            return drafter
        from hydrajax.drafters.several import SOURCES, FromText, Several, with_lookup

        sources = tuple(SOURCES[name] for name in self.sources)
        if self.name is None:
            return FromText(sources)
        if self.sources == (LOOKUP,) and self.nodes:
            return with_lookup(drafter, self.nodes)
        return Several(drafter, sources, self.nodes)


def weightless(text: str) -> DrafterKind | None:
    """Return the kind of a name such as ``lookup`` or ``lookahead-15-5-15``, which needs no files; else None.

    Raises:
        HydrajaxError: too many or too few numbers, or numbers that the drafter refuses.
    """
    if re.search(r"[/\\.]", text):  # a path
        return None
    name, numbers = re.fullmatch(r"(.*?)((?:-[0-9]{1,6})*)", text, re.DOTALL).groups()
    name = text if text in KINDS else name
    kind = KINDS.get(name)
    if kind is None or not kind.about or name == text:
        return kind if kind is not None and kind.about else None
    if not kind.numbers:
        return None
    given = tuple(map(int, numbers.split("-")[1:]))
    if len(given) != len(kind.numbers):
        raise HydrajaxError(f"draft: got '{text}', expected {name} or {'-'.join([name, *kind.numbers])}")
    kind.drafter(*given)  # refuses invalid numbers before a base is loaded
    return replace(kind, given=given)


def _names_corpus(text: str) -> bool:
    return CORPUS in (part.partition("-")[0] for part in re.match(rf"(?:{SOURCE}(?:\+|$))*", text)[0].split("+"))


def _joined(text: str, names: list[str], inner: str) -> DraftRef:
    """Return the parsed ``[lookup[-L]+][corpus[-L]+]INNER``, of which at least one source is there."""
    alone = re.fullmatch(SOURCE, inner) is not None
    parts = [name.partition("-") for name in [*names, inner][: len(names) + alone]]
    kinds = tuple(name for name, _, _ in parts)
    ref = DraftRef(text, None if alone else inner, sources=kinds)
    if CORPUS not in kinds and (not inner or len(kinds) > 1 or weightless(inner)):
        raise HydrajaxError(f"draft: got '{text}', expected heads or a model after 'lookup+'")
    if len(set(kinds)) < len(kinds) or not inner or (ref.name and weightless(inner)):
        raise HydrajaxError(
            f"draft: got '{text}', expected lookup and corpus once each, and heads or a model after them"
        )
    if alone and any(number for _, _, number in parts):
        raise HydrajaxError(
            f"draft: got '{text}', expected no number of nodes without heads or a model: use the tree's"
        )
    ref = replace(ref, nodes=sum(int(number) if number else NODES_OF[name] for name, _, number in parts))
    ref.wrap(KINDS[NONE].drafter())  # refuses an invalid number before a base is loaded
    return ref
