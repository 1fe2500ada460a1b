"""Export draft heads to formats of other programs and to our own: the exact inverse of `hydrajax.formats.load`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.formats import native
from hydrajax.formats.directories import WHAT, cast, exported, parameter_dtype
from hydrajax.formats.draft_registry import FILES, formats, heads, kind_of
from hydrajax.formats.hub import REPOSITORY
from hydrajax.formats.interface import About, HeadFormat, MadeFor, cannot_write
from hydrajax.formats.load import RECORD
from hydrajax.formats.tensors import save_safetensors
from hydrajax.formats.torch_files import save_torch
from hydrajax.models.layout import write

WRITTEN = {format.name: format for format in formats() if format.read_by}
NATIVE = "native"
NATIVE_READ_BY = "`hydrajax generate --base BASE --draft THIS`. `hydrajax convert export` converts it to other formats."
FORMATS = (*WRITTEN, NATIVE)
NOT_RECORDED = "not recorded"


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
    """Save trained draft heads with ``config.json`` and a model card, ``README.md``. Replaces an earlier export.

    A shared block is written once per application, as in the official code; copies of the base's embedding are not
    written.

    Args:
        format: one of `FORMATS`. None takes the first that can express the drafter, those of its own kind first, and
            ``native`` if no other can.
        base_name: ``base_model_name_or_path`` of ``config.json``.
        base_fingerprint: of `hydrajax.formats.fingerprint.fingerprint`. The heads then load onto no other base. It also
            has the base's depth, which some formats need.
        story: ``data``, ``recipe`` and ``tokens_per_step``, for the card and later exports.
        dtype: of the file; None keeps each parameter's own. ``jnp.int8``, in our own format, stores matrices in one
            byte per number, and the rest in float32.
        torch_file: write a ``.pt`` too, if the official code opens no other and torch is installed.
        extra: more fields for ``config.json``.
        overwrite: replace a directory with any content.

    Raises:
        HydrajaxError: the format cannot express the drafter, or the directory may not be replaced or cannot be written.
    """
    kind = kind_of(drafter)
    int8 = dtype is not None and jnp.dtype(dtype) == jnp.int8
    made_for = MadeFor(base_name, ((base_fingerprint or {}).get("shapes") or {}).get("n_layers"))
    try:
        if kind is None:
            raise cannot_write("drafter", type(drafter).__name__, ", ".join(heads(name).__name__ for name in FILES))
        if format not in (None, *FORMATS):
            raise not_allowed("format", format, FORMATS)
        if int8 and format not in (None, NATIVE):
            raise HydrajaxError(f"dtype: got int8 for the format {format}, expected {NATIVE}")
        chosen = None if int8 else _choose(format, drafter, kind, made_for)
        fields = chosen.config(drafter, made_for) if chosen else {}
    except HydrajaxError as error:
        raise HydrajaxError(f"{WHAT}: {error}") from None
    fields |= {"base_model_name_or_path": base_name}
    if base_fingerprint or story:
        fields[RECORD] = {"base": base_fingerprint, "story": story or {}}

    with exported(directory, overwrite) as (folder, config):
        if chosen is None:
            own = jnp.dtype(jnp.float32) if int8 else drafter.dtype if dtype is None else jnp.dtype(dtype)
            params = jax.tree.map_with_path(lambda path, x: np.asarray(x, parameter_dtype(path, own)), params)
            fields |= native.save_native(folder, replace(drafter, dtype=own), params, int8=int8)
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


def _choose(name: str | None, drafter, kind: str, made_for: MadeFor) -> HeadFormat | None:
    """The format of this name, or the first that can express the drafter; None for our own."""
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
        expected = ", ".join([*(format.name for format in fitting), NATIVE])
        raise HydrajaxError(
            f"format: got {name} for {describe(drafter).title}, expected one of {expected}; {refusals[chosen]}"
        )
    return chosen


def model_card(drafter, format: str, read_by: str, base_name: str, story: dict[str, Any]) -> str:
    """Return Markdown with the Hub's front matter.

    Args:
        read_by: the programs that read it, in which HEADS stands for the number of heads.
        base_name: name of the base; ``base_model`` of the front matter if it can be a repository on the Hub.
        story: ``data, recipe, tokens_per_step``; missing ones are `NOT_RECORDED`.
    """
    base_name = _table_cell(base_name)
    about = describe(drafter)
    front = {"library_name": "hydrajax", "tags": ["speculative-decoding", about.tag]}
    if REPOSITORY.fullmatch(base_name):
        front["base_model"] = base_name
    data, recipe, tokens_per_step = (
        _table_cell(story.get(name, NOT_RECORDED)) for name in ("data", "recipe", "tokens_per_step")
    )
    rows = {
        "base": base_name or NOT_RECORDED,
        **about.rows,
        "data": data,
        "recipe": recipe,
        "tokens_per_step (τ)": tokens_per_step,
        "format": format,
    }
    return "\n".join(
        [
            "---",
            *(f"{name}: {json.dumps(value)}" for name, value in front.items()),
            "---",
            "",
            f"# {about.title} for {base_name or 'an unnamed base'}",
            "",
            "Draft heads for tree speculative decoding: they propose tokens, which the base verifies. They work with "
            "this base only.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows.items()),
            "",
            f"Read by: {read_by.replace('HEADS', str(drafter.spec.depth))}",
            "",
        ]
    )


def describe(drafter) -> About:
    """Describe a drafter; the title mentions a prefix layer."""
    about = FILES[kind_of(drafter)].about(drafter)
    if not drafter.spec.prefix_layer:
        return about
    return About(f"{about.title} with a prefix layer", about.tag, about.rows)


def _table_cell(value: Any) -> str:
    """Escape text for a Markdown table."""
    return " ".join(str(value).split()).replace("|", "\\|")
