"""The families of models that load: the file that a ``config.json`` and a configuration are looked up in.

Adding a family is one file beside this one and one word in `FAMILIES`.
"""

from __future__ import annotations

from hydrajax.errors import HydrajaxError
from hydrajax.families import llama_family, mistral, qwen2, qwen3
from hydrajax.families.family import Family, unsupported
from hydrajax.models.layout import Layout
from hydrajax.models.llama_config import LlamaConfig

# A configuration is written as the first family that includes it.
FAMILIES = {module.FAMILY.model_type: module.FAMILY for module in (llama_family, mistral, qwen2, qwen3)}
SUPPORTED = "; ".join(f"'{name}' ({family.models})" for name, family in FAMILIES.items())


def to_llama_config(raw: dict, what: str = "config.json") -> LlamaConfig:
    """Translate ``config.json``, which is called ``what`` in messages.

    Raises `HydrajaxError` that names the field for whatever the model does not implement.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise unsupported(what, "model_type", kind, SUPPORTED)
    return FAMILIES[kind].read(raw, what)


def from_llama_config(c: LlamaConfig, what: str) -> dict:
    """The fields of ``config.json`` for a configuration, as transformers 4 and 5 both read them."""
    return family_of(c, what).write(c)


def base_layout(c: LlamaConfig) -> Layout:
    """The key map of a base of this configuration, by transformers' names."""
    return family_of(c, "base").layout(c)


def family_of(c: LlamaConfig, what: str) -> Family:
    """The family that a configuration is of. Raises `HydrajaxError`, beginning with ``what``, if it is of none."""
    for family in FAMILIES.values():
        if family.includes(c):
            return family
    raise HydrajaxError(f"{what}: no family has both qkv_bias and qk_norm")
