"""Checkpoints of AutoGPTQ and GPTQModel (github.com/ModelCloud/GPTQModel, ``nn_modules/qlinear/torch.py``).

A layer has ``qweight`` int32 ``[inputs / n, outputs]``, ``qzeros`` int32 ``[groups, outputs / n]``, ``scales``
``[groups, outputs]`` and ``g_idx`` ``[inputs]``, the group of each input, with ``n = 32 / bits`` numbers in each word
from the lowest bits on. A weight is ``(number - zero) * scale``. The format ``gptq`` stores each zero minus one, and
``gptq_v2`` stores it as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hydrajax.lowbit.files.stored_linear import FLOAT_TYPES, WORD, Integers, Method, Settings, StoredLinear, unpack
from hydrajax.models.layout import Shape

FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class Gptq(Method):
    """GPTQ, a `Method`.

    Attributes:
        ordered: groups are of consecutive inputs, so that ``g_idx`` may be missing.
        minus_one: zeros are stored minus one.
    """

    bits: int
    group_size: int
    ordered: bool
    minus_one: bool
    parts = "qweight|qzeros|scales|g_idx"
    pads_biases = True
    integer_bits = property(lambda self: (self.bits,))

    @classmethod
    def of(cls, settings: Settings) -> Gptq:
        bits = settings.one_of("bits", (4, 8))
        settings.one_of("is_marlin_format", (False,), False)
        settings.one_of("pack_dtype", ("int32",), "int32")
        field = "checkpoint_format" if settings.get("checkpoint_format") else "format"
        found = settings.one_of(field, FORMATS, FORMATS[0])
        if settings.get("dynamic"):
            overrides = settings.inner("dynamic")
            for pattern in overrides:  # "-:" leaves layers in float, and others change the settings
                if not pattern.startswith("-:"):
                    raise overrides.error(pattern, "only patterns that begin with '-:'")
        return cls(bits, settings.group_size(128), not settings.flag("desc_act", False), found == FORMATS[0])

    def shape(self, linear: StoredLinear) -> Shape:
        per_word = WORD // self.bits
        rows, outputs = linear.matrix("qweight", "int32")
        inputs = rows * per_word
        groups = linear.n_groups("qweight", inputs, self.group_size)
        if outputs % per_word:
            raise linear.error("qweight", f"got {outputs} outputs, expected a multiple of {per_word}")
        linear.check("qzeros", ("int32",), (groups, outputs // per_word))
        linear.check("scales", FLOAT_TYPES, (groups, outputs))
        if "g_idx" in linear or not self.ordered:
            linear.check("g_idx", ("int32", "int64"), (inputs,))
        return outputs, inputs

    def integers(self, linear: StoredLinear) -> Integers:
        scales, zeros = linear.scales("scales"), linear.read("qzeros").view(np.uint32)
        if self.minus_one:
            # Added to whole words, as writers subtract: a zero of 0 borrows from the next number.
            zeros = zeros + np.uint32(sum(1 << shift for shift in range(0, WORD, self.bits)))
        groups = linear.groups("g_idx", len(scales)) if "g_idx" in linear else None
        numbers = unpack(linear.read("qweight"), self.bits, 0)
        return Integers(self.bits, numbers, scales, unpack(zeros, self.bits, 1), groups)
