"""Draft heads in our own format: an orbax directory ``params/`` beside a ``config.json`` that describes the drafter.

``config.json`` names the kind of drafter (`hydrajax.formats.draft_registry`) and gives the settings of its dataclass,
the shapes of all parameters, and the size and checksum of every file: orbax alone would load an array of which a byte
has changed.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.drafters.draft_lm_head import LmHead, Vocabulary
from hydrajax.drafters.drafter import abstract_draft
from hydrajax.errors import HydrajaxError, one_line
from hydrajax.files import check_file, checksums, size_and_checksum
from hydrajax.formats.draft_registry import FILES, HEADS, kind_of
from hydrajax.formats.interface import integer
from hydrajax.formats.tensors import FLOATS
from hydrajax.models.layout import named_leaves
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig

WHAT = "draft"
MARK = "hydrajax_draft"  # the field of config.json by which the format is known; its value is the version
VERSION = 1
PARAMS, COMMITTED = "params", "commit_success.txt"  # the latter is orbax's name


def save_native(folder: Path, drafter, params: Any) -> dict[str, Any]:
    """Write ``params/`` into a directory and return the fields of ``config.json`` that `load_native` needs.

    drafter: of a kind that checkpoints hold.
    """
    from orbax.checkpoint import v1 as ocp  # slow to import, and other formats need none

    values = {field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)}
    prefix = values.pop("prefix", None)  # described beside the settings, as version 1 of the format has it
    values["dtype"] = jnp.dtype(drafter.dtype).name
    ocp.save(folder / PARAMS, jax.tree.map(np.asarray, params))
    # orbax needs none to load, and it names a path of this machine.
    (folder / PARAMS / COMMITTED).unlink(missing_ok=True)
    written = {name: _to_json(value) for name, value in values.items() if value is not None}  # None is the default
    described = {"heads": kind_of(drafter), "prefix": prefix is not None, "settings": written}
    if prefix is not None and prefix.window is not None:
        described["prefix_window"] = prefix.window
    return {
        MARK: VERSION,
        "tensors": _shapes(params),
        "drafter": described,
        "files": checksums(folder, PARAMS),
    }


def load_native(directory: Path, config: dict, base: LlamaConfig, dtype):
    """Load ``(drafter, draft_params)`` for a base of this configuration.

    config: the content of ``config.json``. dtype: of parameters and computation; None keeps the saved one.

    Raises `HydrajaxError` for another version, for a description that is not what was written or is of another base,
    and for files that are missing, damaged or were not written with it.
    """
    from orbax.checkpoint import v1 as ocp

    if config[MARK] != VERSION:
        raise HydrajaxError(f"{WHAT}: config.json: {MARK} is {config[MARK]!r}, supported is {VERSION}")
    drafter = _drafter(config.get("drafter"), base)
    _check_files(directory, config.get("files"))
    saved = drafter.dtype
    shapes = nn.unbox(abstract_draft(drafter, Llama(base, saved)))
    if config.get("tensors") != _shapes(shapes):
        raise HydrajaxError(
            f"{WHAT}: config.json: its tensors are not those that such heads have on this base: they were made for "
            "another base, or the file was changed"
        )
    # As NumPy: orbax ties JAX's arrays to their device, and a program compiled for others would be compiled again.
    target = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)
    try:
        params = ocp.load((directory / PARAMS).absolute(), target)  # orbax takes no relative path
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # this machine's trouble, not the file's
    except Exception as error:  # orbax raises many types for a damaged or foreign directory
        reason = one_line(error)
        raise HydrajaxError(f"{WHAT}: {directory / PARAMS} is damaged: {reason}") from None
    dtype = jnp.dtype(saved if dtype is None else dtype)
    return dataclasses.replace(drafter, dtype=dtype), jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), params)


def _shapes(params: Any) -> dict[str, list[int]]:
    """Shapes by name; orbax would complain of another one at length."""
    return {name: list(leaf.shape) for name, leaf in named_leaves(params).items()}


def _drafter(described: Any, base: LlamaConfig):
    """The drafter of a ``config.json``. Settings that an older file does not have are the defaults of its dataclass."""
    try:
        heads, settings = described["heads"], dict(described["settings"])
        kind, dtype = HEADS[heads], settings.pop("dtype")
        if dtype not in FLOATS.values():
            raise ValueError(f"dtype is {dtype!r}")
        has_prefix = "prefix" in {field.name for field in dataclasses.fields(kind)}
        drafter = _made(kind, settings, dtype=jnp.dtype(dtype), **({"prefix": None} if has_prefix else {}))
        FILES[heads].check(drafter, base)
        prefix = described["prefix"]
        if not isinstance(prefix, bool):
            raise ValueError(f"prefix is {prefix!r}")
        if prefix and not has_prefix:
            raise ValueError(f"prefix is true, {heads} has no prefix layer")
        window = integer(described, "prefix_window", 1) if "prefix_window" in described else None
        if window is not None and not prefix:
            raise ValueError(f"prefix_window is {window}, there is no prefix layer")
    except HydrajaxError as error:
        raise HydrajaxError(f"{WHAT}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise HydrajaxError(f"{WHAT}: config.json: 'drafter' is not what was written: {error}") from None
    return drafter.with_prefix(base, window) if prefix else drafter


def _to_json(value: Any) -> Any:
    """A setting as JSON has it."""
    if isinstance(value, Vocabulary):
        return value.tokens.tolist()
    if isinstance(value, tuple):
        return list(value)
    if dataclasses.is_dataclass(value):
        return {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def _made(kind: type, found: dict, of: str = "", **others) -> Any:
    """The inverse of `_to_json` for a dataclass, the setting ``of``. others: fields that are not in the file.

    Raises `KeyError`, `TypeError`, `ValueError` or `HydrajaxError` for what that does not write.
    """
    kinds = typing.get_type_hints(kind)
    names = {field.name for field in dataclasses.fields(kind)} - others.keys()
    if unknown := found.keys() - names:
        raise ValueError(f"{of or kind.__name__} has {', '.join(sorted(map(str, unknown)))}")
    where = f" of {of}" if of else ""
    return kind(**{name: _read(value, kinds[name], f"{name}{where}") for name, value in found.items()}, **others)


def _read(value: Any, kind: Any, name: str) -> Any:
    """A value of this type, as strictly as `_made`."""
    choices = typing.get_args(kind)
    if type(None) in choices:
        if value is None:
            return None
        kind = choices[0]
    if kind is Vocabulary or typing.get_origin(kind) is tuple:
        if not isinstance(value, list) or not value or any(type(x) is not int or not 0 <= x < 2**31 for x in value):
            raise ValueError(f"{name} is no list of numbers of at most 31 bits")
        return Vocabulary(value) if kind is Vocabulary else tuple(value)
    if dataclasses.is_dataclass(kind):
        found = dict(value)
        if kind is LmHead:  # a `LlamaConfig` may be of an older version, which had fewer fields
            found = {field.name: found.pop(field.name) for field in dataclasses.fields(kind)} | found
        return _made(kind, found, name)
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if type(value) is not kind or (kind is int and abs(value) >= 2**31):
        raise ValueError(f"{name} is {value!r}")
    return value


def _check_files(directory: Path, files: Any) -> None:
    if not isinstance(files, dict) or not files:
        raise HydrajaxError(f"{WHAT}: config.json: 'files' is not what was written")
    folders = {path for path in (directory / PARAMS).rglob("*") if path.is_dir() and not path.is_symlink()}
    present = {str(path.relative_to(directory)) for path in {*(directory / PARAMS).rglob("*")} - folders}
    for name in sorted(files.keys() | present):
        if name not in files:
            raise HydrajaxError(f"{WHAT}: {directory} holds {name}, which was not written with it")
        if name not in present:
            raise HydrajaxError(f"{WHAT}: {name} is missing from {directory}")
        check_file(directory / name, WHAT)
        try:
            found = size_and_checksum(directory / name)
        except OSError as error:  # such as a link in a circle
            raise HydrajaxError(f"{WHAT}: cannot read {directory / name}: {error.strerror}") from None
        if found != files[name]:
            raise HydrajaxError(f"{WHAT}: {directory / name} is damaged: it is not what was written")
