"""Checkpoints of AutoAWQ (github.com/casper-hansen/AutoAWQ, ``awq/modules/linear/gemm.py``), version ``gemm``.

A layer has ``qweight`` int32 ``[inputs, outputs / 8]``, ``qzeros`` int32 ``[groups, outputs / 8]`` and ``scales``
``[groups, outputs]``, with ``group_size`` inputs in each group. A word holds 8 outputs of 4 bits: from the lowest bits
on those of `ORDER`. A weight is ``(number - zero) * scale``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydrajax.lowbit.files.stored_linear import FLOAT_TYPES, Integers, Method, Settings, StoredLinear, unpack
from hydrajax.models.layout import Shape

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Awq(Method):
    """AWQ in 4 bits, a `Method`."""

    group_size: int
    parts = "qweight|qzeros|scales"
    integer_bits = (BITS,)

    @classmethod
    def of(cls, settings: Settings) -> Awq:
        settings.one_of("bits", (BITS,), BITS)
        settings.one_of("zero_point", (True,), True)
        if settings.get("backend") == "llm-awq":
            raise settings.error("backend", "'autoawq'")
        field = "version" if settings.get("version") else "format"  # the newer name
        if str(settings.get(field, "gemm")).lower() != "gemm":
            raise settings.error(field, "'gemm'")
        return cls(settings.group_size(128))

    def shape(self, linear: StoredLinear) -> Shape:
        inputs, words = linear.matrix("qweight", "int32")
        outputs, groups = 8 * words, linear.n_groups("qweight", inputs, self.group_size)
        linear.check("qzeros", ("int32",), (groups, words))
        linear.check("scales", FLOAT_TYPES, (groups, outputs))
        return outputs, inputs

    def integers(self, linear: StoredLinear) -> Integers:
        numbers, zeros = (unpack(linear.read(part), BITS, 1, ORDER) for part in ("qweight", "qzeros"))
        return Integers(BITS, numbers, linear.scales("scales"), zeros)
