"""Draft heads as their authors put them on the Hub, in a ``.pt`` file, into a directory that ``--draft`` reads.

The official Hydra code writes nothing but ``hydra_lm_head.pt``. A pickle is fetched only where somebody asks for it by
this name, and only tensors are read from it (`hydrajax.formats.tensors.TorchFiles`); what is kept is safetensors.
"""

from __future__ import annotations

from pathlib import Path

from hydrajax.errors import HydrajaxError
from hydrajax.formats.directories import exported
from hydrajax.formats.draft_registry import FORMATS
from hydrajax.formats.hub import downloaded
from hydrajax.formats.tensors import FLOATS, holds, open_tensors, read_json, save_safetensors, torch_module
from hydrajax.models.layout import MODEL
from hydrajax.optional_deps import needs

WHAT = "fetch"
OFFICIAL = [format for format in FORMATS if format.stem != MODEL]  # those with a file of their own


def fetch_heads(name: str | Path, directory: str | Path) -> None:
    """Write the heads of ``name`` into ``directory``: ``config.json`` and one safetensors file, its keys unchanged.

    name: ``org/name`` or ``org/name@revision`` on the Hub, or a directory here. An earlier export in ``directory`` is
    replaced; any other content is refused. Raises `HydrajaxError`, and writes nothing, for anything that is no such
    heads, cannot be had or cannot be written, and where torch is not installed.
    """
    if torch_module() is None:  # before gigabytes are fetched
        raise HydrajaxError(f"{WHAT}: {needs('torch')}")
    with exported(directory, overwrite=False, what=WHAT) as (folder, config):
        files = [f"{format.stem}.{suffix}" for format in OFFICIAL for suffix in ("pt", "safetensors")]
        source = downloaded(name, WHAT, ["config.json", *files])
        fields = read_json(source / "config.json", WHAT)
        format = next((one for one in OFFICIAL if one.recognises(fields, ()) and holds(source, one.stem)), None)
        if format is None:
            known = " nor ".join(one.known_by for one in OFFICIAL)
            raise HydrajaxError(f"{WHAT}: '{name}' holds neither {known}")
        found = open_tensors(source, format.stem, WHAT)
        for key in found:
            if (dtype := found.dtype(key)) not in FLOATS.values():
                raise HydrajaxError(f"{WHAT}: {key} has dtype {dtype}, expected {', '.join(FLOATS.values())}")
        save_safetensors(folder / f"{format.stem}.safetensors", {key: found.read(key) for key in found})
        config |= fields
