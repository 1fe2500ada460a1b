"""Checkpoints of compressed-tensors (github.com/vllm-project/compressed-tensors, ``compressors/``).

The formats ``int-quantized``, ``float-quantized`` and ``naive-quantized`` have ``weight``, int8 or float8_e4m3fn
``[outputs, inputs]``. ``pack-quantized`` has ``weight_packed`` int32 ``[outputs, ceil(inputs * bits / 32)]``, where a
word holds ``32 / bits`` inputs from the lowest bits on, each plus ``2 ** (bits - 1)``, and ``weight_shape``, the two
numbers ``outputs, inputs``.

A weight is ``(number - zero) * scale``. ``weight_scale`` has one scale for the layer (``[1]``), per output
(``[outputs, 1]``), per group of inputs (``[outputs, groups]``) or per block. ``weight_zero_point`` has its shape; it is
missing if ``symmetric``, and ``pack-quantized`` packs it along the outputs. ``weight_g_idx`` has the group of each
input, or -1.

Which layers are quantised depends on the file's tensors, as ``ignore`` and ``targets`` say it with patterns. The
settings of a layer are those of the group that has the shapes of its tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hydrajax.lowbit.files import stored_linear
from hydrajax.models.layout import Shape

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
MIXED = "mixed-precision"  # each group has its own format
STRATEGIES = ("tensor", "channel", "group", "block")  # numbers that share a scale
PACKED, SCALE, ZERO, G_IDX = "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"


@dataclass(frozen=True)
class Scheme:
    """Settings of one group of layers; ``block`` has the outputs and inputs of a scale, if it has a block of them."""

    dtype: str
    bits: int
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None

    @classmethod
    def of(cls, weights: stored_linear.Settings) -> Scheme:
        kind = weights.one_of("type", ("int", "float"), "int")
        bits = weights.one_of("num_bits", (4, 8) if kind == "int" else (8,), 8)
        size = None if weights.get("group_size") is None else weights.group_size()
        usual = "tensor" if size is None else "channel" if size == -1 else "group"
        strategy = weights.one_of("strategy", STRATEGIES, usual)
        block = weights.block("block_structure")
        if (strategy == "block") != (block is not None):
            expected = "two positive integers" if block is None else "none"
            raise weights.error("block_structure", f"{expected} with the strategy '{strategy}'")
        if strategy == "group" and size in (None, -1):
            raise weights.error("group_size", "a positive integer with the strategy 'group'")
        dtype = "int8" if kind == "int" else stored_linear.FP8
        return cls(dtype, bits, weights.flag("symmetric", True), strategy, size, block)

    def scale_shapes(
        self, linear: stored_linear.StoredLinear, part: str, outputs: int, inputs: int
    ) -> tuple[Shape, ...]:
        """Return the shapes that ``weight_scale`` may have."""
        if self.strategy == "tensor":
            return (1,), ()
        if self.strategy == "channel":
            return (outputs, 1), (outputs,)
        if self.block is not None:
            return (stored_linear.block_shape(outputs, inputs, self.block),)
        return ((outputs, linear.n_groups(part, inputs, self.group_size)),)


@dataclass(frozen=True)
class Compressed(stored_linear.Method):
    """compressed-tensors, a `Method`."""

    schemes: tuple[Scheme, ...]
    parts = f"{PACKED}|{SCALE}|weight_shape|{ZERO}|{G_IDX}"
    low_dtypes = ("int8", stored_linear.FP8)
    ignored = r".*\.((input|output)_(scale|zero_point|global_scale)|[kqv]_(scale|zero_point))"
    integer_bits = property(lambda self: tuple(scheme.bits for scheme in self.schemes))

    @classmethod
    def of(cls, settings: stored_linear.Settings) -> Compressed:
        if settings.get("sparsity_config"):
            settings.inner("sparsity_config").one_of("format", ("dense",), "dense")
        if settings.get("transform_config"):  # rotates activations
            raise settings.error("transform_config", "none")
        found, schemes = settings.one_of("format", (*FORMATS, MIXED)), []
        groups = settings.inner("config_groups")
        for name in groups:
            group = groups.inner(name)
            if found == MIXED:
                group.one_of("format", FORMATS)
            if group.get("weights") is not None:
                schemes.append(Scheme.of(group.inner("weights")))
        if not schemes:
            raise settings.error("config_groups", "a group with weights")
        return cls(tuple(schemes))

    def shape(self, linear: stored_linear.StoredLinear) -> Shape:
        shape = self._shape(linear)
        self._scheme(linear, *shape)
        return shape

    def read(self, linear: stored_linear.StoredLinear) -> np.ndarray:
        outputs, inputs = self._shape(linear)
        scheme = self._scheme(linear, outputs, inputs)
        return stored_linear.widen_blocks(self._numbers(linear, scheme, inputs), linear.scales(SCALE), scheme.block)

    def integers(self, linear: stored_linear.StoredLinear) -> stored_linear.Integers | None:
        outputs, inputs = self._shape(linear)
        scheme = self._scheme(linear, outputs, inputs)
        if scheme.block is not None:
            return None
        numbers, scales = self._numbers(linear, scheme, inputs), linear.scales(SCALE)
        zeros = self._zeros(linear, scheme, outputs)
        if zeros is None and self._is_packed(linear):
            zeros = 1 << (scheme.bits - 1)
        scales = scales.reshape(-1, scales.shape[-1] if scheme.strategy == "group" else 1)
        zeros = zeros if zeros is None or isinstance(zeros, int) else zeros.reshape(scales.shape).T
        return stored_linear.Integers(scheme.bits, numbers.T, scales.T, zeros, self._groups(linear, scales.shape[1]))

    def _numbers(self, linear: stored_linear.StoredLinear, scheme: Scheme, inputs: int) -> np.ndarray:
        if self._is_packed(linear):
            return stored_linear.unpack(linear.read(PACKED), scheme.bits, 1)[:, :inputs]
        return linear.read("weight")

    @staticmethod
    def _is_packed(linear: stored_linear.StoredLinear) -> bool:
        return PACKED in linear or "weight_shape" in linear or "weight" not in linear

    def _shape(self, linear: stored_linear.StoredLinear) -> Shape:
        if not self._is_packed(linear):
            return linear.matrix("weight", *dict.fromkeys(scheme.dtype for scheme in self.schemes))
        rows, words = linear.matrix(PACKED, "int32")
        linear.check("weight_shape", ("int64", "int32"), (2,))
        outputs, inputs = map(int, linear.read("weight_shape"))
        expected = [(outputs, math.ceil(inputs * scheme.bits / stored_linear.WORD)) for scheme in self.schemes]
        if (rows, words) not in expected or inputs < 1:
            raise linear.error("weight_shape", f"got {[outputs, inputs]}, expected that of {[rows, words]} words")
        return outputs, inputs

    def _scheme(self, linear: stored_linear.StoredLinear, outputs: int, inputs: int) -> Scheme:
        """Return the group's settings that the layer's tensors have, after checking these."""
        packed = self._is_packed(linear)
        part = PACKED if packed else "weight"
        if packed:
            words = linear.shape(PACKED)[1]
            fitting = [one for one in self.schemes if math.ceil(inputs * one.bits / stored_linear.WORD) == words]
        else:
            fitting = [one for one in self.schemes if one.dtype == linear.dtype(part)]
        found = linear.shape(SCALE)
        # The first one reports the error if none has these scales.
        scheme = next((one for one in fitting if found in one.scale_shapes(linear, part, outputs, inputs)), fitting[0])
        linear.check(SCALE, stored_linear.FLOAT_TYPES, *scheme.scale_shapes(linear, part, outputs, inputs))
        if packed:
            down = math.ceil(outputs * scheme.bits / stored_linear.WORD)
            across = found[1] if len(found) == 2 else 1
            zero_shapes = {"int32": (down, across), "int8": found}
        else:
            zero_shapes = dict.fromkeys(("int8", *stored_linear.FLOAT_TYPES, stored_linear.FP8), found)
        if ZERO in linear or not scheme.symmetric:
            linear.check(ZERO, tuple(zero_shapes))
            linear.check(ZERO, tuple(zero_shapes), zero_shapes[linear.dtype(ZERO)])
        if G_IDX in linear:
            linear.check(G_IDX, ("int32", "int64"), (inputs,))
        return scheme

    @staticmethod
    def _zeros(linear: stored_linear.StoredLinear, scheme: Scheme, outputs: int) -> np.ndarray | None:
        """Return the zeros with the offset of packed numbers."""
        if ZERO not in linear:
            return None
        zeros = linear.read(ZERO)
        if linear.dtype(ZERO) == "int32":
            return stored_linear.unpack(zeros, scheme.bits, 0)[:outputs]
        offset = 1 << (scheme.bits - 1) if PACKED in linear else 0
        return zeros.astype(np.float32) + offset

    @staticmethod
    def _groups(linear: stored_linear.StoredLinear, n_groups: int) -> np.ndarray | None:
        if G_IDX not in linear or -1 in linear.read(G_IDX):
            return None
        return linear.groups(G_IDX, n_groups)
