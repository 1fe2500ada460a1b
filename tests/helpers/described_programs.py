"""Decode steps lowered for an absent device, and decoding with its kernels interpreted on this CPU."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh

from helpers.how import sampling
from hydrajax import ops
from hydrajax.api import make_autoregressive_fn, make_decode_fn
from hydrajax.bench.random_models import random_base, random_draft
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.decode import DecodeResult
from hydrajax.decoding.engine import Engine
from hydrajax.decoding.program import Program
from hydrajax.decoding.state import Params
from hydrajax.formats.draft_registry import KINDS
from hydrajax.models.base_model import BoundBase
from hydrajax.models.init import abstract_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.ops import trace
from hydrajax.sharding import AXES
from hydrajax.trees import presets

CONFIG = LlamaConfig(128, 128, 192, 2, 4, 2, 64, max_positions=256)
PROMPTS = np.random.default_rng(0).integers(0, 128, (2, 32)).astype(np.int32), np.array([32, 9], np.int32)
DEVICES = {"cuda": ("NVIDIA H200", 132, "gpu"), "tpu": ("TPU v5 lite", 1, "tpu")}  # by JAX's name for lowering


def lowered_step(platform: trace.Platform, target: str, dtype: str, kind: str, tree: str) -> str:
    """Lower one decode step to text, without compilation or allocation; several devices share it."""
    with _step_for(platform, target, dtype, kind, tree) as traced:
        return traced.lower(lowering_platforms=(target,)).as_text()


def traced_step(platform: trace.Platform, target: str, dtype: str, kind: str, tree: str) -> str:
    """Return the jaxpr of one decode step, without the addresses of functions."""
    with _step_for(platform, target, dtype, kind, tree) as traced:
        return re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr))


@contextmanager
def _step_for(platform: trace.Platform, target: str, dtype: str, kind: str, tree: str) -> Iterator[jax.stages.Traced]:
    model = Llama(CONFIG, jnp.dtype(dtype))
    base, drafter = nn.unbox(abstract_base(model)), KINDS[kind].build(CONFIG, model.dtype)
    draft = jax.eval_shape(lambda base: drafter.init(jax.random.key(0), BoundBase(model, base)), base)
    engine, params = Engine(model, Program(drafter, presets.by_name(tree), max_new_tokens=16)), Params(base, draft)
    # jax 0.11 needs the device of a Pallas kernel.
    device = AbstractDevice(*DEVICES[target])
    if platform.devices == 1:
        mesh = AbstractMesh((), (), abstract_device=device)
    else:
        mesh = AbstractMesh((1, platform.devices), **AXES, abstract_device=device)
    with trace.tracing(platform=platform), jax.sharding.use_abstract_mesh(mesh):
        prompt, lengths = jax.ShapeDtypeStruct((1, 16), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        state = jax.eval_shape(engine.prefill, params, prompt, lengths, sampling(Greedy(), 1, CONFIG.vocab_size))
        yield jax.jit(engine.decode_step).trace(params, state)


@contextmanager
def interpreted(platform: trace.Platform, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace for the platform, with its Pallas kernels interpreted on this CPU."""
    real = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *args, **settings: real(*args, **settings | {"interpret": True}))
    monkeypatch.setattr(ops, "compiler_options", lambda: None)  # this CPU's compiler refuses those of a device
    with trace.tracing(platform=platform):
        yield


def decoded_with(kind: str, tree: str, dtype, window: int | None = None) -> DecodeResult:
    """Decode two sequences of different lengths with a draft, greedy.

    A random model repeats itself, so lookup proposes long accepted paths.
    """
    model, base = random_base(CONFIG.replace(sliding_window=window), jnp.dtype(dtype))
    drafter, params = random_draft(model, base, kind)
    return make_decode_fn(model, drafter, presets.by_name(tree), max_new_tokens=40)(params, *PROMPTS)


def decoded_without(dtype, window: int | None = None) -> DecodeResult:
    """Decode the same sequences without a draft."""
    model, base = random_base(CONFIG.replace(sliding_window=window), jnp.dtype(dtype))
    return make_autoregressive_fn(model, max_new_tokens=40)(Params(base, {}), *PROMPTS)
