"""hydrajax: tree speculative decoding in JAX.

import hydrajax
m = hydrajax.load("path/to/llama", "path/to/heads")
decode_fn = hydrajax.make_decode_fn(m.model, m.drafter, hydrajax.trees.presets.sparse(), hydrajax.Greedy())
out = decode_fn(m.params, prompt)  # out.tokens, out.lengths, out.accept_lengths, out.steps
"""

from hydrajax import trees
from hydrajax.api import Loaded, load
from hydrajax.decoding.acceptance import ExactSampling, Greedy, Typical
from hydrajax.decoding.decode import DecodeResult, make_autoregressive_fn, make_decode_fn
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.state import Params
from hydrajax.errors import HydrajaxError
from hydrajax.generation import Stream, generate, stream
from hydrajax.text.answers import Generation
from hydrajax.trees import TreeTopology

__all__ = [
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
    "generate",
    "load",
    "make_autoregressive_fn",
    "make_decode_fn",
    "stream",
    "trees",
]
