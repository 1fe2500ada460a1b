"""hydrajax: tree speculative decoding in JAX.

import hydrajax
m = hydrajax.load("path/to/llama", "path/to/heads")  # or ("shipped", "hydra++"), the small model of the package
m.generate("def area(").text
decode_fn = hydrajax.make_decode_fn(m)
out = decode_fn(m.params, *m.encode(["def area("]))  # out.tokens, out.lengths, out.accept_lengths, out.steps
"""

from hydrajax import assets, trees
from hydrajax.api import Loaded, load, make_decode_fn
from hydrajax.chat import Chat
from hydrajax.decoding.acceptance import ExactSampling, Greedy, Typical
from hydrajax.decoding.decode import DecodeResult, make_autoregressive_fn
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.state import Params
from hydrajax.errors import HydrajaxError
from hydrajax.generation import Stream, generate, stream
from hydrajax.text.answers import Generation
from hydrajax.trees import TreeTopology

__all__ = [
    "Chat",
    "DecodeResult",
    "ExactSampling",
    "Generation",
    "Greedy",
    "HydrajaxError",
    "Loaded",
    "Params",
    "RejectionSampling",
    "Stream",
    "TreeTopology",
    "Typical",
    "assets",
    "generate",
    "load",
    "make_autoregressive_fn",
    "make_decode_fn",
    "stream",
    "trees",
]
