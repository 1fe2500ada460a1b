"""Key maps of recurrent layers: transformers' tensors of all heads to ours, which keep each key head's together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from hydrajax.families.tensor_names import NO_FILES
from hydrajax.models.layout import Entry, Layout, Parameter, Path, Shape, same, transposed
from hydrajax.models.recurrent_settings import GatedDelta, Mamba2, Recurrent, ShortConv


class DeltaNames(NamedTuple):
    """Names of a gated delta layer's tensors.

    Attributes:
        inputs: Projections, and how many of queries, keys, values and the output's gate each holds.
        gates: Projections, and how many of strengths and decays each holds.
        by_head: The outputs of a projection are those of each key head in turn, and not those of each part.
        norm, output: The last two.
    """

    inputs: Mapping[str, int]
    gates: Mapping[str, int]
    by_head: bool = False
    norm: str = "norm"
    output: str = "out_proj"


# By `GatedDelta.names`.
DELTA_NAMES = {
    "qwen3_next": DeltaNames({"in_proj_qkvz": 4}, {"in_proj_ba": 2}, by_head=True),
    "qwen3_5": DeltaNames({"in_proj_qkv": 3, "in_proj_z": 1}, {"in_proj_b": 1, "in_proj_a": 1}),
    "olmo_hybrid": DeltaNames(
        {"q_proj": 1, "k_proj": 1, "v_proj": 1, "g_proj": 1}, {"b_proj": 1, "a_proj": 1}, False, "o_norm", "o_proj"
    ),
}


def recurrent(
    path: Path, prefix: str, settings: Recurrent, width: int, files: Mapping[str, Shape] = NO_FILES
) -> Layout:
    """Return the key map of one layer's recurrent part.

    Args:
        path: the layer's path in our parameters.
        prefix: the start of its tensors' names.
        settings: its shape.
        width: of the residual stream.
        files: as in `hydrajax.families.family_layout.base_layout`.
    """
    layers = {GatedDelta: partial(_gated_delta, files=files), Mamba2: _mamba2, ShortConv: _short_conv}
    return layers[type(settings)]((*path, "recurrent"), prefix, settings, width)


def _gated_delta(path: Path, prefix: str, s: GatedDelta, width: int, files: Mapping[str, Shape]) -> Layout:
    prefix, names = f"{prefix}linear_attn.", DELTA_NAMES[s.names]
    keys, values = s.key_heads * s.key_dim, s.value_heads * s.value_dim
    heads, mixed, strengths = (s.key_heads, s.values_per_key), (keys, keys, values), (s.value_heads, s.value_heads)
    inputs = {f"{prefix}{name}.weight": n_parts for name, n_parts in names.inputs.items()}
    gates = {f"{prefix}{name}.weight": n_parts for name, n_parts in names.gates.items()}
    conv = _fused((*path, "conv"), {f"{prefix}conv1d.weight": len(mixed)}, mixed, s.key_heads, (1, s.kernel))
    released = {f"{prefix}{part}_conv1d.weight": (size, 1, s.kernel) for part, size in zip("qkv", mixed, strict=True)}
    if found := {name: (*files[name][:1], 1, s.kernel) for name in released if name in files}:  # OLMo hybrid
        complete = len(found) == len(mixed) and sum(shape[0] for shape in found.values()) == sum(mixed)
        conv = _in_parts(conv, found if complete else released)  # transformers 5.24 writes three equal parts
    return [
        _fused((*path, "inputs"), inputs, (*mixed, values), s.key_heads, (width,), names.by_head),
        _fused((*path, "gates"), gates, strengths, s.key_heads, (width,), names.by_head),
        conv,
        reshaped((*path, "log_rate"), f"{prefix}A_log", heads),
        reshaped((*path, "step_bias"), f"{prefix}dt_bias", heads),
        same((*path, "norm_scale"), f"{prefix}{names.norm}.weight", s.value_dim),
        transposed((*path, "output"), f"{prefix}{names.output}.weight", width, values),
    ]


def _short_conv(path: Path, prefix: str, s: ShortConv, width: int) -> Layout:
    prefix, groups = f"{prefix}conv.", (s.groups, s.width // s.groups)

    def inputs(name: str, kind: str, inputs: Shape, order: Shape) -> Entry:
        """Theirs is ``[(part, group, channel), *inputs]``, ours ``[*inputs, group, part, channel]``."""
        return Entry(
            ((*path, name),),
            {f"{prefix}in_proj.{kind}": (3 * s.width, *inputs)},
            lambda x: (Parameter((x.reshape(3, *groups, *inputs),), order=order),),
            lambda x: (x.transpose(np.argsort(order)).reshape(-1, *inputs),),
        )

    conv = _fused((*path, "conv"), {f"{prefix}conv.weight": 1}, (s.width,), s.groups, (1, s.kernel))
    output = transposed((*path, "output"), f"{prefix}out_proj.weight", width, s.width)
    layout = [inputs("inputs", "weight", (width,), (3, 1, 0, 2)), conv, output]
    if s.bias:
        layout += [
            inputs("inputs_bias", "bias", (), (1, 0, 2)),
            reshaped((*path, "conv_bias"), f"{prefix}conv.bias", groups),
            same((*path, "output_bias"), f"{prefix}out_proj.bias", width),
        ]
    return layout


def _mamba2(path: Path, prefix: str, s: Mamba2, width: int) -> Layout:
    """Divide the rows of ``in_proj``, which are gates, values, B, C and time steps, each of all groups."""
    prefix, heads, features = f"{prefix}mamba.", (s.groups, s.heads_per_group), s.heads * s.head_dim
    mixed = (features, s.groups * s.state_size, s.groups * s.state_size)
    parts = (features, *mixed, s.heads)
    conv = {f"{prefix}conv1d.weight": 3}
    biases = [_fused((*path, "conv_bias"), {f"{prefix}conv1d.bias": 3}, mixed, s.groups, ())]

    def join(rows):
        *inputs, steps = np.split(rows, np.cumsum(parts)[:-1])
        inputs = tuple(part.reshape(s.groups, -1, width) for part in inputs)
        return Parameter(inputs, axis=1, order=(2, 0, 1)), Parameter((steps.reshape(*heads, width),), order=(2, 0, 1))

    def split(inputs, steps):
        per_group = [size // s.groups for size in parts[:-1]]
        each = [*np.split(inputs.transpose(1, 2, 0), np.cumsum(per_group)[:-1], axis=1), steps.transpose(1, 2, 0)]
        return (np.concatenate([part.reshape(-1, width) for part in each]),)

    return [
        Entry(((*path, "inputs"), (*path, "steps")), {f"{prefix}in_proj.weight": (sum(parts), width)}, join, split),
        _fused((*path, "conv"), conv, mixed, s.groups, (1, s.kernel)),
        *biases * s.conv_bias,
        reshaped((*path, "log_rate"), f"{prefix}A_log", heads),
        reshaped((*path, "step_bias"), f"{prefix}dt_bias", heads),
        reshaped((*path, "skip"), f"{prefix}D", heads),
        reshaped((*path, "norm_scale"), f"{prefix}norm.weight", (s.groups, features // s.groups)),
        transposed((*path, "output"), f"{prefix}out_proj.weight", width, features),
    ]


def _fused(
    path: Path, tensors: Mapping[str, int], parts: tuple[int, ...], heads: int, inputs: Shape, by_head: bool = False
) -> Entry:
    """Fuse tensors ``[outputs, *inputs]``: ours is ``[input, head, (its outputs of every part)]``, or for a convolution
    ``[head, (its outputs), input]``, and for its bias ``[head, (its outputs)]``.

    Args:
        path: of our parameter.
        tensors: names, and how many consecutive parts each holds.
        parts: outputs of each part, of all heads.
        heads: number of heads.
        inputs: of the tensors.
        by_head: a tensor holds the parts of each head in turn.
    """
    order = ((0, 1), (2, 0, 1), (0, 1, 2))[len(inputs)]
    per_head, ends = [size // heads for size in parts], np.cumsum([0, *tensors.values()])
    held = [parts[start:end] for start, end in itertools.pairwise(ends)]  # the parts of each tensor

    def join(*views):
        if not by_head:
            views = [
                part for view, sizes in zip(views, held, strict=True) for part in np.split(view, np.cumsum(sizes)[:-1])
            ]
        return (Parameter(tuple(view.reshape(heads, -1, *inputs[-1:]) for view in views), axis=1, order=order),)

    def split(ours):
        fused = ours.transpose(np.argsort(order))
        if by_head:
            return (fused.reshape(-1, *inputs),)
        each = [part.reshape(-1, *inputs) for part in np.split(fused, np.cumsum(per_head)[:-1], axis=1)]
        return tuple(np.concatenate(each[start:end]) for start, end in itertools.pairwise(ends))

    theirs = {name: (sum(sizes), *inputs) for name, sizes in zip(tensors, held, strict=True)}
    return Entry((path,), theirs, join, split)


def _in_parts(entry: Entry, tensors: dict[str, Shape]) -> Entry:
    """Return the entry of files that have consecutive rows of its tensor in these tensors."""
    ends = np.cumsum([shape[0] for shape in tensors.values()])[:-1]
    return entry._replace(
        theirs=tensors,
        join=lambda *parts: entry.join(np.concatenate(parts)),
        split=lambda ours: tuple(np.split(entry.split(ours)[0], ends)),
    )


def reshaped(path: Path, name: str, shape: Shape) -> Entry:
    """Return the entry of a vector that is an array of this shape here."""
    size = math.prod(shape)
    return Entry((path,), {name: (size,)}, lambda x: (Parameter((x.reshape(shape),)),), lambda x: (x.reshape(size),))
