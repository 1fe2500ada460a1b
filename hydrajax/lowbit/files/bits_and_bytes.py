"""Checkpoints of bitsandbytes (github.com/bitsandbytes-foundation/bitsandbytes, ``nn/modules.py``, ``functional.py``).

In 8 bits a layer has ``weight`` int8 ``[outputs, inputs]`` and ``SCB`` float32 ``[outputs]``, the largest absolute
value of each output. A weight is ``number * SCB / 127``. ``weight_format`` is 0 for rows.

In 4 bits ``weight`` has the bytes of all numbers in row-major order, the first of two numbers in the upper bits. A
number is an index of the table ``weight.quant_map``, whose value is multiplied by ``weight.absmax`` of its block.
``weight.quant_state.bitsandbytes__nf4`` (or ``fp4``) has JSON as bytes: ``shape``, ``blocksize``, and with double
quantisation ``nested_blocksize`` and ``nested_offset``. Then ``weight.absmax`` is uint8, an index of the table
``weight.nested_quant_map``. Its value is multiplied by ``weight.nested_absmax`` of its block and added to the offset.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hydrajax.lowbit.files.stored_linear import FLOAT_TYPES, LARGEST, Method, Settings, StoredLinear, widen
from hydrajax.models.layout import Shape

SCALE_8 = "SCB"
STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
ABSMAX, TABLE = "weight.absmax", "weight.quant_map"
NESTED_ABSMAX, NESTED_TABLE = "weight.nested_absmax", "weight.nested_quant_map"
BYTES = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4}  # of the dtypes that bytes are stored as
LARGEST_STATE = 1 << 16  # bytes of JSON


@dataclass(frozen=True)
class State:
    """The JSON of a layer in 4 bits. Without double quantisation the nested block has no size."""

    shape: Shape
    block: int
    nested_block: int
    nested_offset: float

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BitsAndBytes(Method):
    """bitsandbytes in 8 and 4 bits, a `Method`. 4 bits are indices of a table, and 8 bits have one scale per output."""

    parts = "SCB|weight_format|weight\\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\\..*)"
    low_dtypes = ("int8", "uint8")

    @classmethod
    def of(cls, settings: Settings) -> BitsAndBytes:
        return cls()

    def shape(self, linear: StoredLinear) -> Shape:
        if self._has_8_bits(linear):
            outputs, inputs = linear.matrix("weight", "int8")
            linear.check(SCALE_8, FLOAT_TYPES, (outputs,))
            if "weight_format" in linear:
                linear.check("weight_format", ("uint8",), (), (1,))
                if found := int(linear.read("weight_format").reshape(())):
                    raise linear.error("weight_format", f"got {found}, expected 0 (rows)")
            return outputs, inputs
        state = self._state(linear)
        linear.check("weight", tuple(BYTES))
        size = math.prod(linear.shape("weight")) * BYTES[linear.dtype("weight")]
        if size != math.ceil(state.size / 2):
            raise linear.error("weight", f"got {size} bytes, expected {math.ceil(state.size / 2)}")
        linear.check(TABLE, FLOAT_TYPES, (16,))
        n_blocks = math.ceil(state.size / state.block)
        linear.check(ABSMAX, ("uint8",) if state.nested_block else FLOAT_TYPES, (n_blocks,))
        if state.nested_block:
            linear.check(NESTED_TABLE, FLOAT_TYPES, (256,))
            linear.check(NESTED_ABSMAX, FLOAT_TYPES, (math.ceil(n_blocks / state.nested_block),))
        return state.shape

    def read(self, linear: StoredLinear) -> np.ndarray:
        if self._has_8_bits(linear):
            scales = linear.scales(SCALE_8).reshape(1, -1)
            weights = widen(linear.read("weight").T, scales)
            weights *= np.float32(1 / 127)
            return weights.T
        state = self._state(linear)
        table = linear.scales(TABLE)
        pairs = np.stack([np.repeat(table, 16), np.tile(table, 16)], axis=1)  # of each byte
        packed = np.ascontiguousarray(linear.read("weight")).reshape(-1).view(np.uint8)
        weights = pairs[packed].reshape(-1)[: state.size]
        absmax = linear.read(ABSMAX) if state.nested_block else linear.scales(ABSMAX)
        if state.nested_block:
            absmax = linear.scales(NESTED_TABLE)[absmax]
            _scale_blocks(absmax, linear.scales(NESTED_ABSMAX), state.nested_block)
            absmax += np.float32(state.nested_offset)
        _scale_blocks(weights, absmax, state.block)
        return weights.reshape(state.shape)

    @staticmethod
    def _has_8_bits(linear: StoredLinear) -> bool:
        return SCALE_8 in linear or ("weight" in linear and linear.dtype("weight") == "int8" and ABSMAX not in linear)

    @staticmethod
    def _state(linear: StoredLinear) -> State:
        part = next((name for name in STATES if name in linear), STATES[0])
        linear.check(part, ("uint8",))
        if len(linear.shape(part)) != 1 or linear.shape(part)[0] > LARGEST_STATE:
            raise linear.error(part, f"got shape {list(linear.shape(part))}, expected at most [{LARGEST_STATE}]")
        try:
            found: Any = json.loads(linear.read(part).tobytes().decode())
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise linear.error(part, "got other bytes, expected a JSON object")

        def size(field: str) -> int:
            if type(found.get(field)) is not int or not 0 < found[field] < LARGEST:
                raise linear.error(part, f"{field}: got {found.get(field)!r}, expected a positive integer")
            return found[field]

        shape, offset, nested = found.get("shape"), found.get("nested_offset", 0.0), NESTED_ABSMAX in linear
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
            raise linear.error(part, f"shape: got {shape!r}, expected two positive integers")
        if type(offset) not in (int, float) or not abs(offset) < np.finfo(np.float32).max:
            raise linear.error(part, f"nested_offset: got {offset!r}, expected a finite number")
        nested = nested or "nested_offset" in found
        return State(tuple(shape), size("blocksize"), size("nested_blocksize") if nested else 0, offset)


def _scale_blocks(numbers: np.ndarray, scales: np.ndarray, size: int) -> None:
    """Multiply blocks of ``size`` numbers in place; the last block may be shorter."""
    whole = len(numbers) // size
    numbers[: whole * size].reshape(whole, size)[...] *= scales[:whole, None]
    numbers[whole * size :] *= scales[whole:]
