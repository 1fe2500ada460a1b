"""Calls of Python functions inside a program on a CPU (`call_host.cc`).

`jax.pure_callback` does the same, but JAX does not keep programs with callbacks in its cache on disk, because they
contain the function's address. Here the address is an argument of the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt32

from hydrajax.models.arrays import Array

NAME = "hydrajax_call_host"
_functions: dict[int, Callable[..., None]] = {}
_numbers = itertools.count()


def call_host(entry: UInt32[Array, "3"], results: Sequence[jax.ShapeDtypeStruct], *inputs: Array) -> Sequence[Array]:
    """Call a function of the host inside a program.

    Args:
        entry: From `calling`.
        results: Shapes and dtypes of the arrays that the function fills.
        inputs: Arrays that the function reads.
    """
    return jax.ffi.ffi_call(NAME, tuple(results), has_side_effect=True)(entry, *inputs)


@contextlib.contextmanager
def calling(*functions: Callable[..., None]) -> Iterator[UInt32[np.ndarray, "F 3"]]:
    """Make functions callable by programs that finish within this context.

    A function is called on a thread of XLA with the bytes of each input and then of each result, uint8 ``[n]``. The
    memory is lent for the duration of the call. An error that it raises ends the program and is raised here.

    Yields:
        The `call_host` entry of each function.
    """
    errors: list[BaseException] = []

    def guarded(function: Callable[..., None], *arrays: Any) -> None:
        try:
            function(*arrays)
        except BaseException as error:
            errors.append(error)
            raise

    numbers = list(itertools.islice(_numbers, len(functions)))
    _functions.update({number: functools.partial(guarded, one) for number, one in zip(numbers, functions, strict=True)})
    try:
        yield np.array([[ADDRESS & 0xFFFFFFFF, ADDRESS >> 32, number] for number in numbers], np.uint32)
    except Exception as error:
        raise (errors or [error])[0] from None
    finally:
        for number in numbers:
            del _functions[number]


@ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int64)
)
def _called(number, count, buffers, sizes):
    """Call a function by its number; return whether it has failed. It is gone if its caller was interrupted."""
    try:
        _functions[number](
            *(np.frombuffer((ctypes.c_char * sizes[i]).from_address(buffers[i]), np.uint8) for i in range(count))
        )
    except BaseException:
        return 1
    return 0


ADDRESS = ctypes.cast(_called, ctypes.c_void_p).value or 0
