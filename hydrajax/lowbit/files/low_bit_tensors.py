"""Bases quantised by other programs: the method of ``config.json``, and its tensors as float ones.

A quantised layer ``X`` appears as ``X.weight`` in float32, widened when it is read. Everything else passes through.
`hydrajax.lowbit.files.kernels` takes a layer's integers instead.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.families.config_fields import unsupported
from hydrajax.formats.tensors import METHOD, TensorFiles, WrappedFiles, open_tensors
from hydrajax.lowbit.files.awq import Awq
from hydrajax.lowbit.files.bits_and_bytes import BitsAndBytes
from hydrajax.lowbit.files.compressed import Compressed
from hydrajax.lowbit.files.fp8 import Fp8 as Fp8Method
from hydrajax.lowbit.files.gptq import Gptq
from hydrajax.lowbit.files.kernels import four_bit_kernel, fp8_kernel
from hydrajax.lowbit.files.mxfp4 import Mxfp4Files
from hydrajax.lowbit.files.stored_linear import FLOAT_TYPES, NAMES, Integers, Method, Settings, StoredLinear
from hydrajax.lowbit.int4_tiles import Int4Tiles
from hydrajax.lowbit.quantized import Fp8
from hydrajax.models.layout import MODEL, Shape

METHODS: dict[str, Callable[[Settings], Method | None]] = {
    "awq": Awq.of,
    "bitsandbytes": BitsAndBytes.of,
    "compressed-tensors": Compressed.of,
    "fbgemm_fp8": Fp8Method.of_fbgemm,
    "fp8": Fp8Method.of,
    "gptq": Gptq.of,
    "mxfp4": lambda settings: None,  # it has none that matter
}


def read_method(config: dict, where: str) -> Method | None:
    """Return the method of a ``config.json`` with its settings, see `hydrajax.formats.tensors.check_method`.

    None for MXFP4.
    """
    field = next(field for field in METHOD if config.get(field))
    try:
        settings = Settings(config[field], field)
        old = "bitsandbytes" if settings.get("load_in_8bit") or settings.get("load_in_4bit") else None
        name = settings.get("quant_method", "compressed-tensors" if field == METHOD[1] else old)
        if not isinstance(name, str) or name not in METHODS:
            raise unsupported(f"{field}.quant_method", name, f"one of {', '.join(map(repr, METHODS))}")
        return METHODS[name](settings)
    except HydrajaxError as error:
        raise HydrajaxError(f"{where}: {error}") from None


def open_low_bits(directory: Path, config: dict, what: str) -> TensorFiles:
    """Open the weights of a base with this ``config.json``, see `hydrajax.formats.tensors.open_base_tensors`."""
    method = read_method(config, f"{what}: {directory / 'config.json'}")
    stored = config.get("dtype") or config.get("torch_dtype")
    files = open_tensors(directory, MODEL, what)
    if method is None:
        return Mxfp4Files(files, f"{what}: {directory}")
    return LowBitFiles(files, method, stored if stored in FLOAT_TYPES else "bfloat16", f"{what}: {directory}")


class LowBitFiles(WrappedFiles):
    """The tensors of a quantised base.

    Args:
        stored: NumPy's name of the dtype that quantised layers count as, in which the model was published.
    """

    def __init__(self, files: TensorFiles, method: Method, stored: str, where: str):
        self._files, self._method, self._stored = files, method, stored
        self.kept_as = "int4" if 4 in method.integer_bits else None
        part = re.compile(rf"(.+?)\.({method.parts})", re.DOTALL)
        names: list[str] = []
        self._linears: dict[str, StoredLinear] = {}
        for name in files:
            layer = match[1] if (match := part.fullmatch(name)) else None
            if layer is None and name.endswith(".weight") and self._plain_dtype(name) in method.low_dtypes:
                layer = name.removesuffix(".weight")
            if layer is not None:
                self._linears[f"{layer}.weight"] = StoredLinear(layer, files, where)
                names.append(f"{layer}.weight")
            elif not re.fullmatch(method.ignored, name, re.DOTALL):
                names.append(name)
        super().__init__(files, names)
        self._shapes: dict[str, Shape] = {}  # of layers whose tensors have been checked

    def _plain_dtype(self, name: str) -> str:
        found = self._files.dtype(name)
        return NAMES.get(found, found)

    def shape(self, key):
        linear = self._linears.get(key)
        if linear is None:
            return self._files.shape(key)
        if key not in self._shapes:
            self._shapes[key] = self._method.shape(linear)
        return self._shapes[key]

    def dtype(self, key):
        return self._stored if key in self._linears else self._files.dtype(key)

    def read(self, key, rows=None):
        linear = self._linears.get(key)
        if linear is None:
            return self._files.read(key, rows)
        with np.errstate(over="ignore", invalid="ignore"):  # huge scales give infinite weights, as in a float file
            found = self.integers(key)
            return (self._method.read(linear) if found is None else found.widened())[:rows]

    def integers(self, key: str) -> Integers | None:
        """Return a layer's numbers and scales; None for float tensors and for layers of other numbers."""
        if key not in self._linears:
            return None
        self.shape(key)  # checks the tensors
        return self._method.integers(self._linears[key])

    def view(self, key):
        return self.read(key) if key in self._linears else self._files.view(key)

    def kernel(self, kind, entry, unlike):
        if issubclass(kind, Int4Tiles):
            return four_bit_kernel(self, entry, unlike)
        return fp8_kernel(self, entry) if kind is Fp8 else None

    def zero_biases(self, wanted):
        if not self._method.pads_biases:
            return []
        biases = (f"{name.removesuffix('.weight')}.bias" for name in self._linears)
        extra = [name for name in biases if name in self._files and name not in wanted]
        return [name for name in extra if self._plain_dtype(name) in FLOAT_TYPES and not np.any(self._files.read(name))]
