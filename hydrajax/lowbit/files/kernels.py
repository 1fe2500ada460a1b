"""Layers of 4-bit integers and of float8_e4m3fn as our kernels store them: a file's own numbers, without rounding."""

import itertools
from typing import Any

import numpy as np

from hydrajax.lowbit.files.stored_linear import FP8, Integers
from hydrajax.lowbit.int4_tiles import Int4Tiles
from hydrajax.lowbit.kernels.tile_layout import GROUPS
from hydrajax.lowbit.quantized import Fp8
from hydrajax.models.layout import Entry

BITS = 4


def four_bit_kernel(files: Any, entry: Entry, unlike: list[Entry] | None = None) -> Int4Tiles | None:
    """Return a kernel that equals the widened layers of an entry bit by bit.

    None if a layer is no 4-bit integers with groups of a multiple of 32 inputs, or has zeros beyond a byte. A kernel of
    several layers has the largest groups that fit them all. Groups of inputs that are apart (``desc_act``) must be the
    same in all layers, as x is reordered once; layers of the same inputs have the same, unless they were quantised one
    after another. An entry of layers with different ones is added to ``unlike``.
    """
    layers, orders = [], []
    for name in entry.theirs:
        layer = files.integers(name)
        if layer is None or (stored := _unsigned(layer)) is None or (found := _in_order(stored)) is None:
            return None
        layers.append(found[0])
        orders.append(found[1])
    if not layers:
        return None
    if not all(np.array_equal(orders[0], order) for order in orders):
        if unlike is not None:
            unlike.append(entry)
        return None
    depth = len(layers[0].numbers)
    sizes = [depth // len(layer.scales) for layer in layers if len(layer.scales) > 1]  # one group fits any size
    group = next((size for size in reversed(GROUPS) if not any(each % size for each in sizes)), None)
    if group is None:
        return None
    starts = np.cumsum([0] + [layer.numbers.shape[1] for layer in layers])
    features = features_of(entry, depth, starts)

    def joined(parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts, axis=1)[:, features.reshape(-1)]

    numbers = joined([layer.numbers for layer in layers])
    scales = joined([_per_group(layer, layer.scales, group) for layer in layers])
    zeros = joined([_per_group(layer, layer.zeros, group) for layer in layers])
    return Int4Tiles.of_numbers(numbers, scales, zeros, (depth, *features.shape), orders[0])


def _in_order(layer: Integers) -> tuple[Integers, np.ndarray | None] | None:
    """Return a layer whose groups are consecutive inputs, and the order of its inputs (None if they had been); None
    for groups of different sizes.
    """
    inputs, n_groups = len(layer.numbers), len(layer.scales)
    if inputs % n_groups:
        return None
    consecutive = np.arange(inputs) * n_groups // inputs
    if layer.groups is None or np.array_equal(layer.groups, consecutive):
        return layer, None
    order = np.argsort(layer.groups, kind="stable").astype(np.int32)
    if not np.array_equal(layer.groups[order], consecutive):
        return None
    return layer._replace(numbers=layer.numbers[order], groups=None), order


def _unsigned(layer: Integers) -> Integers | None:
    """Return a layer with numbers of 0 to 15 and an array of zeros of one byte, if it has such."""
    if layer.bits != BITS:
        return None
    shift = 0 if layer.numbers.dtype == np.uint8 else 1 << (BITS - 1)
    if shift and not -shift <= layer.numbers.min(initial=0) <= layer.numbers.max(initial=0) < shift:
        return None
    zeros = np.asarray(0 if layer.zeros is None else layer.zeros, np.float32) + shift
    if not np.array_equal(zeros, np.clip(np.rint(zeros), 0, 255)):
        return None
    numbers = (layer.numbers + np.int8(shift)).view(np.uint8) if shift else layer.numbers
    zeros = np.broadcast_to(zeros.astype(np.uint8), layer.scales.shape)
    return layer._replace(numbers=numbers, zeros=zeros)


def _per_group(layer: Integers, values: np.ndarray, group: int) -> np.ndarray:
    """Return values ``[groups of the layer, outputs or 1]`` for each group of this size and output."""
    inputs, outputs = layer.numbers.shape
    groups = np.arange(-(-inputs // group)) * group * len(values) // inputs
    return np.broadcast_to(values[groups], (len(groups), outputs))


def features_of(entry: Entry, depth: int, starts: np.ndarray) -> np.ndarray:
    """Return for each feature of the kernel the output of the layers, counted through, that it is."""
    outputs = [np.arange(start, end) for start, end in itertools.pairwise(starts)]
    (parameter,) = entry.join(*(np.broadcast_to(each[:, None], (len(each), depth)) for each in outputs))
    return parameter[(slice(0, 1),)][0]


def fp8_kernel(files: Any, entry: Entry) -> Fp8 | None:
    """Return a kernel that equals the widened layers of an entry bit by bit.

    None if a layer is not in float8_e4m3fn, or has scales of groups or blocks of inputs.
    """
    layers = [files.integers(name) for name in entry.theirs]
    if not layers or not all(
        layer is not None and layer.numbers.dtype == FP8 and layer.zeros is None and len(layer.scales) == 1
        for layer in layers
    ):
        return None
    sizes = [layer.numbers.shape[1] for layer in layers]
    features = features_of(entry, len(layers[0].numbers), np.cumsum([0, *sizes]))
    scales = [np.broadcast_to(layer.scales[0], size) for layer, size in zip(layers, sizes, strict=True)]
    numbers = np.concatenate([layer.numbers for layer in layers], axis=1)
    return Fp8(numbers[:, features], np.concatenate(scales)[features])
