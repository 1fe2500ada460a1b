"""The tensors of a GGUF file that a directory in the user's cache describes (`hydrajax.lowbit.gguf`)."""

import hashlib
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from hydrajax.errors import HydrajaxError
from hydrajax.files import user_cache
from hydrajax.formats.tensors import GGUF_INDEX, TensorFiles, read_json
from hydrajax.optional_deps import needs

GGUF_VERSION = 2  # of these directories
GGUF_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}  # llama.cpp's types that are not quantised
GGUF_ROWS = 1024  # dequantised at once


class GgufFiles(TensorFiles):
    """The tensors of one GGUF file of llama.cpp, dequantised to float32 when they are read.

    Quantised tensors have the dtype float16, that of their scales.

    Args:
        tensors: by transformers' name: ``type`` (llama.cpp's name), ``shape`` (row-major), ``offset`` and ``bytes`` in
            the file, ``head_dim`` if the rows of each head are interleaved, and ``offset_norm`` if 1 was added.
    """

    def __init__(self, path: Path, tensors: dict[str, dict[str, Any]], what: str):
        self._tensors = tensors
        layers = (x["type"] for name, x in tensors.items() if name.startswith("model.layers."))
        self.kept_as = "int4" if any(kind.startswith("Q4") for kind in layers) else None
        super().__init__([path], what)

    def _opened(self, path):
        """Nothing stays open or mapped between tensors."""
        return path

    def _describe(self, path):
        return {
            name: (tuple(x["shape"]), np.dtype(GGUF_FLOATS.get(x["type"], np.float16)).name)
            for name, x in self._tensors.items()
        }

    def _read(self, path, key, rows):
        tensor, shape = self._tensors[key], self.shape(key)
        n_rows = shape[0] if len(shape) > 1 else 1
        wanted = n_rows if rows is None or len(shape) == 1 else min(rows, n_rows)
        if head_dim := tensor.get("head_dim"):
            wanted = -(-wanted // head_dim) * head_dim  # whole heads
        size = tensor["bytes"] // n_rows * wanted
        try:
            with path.open("rb") as file:
                file.seek(tensor["offset"])
                content = np.frombuffer(file.read(size), np.uint8)
        except OSError as error:
            raise HydrajaxError(f"{self._what}: cannot read {path}: {error.strerror}") from None
        if content.size < size:
            raise HydrajaxError(f"{self._what}: {path} ends within tensor '{key}'")
        array = self._dequantise(content.reshape(wanted, -1), tensor["type"])
        if tensor.get("offset_norm"):
            array = array.astype(np.float32) - np.float32(1)
        if head_dim:
            array = array.reshape(-1, head_dim // 2, 2, array.shape[-1]).swapaxes(1, 2)
        return array.reshape(-1, *shape[1:])[:rows]

    def _dequantise(self, blocks: np.ndarray, kind: str) -> np.ndarray:
        if kind in GGUF_FLOATS:
            return blocks.view(GGUF_FLOATS[kind])
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
        except ImportError:
            raise HydrajaxError(f"{self._what}: {needs('gguf')}") from None
        kind = GGMLQuantizationType[kind]
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        array = np.empty((len(blocks), blocks.shape[1] // block_bytes * block_size), np.float32)
        for at in range(0, len(blocks), GGUF_ROWS):  # gguf makes a second copy of what it returns
            array[at : at + GGUF_ROWS] = quants.dequantize(blocks[at : at + GGUF_ROWS], kind)
        return array


def gguf_directory(file: str | Path) -> Path:
    """Return the directory in the user's cache that describes a GGUF file as it is now; it may not exist yet.

    Raises:
        OSError: the file cannot be read.
        RuntimeError: for a user without a home.
    """
    path = os.path.realpath(file)
    found = os.stat(path)
    key = hashlib.sha256(f"{GGUF_VERSION} {found.st_size} {found.st_mtime_ns} {path}".encode(errors="surrogateescape"))
    return user_cache("gguf") / key.hexdigest()[:32]


def open_gguf(directory: Path, what: str) -> GgufFiles:
    """Open the GGUF file of a directory in the user's cache."""
    index = read_json(directory / GGUF_INDEX, what)
    try:
        current = gguf_directory(index["file"])
        tensors, path = dict(index["tensors"]), Path(index["file"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        current = None
    # An index from elsewhere could name any file of this machine.
    if current is None or not current.is_dir() or not os.path.samefile(current, directory):
        raise HydrajaxError(f"{what}: {directory} describes no present GGUF file: give the .gguf file itself")
    return GgufFiles(path, tensors, what)
