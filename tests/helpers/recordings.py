"""The lossless archives of tests/golden, and comparison with subsampled arrays."""

import io
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

STEP = 127  # every 127th entry of a gradient is kept
COLUMNS = 8  # evenly spaced columns of hidden states and logits

Arrays = dict[str, np.ndarray]


def need(path: Path) -> Path:
    """Return ``path``, or skip the test if only the full set of recordings has that file."""
    if not path.exists():
        pytest.skip(f"{path.name} of {path.parent.name} is in the full set of recordings only: set HYDRAJAX_GOLDEN")
    return path


def kept_columns(values: np.ndarray) -> np.ndarray:
    """Return `COLUMNS` evenly spaced entries of the last axis."""
    return values[..., :: max(values.shape[-1] // COLUMNS, 1)]


def kept_entries(values: np.ndarray) -> np.ndarray:
    """Return every `STEP`-th entry of a flattened matrix; a vector is returned whole."""
    return values if values.ndim == 1 else values.reshape(-1)[::STEP]


def as_recorded(values, recorded: np.ndarray):
    """Return the entries of ``values`` that ``recorded`` has: all of them in the full set of recordings."""
    if recorded.ndim < values.ndim:
        return kept_entries(values)
    return values[..., :: values.shape[-1] // recorded.shape[-1]]


def pack(archive: Path, files: dict[str, Arrays | bytes]) -> None:
    """Write ``files`` (arrays by name for .npz and .safetensors, the content of any other file) as one archive.

    Only the exponents of trained float32 weights compress. The bytes of all float32 arrays are therefore split: first
    the three bytes that do not compress, then the exponents. Equal arrays are stored once.
    """
    members: Arrays = {}
    floats: list[np.ndarray] = []
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    known: dict[bytes, int] = {}
    size = 0
    for file, content in files.items():
        if isinstance(content, bytes):
            members[file] = np.frombuffer(content, np.uint8)
            continue
        for name, array in content.items():
            if array.dtype != np.float32 or array.size < 1024:
                members[f"{file}|{name}"] = array
                continue
            start = known.setdefault(array.tobytes(), size)
            places[f"{file}|{name}"] = start, array.shape
            if start == size:
                floats.append(array.reshape(-1))
                size += array.size
    bits = np.concatenate(floats or [np.zeros(0, np.float32)]).view(np.uint32)
    planes = (bits << 1 | bits >> 31).astype("<u4").view(np.uint8).reshape(-1, 4).T  # the last byte has the exponents
    index = np.frombuffer(json.dumps(places).encode(), np.uint8)
    npz = io.BytesIO()
    np.savez(npz, **{"": planes[:3], "exponents": planes[3], "index": index}, **members)
    archive.write_bytes(lzma.compress(npz.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def unpack(archive: Path, folder: Path) -> None:
    """Extract an archive into ``folder``, with the file names of the full set of recordings."""
    from safetensors.numpy import save_file

    with np.load(io.BytesIO(lzma.decompress(archive.read_bytes()))) as members:
        content = dict(members)
    bits = np.concatenate([content.pop(""), content.pop("exponents")[None]]).T.copy().view("<u4").reshape(-1)
    floats = (bits >> 1 | bits << 31).view(np.float32)
    files: dict[str, Arrays] = {}
    for key, (start, shape) in json.loads(content.pop("index").tobytes()).items():
        file, name = key.split("|")
        files.setdefault(file, {})[name] = floats[start : start + int(np.prod(shape))].reshape(shape)
    for key, array in content.items():
        file, _, name = key.partition("|")
        if name:
            files.setdefault(file, {})[name] = array
            continue
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(array.tobytes())
    for file, arrays in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".npz":
            np.savez(path, **arrays)
        else:
            save_file(arrays, path, {"format": "pt"})
