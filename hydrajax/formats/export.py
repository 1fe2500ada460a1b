"""Saving draft heads in the formats that other programs read, and in our own.

It is the inverse of `hydrajax.formats.load`, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.formats import native
from hydrajax.formats.card import describe, model_card
from hydrajax.formats.directories import WHAT, cast, exported
from hydrajax.formats.draft_registry import FILES, HEADS, kind_of
from hydrajax.formats.draft_registry import FORMATS as RELEASED
from hydrajax.formats.interface import HeadFormat, MadeFor, cannot_write
from hydrajax.formats.load import RECORD
from hydrajax.formats.tensors import save_safetensors, save_torch
from hydrajax.models.layout import write

WRITTEN = {format.name: format for format in RELEASED if format.read_by}
NATIVE = "native"
NATIVE_READ_BY = "`hydrajax generate --base BASE --draft THIS`. `hydrajax convert export` turns it into other formats."
FORMATS = (*WRITTEN, NATIVE)


def export_heads(
    directory: str | Path,
    drafter,
    params: Any,
    *,
    format: str | None = None,
    base_name: str = "",
    base_fingerprint: dict | None = None,
    story: dict[str, Any] | None = None,
    dtype=jnp.bfloat16,
    torch_file: bool = False,
    extra: dict | None = None,
    overwrite: bool = False,
) -> None:
    """Save draft heads with their ``config.json`` and a model card, ``README.md``.

    drafter: of a kind with trained parameters.
    format: a name of `FORMATS`. ``native`` is our own, an orbax directory, of any drafter. The others are described
        beside the drafters, such as in `hydrajax.formats.medusa_format`. None takes the first that can say what the
        drafter is, those of its own kind before others, and our own if no other can.
    base_name: becomes ``base_model_name_or_path``.
    base_fingerprint: `hydrajax.formats.fingerprint.fingerprint` of the base; the heads then load onto no other.
        It also says how many layers the base has, for formats that count those which heads read from the first on.
    story: ``data``, ``recipe`` (texts) and ``tokens_per_step`` (a number or text), for the card and later exports.
    dtype: of the file; None keeps each parameter's own.
    torch_file: write a ``.pt`` too, where the released code opens no other and torch is installed.
    extra: more fields for ``config.json``.
    overwrite: replace a directory even if it is no earlier export, with all that is in it.

    A shared block is written once per application, as the official code does; the loader takes equal blocks for a
    shared one. The official files also hold copies of the base's embedding, which their code takes from the base
    anyway: they are left out.

    Raises `HydrajaxError` for drafters that the format cannot express, and if the directory may not be replaced or
    cannot be written.
    """
    kind = kind_of(drafter)
    made_for = MadeFor(base_name, ((base_fingerprint or {}).get("shapes") or {}).get("n_layers"))
    try:
        if kind is None:
            allowed = ", ".join(kind.__name__ for kind in HEADS.values())
            raise cannot_write(f"drafter is {type(drafter).__name__}", allowed)
        if format not in (None, *FORMATS):
            raise not_allowed("format", format, FORMATS)
        chosen = _chosen(format, drafter, kind, made_for)
        fields = chosen.config(drafter, made_for) if chosen else {}
    except HydrajaxError as error:
        raise HydrajaxError(f"{WHAT}: {error}") from None
    fields |= {"base_model_name_or_path": base_name}
    if base_fingerprint or story:
        fields[RECORD] = {"base": base_fingerprint, "story": story or {}}

    with exported(directory, overwrite) as (folder, config):
        if chosen is None:
            own = drafter.dtype if dtype is None else jnp.dtype(dtype)
            params = jax.tree.map(lambda x: np.asarray(x, own), params)
            fields |= native.save_native(folder, replace(drafter, dtype=own), params)
        else:
            tensors = cast(write(chosen.layout(drafter, fields), params), dtype)
            if chosen.dtype_field:
                fields[chosen.dtype_field] = next(iter(tensors.values())).dtype.name
            tensors |= chosen.constants(drafter)
            save_safetensors(folder / f"{chosen.stem}.safetensors", tensors)
            if torch_file and chosen.torch_only:
                save_torch(folder / f"{chosen.stem}.pt", tensors)
        name, read_by = (chosen.name, chosen.read_by) if chosen else (NATIVE, NATIVE_READ_BY)
        (folder / "README.md").write_text(model_card(drafter, name, read_by, base_name, story or {}))
        config |= fields | (extra or {})


def _chosen(name: str | None, drafter, kind: str, made_for: MadeFor) -> HeadFormat | None:
    """The format of this name, None for our own; without a name the first that can say what the drafter is.

    Raises `HydrajaxError` where the named one cannot, and says which can.
    """
    own = [format for format in FILES[kind].formats if format.read_by]
    refusals: dict[HeadFormat, HydrajaxError] = {}
    fitting: list[HeadFormat] = []
    for format in [*own, *(other for other in WRITTEN.values() if other not in own)]:
        try:
            format.config(drafter, made_for)
            fitting.append(format)
        except HydrajaxError as error:
            refusals[format] = error
    if name is None:
        return fitting[0] if fitting else None
    chosen = WRITTEN.get(name)
    if chosen in refusals:
        allowed = ", ".join([*(format.name for format in fitting), NATIVE])
        raise HydrajaxError(
            f"these are {describe(drafter).title}, formats that can hold them: {allowed}; {name} cannot: "
            f"{refusals[chosen]}"
        )
    return chosen
