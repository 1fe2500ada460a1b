"""How a kind of drafter is kept in files: what `hydrajax.formats` asks the drafter's own files.

A kind of drafter that is trained has one `Files`, which its line in `hydrajax.formats.draft_registry` names. Loading,
exporting and the model card go through these, so none of them knows any kind by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hydrajax.drafters.drafter import Drafter
from hydrajax.errors import HydrajaxError
from hydrajax.formats.tensors import TensorFiles
from hydrajax.models.layout import Layout
from hydrajax.models.llama_config import LlamaConfig

CONFIG = "config.json"
MOST = 64  # heads, and blocks of one: more are a slip, which would take all memory


class MadeFor(NamedTuple):
    """What an export knows of the base that heads were made for. n_layers: None where nobody said it."""

    name: str = ""
    n_layers: int | None = None


class HeadFormat:
    """One way in which a program keeps draft heads in a directory: ``config.json`` beside one file of tensors.

    name:        what ``hydrajax convert export --format`` calls it.
    stem:        the name of the file of tensors without its suffix, or `hydrajax.models.layout.MODEL`.
    known_by:    how a person recognises such a directory, for the message that a directory is none.
    read_by:     who reads what we write, a sentence for the model card; HEADS in it stands for the number of heads.
                 Empty for formats that we read and do not write.
    ignored:     a regular expression of names of tensors in the file that are not the heads'.
    dtype_field: the field of ``config.json`` that names the dtype of the file, where the format has one.
    torch_only:  whether the official code opens PyTorch's file alone, so that an export may write that one too.

    Errors that the methods raise are `HydrajaxError` without the name of the directory, which the caller adds.
    """

    name: str
    stem: str
    known_by: str
    read_by: str = ""
    ignored: str = "(?!)"
    dtype_field: str = ""
    torch_only: bool = False

    def recognises(self, config: dict, names: Collection[str]) -> bool:
        """Whether a directory is of this format.

        config: the content of ``config.json``. names: of the tensors of the whole model beside it. There are none when
        this is asked first: the model is opened only if no format recognises ``config.json`` alone.
        """
        raise NotImplementedError

    def drafter(self, config: dict, files: TensorFiles, base: LlamaConfig) -> Drafter:
        """The drafter that ``config.json`` and the names and shapes of the tensors describe, computing in float32.

        No tensor is read. Raises `HydrajaxError` for a description that is not supported or fits another base.
        """
        raise NotImplementedError

    def layout(self, drafter: Drafter, config: dict) -> Layout:
        """The key map of such a drafter, for reading and writing. config: the content of ``config.json``."""
        raise NotImplementedError

    def settled(self, drafter: Drafter, files: TensorFiles, dtype: Any) -> Drafter:
        """The drafter with what only the content of its tensors tells, such as which blocks are shared.

        Names, shapes and dtypes of the tensors have been checked by then.

        dtype: that the drafter shall compute in; None for that of the file.
        """
        raise NotImplementedError

    def config(self, drafter: Drafter, made_for: MadeFor) -> dict:
        """The fields of ``config.json`` with which to write a drafter. Raises `HydrajaxError` if there are none."""
        raise NotImplementedError

    def constants(self, drafter: Drafter) -> dict[str, np.ndarray]:
        """Tensors that follow from the drafter's settings, by name, which are written as they are beside its own."""
        return {}


@dataclass(frozen=True)
class About:
    """What the model card says of a drafter. tag: under which the Hub lists it; rows: of the card's table."""

    title: str
    tag: str
    rows: dict[str, str]


@dataclass(frozen=True)
class Files:
    """How a kind of drafter that has trained parameters is kept in files, besides our own (`hydrajax.formats.native`).

    formats: of other programs, in which it is read and written; an export prefers the first that fits.
    check:   ``(drafter, base)`` raises ValueError for settings that nobody writes, before anything of their size is
             made, and `HydrajaxError` for those of another base.
    about:   ``drafter -> About``.
    """

    formats: tuple[HeadFormat, ...]
    check: Callable[[Any, LlamaConfig], None]
    about: Callable[[Any], About]


def check_sizes(found_sizes: tuple[int, ...], base: LlamaConfig) -> None:
    """Refuse heads whose vocabulary and width, the shape of an lm head, are not this base's."""
    for name, found, wanted in zip(("vocabulary", "width"), found_sizes, (base.vocab_size, base.width), strict=False):
        if found != wanted:
            raise HydrajaxError(f"the heads were made for another base: their {name} is {found}, not {wanted}")


def integer(config: dict, field: str, least: int) -> int:
    """A whole number that ``config.json`` must hold."""
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise HydrajaxError(f"config.json: {field} must be an integer from {least} up, found {value!r}")
    return value


def expect(config: dict, allowed: dict[str, Any], where: str = CONFIG) -> None:
    """Refuse a field that declares what is not computed here. allowed: the values of each, of which None is absent."""
    for name, values in allowed.items():
        if (found := config.get(name)) not in values:
            said = next((value for value in values if value is not None), None)
            raise HydrajaxError(f"{where}: {name} is {found!r}, supported is {'none' if said is None else repr(said)}")


def flag(config: dict, name: str, default: bool | None = None) -> bool:
    """True or false as ``config.json`` says. default: where it says nothing; None refuses that."""
    found = config.get(name, default)
    if not isinstance(found, bool):
        raise HydrajaxError(f"{CONFIG}: {name} must be true or false, found {found!r}")
    return found


def cannot_write(found: str, allowed: str) -> HydrajaxError:
    """The error that a format has no way to say what a drafter is."""
    return HydrajaxError(f"{found}, the official layouts allow {allowed}")


def drafter_name(drafter: Any) -> str:
    """Return a drafter's class for messages, and its prefix layer."""
    name = type(drafter).__name__
    return f"{name} with a prefix layer" if drafter.spec.prefix_layer else name
