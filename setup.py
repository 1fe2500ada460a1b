"""The part of the build that pyproject.toml cannot say: the CPU kernels, where there is a compiler for them."""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup

# jaxlib brings the headers of XLA's foreign function interface. It is found and not imported, which would be slow.
jaxlib = importlib.util.find_spec("jaxlib")
kernels = (
    [
        Extension(
            "hydrajax.models.kernels._few_rows",
            sources=[
                f"hydrajax/models/kernels/{name}.cc"
                for name in ("few_rows", "few_bits", "attention", "add_norm", "append_rows", "call_host")
            ],
            depends=[
                "setup.py",  # another list of sources needs another build
                *(
                    f"hydrajax/models/kernels/{name}.h"
                    for name in ("amx", "cpu_kernels", "experts", "few_bits", "few_bits_256", "few_bits_512", "numbers")
                ),
            ],
            include_dirs=[str(Path(folder, "include")) for folder in jaxlib.submodule_search_locations],
            language="c++",
            extra_compile_args=["-std=c++17", "-O3", "-fno-gcse-after-reload", "-fno-math-errno", "-Wno-psabi"],
            optional=True,  # XLA does the same, slower, so a machine without a compiler can do without
        ),
    ]
    if jaxlib
    else []
)

setup(ext_modules=kernels)
