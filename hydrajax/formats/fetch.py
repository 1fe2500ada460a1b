"""Fetch draft heads that are published as a ``.pt`` file, and save them as safetensors.

The official Hydra code writes only ``hydra_lm_head.pt``. A pickle is downloaded by this command alone, and only tensors
are read from it (`hydrajax.formats.torch_files.TorchFiles`).
"""

from pathlib import Path

from hydrajax.errors import HydrajaxError
from hydrajax.formats.directories import exported
from hydrajax.formats.draft_registry import formats
from hydrajax.formats.hub import downloaded
from hydrajax.formats.tensors import expect_tensors, holds, open_tensors, read_json, save_safetensors
from hydrajax.formats.torch_files import torch_module
from hydrajax.models.layout import MODEL
from hydrajax.optional_deps import needs

WHAT = "fetch"
OFFICIAL = [format for format in formats() if format.stem != MODEL]  # those with a file name of their own


def fetch_heads(name: str | Path, directory: str | Path) -> None:
    """Write ``config.json`` and one safetensors file with unchanged keys.

    Args:
        name: ``org/name`` or ``org/name@revision`` on the Hub, or a local directory.
        directory: the output. An earlier export is replaced.

    Raises:
        HydrajaxError: no such heads, other files in ``directory``, a failed download, or torch is not installed.
            Nothing is written then.
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
        expect_tensors(found, {key: found.shape(key) for key in found}, WHAT)  # floats
        save_safetensors(folder / f"{format.stem}.safetensors", {key: found.read(key) for key in found})
        config |= fields
