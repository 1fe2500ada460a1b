"""The kinds of drafters, one entry each. A kind also has a class in `hydrajax.drafters` and its formats in
this package.

Commands, training, benchmarks and the roofline look kinds up here and import no drafter class.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hydrajax.drafters.amphista import AmphistaHeads
from hydrajax.drafters.block import BlockSettings
from hydrajax.drafters.chains import Source
from hydrajax.drafters.corpus_search import CorpusSearch
from hydrajax.drafters.dflash import DFlash, JetSpec
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.drafters.drafter import Drafter
from hydrajax.drafters.dspark import DSpark, DSparkSettings
from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3
from hydrajax.drafters.head_stack import StackSettings
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.lookahead import Lookahead
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.mtp import MTP
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.peagle import PEagle, PEagleSettings
from hydrajax.drafters.settings import Settings
from hydrajax.drafters.several import FromText, Several
from hydrajax.drafters.with_lookup import NODES, WithLookup
from hydrajax.errors import HydrajaxError
from hydrajax.formats import (
    amphista_format,
    block_format,
    eagle_format,
    hydra_format,
    medusa_format,
    mtp_format,
    peagle_format,
)
from hydrajax.formats.interface import Files
from hydrajax.models.llama_config import LlamaConfig


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafter.

    Attributes:
        title: display name.
        drafter: its class. A trained one has ``Settings`` and ``for_base`` (`hydrajax.drafters.drafter.Trainable`).
        files: its formats, for trained kinds. The kind's name is then the one in configurations and files.
        settings: of released heads, if not the defaults.
        about: help text of a drafter without weights, which ``--draft`` and `hydrajax.load` accept by name.
        numbers: names of the numbers that may follow that name (`without_weights`), the first fields of the class.
        given: these numbers, as parsed.
    """

    title: str
    drafter: type
    files: Files | None = None
    settings: Settings | None = None
    about: str = ""
    numbers: tuple[str, ...] = ()
    given: tuple[int, ...] = ()

    def build(self, config: LlamaConfig, dtype) -> Drafter:
        """Return the drafter for a base of this shape, heads in their released size."""
        if self.about:
            return self.drafter(*self.given)
        return self.drafter.for_base(config, dtype, self.settings)


# Formats are tried, and listed, in this order.
KINDS = {
    "none": DrafterKind("no draft", NoDrafter, about="no draft at all"),
    "lookup": DrafterKind("Lookup", PromptLookup, about="n-grams of the text so far"),
    "corpus": DrafterKind("Corpus", FromText, about="n-grams of past outputs"),
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
    "eagle": DrafterKind("EAGLE", Eagle, eagle_format.EAGLE_FILES),
    "eagle3": DrafterKind("EAGLE-3", Eagle3, eagle_format.EAGLE_3_FILES),
    "mtp": DrafterKind("MTP", MTP, mtp_format.FILES),
    "dflash": DrafterKind("DFlash", DFlash, block_format.DFLASH_FILES, BlockSettings(5, 16)),
    "jetspec": DrafterKind("JetSpec", JetSpec, block_format.JETSPEC_FILES, BlockSettings(5, 16)),
    "dspark": DrafterKind("DSpark", DSpark, block_format.DSPARK_FILES, DSparkSettings(5, 7, markov_rank=256)),
    "p-eagle": DrafterKind("P-EAGLE", PEagle, peagle_format.FILES, PEagleSettings(4, 8)),
    "model": DrafterKind("draft model", DraftModel),
}
WITHOUT_WEIGHTS = {name: kind for name, kind in KINDS.items() if kind.about}
FILES = {name: kind.files for name, kind in KINDS.items() if kind.files}
HEADS = {name: KINDS[name].drafter for name in FILES}
FORMATS = [format for files in FILES.values() for format in files.formats]


def without_weights(draft: Any) -> DrafterKind | None:
    """Return the kind of a name such as ``lookup`` or ``lookahead-15-5-15``, which needs no files; else None.

    Raises:
        HydrajaxError: the name has too many, too few or invalid numbers.
    """
    if not isinstance(draft, str):
        return None
    name, *numbers = draft.split("-")
    kind = WITHOUT_WEIGHTS.get(name)
    if kind is None or not numbers:
        return kind
    if not kind.numbers or not all(re.fullmatch(r"[0-9]{1,6}", number) for number in numbers):
        return None
    if len(numbers) != len(kind.numbers):
        raise HydrajaxError(f"draft: got '{draft}', expected {name} or {'-'.join([name, *kind.numbers])}")
    given = tuple(map(int, numbers))
    kind.drafter(*given)  # refuses invalid numbers before a base is loaded
    return replace(kind, given=given)


class LookupAndDraft(NamedTuple):
    """A parsed ``lookup[-L]+DRAFT``: the name or directory of the draft, and the L nodes of `WithLookup`.

    With L = 0 lookup's chains compete for the nodes of the draft's tree (`Several`).
    """

    draft: str
    nodes: int

    def wrap(self, drafter: Drafter) -> WithLookup | Several:
        if not self.nodes:
            return Several(drafter, (SOURCES["lookup"],), 0)
        return WithLookup(drafter, self.nodes)


class SeveralDrafts(NamedTuple):
    """A parsed ``[lookup[-L]+]corpus[-L][+DRAFT]``: the draft, None without one, what else drafts, and its L nodes."""

    draft: str | None
    sources: tuple[Source, ...]
    nodes: int

    def wrap(self, drafter: Drafter) -> FromText | Several:
        """Return the drafter of all; `NoDrafter` for none."""
        return FromText(self.sources) if self.draft is None else Several(drafter, self.sources, self.nodes)


SOURCES = {"lookup": PromptLookup(), "corpus": CorpusSearch()}
NODES_OF = {"lookup": NODES, "corpus": 8}  # L without a number
OF_TEXT = rf"(?:{'|'.join(SOURCES)})(?:-[0-9]{{1,6}})?"


def parse_several(draft: Any) -> LookupAndDraft | SeveralDrafts | None:
    """Parse drafts joined by ``+``: lookup and corpus, in any order, and one other; None for any other name.

    Raises:
        HydrajaxError: The other draft has no weights, a source is named twice, or L is invalid.
    """
    text = str(draft) if isinstance(draft, (str, Path)) else ""
    found = re.fullmatch(rf"((?:{OF_TEXT}\+)*)(.*)", text)
    *names, inner = [*found[1].split("+")[:-1], found[2]]
    if re.fullmatch(OF_TEXT, inner):
        names, inner = [*names, inner], None
    parts = [name.partition("-") for name in names]
    kinds = [name for name, _, _ in parts]
    if "corpus" not in kinds or (inner is None and names == ["corpus"]):
        return parse_lookup(draft)
    if len(set(kinds)) < len(kinds) or inner == "" or (inner and without_weights(inner)):
        raise HydrajaxError(
            f"draft: got '{text}', expected lookup and corpus once each, and heads or a model after them"
        )
    if inner is None and any(number for _, _, number in parts):
        raise HydrajaxError(
            f"draft: got '{text}', expected no number of nodes without heads or a model: use the tree's"
        )
    nodes = sum(int(number) if number else NODES_OF[name] for name, _, number in parts)
    several = SeveralDrafts(inner, tuple(SOURCES[name] for name in kinds), nodes)
    several.wrap(NoDrafter())  # refuses an invalid number before a base is loaded
    return several


def naming_corpus(draft: Any) -> str:
    """Return the name of a draft with the suffix corpus added, if it is not there; None and ``none`` are no draft."""
    if draft in (None, "none"):
        return "corpus"
    if not isinstance(draft, (str, Path)):
        raise HydrajaxError(f"corpus: got a {type(draft).__name__} as the draft, expected a name or a directory")
    known = str(draft) == "corpus" or isinstance(parse_several(draft), SeveralDrafts)
    return str(draft) if known else f"corpus+{draft}"


def parse_lookup(draft: Any) -> LookupAndDraft | None:
    """Parse ``lookup+DRAFT`` or ``lookup-L+DRAFT``; None for any other name.

    Raises:
        HydrajaxError: DRAFT has no weights, or L is invalid.
    """
    found = re.fullmatch(r"lookup(?:-([0-9]{1,6}))?\+(.*)", str(draft)) if isinstance(draft, (str, Path)) else None
    if found is None:
        return None
    nodes, inner = found.groups()
    if not inner or without_weights(inner) or parse_lookup(inner):
        raise HydrajaxError(f"draft: got '{draft}', expected heads or a model after 'lookup+'")
    parsed = LookupAndDraft(inner, NODES if nodes is None else int(nodes))
    parsed.wrap(NoDrafter())  # refuses an invalid number before a base is loaded
    return parsed


def title_of(drafter: Drafter) -> str:
    """Return a drafter's display name, such as "Medusa", or "Hydra++" for Hydra heads with a prefix layer."""
    if isinstance(drafter, (Several, FromText)):
        names = " and ".join(name for name, source in SOURCES.items() if source in drafter.sources)
        return f"{title_of(drafter.drafter)} with {names}" if isinstance(drafter, Several) else names.capitalize()
    if drafter.spec.branch_nodes:
        return f"{title_of(drafter.drafter)} with lookup"
    title = next((kind.title for kind in KINDS.values() if kind.drafter is type(drafter)), type(drafter).__name__)
    return f"{title}++" if drafter.spec.prefix_layer else title


def kind_of(drafter: Any) -> str | None:
    """Return the name in `FILES` of a drafter's kind, or None."""
    return next((name for name, kind in HEADS.items() if type(drafter) is kind), None)
