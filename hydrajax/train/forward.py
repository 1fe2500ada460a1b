"""Parameters on their way into a forward pass."""

from __future__ import annotations

from typing import Any

import jax


def cast(params: Any, dtype) -> Any:
    """Float32 master parameters in the dtype of the computation."""
    return jax.tree.map(lambda x: x.astype(dtype), params)
