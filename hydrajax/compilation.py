"""JAX's compilation cache on disk, which the programs and `hydrajax.load` turn on."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


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


def keep_collectives_out(devices: Collection[jax.Device]) -> None:
    """Turn the cache off, for this process, if programs are to be split over these devices and they are CPUs.

    What XLA's CPU client reads from the cache has lost the order of its all-reduces (jaxlib 0.11). On a machine with
    few cores each device then begins with another one and waits for the others, until XLA ends the process.
    """
    split = len(devices) > 1 and any(device.platform == "cpu" for device in devices)
    if split and jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX asks once whether there is one
