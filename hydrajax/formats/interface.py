"""Interface between draft heads and their files.

Each trained kind of drafter has one `Files` in the group ``formats`` of `hydrajax.plugins`. Loading, export and the
model card use these and refer to no kind by name.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hydrajax.drafters.drafter import Drafter
from hydrajax.errors import HydrajaxError
from hydrajax.families.config_fields import unsupported
from hydrajax.formats.tensors import TensorFiles
from hydrajax.models.layout import Layout, Shape
from hydrajax.models.llama_config import LlamaConfig

CONFIG = "config.json"
# Every whole model has one of them, and no heads do.
LAST_NORMS = {f"model.{part}{norm}.weight" for part in ("", "language_model.") for norm in ("norm", "embedding_norm")}
LAST_NORMS.add("backbone.norm_f.weight")
MOST = 64  # heads, and blocks per head: a larger number is a typo, and would take all memory


class MadeFor(NamedTuple):
    """The base that heads were made for, as far as an export knows it.

    Attributes:
        name: of the base; empty if unknown.
        n_layers: None if unknown.
    """

    name: str = ""
    n_layers: int | None = None


class HeadFormat:
    """A directory format of draft heads: ``config.json`` and one file of tensors.

    The methods raise `HydrajaxError` without the directory's name, which the caller adds.

    Attributes:
        name: the value of ``hydrajax convert export --format``.
        stem: name of the file of tensors without its suffix, or `hydrajax.models.layout.MODEL`.
        known_by: how a user recognises such a directory, for error messages.
        read_by: the programs that read our export, for the model card; HEADS stands for the number of heads. Empty for
            formats that are only read.
        ignored: regular expression of tensor names that are not the heads'.
        dtype_field: field of ``config.json`` with the file's dtype, if any.
        torch_only: the official code opens PyTorch's file alone, so an export may write that too.
    """

    name: str
    stem: str
    known_by: str
    read_by: str = ""
    ignored: str = "(?!)"
    dtype_field: str = ""
    torch_only: bool = False

    def recognises(self, config: dict, names: Collection[str]) -> bool:
        """Return True if a directory has this format.

        Args:
            names: names of the tensors. Empty in the first round, as the tensors are opened only if no format
                recognises ``config.json`` alone.
        """
        raise NotImplementedError

    def drafter(self, config: dict, files: TensorFiles, base: LlamaConfig) -> Drafter:
        """Return the float32 drafter that ``config.json`` and the tensors' names and shapes describe; read none."""
        raise NotImplementedError

    def layout(self, drafter: Drafter, config: dict) -> Layout:
        """Return the key map of a drafter with this ``config.json``."""
        raise NotImplementedError

    def layout_in(self, drafter: Drafter, config: dict, files: Mapping[str, Shape]) -> Layout:
        """Return `layout` for files whose tensors have these names and shapes, where files have several forms."""
        return self.layout(drafter, config)

    def settled(self, drafter: Drafter, files: TensorFiles, dtype: Any) -> Drafter:
        """Return the drafter with its dtype, and with settings that depend on tensor contents, such as shared blocks.

        Its `Drafter.init` must return parameters of this dtype, in which the tensors are loaded.

        Args:
            drafter: from the names, shapes and dtypes of the tensors, which have been checked.
            dtype: of the computation; None for the file's.
        """
        raise NotImplementedError

    def config(self, drafter: Drafter, made_for: MadeFor) -> dict:
        """Return the fields of ``config.json`` for an export; raise `HydrajaxError` if the format cannot express the
        drafter.
        """
        raise NotImplementedError

    def constants(self, drafter: Drafter) -> dict[str, np.ndarray]:
        """Return further tensors to write, which follow from the drafter's settings."""
        return {}


@dataclass(frozen=True)
class About:
    """A drafter's description in the model card."""

    title: str
    tag: str
    rows: dict[str, str]


@dataclass(frozen=True)
class Files:
    """Files of one trained kind of drafter, in addition to our own format (`hydrajax.formats.native`).

    Attributes:
        formats: formats of other programs; an export prefers the first that fits.
        check: ``(drafter, base)``, called before anything is allocated. Raises ValueError for settings that no export
            writes, and `HydrajaxError` for those of another base.
    """

    formats: tuple[HeadFormat, ...]
    check: Callable[[Any, LlamaConfig], None]
    about: Callable[[Any], About]


def check_counts(heads: Any, *names: str) -> None:
    """Refuse settings outside 1 to `MOST`, with a ValueError."""
    for name in names:
        if not 1 <= (found := getattr(heads, name)) <= MOST:
            raise ValueError(f"{name}: got {found}, expected 1 to {MOST}")


def check_layer(c: LlamaConfig) -> None:
    """Refuse a layer that is far wider than its hidden states, with a ValueError."""
    if max(c.mlp_width, c.n_heads * c.head_dim) > MOST * c.width:
        raise ValueError(f"config: got mlp_width {c.mlp_width} and {c.n_heads} heads of {c.head_dim}")


def about_layers(heads: Any, title: str, tag: str, layers: str, width: int) -> About:
    """Describe a draft of ``layers`` that runs once for every token ahead."""
    size = heads.config.vocab_size
    rows = {"draft": f"{layers}, up to {heads.depth} tokens ahead", "width, vocabulary": f"{width}, {size}"}
    if heads.vocabulary is not None:
        rows["draft vocabulary"] = str(heads.lm_head.size(size))
    return About(title, tag, rows)


def check_sizes(found_sizes: tuple[int, ...], base: LlamaConfig) -> None:
    """Refuse heads whose (vocabulary, width), the shape of an lm head, differ from the base's."""
    for name, found, wanted in zip(("vocabulary", "width"), found_sizes, (base.vocab_size, base.width), strict=False):
        if found != wanted:
            raise HydrajaxError(f"{name}: got {found}, expected {wanted}; the heads were made for another base")


def check_copies(files: TensorFiles, base: LlamaConfig, *names: str) -> None:
    """Refuse files whose copies of the base's embedding or lm head have another base's size."""
    for name in names:
        if name in files:
            check_sizes(files.shape(name), base)


def integer(config: dict, field: str, least: int, default: int | None = None) -> int:
    """Return an integer field of ``config.json``, which may be missing if there is a default."""
    value = config.get(field)
    if field not in config and default is not None:
        return default
    if type(value) is not int or value < least:
        raise HydrajaxError(f"{CONFIG}: {field}: got {value!r}, expected an integer of at least {least}")
    return value


def flag(config: dict, field: str, default: bool | None = None) -> bool:
    """Return a boolean field of ``config.json``, which may be missing if there is a default."""
    found = config.get(field, default)
    if not isinstance(found, bool):
        raise HydrajaxError(f"{CONFIG}: {field}: got {found!r}, expected true or false")
    return found


def expect(config: dict, allowed: dict[str, tuple], where: str = CONFIG) -> None:
    """Raise `HydrajaxError` for a field that declares an unimplemented variant.

    Args:
        allowed: values of each field; None means missing.
    """
    for name, values in allowed.items():
        if (found := config.get(name)) not in values:
            shown = next((repr(value) for value in values if value is not None), "no such field")
            raise HydrajaxError(f"{where}: {name}: got {found!r}, expected {shown}")


def refuse_quantized(config: dict, where: str = CONFIG) -> None:
    """Raise `HydrajaxError` for a draft whose weights are quantised."""
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise HydrajaxError(f"{where}: {unsupported('quantization_config', method, 'none (float weights)')}")


def cannot_write(field: str, found: object, expected: object) -> HydrajaxError:
    """Return the error that a format cannot express a drafter."""
    return HydrajaxError(f"{field}: got {found}, expected {expected}")


def drafter_name(drafter: Any) -> str:
    """Return a drafter's class name for messages, and its prefix layer."""
    name = type(drafter).__name__
    return f"{name} with a prefix layer" if drafter.spec.prefix_layer else name
