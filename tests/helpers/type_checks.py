"""The runtime type checker of tests/conftest.py: beartype, with integers accepted as floats (PEP 484)."""

from types import FunctionType

import jaxtyping
from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped


def _jaxtyped_if_annotated(*functions, typechecker=None):
    """`jaxtyping.jaxtyped` for functions with annotations; the others, which have nothing to check, stay as they are.

    Most of the functions in functions are of the second kind, and would be decorated anew at each call of the outer.
    """
    if functions:
        return _jaxtyped(*functions, typechecker=typechecker)

    def decorate(function):
        bare = isinstance(function, FunctionType) and not function.__annotations__
        return function if bare else _jaxtyped(function, typechecker=typechecker)

    return decorate


jaxtyping.jaxtyped = _jaxtyped_if_annotated
