"""Our own format of draft heads: an orbax directory ``params/`` and a ``config.json`` that describes the drafter.

``config.json`` has the kind of drafter (`hydrajax.formats.draft_registry`), the fields of its dataclass, the shapes of
all parameters, and the size and checksum of each file, as orbax does not notice a changed byte. Version 2 stores
matrices in int8 (`hydrajax.lowbit.quantized.Int8`), which are loaded as floats (see `is_int8`).
"""

import dataclasses
import math
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hydrajax import plugins
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.trainable import abstract_draft
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.errors import HydrajaxError, one_line
from hydrajax.files import checksums
from hydrajax.formats.directories import parameter_dtype
from hydrajax.formats.draft_registry import FILES, heads, kind_of
from hydrajax.formats.interface import integer
from hydrajax.formats.tensors import FLOATS
from hydrajax.models.layout import named_leaves
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.plugins import outdated

WHAT = "draft"
MARK = "hydrajax_draft"  # field of config.json that marks the format; its value is the version
FLOAT, INT8 = 1, 2  # versions
FEWEST_INPUTS = 16  # of a matrix that is stored in int8; the biases of fused layers have two rows
PARAMS, COMMITTED = "params", "commit_success.txt"  # the latter is orbax's


def save_native(folder: Path, drafter, params: Any, *, int8: bool = False) -> dict[str, Any]:
    """Write ``params/`` of a drafter with trained parameters; return the fields of ``config.json``.

    With ``int8``, matrices are rounded to one byte per number and a scale per output.
    """
    from orbax.checkpoint import v1 as ocp  # slow to import, and not needed by other formats

    values = {field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)}
    prefix = values.pop("prefix", None)  # stored outside the settings in version 1
    values["dtype"] = jnp.dtype(drafter.dtype).name
    arrays = jax.tree.map(np.asarray, params)
    if int8:
        kind = plugins.find("weights", "int8")
        arrays = jax.tree.map(lambda x: kind.of(x).arrays() if _is_matrix(x) else x, arrays)
    ocp.save(folder / PARAMS, arrays)
    # Not needed to load, and it contains a path of this machine.
    (folder / PARAMS / COMMITTED).unlink(missing_ok=True)
    settings = {name: _to_json(value) for name, value in values.items() if value is not None}  # None is the default
    described = {"heads": kind_of(drafter), "prefix": prefix is not None, "settings": settings}
    if prefix is not None and prefix.window is not None:
        described["prefix_window"] = prefix.window
    return {
        MARK: INT8 if int8 else FLOAT,
        "tensors": _shapes(params),
        "drafter": described,
        "files": checksums(folder, PARAMS),
    }


def is_int8(config: Mapping[str, Any]) -> bool:
    """Return whether a draft with this ``config.json`` stores its matrices in int8."""
    return config.get(MARK) == INT8


def load_native(directory: Path, config: dict, base: LlamaConfig, dtype):
    """Load ``(drafter, arrays)`` for a base of this configuration; the arrays are NumPy's.

    Args:
        dtype: of parameters and computation; None for the saved one.

    Raises:
        HydrajaxError: another version, an invalid description, another base, or missing, damaged or extra files.
    """
    from orbax.checkpoint import v1 as ocp

    version = config[MARK]
    if version not in (FLOAT, INT8):
        raise HydrajaxError(f"{WHAT}: config.json: {MARK}: got {version!r}, expected {FLOAT} or {INT8}")
    drafter = _drafter(config.get("drafter"), base)
    _check_files(directory, config.get("files"))
    saved = drafter.dtype
    shapes = nn.unbox(abstract_draft(drafter, Llama(base, saved)))
    if config.get("tensors") != _shapes(shapes):
        raise HydrajaxError(
            f"{WHAT}: config.json: tensors: got other shapes than such heads have on this base; they were made for "
            "another base, or the file was changed"
        )
    # As NumPy: orbax ties JAX arrays to their device, and programs for other devices would be compiled again.
    target = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)
    if version == INT8:
        target = jax.tree.map(lambda x: _empty_int8(x.shape) if _is_matrix(x) else x, target)
    try:
        params = ocp.load((directory / PARAMS).absolute(), target)  # orbax accepts no relative path
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # not the file's fault
    except Exception as error:  # orbax raises many types for a damaged or foreign directory
        raise HydrajaxError(f"{WHAT}: {directory / PARAMS} is damaged: {one_line(error)}") from None
    if version == INT8:
        params = jax.tree.map(
            lambda x: x["values"].astype(np.float32) * x["scale"] if _is_int8(x) else x, params, is_leaf=_is_int8
        )
    dtype = jnp.dtype(saved if dtype is None else dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # too large numbers become infinite, as in other formats
        params = jax.tree.map_with_path(lambda path, x: np.asarray(x, parameter_dtype(path, dtype)), params)
        return dataclasses.replace(drafter, dtype=dtype), params


def _is_matrix(x: Any) -> bool:
    return len(x.shape) > 1 and x.shape[0] >= FEWEST_INPUTS


def _is_int8(x: Any) -> bool:
    return isinstance(x, dict) and x.keys() == {"values", "scale"}


def _empty_int8(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {"values": np.empty(shape, np.int8), "scale": np.empty(shape[1:], np.float32)}


def _shapes(params: Any) -> dict[str, list[int]]:
    return {name: list(leaf.shape) for name, leaf in named_leaves(params).items()}


def _drafter(described: Any, base: LlamaConfig):
    """Rebuild a drafter. Settings that an older file lacks get the defaults of its dataclass."""
    try:
        name, settings, prefix = described["heads"], dict(described["settings"]), described["prefix"]
        if isinstance(name, str) and name not in FILES:
            raise ValueError(f"heads: got '{name}', expected {', '.join(FILES)}{outdated()}")
        kind, dtype = heads(name), settings.pop("dtype")
        if dtype not in FLOATS.values():
            raise ValueError(f"dtype: got {dtype!r}")
        has_prefix = "prefix" in {field.name for field in dataclasses.fields(kind)}
        drafter = _from_json(kind, settings, dtype=jnp.dtype(dtype), **({"prefix": None} if has_prefix else {}))
        FILES[name].check(drafter, base)
        window = integer(described, "prefix_window", 1) if "prefix_window" in described else None
        if not isinstance(prefix, bool):
            raise ValueError(f"prefix: got {prefix!r}, expected true or false")
        if prefix and not has_prefix:
            raise ValueError(f"prefix: got true, expected false: {name} has no prefix layer")
        if window is not None and not prefix:
            raise ValueError(f"prefix_window: got {window} without a prefix layer")
    except HydrajaxError as error:
        raise HydrajaxError(f"{WHAT}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise HydrajaxError(f"{WHAT}: config.json: drafter is invalid: {error}") from None
    return drafter.with_prefix(base, window) if prefix else drafter


def _to_json(value: Any) -> Any:
    if isinstance(value, Vocabulary):
        return value.tokens.tolist()
    if isinstance(value, tuple):
        return list(value)
    if dataclasses.is_dataclass(value):
        return {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def _from_json(kind: type, found: dict, name: str = "", **others) -> Any:
    """Inverse of `_to_json` for a dataclass, the setting ``name``. others: fields that are not in the file."""
    kinds = typing.get_type_hints(kind)
    names = {field.name for field in dataclasses.fields(kind)} - others.keys()
    may_be_empty = {field.name for field in dataclasses.fields(kind) if field.default == ()}
    if unknown := found.keys() - names:
        raise ValueError(f"{name or kind.__name__}: got unknown fields {', '.join(sorted(map(str, unknown)))}")
    where = f" of {name}" if name else ""
    read = {
        field: () if value == [] and field in may_be_empty else _value(value, kinds[field], f"{field}{where}")
        for field, value in found.items()
    }
    return kind(**read, **others)


def _value(value: Any, kind: Any, name: str) -> Any:
    choices = typing.get_args(kind)
    if type(None) in choices:
        if value is None:
            return None
        kind = choices[0]
    if typing.get_origin(kind) is tuple and float in choices and isinstance(value, list):
        return tuple(_value(x, float, name) for x in value)
    if kind is Vocabulary or typing.get_origin(kind) is tuple:
        if not isinstance(value, list) or not value or any(type(x) is not int or not 0 <= x < 2**31 for x in value):
            raise ValueError(f"{name}: expected a list of numbers below 2**31")
        return Vocabulary(value) if kind is Vocabulary else tuple(value)
    if dataclasses.is_dataclass(kind):
        found = dict(value)
        if kind is LmHead:  # no field may be missing but a later one; in a `LlamaConfig` of an older version some are
            found = {"clustered": False} | found
            found = {field.name: found.pop(field.name) for field in dataclasses.fields(kind)} | found
        return _from_json(kind, found, name)
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if type(value) is not kind or (kind is int and abs(value) >= 2**31):
        raise ValueError(f"{name}: got {value!r}")
    return value


def _check_files(directory: Path, files: Any) -> None:
    if not isinstance(files, dict) or not files:
        raise HydrajaxError(f"{WHAT}: config.json: files: got {files!r}, expected sizes and checksums")
    try:
        found = checksums(directory, PARAMS)
    except OSError as error:
        raise HydrajaxError(f"{WHAT}: cannot read {error.filename}: {error.strerror}") from None
    for name in sorted(files.keys() | found.keys()):
        if name not in files:
            raise HydrajaxError(f"{WHAT}: {directory / name} was not written with it")
        if name not in found:
            raise HydrajaxError(f"{WHAT}: {name} is missing from {directory}")
        if files[name] != found[name]:
            raise HydrajaxError(f"{WHAT}: {directory / name} is damaged: its size or checksum differs")
