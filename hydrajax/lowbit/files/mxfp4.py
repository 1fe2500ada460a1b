"""Checkpoints of gpt-oss with experts in MXFP4 (`hydrajax.lowbit.mxfp4`).

``X_blocks`` is uint8 ``[experts, outputs, groups, 16]``, the 32 codes of a group two in a byte, the first in the low
bits. ``X_scales`` is uint8 ``[experts, outputs, groups]``. Both appear as ``X``, bfloat16 ``[experts, inputs,
outputs]``, as transformers has it.
"""

import dataclasses

import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.formats.tensors import TensorFiles, WrappedFiles
from hydrajax.lowbit.mxfp4 import BIAS, Mxfp4Tiles, widen
from hydrajax.models.layout import Entry

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32


class Mxfp4Files(WrappedFiles):
    """The tensors of such a base."""

    kept_as, of_experts = "mxfp4", True

    def __init__(self, files: TensorFiles, where: str):
        self._where = where
        self._packed = packed = {name.removesuffix(BLOCKS) for name in files if name.endswith(BLOCKS)}
        parts = {f"{name}{part}" for name in packed for part in (BLOCKS, SCALES)}
        super().__init__(files, sorted((set(files) - parts) | packed))

    def shape(self, key):
        if key not in self._packed:
            return self._files.shape(key)
        blocks = self._files.shape(f"{key}{BLOCKS}")
        if f"{key}{SCALES}" not in self._files:
            raise HydrajaxError(f"{self._where}: missing tensor '{key}{SCALES}'")
        for part, expected in ((BLOCKS, (*blocks[:3], GROUP // 2)), (SCALES, blocks[:3])):
            found, dtype = self._files.shape(f"{key}{part}"), self._files.dtype(f"{key}{part}")
            if found != expected or len(blocks) != 4 or dtype != "U8":
                raise HydrajaxError(
                    f"{self._where}: {key}{part}: got shape {list(found)} of {dtype}, expected {list(expected)} of U8"
                )
        experts, outputs, groups, _ = blocks
        return experts, groups * GROUP, outputs

    def dtype(self, key):
        return "bfloat16" if key in self._packed else self._files.dtype(key)

    def read(self, key, rows=None):
        if key not in self._packed:
            return self._files.read(key, rows)
        wide = [widen(*stored) for stored in zip(*self._stored(key), strict=True)]
        return np.stack([expert.reshape(len(expert), -1).T for expert in wide[:rows]])

    def view(self, key):
        return self.read(key) if key in self._packed else self._files.view(key)

    def _stored(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return codes ``[experts, outputs, groups, 32]`` and exponents."""
        self.shape(key)  # checks the tensors
        blocks, exponents = (self._files.read(f"{key}{part}") for part in (BLOCKS, SCALES))
        if exponents.max(initial=0) > 2 * BIAS:
            raise HydrajaxError(f"{self._where}: {key}{SCALES}: got 255, which is no number, expected 0 to {2 * BIAS}")
        return np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:3], GROUP), exponents

    def kernel(self, kind, entry: Entry, unlike):
        """Return the kernels of all experts as they are stored."""
        name = next(iter(entry.theirs))
        if kind is not Mxfp4Tiles or name not in self._packed:
            return None
        experts, depth, outputs = self.shape(name)
        # The outputs in the order of the kernel's features.
        (numbered,) = entry.join(np.broadcast_to(np.arange(outputs), (experts, depth, outputs)))
        order = numbered.parts[0][(slice(0, 1),)][0]
        found: dict[str, np.ndarray] = {}
        for i, (codes, exponents) in enumerate(zip(*self._stored(name), strict=True)):
            by_output = codes.reshape(outputs, depth)[order.reshape(-1)], exponents[order.reshape(-1)]
            kernel = kind.of_codes(*(x.T for x in by_output), (depth, *order.shape))
            for part, array in kernel.arrays().items():
                found.setdefault(part, np.empty((experts, *array.shape), array.dtype))[i] = array
        return dataclasses.replace(kernel, **found)
