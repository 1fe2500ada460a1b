"""The CPU kernels compiled for ARM give the bits that they give here. No ARM chip is needed: qemu runs them."""

import importlib.util
import platform
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from hydrajax.ops.cpu import library

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"  # Debian: g++-aarch64-linux-gnu, qemu-user
PROGRAM = Path(__file__).parents[1] / "programs/product_bits.cc"
X86 = "-mavx2", "-mfma", "-mf16c"
# The flags of setup.py's libraries, and a CPU that has their instructions and not those of the next.
ARCHES = {"armv8-a": "cortex-a57", "armv8.2-a+dotprod": "neoverse-n1", "armv8.2-a+dotprod+i8mm": "max"}
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
    plain, *others = (
        output(source, tmp_path, COMPILER, f"-march={arch}", run=(EMULATOR, "-cpu", cpu))
        for arch, cpu in ARCHES.items()
    )
    assert all(other == plain for other in others)
    assert "depend" not in plain
    assert "wrongly" not in plain
    assert len(set(plain.splitlines())) == len(plain.splitlines()) >= 32
    if platform.machine() == "x86_64":
        assert plain == output(source, tmp_path, "g++", *X86)


def test_several_rows_are_multiplied_in_pairs_where_the_cpu_can(tmp_path):
    """The library for such CPUs stops on another one at its first product of two rows, unless told to do without."""
    build = "few_bits", tmp_path, COMPILER, "-march=armv8.2-a+dotprod+i8mm"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        output(*build, run=(EMULATOR, "-cpu", "neoverse-n1"))
    assert failed.value.returncode == -signal.SIGILL
    told = "env", "HYDRAJAX_PLAIN_CPU_KERNELS=neondot", EMULATOR, "-cpu", "neoverse-n1"
    assert output(*build, run=told) == output(*build, run=(EMULATOR, "-cpu", "max"))


def test_a_library_runs_where_the_cpu_has_its_instructions(tmp_path):
    source = (
        f'#include "{Path(library.__file__).with_name("runs_here.cc")}"\nint main() {{ return hydrajax_runs_here(); }}'
    )
    for place, arch in enumerate(ARCHES):
        build = COMPILER, f"-march={arch}", "-static", "-x", "c++", "-", "-o", tmp_path / "program"
        subprocess.run(build, input=source, text=True, check=True)
        runs = [
            subprocess.run([EMULATOR, "-cpu", cpu, tmp_path / "program"], check=False).returncode
            for cpu in ARCHES.values()
        ]
        assert runs == [0] * place + [1] * (len(ARCHES) - place)
