"""Describe the machine that measured times depend on."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Return the device, its cores, and the versions of JAX, Python and hydrajax.

    ``cpu_kernels``: whether the package's CPU kernels were built (`hydrajax.ops.cpu`).
    """
    import jax  # slow to import, which the version does not need

    from hydrajax.ops.cpu import library

    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "platform": device.platform,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "hydrajax": own_version(),
        "cpu_kernels": library.available(),
    }


def own_version() -> str:
    """Return the installed version of hydrajax."""
    try:
        return version("hydrajax")
    except PackageNotFoundError:  # imported from a source folder
        return "not installed"


def check_imported(*packages: str) -> None:
    """Raise ImportError if another version of an imported package was installed since, as by a cell of a notebook."""
    for name in packages:
        imported = getattr(sys.modules.get(name), "__version__", None)
        try:
            installed = version(name) if imported else None
        except PackageNotFoundError:  # the package is a source folder
            continue
        if installed != imported:
            message = f"{name}: {imported} is imported, but {installed} was installed since"
            raise ImportError(f"{message}; restart Python (Colab: Runtime > Restart session)")


def _processor() -> str:
    """The processor's name; on most systems Python only gives its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), None) or platform.processor() or platform.machine()
