"""A family of models as an entry of the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hydrajax.models.llama_config import LlamaConfig


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        architecture: Its class in transformers.
        models: Well-known models of the family, for messages.
        defaults: transformers' defaults for missing fields, where they differ from LLaMA's.
        read: ``read(raw, config)`` returns the configuration with the family's own settings, from the fields of a
            ``config.json`` and the settings that all families share.
        write: ``write(config)`` returns the family's own fields.
        prepare: ``prepare(raw)`` returns the fields with those of older files in the form of newer ones.
        partial_rotary: The number of rotated features of a head depends on ``partial_rotary_factor``.
        attention_bias: ``attention_bias`` adds biases to queries, keys and values; for other families it is refused.
    """

    architecture: str
    models: str
    defaults: dict[str, Any] = field(default_factory=dict)
    read: Callable[[dict, LlamaConfig], LlamaConfig] = lambda raw, config: config
    write: Callable[[LlamaConfig], dict[str, Any]] = lambda config: {}
    prepare: Callable[[dict], dict] = lambda raw: raw
    partial_rotary: bool = False
    attention_bias: bool = False
