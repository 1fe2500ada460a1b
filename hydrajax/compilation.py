"""JAX's compilation cache on disk, which the programs and `hydrajax.load` turn on."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def use_compilation_cache() -> None:
    """Keep compiled programs for other processes, in ``~/.cache/hydrajax/xla`` or below ``$XDG_CACHE_HOME``.

    A folder that JAX was told before (``JAX_COMPILATION_CACHE_DIR`` or `jax.config`) stays, and
    ``JAX_ENABLE_COMPILATION_CACHE=false`` turns the cache off. JAX keeps what took longer than a second to compile.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as in some containers, does without
        return
    jax.config.update("jax_compilation_cache_dir", str(home / "hydrajax" / "xla"))
