"""The kinds of drafters: a line for each. Everything else of a kind is in its own file.

Commands, files, training, benchmarks and costs ask here and never for a class by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from hydrajax.drafters.amphista import AmphistaHeads
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.drafters.drafter import Drafter, Trainable
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.lookahead import Lookahead
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.with_lookup import NODES, WithLookup
from hydrajax.errors import HydrajaxError
from hydrajax.formats import amphista, eagle, hydra, medusa
from hydrajax.formats.interface import Files
from hydrajax.models.config import LlamaConfig


@dataclass(frozen=True)
class Kind:
    """A kind of drafter.

    title: for people. drafter: its class. about: of a drafter without weights, whose name is all that ``--draft`` and
    `hydrajax.load` need, what the command line says of it. files: of draft heads, how they are kept in files; the name
    is then what configurations and files call them. (Those of a draft model are a base's.) settings: of heads as they
    were released, over the defaults. numbers: of a drafter without weights, the fields of the numbers that may follow
    its name (`without_weights`), by the letters that messages call them.
    """

    title: str
    drafter: type
    about: str = ""
    files: Files | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)

    def build(self, config: LlamaConfig, dtype) -> Drafter:
        """The drafter for a base of this shape, heads at their released size."""
        return self.drafter(**self.settings) if self.about else self.drafter.for_base(config, dtype, **self.settings)


# Directories of heads are recognised, and formats listed, in this order.
KINDS = {
    "none": Kind("no draft", NoDrafter, about="no draft at all"),
    "lookup": Kind("Lookup", PromptLookup, about="n-grams of the text so far"),
    "lookahead": Kind(
        "Lookahead",
        Lookahead,
        about="n-grams that the base guesses ahead; lookahead-W-N-G: window, length, guesses; default 15-5-15",
        numbers={"W": "window", "N": "ngram", "G": "guesses"},
    ),
    "hydra": Kind("Hydra", HydraHeads, files=hydra.FILES),
    "medusa": Kind("Medusa", MedusaHeads, files=medusa.FILES),
    "hydra++": Kind("Hydra++", HydraHeads, settings={"prefix": True, "n_layers": 4}),
    "amphista": Kind("Amphista", AmphistaHeads, files=amphista.FILES),
    "eagle": Kind("EAGLE", Eagle, files=eagle.EAGLE_FILES),
    "eagle3": Kind("EAGLE-3", Eagle3, files=eagle.EAGLE_3_FILES),
    "model": Kind("draft model", DraftModel),
}
WITHOUT_WEIGHTS = {name: kind for name, kind in KINDS.items() if kind.about}
FILES = {name: kind.files for name, kind in KINDS.items() if kind.files}
HEADS = {name: files.drafter for name, files in FILES.items()}
FORMATS = [format for files in FILES.values() for format in files.formats]


def without_weights(draft: Any) -> Kind | None:
    """The kind that is meant by a name which needs no files, such as ``lookup`` or ``lookahead-15-5-15``; else None.

    Raises `HydrajaxError` for numbers after the name that are too many or too few, or that make no sense.
    """
    if not isinstance(draft, str):
        return None
    if draft in WITHOUT_WEIGHTS:
        return WITHOUT_WEIGHTS[draft]
    for name, kind in WITHOUT_WEIGHTS.items():
        if kind.numbers and re.fullmatch(rf"{name}(-\d{{1,6}})+", draft):
            found = [int(number) for number in draft.removeprefix(f"{name}-").split("-")]
            if len(found) != len(kind.numbers):
                raise HydrajaxError(f"draft: found '{draft}', allowed are {name} and {'-'.join([name, *kind.numbers])}")
            settings = dict(zip(kind.numbers.values(), found, strict=True))
            kind.drafter(**settings)  # refuses what makes no sense before a base is loaded
            return replace(kind, settings=settings)
    return None


class BesideLookup(NamedTuple):
    """What ``lookup+DRAFT`` or ``lookup-L+DRAFT`` means: ``draft``, a name or a directory, `WithLookup` of L nodes."""

    draft: str
    nodes: int

    def around(self, drafter: Drafter) -> WithLookup:
        return WithLookup(drafter, self.nodes)


def beside_lookup(draft: Any) -> BesideLookup | None:
    """What a draft is called that lookup stands beside, such as ``lookup+hydra++``; None for any other.

    Raises `HydrajaxError` for a drafter without weights beside lookup, and for a number that makes no sense.
    """
    found = re.fullmatch(r"lookup(?:-(\d{1,6}))?\+(.*)", str(draft)) if isinstance(draft, (str, Path)) else None
    if found is None:
        return None
    nodes, inner = found.groups()
    if not inner or without_weights(inner) or beside_lookup(inner):
        raise HydrajaxError(f"draft: found '{draft}', what follows 'lookup+' must be heads or a model")
    beside = BesideLookup(inner, NODES if nodes is None else int(nodes))
    beside.around(NoDrafter())  # refuses what makes no sense before a base is loaded
    return beside


def heads_for(name: str, config: LlamaConfig, dtype, *, prefix: bool = False, **settings) -> Trainable:
    """Return draft heads for a base of this shape.

    settings: of the class in `HEADS`, over its defaults. Raises `HydrajaxError` for a prefix layer before heads that
    have none.
    """
    if prefix and not has_prefix(name):
        raise HydrajaxError(f"draft.prefix: {name} has no prefix layer, found true")
    layer = {"prefix": True} if prefix else {}
    return HEADS[name].for_base(config, dtype, **layer, **settings)


def has_prefix(name: str) -> bool:
    """Tell whether this kind of heads may have a prefix layer (`hydrajax.drafters.prefix`)."""
    return "prefix" in {field.name for field in fields(HEADS[name])}


def title_of(drafter: Drafter) -> str:
    """Return a drafter's name for people, such as "Medusa" or, of Hydra heads with a prefix layer, "Hydra++"."""
    if drafter.spec.branch_nodes:
        return f"{title_of(drafter.drafter)} with lookup"
    title = next((kind.title for kind in KINDS.values() if kind.drafter is type(drafter)), type(drafter).__name__)
    return f"{title}++" if getattr(drafter, "prefix", None) else title


def kind_of(drafter: Any) -> str | None:
    """Return the name in `FILES` of a drafter's kind; None if files hold no such drafter."""
    return next((name for name, kind in HEADS.items() if type(drafter) is kind), None)
