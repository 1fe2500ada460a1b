"""The kinds of drafters and their files, by name. A kind is imported when it is looked up.

Commands, training, benchmarks and the roofline look kinds up here and import no drafter class.
"""

from typing import Any

from hydrajax import plugins
from hydrajax.drafters.drafter import Drafter
from hydrajax.formats.interface import HeadFormat

KINDS = plugins.Group("drafters")  # `hydrajax.drafters.kind.DrafterKind`
FILES = plugins.Group("formats")  # `hydrajax.formats.interface.Files` of the trained kinds


def heads(name: str) -> type:
    """Return the class of a trained kind, a key of `FILES`."""
    return KINDS[name].drafter


def trainable() -> list[str]:
    """Return the names in `FILES` of the kinds that can be trained."""
    return [name for name in FILES if hasattr(heads(name), "Settings")]


def formats() -> list[HeadFormat]:
    """Return the formats of all kinds, in the order in which they are tried and listed."""
    return [format for files in FILES.values() for format in files.formats]


def without_weights() -> dict[str, Any]:
    """Return the kinds that ``--draft`` accepts by name alone."""
    return {name: kind for name, kind in KINDS.items() if kind.about}


def title_of(drafter: Drafter) -> str:
    """Return a drafter's display name, such as "Medusa", or "Hydra++" for Hydra heads with a prefix layer."""
    if hasattr(drafter, "title"):  # of several drafts
        return drafter.title(title_of)
    kinds = (KINDS[name] for name in plugins.imported(KINDS.name))
    title = next((kind.title for kind in kinds if kind.drafter is type(drafter)), type(drafter).__name__)
    return f"{title}++" if drafter.spec.prefix_layer else title


def kind_of(drafter: Any) -> str | None:
    """Return the name in `FILES` of a drafter's kind, or None."""
    names = (name for name in plugins.imported(KINDS.name) if name in FILES)
    return next((name for name in names if heads(name) is type(drafter)), None)
