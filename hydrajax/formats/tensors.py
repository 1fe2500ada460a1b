"""Tensors by name in safetensors files, and in files of other kinds that `hydrajax.plugins` names.

Nothing is executed, and files must hold exactly what is expected. Tensors are read one at a time and the file is closed
after each, so that the host never holds a whole model (measured by ``experiments/load_memory.py``). Of a safetensors
file, a slice of a tensor can be read alone (`TensorFiles.view`).
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hydrajax import plugins
from hydrajax.errors import HydrajaxError, one_line
from hydrajax.files import check_file
from hydrajax.models.layout import ADAPTER, MODEL, Entry, Shape
from hydrajax.models.weights import Quantized

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' names, NumPy's
FP8 = "F8_E4M3"  # safetensors' name
LONGEST_HEADER = 16 << 20  # bytes of a safetensors header, enough for 100,000 tensors
GGUF_SUFFIX = ".gguf"
GGUF_INDEX = "model.gguf.json"  # in a directory of `hydrajax.lowbit.gguf`: the file and its tensors
METHOD = ("quantization_config", "compression_config")  # fields of config.json of a base in few bits, the first newer
TORCH_FILES = {MODEL: "pytorch_model.bin", ADAPTER: "adapter_model.bin"}  # names of transformers and PEFT


def read_json(path: Path, what: str) -> dict:
    """Return the JSON object in a file, or raise `HydrajaxError` beginning with ``what``."""
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


class TensorFiles:
    """The tensors of one or several files by name. Subclasses open and describe one file."""

    # The type that keeps the weights of layers as they are stored; None: they are floats, or are widened.
    kept_as: str | None = None
    of_experts = False  # these layers are experts, one tensor of all experts each

    def __init__(self, files: list[Path], what: str):
        self._what = what
        self._open_file: tuple[Path, Any] | None = None
        self._found: dict[str, tuple[Path, Shape, str]] = {}
        for path in files:
            for key, (shape, dtype) in self._describe(self._opened(path)).items():
                if key in self._found:
                    raise HydrajaxError(f"{what}: tensor '{key}' is in both {self._found[key][0].name} and {path.name}")
                self._found[key] = path, shape, dtype

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, key: object) -> bool:
        return key in self._found

    def shape(self, key: str) -> Shape:
        return self._found[key][1]

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shapes by name."""
        return _Shapes(self)

    def zero_biases(self, wanted: Collection[str]) -> list[str]:
        """Return the names of biases of zeros that no layer needs, which some quantisers add to every layer."""
        return []

    def kernel(self, kind: type[Quantized], entry: Entry, unlike: list[Entry]) -> Quantized | None:
        """Return the kernel of an entry in the file's own numbers; None if this class cannot hold them.

        An entry whose layers differ in the order of their inputs is added to ``unlike``.
        """
        return None

    def dtype(self, key: str) -> str:
        """Return NumPy's name of the dtype, or the file's own name if NumPy has no such dtype."""
        return self._found[key][2]

    def read(self, key: str, rows: int | None = None) -> np.ndarray:
        """Return one tensor, or its first rows alone; bfloat16 as ml_dtypes' type."""
        return self._read(self._opened(self._found[key][0]), key, rows)

    def view(self, key: str) -> np.ndarray:
        """Return one tensor, to be cut and then copied.

        Safetensors files are mapped, so that only the pages of the copied slice are read, and what the kernel reads
        ahead. Tensors of other files are read whole: those of PyTorch files are copied, others dequantised.
        """
        return self.read(key)

    def _opened(self, path: Path):
        if self._open_file is None or self._open_file[0] != path:
            self._open_file = None  # closes the previous one
            self._open_file = path, self._open(path)
        return self._open_file[1]

    _open: Callable[[Path], Any]
    _describe: Callable[[Any], dict[str, tuple[Shape, str]]]
    _read: Callable[[Any, str, int | None], np.ndarray]


class SafetensorFiles(TensorFiles):
    """Files in the format of the safetensors library."""

    def __init__(self, files: list[Path], what: str):
        self._starts: dict[Path, dict[str, int]] = {}  # of the tensors in a file
        super().__init__(files, what)

    def _opened(self, path):
        """Open the file for each tensor: pages that were read of a mapped file stay in memory while it is open."""
        return self._open(path)

    def _open(self, path):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
            if length > LONGEST_HEADER:
                raise SafetensorError(f"header: got {length} bytes, expected at most {LONGEST_HEADER}")
            return safe_open(path, framework="np")
        except FileNotFoundError:
            raise HydrajaxError(f"{self._what}: no such file: {path}") from None
        except MemoryError:  # the file is mapped, and the address space may be limited
            raise HydrajaxError(f"{self._what}: cannot map {path}: not enough memory") from None
        except (SafetensorError, OSError) as error:
            raise HydrajaxError(f"{self._what}: {path} is damaged or not a safetensors file: {error}") from None

    def _describe(self, file):
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (safe_open is not a dict)
        return {
            key: (tuple(part.get_shape()), FLOATS.get(part.get_dtype(), part.get_dtype()))
            for key, part in slices.items()
        }

    def _read(self, file, key, rows):
        if self.dtype(key) == FP8:  # safetensors looks for this dtype in NumPy, which has none
            return self._mapped(key, jnp.float8_e4m3fn)[:rows].copy()
        try:
            return file.get_tensor(key) if rows is None else file.get_slice(key)[: min(rows, self.shape(key)[0])]
        except SafetensorError as error:
            raise HydrajaxError(f"{self._what}: cannot read tensor '{key}': {error}") from None

    def view(self, key):
        return self._mapped(key, jnp.dtype(self.dtype(key)))

    def _mapped(self, key: str, dtype: Any) -> np.ndarray:
        """Map a tensor. Pages that were read of it stay in memory while the array is alive."""
        path, shape, _ = self._found[key]
        try:
            if path not in self._starts:
                self._starts[path] = _starts(path)
            start = self._starts[path][key]
            return np.asarray(np.memmap(path, dtype, "r", start, shape))
        except (OSError, ValueError, KeyError) as error:  # the file has been checked, but may have changed since
            raise HydrajaxError(f"{self._what}: cannot read tensor '{key}': {one_line(error)}") from None


def _starts(path: Path) -> dict[str, int]:
    """Return where the tensors of a safetensors file begin. The library has checked the header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: 8 + length + x["data_offsets"][0] for name, x in header.items() if name != "__metadata__"}


def _candidates(directory: Path, stem: str) -> list[Path]:
    """Return the files and, for a model, the indices of shards; in transformers' order."""
    names = f"{stem}.safetensors", TORCH_FILES.get(stem, f"{stem}.pt")
    kinds = ("", ".index.json") if stem == MODEL else ("",)
    return [directory / f"{name}{kind}" for name in names for kind in kinds]


def holds(directory: Path, stem: str) -> bool:
    """Return True if the directory has files that `open_tensors` would open."""
    return any(path.exists() for path in _candidates(directory, stem)) or _is_gguf(directory, stem)


def _is_gguf(directory: Path, stem: str) -> bool:
    return stem == MODEL and (directory / GGUF_INDEX).is_file()


def open_tensors(directory: Path, stem: str, what: str) -> TensorFiles:
    """Open ``stem.safetensors``, or else ``stem.pt``.

    The stem `MODEL` means the weights of a Hugging Face directory: ``model.safetensors`` or ``pytorch_model.bin``, each
    one file or shards with an index, or a GGUF file. Shards must be in the directory itself.

    Raises:
        HydrajaxError: begins with ``what``; the files are missing or damaged.
    """
    candidates = _candidates(directory, stem)
    for path in candidates:
        is_index = path.suffix == ".json"
        if path.exists() if is_index else path.is_file():
            kind = SafetensorFiles if ".safetensors" in path.suffixes else plugins.find("base_files", "torch")
            return kind(_shards(directory, path, what) if is_index else [path], what)
    if _is_gguf(directory, stem):
        return plugins.find("base_files", "gguf_tensors")(directory, what)
    names = " nor ".join(path.name for path in candidates if path.suffix != ".json")
    raise HydrajaxError(f"{what}: {directory} has neither {names}" + ", nor their .index.json" * (stem == MODEL))


def check_method(config: dict, where: str) -> None:
    """Refuse a base whose ``config.json`` has it quantised in a way that is not implemented."""
    if any(config.get(field) for field in METHOD):
        plugins.find("base_files", "low_bits").read_method(config, where)


def open_base_tensors(directory: Path, what: str, config: dict | None = None) -> TensorFiles:
    """Open the weights of a base, see `open_tensors`; quantised layers appear as float ones.

    Args:
        config: the content of ``config.json``; by default it is read.
    """
    config = read_json(directory / "config.json", what) if config is None else config
    if any(config.get(field) for field in METHOD):
        return plugins.find("base_files", "low_bits").open_low_bits(directory, config, what)
    return open_tensors(directory, MODEL, what)


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
    """Write a file that transformers opens too. Raises `OSError` if it cannot be written."""
    try:
        save_file({name: np.array(x, order="C") for name, x in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # such as a full disk
        raise OSError(one_line(error)) from None


class WrappedFiles(TensorFiles):
    """The tensors of other files, of which some appear in another form and perhaps under another name."""

    def __init__(self, files: TensorFiles, names: Iterable[str]):
        self._files, self._names = files, dict.fromkeys(names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names


class _Shapes(Mapping):
    """The shape of each tensor of files. Those that nobody asks for are not checked."""

    def __init__(self, files: TensorFiles):
        self._files = files

    def __getitem__(self, name: str) -> Shape:
        return self._files.shape(name)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def expect_tensors(found: TensorFiles, wanted: dict[str, Shape], what: str, ignored: str = "(?!)") -> None:
    """Refuse missing, unexpected, misshapen and non-float tensors, naming the first few.

    Args:
        ignored: Regular expression of further names that may be there.
    """
    missing = sorted(set(wanted) - set(found))
    extra = sorted(key for key in set(found) - set(wanted) if not re.fullmatch(ignored, key, re.DOTALL))
    for problem, keys in (("missing", missing), ("unexpected", extra)):
        if keys:
            raise HydrajaxError(f"{what}: {problem} tensor{'s' * (len(keys) > 1)} {_some(map(repr, keys))}")
    shapes = [
        f"{key}: got shape {list(found.shape(key))}, expected {list(shape)}"
        for key, shape in wanted.items()
        if found.shape(key) != tuple(shape)
    ]
    floats = FLOATS.values()
    dtypes = [
        f"{key}: got dtype {found.dtype(key)}, expected {', '.join(floats)}"
        for key in wanted
        if found.dtype(key) not in floats
    ]
    if shapes or dtypes:
        raise HydrajaxError(f"{what}: {_some(shapes + dtypes)}")


def _some(items, most: int = 5) -> str:
    items = list(items)
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
