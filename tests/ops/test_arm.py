"""The CPU kernels compiled for ARM give the bits that they give here. No ARM chip is needed: qemu runs them."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from hydrajax.ops.cpu import library

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"  # Debian: g++-aarch64-linux-gnu, qemu-user
PROGRAM = Path(__file__).parents[1] / "programs/product_bits.cc"
X86 = "-mavx2", "-mfma", "-mf16c"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason="compiles for ARM and runs it"),
]


def output(source: str, folder: Path, compiler: str, *flags: str, run: tuple[str, ...] = ()) -> str:
    """Return what the program prints of a source of the kernels."""
    (jaxlib,) = importlib.util.find_spec("jaxlib").submodule_search_locations
    path, done = Path(library.__file__).parent, folder / f"{compiler}{''.join(flags)}"
    defines = f'-DSOURCE="{path / source}.cc"', *(["-DFEW_BITS"] if source == "few_bits" else [])
    options = "-std=c++17", "-O3", "-fno-math-errno", "-w", f"-I{jaxlib}/include", f"-I{path}", "-static", "-pthread"
    subprocess.run([compiler, *options, *flags, *defines, PROGRAM, "-o", done], check=True, capture_output=True)
    return subprocess.run([*run, done], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("source", ["few_bits", "few_rows"])
def test_products_have_the_same_bits(source, tmp_path):
    plain, dot_products = (
        output(source, tmp_path, COMPILER, f"-march={arch}", run=(EMULATOR, "-cpu", "max"))
        for arch in ("armv8-a", "armv8.2-a+dotprod")
    )
    assert plain == dot_products
    assert len(set(plain.splitlines())) == len(plain.splitlines()) >= 32
    if platform.machine() == "x86_64":
        assert plain == output(source, tmp_path, "g++", *X86)
