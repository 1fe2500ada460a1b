"""The runtime type checker of tests/conftest.py: beartype, with integers accepted as floats (PEP 484)."""

import functools
import inspect
from types import FunctionType
from typing import Any, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped


def _jaxtyped_once(*functions, typechecker=None):
    """`jaxtyping.jaxtyped` that checks the arguments of a function once; jaxtyping checks them again with the result.

    Functions without annotations stay as they are: most inner functions, which every call of the outer decorates anew.
    """
    if functions:
        return _jaxtyped(*functions, typechecker=typechecker)

    def decorate(function):
        if not isinstance(function, FunctionType) or inspect.isgeneratorfunction(function):
            return _jaxtyped(function, typechecker=typechecker)
        return _checked(function, typechecker) if function.__annotations__ else function

    return decorate


def _checked(function, typechecker):
    """Return function with its arguments and result checked; an axis has the same size in all of them."""
    written = function.__annotations__
    function.__annotations__ = {name: _hint(function, hint) for name, hint in written.items()}
    checked = typechecker(function)
    function.__annotations__ = written

    @functools.wraps(function)
    def with_axes(*args, **kwargs):
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        with _jaxtyped("context"):
            return checked(*args, **kwargs)

    return with_axes


def _hint(function, hint):
    """Evaluate an annotation; one with a name of an outer function is not checked, as in jaxtyping."""
    if not isinstance(hint, str):
        return hint

    def stub(): ...

    stub.__annotations__ = {"hint": hint}
    try:
        return get_type_hints(stub, function.__globals__, include_extras=True)["hint"]
    except Exception:
        return Any


jaxtyping.jaxtyped = _jaxtyped_once
