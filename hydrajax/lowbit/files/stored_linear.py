"""One linear layer as quantised files hold it: its tensors, their checks, and packed integers widened to float32."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.families.config_fields import unsupported
from hydrajax.formats.tensors import FLOATS, TensorFiles
from hydrajax.models.layout import Shape

FLOAT_TYPES = tuple(FLOATS.values())
FP8 = "float8_e4m3fn"
# safetensors' names of dtypes that are no floats, NumPy's and ml_dtypes' names.
NAMES = {"I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64", "F8_E4M3": FP8}
WORD = 32  # bits of a packed integer
ROWS = 256  # inputs that are widened at a time
LARGEST = 1 << 31  # above the sizes of groups and blocks


class Method(abc.ABC):
    """A method of quantisation with its settings.

    Attributes:
        parts: regular expression of the names of a layer's tensors, without the layer's name and the dot.
        low_dtypes: dtypes by which a tensor ``weight`` is known to be quantised.
        ignored: regular expression of whole names of tensors that are not the weights', such as activation scales.
        pads_biases: files may have biases of zeros for layers without biases.
        integer_bits: sizes of the integers that layers may be stored in.
    """

    parts: str
    low_dtypes: tuple[str, ...] = ()
    ignored = "(?!)"
    pads_biases = False
    integer_bits: tuple[int, ...] = ()

    @abc.abstractmethod
    def shape(self, linear: StoredLinear) -> Shape:
        """Return ``(outputs, inputs)`` after checking shapes and dtypes of the layer's tensors."""

    def integers(self, linear: StoredLinear) -> Integers | None:
        """Return the layer's numbers and scales; None if its scales are not those of groups of inputs."""
        return None

    def read(self, linear: StoredLinear) -> np.ndarray:
        """Return the float32 weights ``[outputs, inputs]`` of a layer that has no `integers`."""
        raise NotImplementedError


class Integers(NamedTuple):
    """A layer of integers or of float8_e4m3fn, ``(numbers - zeros) * scales``.

    Attributes:
        numbers: uint8, int8 or float8_e4m3fn ``[inputs, outputs]``.
        scales: float32 ``[groups, outputs or 1]``.
        zeros: ``[groups, outputs or 1]``, or one number for all; None for 0.
        groups: The group of each input; None for consecutive inputs in groups of equal size.
    """

    bits: int
    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | int | None = None
    groups: np.ndarray | None = None

    def widened(self) -> np.ndarray:
        """Return the float32 weights ``[outputs, inputs]``."""
        return widen(self.numbers, self.scales, self.zeros, self.groups).T


class StoredLinear:
    """The tensors of one layer.

    Args:
        name: of the layer, such as ``model.layers.0.mlp.up_proj``.
    """

    def __init__(self, name: str, files: TensorFiles, where: str):
        self._name, self._files, self._where = name, files, where

    def __contains__(self, part: str) -> bool:
        return f"{self._name}.{part}" in self._files

    def error(self, part: str, message: str) -> HydrajaxError:
        """Return an error about one tensor."""
        return HydrajaxError(f"{self._where}: {self._name}.{part}: {message}")

    def shape(self, part: str) -> Shape:
        return self._files.shape(self._present(part))

    def dtype(self, part: str) -> str:
        """Return NumPy's or ml_dtypes' name of the dtype, or the file's own name for other dtypes."""
        found = self._files.dtype(self._present(part))
        return NAMES.get(found, found)

    def read(self, part: str) -> np.ndarray:
        return self._files.read(self._present(part))

    def _present(self, part: str) -> str:
        if part not in self:
            raise HydrajaxError(f"{self._where}: missing tensor '{self._name}.{part}'")
        return f"{self._name}.{part}"

    def check(self, part: str, dtypes: Sequence[str], *shapes: Shape) -> None:
        """Refuse a tensor that is missing, or of another dtype or shape than one of these."""
        found = self.shape(part)
        if shapes and found not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(part, f"got shape {list(found)}, expected {expected}")
        if self.dtype(part) not in dtypes:
            raise self.error(part, f"got dtype {self.dtype(part)}, expected {', '.join(dtypes)}")

    def matrix(self, part: str, *dtypes: str) -> Shape:
        """Return the shape of a tensor with two dimensions."""
        self.check(part, dtypes)
        if len(self.shape(part)) != 2:
            raise self.error(part, f"got shape {list(self.shape(part))}, expected two dimensions")
        return self.shape(part)

    def n_groups(self, part: str, inputs: int, size: int) -> int:
        """Return the number of groups of ``size`` inputs; -1 means one group."""
        if size == -1:
            return 1
        if inputs % size:
            raise self.error(part, f"got {inputs} inputs, expected a multiple of group_size {size}")
        return inputs // size

    def scales(self, part: str) -> np.ndarray:
        """Return float32 scales; refuse numbers that are not finite."""
        scales = self.read(part).astype(np.float32)
        if not np.isfinite(scales).all():
            raise self.error(part, f"got {scales[~np.isfinite(scales)].flat[0]}, expected finite numbers")
        return scales

    def groups(self, part: str, n_groups: int) -> np.ndarray:
        """Return the group of each input, as a file lists them."""
        groups = self.read(part)
        for found in (groups.min(initial=0), groups.max(initial=0)):
            if not 0 <= found < n_groups:
                raise self.error(part, f"got group {found}, expected 0 to {n_groups - 1}")
        return groups


class Settings:
    """Fields of ``quantization_config``; errors begin with the field's full name."""

    def __init__(self, fields: Any, name: str):
        if not isinstance(fields, dict):
            raise unsupported(name, fields, "an object")
        self._fields, self._name = fields, name

    def error(self, field: str, expected: str) -> HydrajaxError:
        return unsupported(f"{self._name}.{field}", self._fields.get(field), expected)

    def get(self, field: str, default: Any = None) -> Any:
        """Return a field's value; the default if it is missing or null."""
        found = self._fields.get(field)
        return default if found is None else found

    def one_of(self, field: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """Return a value that must be one of these, of the same type."""
        found = self.get(field, default)
        if not any(type(found) is type(value) and found == value for value in allowed):
            raise self.error(field, ("one of " if len(allowed) > 1 else "") + ", ".join(map(repr, allowed)))
        return found

    def flag(self, field: str, default: bool) -> bool:
        return self.one_of(field, (True, False), default)

    def group_size(self, default: int | None = None) -> int:
        found = self.get("group_size", default)
        if type(found) is not int or not (0 < found < LARGEST or found == -1):
            raise self.error("group_size", "a positive integer, or -1 for all inputs")
        return found

    def block(self, field: str) -> tuple[int, int] | None:
        """Return the rows and columns of a block; None if the field is missing."""
        found = self.get(field)
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int and 0 < n < LARGEST for n in found):
            raise self.error(field, "two positive integers")
        return found[0], found[1]

    def inner(self, field: str) -> Settings:
        """Return the settings of a nested object."""
        return Settings(self._fields.get(field), f"{self._name}.{field}")

    def __iter__(self):
        return iter(self._fields)


def unpack(words: np.ndarray, bits: int, axis: int, order: Sequence[int] | None = None) -> np.ndarray:
    """Unpack 32-bit words along an axis.

    Args:
        words: ``[rows, columns]`` of a 32-bit integer type.
        bits: of each number, a divisor of 8.
        axis: 0 or 1, which gets longer by ``32 / bits``.
        order: the i-th number from the lowest bits has position ``order[i]`` among a word's numbers; by default i.

    Returns:
        uint8.
    """
    words, count = words.view(np.uint32), WORD // bits
    numbers = np.empty((*words.shape[: axis + 1], count, *words.shape[axis + 1 :]), np.uint8)
    by_position = np.moveaxis(numbers, axis + 1, 0)
    for i, position in enumerate(order or range(count)):
        by_position[position] = (words >> np.uint32(i * bits)) & np.uint32((1 << bits) - 1)
    shape = list(words.shape)
    shape[axis] *= count
    return numbers.reshape(shape)


def widen(
    numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray | int | None = None, groups: np.ndarray | None = None
) -> np.ndarray:
    """Return the float32 weights ``(numbers - zeros) * scales`` of `Integers`, each rounded once."""
    wide = numbers.astype(np.float32)  # in the memory order of `numbers`
    inputs = len(wide)
    groups = np.arange(inputs) * len(scales) // inputs if groups is None else groups
    zeros = np.full((len(scales), 1), zeros, np.float32) if isinstance(zeros, int) else zeros
    for start in range(0, inputs, ROWS):
        rows = slice(start, start + ROWS)
        if zeros is not None:
            wide[rows] -= zeros[groups[rows]]
        wide[rows] *= scales[groups[rows]]
    return wide


def block_shape(outputs: int, inputs: int, block: tuple[int, int]) -> Shape:
    """Return the number of blocks down and across; the last ones may be cut off."""
    return math.ceil(outputs / block[0]), math.ceil(inputs / block[1])


def widen_blocks(numbers: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Return the float32 weights of ``numbers [outputs, inputs]`` with one scale per block of `block_shape`."""
    outputs, inputs = numbers.shape
    by_input = scales[np.arange(outputs) // block[0]].T  # [block of inputs, outputs]
    return widen(numbers.T, by_input, groups=np.arange(inputs) // block[1]).T
