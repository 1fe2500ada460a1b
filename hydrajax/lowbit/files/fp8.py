"""Checkpoints in FP8 (e4m3): ``quant_method`` ``fp8`` (DeepSeek, Qwen 3) and ``fbgemm_fp8`` (LLaMA 3.1).

A layer has ``weight`` float8_e4m3fn ``[outputs, inputs]`` and scales, by which the numbers are multiplied:

- ``fp8`` with ``weight_block_size`` (github.com/deepseek-ai/DeepSeek-V3, ``inference/fp8_cast_bf16.py``):
  ``weight_scale_inv``, one per block of that many outputs and inputs, where the last blocks may be cut off.
- ``fp8`` without (github.com/neuralmagic/AutoFP8): ``weight_scale`` or ``weight_scale_inv``, one for the layer or one
  per output.
- ``fbgemm_fp8`` (transformers, ``integrations/fbgemm_fp8.py``): ``weight_scale``, one per output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hydrajax.lowbit.files import stored_linear
from hydrajax.models.layout import Shape


@dataclass(frozen=True)
class Fp8(stored_linear.Method):
    """FP8, a `Method`; ``block`` has the outputs and inputs of one scale, None for scales per layer or output."""

    block: tuple[int, int] | None = None
    parts = "weight_scale|weight_scale_inv"
    low_dtypes = (stored_linear.FP8,)
    ignored = r".*\.(input_scale|input_scale_ub|activation_scale|[kqv]_scale|kv_scale)"

    @classmethod
    def of(cls, settings: stored_linear.Settings) -> Fp8:
        settings.one_of("fmt", ("e4m3",), "e4m3")
        return cls(settings.block("weight_block_size"))

    @classmethod
    def of_fbgemm(cls, settings: stored_linear.Settings) -> Fp8:
        return cls()

    def shape(self, linear: stored_linear.StoredLinear) -> Shape:
        outputs, inputs = linear.matrix("weight", stored_linear.FP8)
        whole = ((), (1,), (outputs,), (outputs, 1))
        shapes = whole if self.block is None else (stored_linear.block_shape(outputs, inputs, self.block),)
        linear.check(self._scale(linear), stored_linear.FLOAT_TYPES, *shapes)
        return outputs, inputs

    def integers(self, linear: stored_linear.StoredLinear) -> stored_linear.Integers | None:
        if self.block is not None:
            return None
        numbers, scales = linear.read("weight"), linear.scales(self._scale(linear))
        return stored_linear.Integers(8, numbers.T, scales.reshape(1, -1))

    def read(self, linear: stored_linear.StoredLinear) -> np.ndarray:
        return stored_linear.widen_blocks(linear.read("weight"), linear.scales(self._scale(linear)), self.block)

    def _scale(self, linear: stored_linear.StoredLinear) -> str:
        inverse = "weight_scale_inv"
        return inverse if inverse in linear or (self.block and "weight_scale" not in linear) else "weight_scale"
