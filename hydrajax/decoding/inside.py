"""Decode functions inside other programs (docs/inside_other_programs.md): gradients, meshes and exports."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax import export
from jax.sharding import AxisType, NamedSharding

from hydrajax.errors import HydrajaxError
from hydrajax.ops.cpu import library

T = TypeVar("T")


def frozen(arrays: T, with_logprobs: bool) -> T:
    """Return arrays whose gradients stop here; ``with_logprobs``, raise `HydrajaxError` where they are differentiated.

    Tokens are integers, and our kernels have no derivatives. Log-probabilities would silently have a gradient of 0.
    """
    return jax.lax.stop_gradient(_never_differentiated(arrays) if with_logprobs else arrays)


@jax.custom_jvp
def _never_differentiated(arrays: T) -> T:
    return arrays


@_never_differentiated.defjvp
def _refuse_gradient(arrays: tuple, tangents: tuple) -> Any:
    raise HydrajaxError(
        "logprobs: have no gradient; pass jax.lax.stop_gradient(params), and score the tokens with a pass of the base"
    )


def check_types(arguments: Any) -> None:
    """Raise `HydrajaxError` for arrays whose types name axes of a mesh, which the decode loop does not carry."""
    for leaf in jax.tree.leaves(arguments):
        if not (isinstance(leaf, jax.core.Tracer) or isinstance(getattr(leaf, "sharding", None), NamedSharding)):
            continue
        kind = jax.typeof(leaf)
        if getattr(getattr(kind, "manual_axis_type", kind), "varying", None):
            raise HydrajaxError("shard_map: got check_vma=True, expected jax.shard_map(..., check_vma=False)")
        if AxisType.Explicit in kind.sharding.mesh.axis_types and any(kind.sharding.spec):
            todo = "call jax.sharding.auto_axes(decode_fn, out_sharding=...)"
            raise HydrajaxError(f"mesh: got {kind} over Explicit axes, expected Auto axes: {todo}")


def export_checks() -> list[export.DisabledSafetyCheck]:
    """Return the ``disabled_checks`` of `jax.export.export` for a program with a decode function, and register our
    kernels, which the process that calls the exported program needs too (docs/inside_other_programs.md).
    """
    library.available()
    return [export.DisabledSafetyCheck.custom_call(name) for name in library.TARGETS]
