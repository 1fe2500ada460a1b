"""The kinds of drafters: a line for each. Everything else of a kind is in its own file.

Commands, files, training, benchmarks and costs ask here and never for a class by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hydrajax.drafters import hydra_files, medusa_files
from hydrajax.drafters.drafter import Drafter, Trainable
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.drafters.none import NoDrafter
from hydrajax.drafters.prefix import WithPrefix
from hydrajax.models.config import LlamaConfig


@dataclass(frozen=True)
class Kind:
    """title: for people. build: the drafter at its released size for a base of this shape and dtype."""

    title: str
    build: Callable[[LlamaConfig, Any], Drafter]


# Drafters without weights: their name is all that is needed to use them, as in ``--draft lookup``.
BY_NAME = {
    "none": Kind("no draft", lambda config, dtype: NoDrafter()),
    "lookup": Kind("prompt lookup", lambda config, dtype: PromptLookup()),
}
# Draft heads by the names that configurations and files give them; any of them may stand behind a prefix layer. A line
# names how they are kept in files, and so their class. Directories are recognised, and formats listed, in this order.
FILES = {"hydra": hydra_files.FILES, "medusa": medusa_files.FILES}
HEADS = {name: files.drafter for name, files in FILES.items()}
KINDS = BY_NAME | {
    "medusa": Kind("Medusa", lambda config, dtype: heads_for("medusa", config, dtype)),
    "hydra": Kind("Hydra", lambda config, dtype: heads_for("hydra", config, dtype)),
    "hydra++": Kind("Hydra++", lambda config, dtype: heads_for("hydra", config, dtype, prefix=True, n_layers=4)),
}


def heads_for(name: str, config: LlamaConfig, dtype, *, prefix: bool = False, **settings) -> Trainable:
    """Draft heads for a base of this shape. settings: fields of the class in `HEADS`, over its defaults."""
    heads = HEADS[name].for_base(config, dtype, behind_prefix=prefix, **settings)
    return WithPrefix(heads, config) if prefix else heads


def kind_of(heads: Any) -> str | None:
    """The name in `FILES` of the kind that some heads are of; None if files hold no such drafter."""
    return next((name for name, kind in HEADS.items() if type(heads) is kind), None)
