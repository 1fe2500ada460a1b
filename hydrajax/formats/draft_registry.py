"""The kinds of drafters: a line for each. The rest of a kind is its class in `hydrajax.drafters` and its format here.

Commands, files, training, benchmarks and the roofline ask here and never for a class by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hydrajax.drafters.amphista import AmphistaHeads
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3
from hydrajax.drafters.head_stack import StackSettings
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.lookahead import Lookahead
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.settings import Settings
from hydrajax.drafters.with_lookup import NODES, WithLookup
from hydrajax.errors import HydrajaxError
from hydrajax.formats import amphista_format, eagle_format, hydra_format, medusa_format
from hydrajax.formats.interface import Files
from hydrajax.formats.speculators import SPECULATORS
from hydrajax.models.llama_config import LlamaConfig


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafter.

    title:    for people.
    drafter:  its class. A trained one has ``Settings`` and ``for_base`` (`hydrajax.drafters.drafter.Trainable`).
    files:    of draft heads, how they are kept in files; the name is then what configurations and files call them.
    settings: of heads as they were released, where these are not the defaults.
    about:    of a drafter without weights, which ``--draft`` and `hydrajax.load` take by name: what the command line
              says of it.
    numbers:  of a drafter without weights, what messages call the numbers that may follow its name (`without_weights`),
              which are the first fields of its class.
    given:    these numbers, as found in a name.
    """

    title: str
    drafter: type
    files: Files | None = None
    settings: Settings | None = None
    about: str = ""
    numbers: tuple[str, ...] = ()
    given: tuple[int, ...] = ()

    def build(self, config: LlamaConfig, dtype) -> Drafter:
        """Return the drafter for a base of this shape, heads at their released size."""
        if self.about:
            return self.drafter(*self.given)
        return self.drafter.for_base(config, dtype, self.settings)


# Directories of heads are recognised, and formats listed, in this order.
KINDS = {
    "none": DrafterKind("no draft", NoDrafter, about="no draft at all"),
    "lookup": DrafterKind("Lookup", PromptLookup, about="n-grams of the text so far"),
    "lookahead": DrafterKind(
        "Lookahead",
        Lookahead,
        about="n-grams that the base guesses ahead; lookahead-W-N-G: window, length, guesses; default 15-5-15",
        numbers=("W", "N", "G"),
    ),
    "hydra": DrafterKind("Hydra", HydraHeads, hydra_format.FILES),
    "medusa": DrafterKind("Medusa", MedusaHeads, medusa_format.FILES),
    "hydra++": DrafterKind("Hydra++", HydraHeads, settings=StackSettings(prefix=True, n_layers=4)),
    "amphista": DrafterKind("Amphista", AmphistaHeads, amphista_format.FILES),
    "eagle": DrafterKind("EAGLE", Eagle, eagle_format.files(eagle_format.EAGLE)),
    "eagle3": DrafterKind(
        "EAGLE-3", Eagle3, eagle_format.files(eagle_format.EAGLE_3, eagle_format.VLLM_EAGLE_3, SPECULATORS)
    ),
    "model": DrafterKind("draft model", DraftModel),
}
WITHOUT_WEIGHTS = {name: kind for name, kind in KINDS.items() if kind.about}
FILES = {name: kind.files for name, kind in KINDS.items() if kind.files}
HEADS = {name: KINDS[name].drafter for name in FILES}
FORMATS = [format for files in FILES.values() for format in files.formats]


def without_weights(draft: Any) -> DrafterKind | None:
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
            kind.drafter(*found)  # refuses what makes no sense before a base is loaded
            return replace(kind, given=tuple(found))
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


def title_of(drafter: Drafter) -> str:
    """Return a drafter's name for people, such as "Medusa" or, of Hydra heads with a prefix layer, "Hydra++"."""
    if drafter.spec.branch_nodes:
        return f"{title_of(drafter.drafter)} with lookup"
    title = next((kind.title for kind in KINDS.values() if kind.drafter is type(drafter)), type(drafter).__name__)
    return f"{title}++" if drafter.spec.prefix_layer else title


def kind_of(drafter: Any) -> str | None:
    """Return the name in `FILES` of a drafter's kind; None if files hold no such drafter."""
    return next((name for name, kind in HEADS.items() if type(drafter) is kind), None)
