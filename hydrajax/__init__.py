"""hydrajax: tree speculative decoding in JAX.

import hydrajax
m = hydrajax.load("path/to/llama", "path/to/heads")  # or ("shipped", "hydra++"), the bundled model
m.generate("def area(").text
decode_fn = hydrajax.make_decode_fn(m)
out = decode_fn(m.params, *m.encode(["def area("]))  # out.tokens, out.lengths, out.steps
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hydrajax.machine import check_imported, own_version

if TYPE_CHECKING:
    from hydrajax import assets, trees
    from hydrajax.api import load, make_autoregressive_fn, make_decode_fn
    from hydrajax.conversation import Chat
    from hydrajax.decoding.acceptance import Greedy
    from hydrajax.decoding.decode import DecodeResult
    from hydrajax.decoding.inside import export_checks
    from hydrajax.decoding.processors import AllowedTokens, LogitBias, Penalties
    from hydrajax.decoding.program import Program
    from hydrajax.decoding.rejection import RejectionSampling
    from hydrajax.decoding.request import Request
    from hydrajax.decoding.sampling import ExactSampling
    from hydrajax.decoding.state import Params
    from hydrajax.decoding.traversal import BlockVerification, TraversalVerification
    from hydrajax.decoding.typical import Typical
    from hydrajax.errors import HydrajaxError
    from hydrajax.generation import Stream, generate, stream
    from hydrajax.grammar.grammar import Grammar
    from hydrajax.integrations.params import from_params, to_params
    from hydrajax.language_model import LanguageModel
    from hydrajax.loaded_model import make_executor
    from hydrajax.sharding import Placement
    from hydrajax.text.answers import Generation
    from hydrajax.trees import TreeTopology

check_imported("numpy", "jax", "flax")
__version__ = own_version()

__all__ = [
    "AllowedTokens", "BlockVerification", "Chat", "DecodeResult", "ExactSampling", "Generation", "Grammar", "Greedy",
    "HydrajaxError", "LanguageModel", "LogitBias", "Params", "Penalties", "Placement", "Program", "RejectionSampling",
    "Request", "Stream", "TraversalVerification", "TreeTopology", "Typical", "assets", "export_checks", "from_params",
    "generate", "load", "make_autoregressive_fn", "make_decode_fn", "make_executor", "stream", "to_params", "trees",
]  # fmt: skip

# Each name is imported at its first use: with JAX they take most of a second.
HOMES = {
    "hydrajax.api": ("load", "make_autoregressive_fn", "make_decode_fn"),
    "hydrajax.conversation": ("Chat",),
    "hydrajax.decoding.acceptance": ("Greedy",),
    "hydrajax.decoding.decode": ("DecodeResult",),
    "hydrajax.decoding.inside": ("export_checks",),
    "hydrajax.decoding.processors": ("AllowedTokens", "LogitBias", "Penalties"),
    "hydrajax.decoding.rejection": ("RejectionSampling",),
    "hydrajax.decoding.program": ("Program",),
    "hydrajax.decoding.request": ("Request",),
    "hydrajax.decoding.sampling": ("ExactSampling",),
    "hydrajax.decoding.state": ("Params",),
    "hydrajax.decoding.traversal": ("BlockVerification", "TraversalVerification"),
    "hydrajax.decoding.typical": ("Typical",),
    "hydrajax.errors": ("HydrajaxError",),
    "hydrajax.generation": ("Stream", "generate", "stream"),
    "hydrajax.grammar.grammar": ("Grammar",),
    "hydrajax.integrations.params": ("from_params", "to_params"),
    "hydrajax.language_model": ("LanguageModel",),
    "hydrajax.loaded_model": ("make_executor",),
    "hydrajax.sharding": ("Placement",),
    "hydrajax.text.answers": ("Generation",),
    "hydrajax.trees": ("TreeTopology",),
}


def __getattr__(name: str) -> Any:
    if name in ("assets", "serve", "trees"):
        return importlib.import_module(f"hydrajax.{name}")
    home = next((home for home, names in HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'hydrajax' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(home), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
