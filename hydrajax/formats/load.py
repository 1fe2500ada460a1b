"""Load draft heads of any supported format, recognised by ``config.json`` and tensor names.

Names, shapes and dtypes of foreign tensors are checked before any tensor is read. On a mesh the heads are sharded as
the base is, and of safetensors files no more is read than the devices' slices, except to compare blocks that may be
copies. Files in our own format are read whole.
"""

from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hydrajax.drafters.drafter import Drafter
from hydrajax.errors import HydrajaxError
from hydrajax.families.family_registry import FAMILIES
from hydrajax.formats import native
from hydrajax.formats.checkpoint import Checkpoint
from hydrajax.formats.directories import parameter_dtype
from hydrajax.formats.draft_ref import OWN
from hydrajax.formats.draft_registry import FILES, formats
from hydrajax.formats.fingerprint import check_fingerprint
from hydrajax.formats.interface import LAST_NORMS, HeadFormat
from hydrajax.formats.tensors import TensorFiles, expect_tensors, holds, open_tensors
from hydrajax.models.layout import MODEL, Parameter, leaf, read, shapes
from hydrajax.models.layout import Path as Keys
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.sharding import placer

WHAT = "draft"
RECORD = "hydrajax"  # field of an exported config.json: the base's fingerprint and the training record


def load_draft(
    draft: Checkpoint | str | Path,
    base: LlamaConfig,
    dtype=jnp.float32,
    *,
    base_directory: Checkpoint | str | Path | None = None,
    adapter: str | Path | None = None,
    mesh: Mesh | None = None,
):
    """Load ``(drafter, draft_params)`` for a base of this configuration.

    Args:
        dtype: of parameters and computation; None for the files' own.
        base_directory: the base's directory or checkpoint. Heads that record their base are then refused for any other;
            most released ones have no record.
        adapter: directory of the base's adapter. A base with an adapter is another base than without.
        mesh: shards the heads as the base is; None for the default device.

    Raises:
        HydrajaxError: anything missing, damaged, unsupported or made for another base.
    """
    draft = Checkpoint.of(draft, WHAT)
    draft.check_directory()
    directory, config = draft.directory, draft.raw
    format = None if native.MARK in config else find_format(directory, config)
    record = config.get(RECORD)
    if base_directory is not None and isinstance(record, dict) and record.get("base"):
        name = str(config.get("base_model_name_or_path") or "")
        check_fingerprint(record["base"], name, base_directory, f"{WHAT}: {directory}", adapter)
    dtype = None if dtype is None else jnp.dtype(dtype)
    if format is None:
        drafter, arrays = native.load_native(directory, config, base, dtype)
        put = _head_placer(drafter, base, mesh)
        return drafter, jax.tree.map_with_path(lambda path, x: put(tuple(key.key for key in path), x), arrays)
    return load_released(directory, config, base, dtype, format, mesh)


def find_format(directory: Path, config: dict) -> HeadFormat:
    """Return the format of a directory with this ``config.json``; raise `HydrajaxError` if there is none."""
    known = formats()
    fitting = [format for format in known if format.recognises(config, ())]
    if not fitting and holds(directory, MODEL):
        names = set(open_tensors(directory, MODEL, WHAT))
        fitting = [format for format in known if format.recognises(config, names)]
    if fitting:  # the first one reports its missing file if there is none
        return next((format for format in fitting if holds(directory, format.stem)), fitting[0])
    supported = ", ".join([*(format.known_by for format in known), "hydrajax's own ('hydrajax_draft')"])
    raise HydrajaxError(f"{WHAT}: {directory} holds no draft heads of a supported format: {supported}")


def is_model(draft: Checkpoint | str | Path) -> bool:
    """Return True if a directory holds a whole model of a supported family and no draft heads.

    Heads may also have a model's ``config.json`` (EAGLE), or be in one file with their base (Medusa-2).
    """
    draft = Checkpoint.of(draft, WHAT)
    draft.check_directory()
    directory, config = draft.directory, draft.raw
    kind = config.get("model_type")
    if not isinstance(kind, str) or native.MARK in config or kind not in FAMILIES:
        return False
    if any(format.recognises(config, ()) for format in formats()) or not holds(directory, MODEL):
        return False
    names = set(open_tensors(directory, MODEL, WHAT))
    return not LAST_NORMS.isdisjoint(names) and not any(format.recognises(config, names) for format in formats())


def load_own_heads(
    base_files: Checkpoint | str | Path, base: LlamaConfig, dtype=jnp.float32, *, mesh: Mesh | None = None
):
    """Load ``(drafter, draft_params)`` of the MTP module in the base's own files.

    Args:
        base_files: the base's checkpoint; quantised modules are widened. The other arguments are those of `load_draft`.

    Raises:
        HydrajaxError: there is no module, or one that is not supported.
    """
    base_files = Checkpoint.of(base_files, WHAT)
    format = find_own_heads(base_files)
    directory, raw, files = base_files.directory, base_files.raw, base_files.files
    return load_released(directory, raw, base, None if dtype is None else jnp.dtype(dtype), format, mesh, files)


def find_own_heads(base: Checkpoint) -> HeadFormat:
    """Return the format of the MTP module in a base's files."""
    names = set(base.files)
    modules = FILES[OWN].formats
    for format in modules:
        if format.found_in(base.raw, names):
            return format
    known = " or ".join(f"'{format.prefix(base.raw)}*'" for format in modules)
    raise HydrajaxError(
        f"{WHAT}: got '{OWN}', but the base in {base.directory} has no MTP module (no tensors {known}); name "
        "heads or another draft"
    )


def load_released(
    directory: Path,
    config: dict,
    base: LlamaConfig,
    dtype,
    format: HeadFormat,
    mesh: Mesh | None = None,
    files: TensorFiles | None = None,
):
    """Load ``(drafter, draft_params)`` in this format; the arguments are those of `load_draft`.

    ``files`` are the tensors; by default those of ``directory``.
    """
    files, where = open_tensors(directory, format.stem, WHAT) if files is None else files, f"{WHAT}: {directory}"
    try:
        drafter = format.drafter(config, files, base)
        expect_tensors(files, shapes(format.layout_in(drafter, config, files.shapes)), format.stem, format.ignored)
        drafter = format.settled(drafter, files, dtype)
    except HydrajaxError as error:
        raise HydrajaxError(f"{where}: {error}") from None
    layout, put = format.layout_in(drafter, config, files.shapes), _head_placer(drafter, base, mesh)
    return drafter, read(layout, files, lambda path, x: put(path, x.astype(parameter_dtype(path, dtype))))


def _head_placer(
    drafter: Drafter, base: LlamaConfig, mesh: Mesh | None
) -> Callable[[Keys, np.ndarray | Parameter], jax.Array]:
    """Return ``put(path, array)``, which places one parameter of a drafter."""
    place = placer(mesh)
    if mesh is None:  # axes are not needed, and tracing the drafter for them takes a tenth of a second
        return lambda path, array: place(array, None)
    from hydrajax.drafters.trainable import abstract_draft

    axes = nn.get_partition_spec(abstract_draft(drafter, Llama(base, drafter.dtype)))
    return lambda path, array: place(array, leaf(axes, path))
