"""Tensors by name in safetensors and PyTorch files. Reading is strict: nothing is executed and nothing is guessed.

Tensors are read one at a time and the file is let go after each, so that the host never holds a whole model
(``experiments/load_memory.py`` measures it).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.files import check_file
from hydrajax.formats.pickles import check_torch_file, starts_as_zip
from hydrajax.models.layout import ADAPTER, MODEL, Shape
from hydrajax.optional_deps import needs

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' names, NumPy's
LONGEST_HEADER = 16 << 20  # bytes of a safetensors file that name its tensors: 100,000 of them
NOTHING = re.compile(r"(?!)")


def read_json(path: Path, what: str) -> dict:
    """A JSON object from a file, or one clear line."""
    check_file(path, what)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HydrajaxError(f"{what}: no such file: {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise HydrajaxError(f"{what}: cannot read {path} as JSON: {error}") from None
    if not isinstance(content, dict):
        raise HydrajaxError(f"{what}: {path} must hold a JSON object")
    return content


class Description(NamedTuple):
    """What a file says of a tensor before it is read.

    dtype: as NumPy names it, or the file's own name where NumPy has no such dtype.
    """

    shape: Shape
    dtype: str


class TensorFiles:
    """The tensors of one or several files by name. A subclass knows how to open one file and what is in it."""

    def __init__(self, files: list[Path], what: str):
        self._what = what
        self._open_file: tuple[Path, Any] | None = None
        self._file_of: dict[str, Path] = {}
        self._described: dict[str, Description] = {}
        for path in files:
            for key, description in self._describe(self._opened(path)).items():
                if key in self._file_of:
                    raise HydrajaxError(f"{what}: tensor '{key}' is in both {self._file_of[key].name} and {path.name}")
                self._file_of[key], self._described[key] = path, description

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)

    def __contains__(self, key: object) -> bool:
        return key in self._described

    def shape(self, key: str) -> Shape:
        return self._described[key].shape

    def dtype(self, key: str) -> str:
        return self._described[key].dtype

    def read(self, key: str) -> np.ndarray:
        """One tensor as NumPy, bfloat16 as ml_dtypes' type."""
        return self._read(self._opened(self._file_of[key]), key)

    def read_first(self, key: str, rows: int) -> np.ndarray:
        """The first rows of a tensor; no other is read."""
        return self._read(self._opened(self._file_of[key]), key, rows)

    def _opened(self, path: Path):
        if self._open_file is None or self._open_file[0] != path:
            self._open_file = None  # closes the one before
            self._open_file = path, self._open(path)
        return self._open_file[1]

    def _open(self, path: Path):
        raise NotImplementedError

    def _describe(self, file) -> dict[str, Description]:
        raise NotImplementedError

    def _read(self, file, key: str, rows: int | None = None) -> np.ndarray:
        raise NotImplementedError


class SafetensorFiles(TensorFiles):
    """Files in the format of the safetensors library."""

    def _opened(self, path):
        """Open it anew for every tensor: what has been read of a mapped file stays in memory while it is open."""
        return self._open(path)

    def _open(self, path):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
            if length > LONGEST_HEADER:
                raise SafetensorError(f"its header has {length} bytes, allowed are {LONGEST_HEADER}")
            return safe_open(path, framework="np")
        except FileNotFoundError:
            raise HydrajaxError(f"{self._what}: no such file: {path}") from None
        except MemoryError:  # it is mapped, and addresses may be limited
            raise HydrajaxError(f"{self._what}: cannot map {path}: it takes more memory than there is") from None
        except (SafetensorError, OSError) as error:
            raise HydrajaxError(f"{self._what}: {path} is damaged or not a safetensors file: {error}") from None

    def _describe(self, file):
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (safe_open is not a dict)
        return {
            key: Description(tuple(part.get_shape()), FLOATS.get(part.get_dtype(), part.get_dtype()))
            for key, part in slices.items()
        }

    def _read(self, file, key, rows=None):
        try:
            return file.get_tensor(key) if rows is None else file.get_slice(key)[: min(rows, self.shape(key)[0])]
        except SafetensorError as error:
            raise HydrajaxError(f"{self._what}: cannot read tensor '{key}': {error}") from None


class TorchFiles(TensorFiles):
    """Files that ``torch.save`` wrote, which hold state dicts of tensors. Only tensors are unpickled from them."""

    def _open(self, path):
        torch = torch_module()
        if torch is None:
            raise HydrajaxError(f"{self._what}: cannot read {path.name}: {needs('torch')}")
        if not path.is_file():
            raise HydrajaxError(f"{self._what}: no such file: {path}")
        try:
            check_torch_file(path)
            # Files of torch before 1.6 cannot be mapped and are read whole.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=starts_as_zip(path))
            tensors, odd = self._plain(state, torch)
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors.values()}
            if sum(storages.values()) > path.stat().st_size:
                odd = ", of no more bytes than the file has"
        except Exception as error:  # torch raises many types for a damaged or unsafe file
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise HydrajaxError(f"{self._what}: {path} is damaged or holds more than tensors: {reason}") from None
        if odd is not None:
            raise HydrajaxError(f"{self._what}: {path} must hold a state dict of tensors{odd}")
        return tensors

    @staticmethod
    def _plain(state: Any, torch) -> tuple[dict, str | None]:
        """The tensors by name, and what is wrong if they are not plain dense ones that are all in the file."""
        if not isinstance(state, dict):
            return {}, ""
        tensors = {}
        for name, tensor in dict.items(state):  # a subclass may say otherwise
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                return {}, ""
            tensor = tensors[name] = torch.Tensor.detach(tensor)  # which leaves behind what a file hangs on a tensor
            if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided or tensor.device.type != "cpu":
                return {}, f", '{name}' is no plain dense one"
            if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
                return {}, f", '{name}' is larger than what is stored of it"
        return tensors, None

    def _describe(self, file):
        return {
            name: Description(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in file.items()
        }

    def _read(self, file, key, rows=None):
        tensor = file[key][:rows] if rows else file[key]
        tensor = tensor.clone(memory_format=torch_module().contiguous_format)  # the file is mapped, and let go
        if str(tensor.dtype) == "torch.bfloat16":  # NumPy gets its bfloat16 from ml_dtypes, torch does not know it
            return tensor.view(torch_module().int16).numpy().view(jnp.bfloat16)
        return tensor.numpy()


def torch_module():
    """torch, imported only where a file of its own is read or written; None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


TORCH_FILES = {MODEL: "pytorch_model.bin", ADAPTER: "adapter_model.bin"}  # transformers' and PEFT's names
SHARDED = ".index.json"  # what the index of shards adds to the name of the single file


def _candidates(directory: Path, stem: str) -> list[tuple[Path, type[TensorFiles]]]:
    """The files in which tensors may lie under this name, safetensors before PyTorch files, as transformers looks."""
    torchs = TORCH_FILES.get(stem, f"{stem}.pt")
    return [(directory / f"{stem}.safetensors", SafetensorFiles), (directory / torchs, TorchFiles)]


def _index(path: Path) -> Path:
    return path.with_name(path.name + SHARDED)


def holds(directory: Path, stem: str) -> bool:
    """Whether a directory has files that `open_tensors` would look at."""
    return any(path.exists() or (stem == MODEL and _index(path).exists()) for path, _ in _candidates(directory, stem))


def open_tensors(directory: Path, stem: str, what: str) -> TensorFiles:
    """The tensors of ``stem.safetensors``, or else of ``stem.pt``.

    The stem `MODEL` stands for the weights of a Hugging Face directory: ``model.safetensors``, else
    ``pytorch_model.bin``, each a single file or shards with their index. Shards must lie in the directory itself.
    """
    candidates = _candidates(directory, stem)
    for path, kind in candidates:
        if path.is_file():  # before an index, as transformers does
            return kind([path], what)
        if stem == MODEL and _index(path).exists():
            return kind(_shards(directory, _index(path), what), what)
    names = " nor ".join(path.name for path, _ in candidates)
    more = ", nor the .index.json of either" if stem == MODEL else ""
    raise HydrajaxError(f"{what}: {directory} has neither {names}{more}")


def _shards(directory: Path, index: Path, what: str) -> list[Path]:
    names = read_json(index, what).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise HydrajaxError(f"{what}: {index} has no 'weight_map' of file names")
    shards = sorted(set(names.values()))
    for shard in shards:
        if Path(shard).name != shard or not shard.isprintable():
            raise HydrajaxError(f"{what}: {index.name} names {shard!r}, a path outside the directory")
        if not os.path.isfile(directory / shard):
            raise HydrajaxError(f"{what}: shard {shard} is named in {index.name} but missing from {directory}")
    return [directory / shard for shard in shards]


def save_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a file that transformers opens, too. Raises `OSError` where it cannot be written."""
    try:
        save_file({name: np.array(x, order="C") for name, x in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # such as a full disk
        raise OSError(one_line(error)) from None


def save_torch(path: Path, tensors: dict[str, np.ndarray]) -> bool:
    """Write a state dict as ``torch.save`` does. Returns False, and writes nothing, where torch is not installed."""
    torch = torch_module()
    if torch is None:
        return False

    def tensor(x):
        if x.dtype == jnp.bfloat16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)

    torch.save({name: tensor(np.array(x, order="C")) for name, x in tensors.items()}, path)
    return True


def expect_tensors(found: TensorFiles, wanted: dict[str, Shape], what: str, ignored: re.Pattern = NOTHING) -> None:
    """Refuse missing, unexpected, misshapen and non-float tensors.

    The message names the first few and says how many more there are. ignored: names that may be there besides.
    """
    missing = sorted(set(wanted) - set(found))
    extra = sorted(key for key in set(found) - set(wanted) if not ignored.fullmatch(key))
    for problem, keys in (("missing", missing), ("unexpected", extra)):
        if keys:
            raise HydrajaxError(f"{what}: {problem} tensor{'s' * (len(keys) > 1)} {_some(map(repr, keys))}")
    lines = [
        f"{key} has shape {list(found.shape(key))}, expected {list(shape)}"
        for key, shape in wanted.items()
        if found.shape(key) != tuple(shape)
    ]
    lines += [
        f"{key} has dtype {found.dtype(key)}, expected {', '.join(FLOATS.values())}"
        for key in wanted
        if found.dtype(key) not in FLOATS.values()
    ]
    if lines:
        raise HydrajaxError(f"{what}: {_some(lines)}")


def _some(items, most: int = 5) -> str:
    items = list(items)
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
