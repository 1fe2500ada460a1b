"""Tensors by name in files of PyTorch, from which nothing but tensors is read."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.formats.tensors import TensorFiles
from hydrajax.optional_deps import needs


class TorchFiles(TensorFiles):
    """State dicts saved by ``torch.save``, from which only tensors are unpickled."""

    def _open(self, path):
        torch = torch_module()
        if torch is None:
            raise HydrajaxError(f"{self._what}: cannot read {path.name}: {needs('torch')}")
        if not path.is_file():
            raise HydrajaxError(f"{self._what}: no such file: {path}")
        try:
            with path.open("rb") as file:  # files of torch before 1.6 cannot be mapped and are read whole
                is_zip = file.read(4) == b"PK\x03\x04"
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
            tensors, problem = self._plain(state, torch)
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors.values()}
            if sum(storages.values()) > path.stat().st_size:
                problem = "must hold no more bytes of tensors than the file has"
        except Exception as error:  # torch raises many types for a damaged or unsafe file
            # Around the reason torch explains how to run the code that a file names.
            found = str(error).rpartition("WeightsUnpickler error:")[2].strip()
            reason = one_line(re.split(r"\. |\n", found)[0] or type(error).__name__)
            raise HydrajaxError(f"{self._what}: {path} is damaged or holds more than tensors: {reason}") from None
        if problem:
            raise HydrajaxError(f"{self._what}: {path} {problem}")
        return tensors

    @staticmethod
    def _plain(state: Any, torch) -> tuple[dict, str]:
        """Return the tensors by name, and the problem if one is not dense or not stored in the file."""
        if not isinstance(state, dict):
            return {}, "must hold a state dict of tensors"
        tensors = {}
        for name, tensor in dict.items(state):  # a subclass may override items
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                return {}, "must hold a state dict of tensors"
            tensor = tensors[name] = torch.Tensor.detach(tensor)  # without attributes that a file attached to it
            if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided or tensor.device.type != "cpu":
                return {}, f"must hold dense tensors: got '{name}'"
            if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
                return {}, f"must hold all numbers of a tensor: got '{name}'"
        return tensors, ""

    def _describe(self, file):
        return {name: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in file.items()}

    def _read(self, file, key, rows):
        tensor = file[key][:rows] if rows else file[key]
        tensor = tensor.clone(memory_format=torch_module().contiguous_format)  # a copy, as the mapped file is closed
        if str(tensor.dtype) == "torch.bfloat16":  # which torch cannot convert to NumPy
            return tensor.view(torch_module().int16).numpy().view(jnp.bfloat16)
        if str(tensor.dtype) == "torch.float8_e4m3fn":
            return tensor.view(torch_module().uint8).numpy().view(jnp.float8_e4m3fn)
        return tensor.numpy()


def torch_module():
    """Return torch, imported only to read or write its files; None if it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def save_torch(path: Path, tensors: dict[str, np.ndarray]) -> bool:
    """Write a state dict as ``torch.save`` does. Returns False, and writes nothing, if torch is not installed."""
    torch = torch_module()
    if torch is None:
        return False

    def tensor(x):
        if x.dtype == jnp.bfloat16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)

    torch.save({name: tensor(np.array(x, order="C")) for name, x in tensors.items()}, path)
    return True
