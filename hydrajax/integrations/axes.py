"""Tensors of a Hugging Face checkpoint as views of the arrays of another JAX program, and back.

Every family's layout (`hydrajax.families.family_layout.base_layout`) names tensors as transformers does. A table states
where another program keeps each of them, so that one table serves all families. Axes are written in letters:

    v vocabulary, d width, f features of an MLP, n heads, k key-value heads, h features of a head, x experts

``H`` are a head's features in the order of an interleaved rotary embedding, which turns neighbours instead of halves.
A digit is an index that is taken of that axis, ``l`` takes the layer's place among the array's layers, and ``e`` the
expert's number. So ``"1kdh"`` are the values of a fused array, and ``"dlnh"`` is an array of several layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.models.llama_config import LlamaConfig

LORA = "_lora_a", "_lora_b"  # after the path of a weight: qwix' low-rank factors
# The axes of transformers' tensors by the end of their names, in brackets those that are one axis there.
AXES = {
    "embed_tokens.weight": "vd",
    "lm_head.weight": "vd",
    "embed_tokens_per_layer.weight": "v(lp)",
    "per_layer_model_projection.weight": "(lp)d",
    "self_attn.q_proj.weight": "(nh)d",
    "self_attn.k_proj.weight": "(kh)d",
    "self_attn.v_proj.weight": "(kh)d",
    "self_attn.o_proj.weight": "d(nh)",
    "self_attn.q_proj.bias": "(nh)",
    "self_attn.k_proj.bias": "(kh)",
    "self_attn.v_proj.bias": "(kh)",
    "mlp.gate_proj.weight": "fd",
    "mlp.up_proj.weight": "fd",
    "mlp.down_proj.weight": "df",
    "mlp.gate.weight": "xd",
    "mlp.experts.e.gate_proj.weight": "fd",
    "mlp.experts.e.up_proj.weight": "fd",
    "mlp.experts.e.down_proj.weight": "df",
    "per_layer_input_gate.weight": "pd",
    "per_layer_projection.weight": "dp",
}  # of all others "d", such as the scales of norms


class Place(NamedTuple):
    """A tensor's place in the other program.

    Attributes:
        path: of an array, with ``{i}`` for the layer's number.
        axes: of the array; empty if they are the tensor's own.
        scale: the tensor is the array times this number,
        offset: plus this one.
        layers: whose tensors the array has; None for all.
    """

    path: str
    axes: str = "d"
    scale: float = 1.0
    offset: float = 0.0
    layers: range | None = None


Table = Mapping[str, Place | Sequence[Place]]  # by the end of transformers' name; the first place that exists


class Tensor(NamedTuple):
    """A tensor of a checkpoint: the end of its name, ``e`` for an expert's number, and its layer and expert."""

    end: str
    layer: int
    expert: int

    @staticmethod
    def named(name: str) -> Tensor:
        """Parse transformers' name."""
        layer, expert = re.search(r"\blayers\.(\d+)\.", name), re.search(r"\bexperts\.(\d+)\.", name)
        end = re.sub(r"^model\.(language_model\.)?(layers\.\d+\.)?", "", name)
        end = re.sub(r"\bexperts\.\d+\.", "experts.e.", end)
        return Tensor(end, *(int(found[1]) if found else 0 for found in (layer, expert)))

    @property
    def groups(self) -> list[str]:
        """The letters of each of its axes."""
        return [many or one for many, one in re.findall(r"\((\w+)\)|(\w)", AXES.get(self.end, "d"))]

    def left(self, place: Place) -> str:
        """Return the axes of its array of which nothing is taken."""
        taken = {*"0123456789le"} - {*"".join(self.groups)}
        return "".join(axis for axis in place.axes if axis not in taken)

    def index(self, place: Place) -> tuple[int | slice, ...]:
        """Return its part of the array."""
        left = self.left(place)
        taken = {"l": self.layer if place.layers is None else place.layers.index(self.layer), "e": self.expert}
        return tuple(
            slice(None) if axis in left else taken[axis] if axis in taken else int(axis) for axis in place.axes
        )


def _reordered(array: Any, axes: str, first: int | None) -> Any:
    """Return an array whose axis ``H`` is a matrix of ``first`` rows that is transposed; None for two columns."""
    if "H" not in axes:
        return array
    at, shape = axes.index("H"), array.shape
    split = array.reshape(*shape[:at], first or shape[at] // 2, -1, *shape[at + 1 :])
    return split.swapaxes(at, at + 1).reshape(shape)


class ForeignTensors:
    """The tensors of a checkpoint, as views of another program's arrays (`hydrajax.models.layout.Readable`).

    Attributes:
        arrays: by path; NumPy's, JAX's or tracers.
        places: the place of each tensor of the checkpoint.
        lora_alpha: of low-rank factors next to the arrays, whose product is multiplied by alpha / rank.
    """

    def __init__(self, arrays: Mapping[str, Any], places: Mapping[str, Place], lora_alpha: float | None = None):
        self.arrays, self.places, self.lora_alpha = arrays, places, lora_alpha

    def view(self, name: str) -> Any:
        """Return one tensor by transformers' name."""
        tensor, place = Tensor.named(name), self.places[name]
        array = self._merged(place, tensor)
        if not place.axes:
            return array
        axes = tensor.left(place)
        if axes != place.axes:
            array = array[tensor.index(place)]
        array = _reordered(array, axes, None)
        order = [axes.lower().index(axis) for axis in "".join(tensor.groups)]
        if order != sorted(order):
            array = array.transpose(order)
        if array.ndim > len(tensor.groups):
            sizes = iter(array.shape)
            array = array.reshape([math.prod(next(sizes) for _ in group) for group in tensor.groups])
        array = array if place.scale == 1.0 else array * np.asarray(place.scale, array.dtype)
        return array if place.offset == 0.0 else array + np.asarray(place.offset, array.dtype)

    def _merged(self, place: Place, tensor: Tensor) -> Any:
        """Return an array with the product of its low-rank factors added, whose inputs are its contracted axes."""
        array = self.arrays[place.path]
        factors = [self.arrays.get(place.path + end) for end in LORA]
        if factors[0] is None:
            return array
        unique = iter("ABCDEFG")
        axes = "".join(next(unique) if axis.isdigit() else axis for axis in place.axes)
        inputs = "".join(axis for axis in axes if axis in tensor.groups[-1])
        outputs = "".join(axis for axis in axes if axis not in inputs)
        sizes = dict(zip(axes, array.shape, strict=True))
        a, b = (x.astype(jnp.float32) for x in factors)
        a, b = a.reshape([*map(sizes.get, inputs), -1]), b.reshape([-1, *map(sizes.get, outputs)])
        delta = jnp.einsum(f"{inputs}R,R{outputs}->{axes}", a, b, precision=jax.lax.Precision.HIGHEST)
        return (array.astype(jnp.float32) + self.lora_alpha / len(b) * delta).astype(array.dtype)


def places_of(
    table: Table | None, names: Mapping[str, Sequence[int]], arrays: Mapping[str, Any], config: LlamaConfig
) -> dict[str, Place]:
    """Return the place of each tensor of a checkpoint.

    Args:
        table: of the layout; None for transformers' own names and axes.
        names: names and shapes of the checkpoint's tensors.
        arrays: by path; anything with a shape.
        config: of the base.

    Raises:
        HydrajaxError: for an array that is missing, has another shape, or belongs to no tensor.
    """
    found, used = {}, set()
    for name, shape in names.items():
        candidates = candidates_of(table, name)
        present = [place for place in candidates if place.path in arrays]
        if not present:
            paths = " or ".join(dict.fromkeys(place.path for place in candidates))
            raise HydrajaxError(f"params: got no {paths or 'such tensor'}, expected {name} {list(shape)}")
        for place in present:
            got, expected = list(arrays[place.path].shape), _shape(place, name, shape, config)
            if len(got) == len(expected) and all(b in ("any", a) for a, b in zip(got, expected, strict=True)):
                break
        else:
            listed = ", ".join(map(str, expected))
            raise HydrajaxError(f"params: {place.path}: got the shape {got}, expected [{listed}]")
        found[name] = place
        used |= {place.path, *(place.path + end for end in LORA)}
    for i in range(config.n_layers):
        if config.of_layer(i).shared_kv:  # Gemma 4 in other programs has keys and values that it does not use
            for part in ("k_proj", "v_proj", "k_norm"):
                used |= {place.path for place in candidates_of(table, f"model.layers.{i}.self_attn.{part}.weight")}
    if foreign := sorted(arrays.keys() - used):
        more = f" and {len(foreign) - 1} more" if foreign[1:] else ""
        raise HydrajaxError(f"params: got {foreign[0]}{more}, for which the configuration has no weight")
    return found


def candidates_of(table: Table | None, name: str) -> list[Place]:
    """Return the places where a tensor can be; without a table that of its own name."""
    if table is None:
        return [Place(name, "")]
    tensor = Tensor.named(name)
    found = table.get(tensor.end, ())
    return [
        place._replace(path=place.path.replace("{i}", str(tensor.layer)))
        for place in ([found] if isinstance(found, Place) else found)
        if place.layers is None or tensor.layer in place.layers
    ]


def _shape(place: Place, name: str, shape: Sequence[int], config: LlamaConfig, parts: Any = "any") -> list[Any]:
    """Return the shape of the array of a tensor that has ``shape`` in the checkpoint.

    Args:
        parts: size of an axis of which an index is taken.
    """
    tensor = Tensor.named(name)
    c = config.of_layer(tensor.layer)
    sizes = {"n": c.n_heads, "k": c.n_kv_heads, "h": c.head_dim, "H": c.head_dim, "p": c.per_layer_width}
    sizes["l"] = config.n_layers if place.layers is None else len(place.layers)
    sizes["e"] = config.any_experts.count if config.any_experts else 0
    sizes |= {group: size for group, size in zip(tensor.groups, shape, strict=True) if len(group) == 1}
    return [parts if axis.isdigit() else sizes[axis] for axis in place.axes] or list(shape)


def arrays_of(tensors: Mapping[str, np.ndarray], places: Mapping[str, Place], config: LlamaConfig) -> dict[str, Any]:
    """Return the other program's arrays by path, on the host: the inverse of `ForeignTensors.view`."""
    found: dict[str, np.ndarray] = {}
    digits: dict[str, int] = {}  # of each path: the size of the axis of which indices are taken
    for place in places.values():
        taken = [int(axis) + 1 for axis in place.axes if axis.isdigit()]
        digits[place.path] = max([digits.get(place.path, 0), *taken])
    for name, place in places.items():
        tensor, value = Tensor.named(name), np.asarray(tensors[name])
        if not place.axes:
            found[place.path] = value
            continue
        shape = _shape(place, name, value.shape, config, digits[place.path])
        part = found.setdefault(place.path, np.empty(shape, value.dtype))[tensor.index(place)]
        axes, theirs = tensor.left(place), "".join(tensor.groups)
        sizes = dict(zip(axes.lower(), part.shape, strict=True))
        value = (value - np.asarray(place.offset, value.dtype)) / np.asarray(place.scale, value.dtype)
        value = value.reshape([sizes[axis] for axis in theirs]).transpose([theirs.index(axis) for axis in sizes])
        part[...] = _reordered(value, axes, 2)
    return found
