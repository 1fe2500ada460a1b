"""Draft heads in our own format: an orbax directory ``params/`` beside a ``config.json`` that describes the drafter.

``config.json`` also has the size and checksum of every file: orbax alone would load an array of which a byte has
changed.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from hydrajax.checkpoints.heads.released import check_sizes
from hydrajax.checkpoints.tensors import FLOATS
from hydrajax.drafters.drafter import abstract_draft
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.prefix import WithPrefix, heads_of, replace_in_heads
from hydrajax.errors import HydrajaxError, one_line
from hydrajax.files import size_and_checksum
from hydrajax.models.config import LlamaConfig
from hydrajax.models.llama import Llama

WHAT = "--draft"
MARK = "hydrajax_draft"  # the field of config.json by which the format is known; its value is the version
VERSION = 1
PARAMS = "params"
MOST = 64  # heads, and blocks of one: more are a slip, which would take all memory
KINDS = {"hydra": HydraHeads, "medusa": MedusaHeads}


def save_native(folder: Path, drafter, params: Any) -> dict[str, Any]:
    """Write ``params/`` into a directory and return the fields of ``config.json`` that `load_native` needs."""
    from orbax.checkpoint import v1 as ocp  # slow to import, and other formats need none

    heads = heads_of(drafter)
    kinds = {kind: name for name, kind in KINDS.items()}
    if type(heads) not in kinds:
        raise HydrajaxError(f"export: drafter is {type(heads).__name__}, the native format allows {', '.join(KINDS)}")
    ocp.save(folder / PARAMS, jax.tree.map(np.asarray, params))
    files = sorted(path for path in (folder / PARAMS).rglob("*") if path.is_file())
    fields = dataclasses.asdict(heads) | {"dtype": jnp.dtype(heads.dtype).name}
    return {
        MARK: VERSION,
        "tensors": _described(params),
        "drafter": {"heads": kinds[type(heads)], "prefix": isinstance(drafter, WithPrefix), "settings": fields},
        "files": {str(path.relative_to(folder)): size_and_checksum(path) for path in files},
    }


def load_native(directory: Path, config: dict, base: LlamaConfig, dtype):
    """``(drafter, draft_params)`` for a base of this configuration; dtype None keeps the saved one."""
    from orbax.checkpoint import v1 as ocp

    if config[MARK] != VERSION:
        raise HydrajaxError(f"{WHAT}: config.json: {MARK} is {config[MARK]!r}, supported is {VERSION}")
    drafter = _drafter(config.get("drafter"), base)
    _check_files(directory, config.get("files"))
    saved = heads_of(drafter).dtype
    shapes = nn.unbox(abstract_draft(drafter, Llama(base, saved)))
    if config.get("tensors") != _described(shapes):
        raise HydrajaxError(
            f"{WHAT}: config.json: its tensors are not those that such heads have on this base: they were made for "
            "another base, or the file was changed"
        )
    here = SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
    try:
        params = ocp.load(directory / PARAMS, target)
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # this machine's trouble, not the file's
    except Exception as error:  # orbax raises many types for a damaged or foreign directory
        reason = one_line(error)
        raise HydrajaxError(f"{WHAT}: {directory / PARAMS} is damaged: {reason}") from None
    if dtype is None or dtype == saved:
        return drafter, params
    return replace_in_heads(drafter, dtype=jnp.dtype(dtype)), jax.tree.map(lambda x: x.astype(dtype), params)


def _described(params: Any) -> dict[str, list[int]]:
    """Shapes by name; orbax would complain of another one at length."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): list(x.shape) for path, x in leaves}


def _drafter(described: Any, base: LlamaConfig):
    try:
        kind, settings = KINDS[described["heads"]], dict(described["settings"])
        if settings["dtype"] not in FLOATS.values():
            raise ValueError(f"dtype is {settings['dtype']!r}")
        settings["dtype"] = jnp.dtype(settings["dtype"])
        wanted = {field.name: field.type for field in dataclasses.fields(kind)}
        if settings.keys() != wanted.keys():
            raise ValueError(f"its settings are {', '.join(sorted(settings))}")
        kinds = {"int": int, "bool": bool, "float": (int, float)}
        for name, value in settings.items():
            if wanted[name] in kinds and (
                not isinstance(value, kinds[wanted[name]]) or (wanted[name] == "int" and isinstance(value, bool))
            ):
                raise ValueError(f"{name} is {value!r}")
        if not (1 <= settings["n_heads"] <= MOST and 1 <= settings["n_layers"] <= MOST):
            raise ValueError(f"it has {settings['n_heads']} heads of {settings['n_layers']} blocks, allowed are {MOST}")
        if not 0 <= settings["hidden_state_offset"] <= base.n_layers:
            raise ValueError(
                f"hidden_state_offset is {settings['hidden_state_offset']}, the base has {base.n_layers} layers"
            )
        heads = kind(**settings)
        prefix = described["prefix"]
        if not isinstance(prefix, bool):
            raise ValueError(f"prefix is {prefix!r}")
    except HydrajaxError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise HydrajaxError(f"{WHAT}: config.json: 'drafter' is not what was written: {error}") from None
    check_sizes((heads.vocab_size, heads.width), base)
    return WithPrefix(heads, base) if prefix else heads


def _check_files(directory: Path, files: Any) -> None:
    if not isinstance(files, dict) or not files:
        raise HydrajaxError(f"{WHAT}: config.json: 'files' is not what was written")
    present = {str(path.relative_to(directory)) for path in (directory / PARAMS).rglob("*") if path.is_file()}
    for name in sorted(files.keys() | present):
        if name not in files:
            raise HydrajaxError(f"{WHAT}: {directory} holds {name}, which was not written with it")
        if name not in present:
            raise HydrajaxError(f"{WHAT}: {name} is missing from {directory}")
        if size_and_checksum(directory / name) != files[name]:
            raise HydrajaxError(f"{WHAT}: {directory / name} is damaged: it is not what was written")
