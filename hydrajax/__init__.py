"""hydrajax: tree speculative decoding in JAX.

import hydrajax
m = hydrajax.load("path/to/llama", "path/to/heads")  # or ("shipped", "hydra++"), the bundled model
m.generate("def area(").text
decode_fn = hydrajax.make_decode_fn(m)
out = decode_fn(m.params, *m.encode(["def area("]))  # out.tokens, out.lengths, out.steps
"""

from hydrajax import assets, trees
from hydrajax.api import load, make_autoregressive_fn, make_decode_fn
from hydrajax.conversation import Chat
from hydrajax.decoding.acceptance import ExactSampling, Greedy, Typical
from hydrajax.decoding.decode import DecodeResult
from hydrajax.decoding.processors import AllowedTokens, LogitBias, Penalties
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.spec import DecodeSpec
from hydrajax.decoding.state import Params
from hydrajax.errors import HydrajaxError
from hydrajax.generation import Stream, generate, stream
from hydrajax.language_model import LanguageModel, make_executor
from hydrajax.machine import own_version
from hydrajax.sharding import Placement
from hydrajax.text.answers import Generation
from hydrajax.trees import TreeTopology

__version__ = own_version()

__all__ = [
    "AllowedTokens",
    "Chat",
    "DecodeResult",
    "DecodeSpec",
    "ExactSampling",
    "Generation",
    "Greedy",
    "HydrajaxError",
    "LanguageModel",
    "LogitBias",
    "Params",
    "Penalties",
    "Placement",
    "RejectionSampling",
    "Stream",
    "TreeTopology",
    "Typical",
    "assets",
    "generate",
    "load",
    "make_autoregressive_fn",
    "make_decode_fn",
    "make_executor",
    "stream",
    "trees",
]
