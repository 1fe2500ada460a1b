"""JAX's compilation cache on disk, which the commands and `hydrajax.load` enable."""

import os
from collections.abc import Collection

import jax
from jax.experimental.compilation_cache import compilation_cache

from hydrajax.files import user_cache

SHORTEST = 0.1  # seconds; one start compiles dozens of programs below JAX's limit


def use_compilation_cache() -> None:
    """Cache compiled programs in ``~/.cache/hydrajax/xla``, or below ``$XDG_CACHE_HOME``.

    A folder from ``JAX_COMPILATION_CACHE_DIR`` or `jax.config` takes precedence; ``JAX_ENABLE_COMPILATION_CACHE=false``
    disables the cache. Programs that compile in a tenth of a second are not kept; JAX's own limit is a second.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        folder = user_cache("xla")
    except RuntimeError:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST)


def keep_collectives_out(devices: Collection[jax.Device]) -> None:
    """Disable the cache in this process if programs are sharded over these devices and the devices are CPUs.

    Programs that XLA's CPU client reads from the cache have lost the order of their all-reduces (jaxlib 0.11). With few
    cores, the devices then start different ones and wait for each other, until XLA ends the process.
    """
    split = len(devices) > 1 and any(device.platform == "cpu" for device in devices)
    if split and jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX checks for a cache only once
