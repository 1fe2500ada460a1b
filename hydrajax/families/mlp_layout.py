"""Key maps of MLPs, with a gate and without."""

from __future__ import annotations

import numpy as np

from hydrajax.families.tensor_names import FUSED_MLP
from hydrajax.models.layout import Entry, Layout, Parameter, Path, transposed
from hydrajax.models.llama_config import LlamaConfig


def dense_mlp(path: Path, prefix: str, c: LlamaConfig) -> Layout:
    """Return the key map of one layer's MLP."""
    mlp = f"{prefix}mlp."
    down = transposed((*path, "down"), f"{mlp}down_proj.weight", c.width, c.mlp_width)
    return [gate_up((*path, "gate_up"), mlp, c, c.mlp_width), down]


def gate_up(path: Path, prefix: str, c: LlamaConfig, features: int) -> Entry:
    """Fuse the gate and up projections: ours are ``[inputs, (gate, up), feature]``, theirs ``[feature, inputs]``. An
    MLP without a gate has the second alone.
    """
    if c.fused_projections or c.names in FUSED_MLP:
        shape = (2, features, c.width)
        return Entry(
            (path,),
            {f"{prefix}gate_up_proj.weight": (2 * features, c.width)},
            lambda both: (Parameter((both.reshape(shape),), order=(2, 0, 1)),),
            lambda both: (both.transpose(1, 2, 0).reshape(-1, c.width),),
        )
    names = [f"{prefix}{part}_proj.weight" for part in (("up",) if c.activation == "relu2" else ("gate", "up"))]
    return Entry((path,), dict.fromkeys(names, (features, c.width)), lambda *parts: (of_parts(*parts),), parts_of)


def of_parts(*parts: np.ndarray) -> Parameter:
    """Return ``[inputs, part, feature]`` of tensors ``[feature, inputs]``."""
    return Parameter(tuple(part[None] for part in parts), order=(2, 0, 1))


def parts_of(ours: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the tensors of `of_parts`."""
    return tuple(part.T for part in ours.swapaxes(0, 1))
