"""Random bases and trees, and what a base says alone: the whole text fed again for every token, without a cache."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.decoding.processors import NodeContext, TokenCounts, count_tokens, process
from hydrajax.decoding.sampling import position_keys
from hydrajax.decoding.spec import SamplingParams
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig, RopeScaling
from hydrajax.trees.dynamic import DynamicTree
from hydrajax.trees.static_tree import TreeTopology

# Rounding changes logits by some 1e-6 of their spread. A place whose token changes with so much is a draw, and what
# follows it is not compared.
ROUNDING, COPIES = 1e-4, 7


def random_config(random: random.Random) -> LlamaConfig:
    """Shapes that nobody would choose: any number of queries for each key, small heads, windows, odd widths."""
    context, n_kv_heads = random.randrange(26, 49), random.choice((1, 1, 2, 3))
    scaling = random.choice((None, None, RopeScaling("linear", 2.5), RopeScaling("llama3", 8.0, 1.0, 4.0, 16)))
    return LlamaConfig(
        vocab_size=random.choice((5, 11, 17, 40)),
        width=random.choice((16, 30, 33, 48)),
        mlp_width=random.choice((7, 24, 50)),
        n_layers=random.choice((1, 2)),
        n_heads=n_kv_heads * random.choice((1, 2, 3, 4)),
        n_kv_heads=n_kv_heads,
        head_dim=random.choice((2, 6, 8, 10, 14, 22)),
        max_positions=context,
        rope_theta=random.choice((100.0, 10_000.0)),
        rope_scaling=scaling,
        tied_lm_head=random.random() < 0.3,
        qkv_bias=random.random() < 0.3,
        qk_norm=random.random() < 0.3,
        sliding_window=random.choice((None, None, 1, 3, random.randrange(2, context))),
    )


def random_tree(random: random.Random, depth: int, widest: int, grows: bool) -> TreeTopology | DynamicTree:
    """One that the drafter can fill. Ranks are drawn freely, so that most trees skip some; or one that is grown."""
    if grows and depth and random.random() < 0.3:
        expansions, top_k = random.randrange(min(depth, 4)), random.randrange(1, min(widest, 4) + 1)
        return DynamicTree(1 + random.randint(1, min(top_k + expansions * top_k**2, 20)), expansions, top_k)
    known = {()}
    for _ in range(random.choice((0, 1, 3, 8, 20)) if depth else 0):
        parent = random.choice(sorted(path for path in known if len(path) < depth))
        known.add((*parent, random.randrange(min(widest, 9))))
    return TreeTopology.from_choices(known - {()})


def noise(shapes: Any, seed: int) -> Any:
    """Random leaves of these shapes: large enough that attention is uneven and logits differ by more than rounding."""
    random = np.random.default_rng(seed)

    def leaf(shape) -> np.ndarray:
        drawn = random.standard_normal(shape.shape).astype(np.float32)
        return 1 + 0.2 * drawn if drawn.ndim == 1 else 0.3 * drawn

    return jax.tree.map(leaf, shapes)


@dataclass(frozen=True)
class Alone:
    """A base that decodes on its own, in the slowest way there is."""

    config: LlamaConfig

    @cached_property
    def model(self) -> Llama:
        return Llama(self.config)

    @cached_property
    def shapes(self) -> Any:
        return jax.eval_shape(lambda: init_base(self.model, jax.random.key(0)))

    @cached_property
    def _continued(self):
        context = self.config.max_positions

        def continued(params, texts, starts, sampling):
            batch, places = len(texts), jnp.arange(context)
            positions = jnp.broadcast_to(places, texts.shape)

            def chosen(logits, texts, last):
                counts = None
                if count_tokens(sampling.processors):
                    is_token = texts[:, :, None] == jnp.arange(self.config.vocab_size)
                    emitted = (places >= starts[:, None]) & (places <= last)
                    counts = TokenCounts(
                        jnp.any(is_token & (places < starts[:, None])[:, :, None], axis=1),
                        jnp.sum(is_token & emitted[:, :, None], axis=1, dtype=jnp.int32),
                    )
                logits = process(sampling.processors, logits, NodeContext(jnp.zeros(batch, jnp.int32), counts))
                return sampling.rule.first_root(logits, position_keys(sampling.rng, last + 1 - starts))

            def grow(last, carry):
                texts, clear = carry
                hidden = self.model.apply({"params": params}, texts, positions, causal_mask(context)).hidden[:, last]
                logits = self.model.apply({"params": params}, hidden, method="logits")
                shaken = jax.random.normal(jax.random.key(last), (COPIES, *logits.shape)).at[0].set(0)
                shaken = logits + ROUNDING * jnp.std(logits, axis=-1, keepdims=True) * shaken
                tokens = jax.vmap(lambda one: chosen(one, texts, last))(shaken)
                token, same = tokens[0], jnp.all(tokens == tokens[0], axis=0)
                grows = starts <= last + 1
                texts = texts.at[:, last + 1].set(jnp.where(grows, token, texts[:, last + 1]))
                return texts, clear.at[:, last + 1].set(~grows | same)

            first = jnp.ones((batch, context), bool)
            return jax.lax.fori_loop(jnp.min(starts) - 1, context - 1, grow, (texts, first))

        return jax.jit(continued, compiler_options={"xla_backend_optimization_level": 0})

    def continued(self, params, prompts: list[list[int]], sampling: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
        """Each prompt and what follows, int32 ``[B, context]``, and up to where that is no draw, int32 ``[B]``.

        sampling: with a key for each row; the limits do not count.
        """
        context = self.config.max_positions
        texts = np.zeros((len(prompts), context), np.int32)
        for row, prompt in zip(texts, prompts, strict=True):
            row[: len(prompt)] = prompt
        starts = np.array([len(prompt) for prompt in prompts], np.int32)
        texts, clear = jax.device_get(self._continued(params, texts, starts, sampling))
        return texts, np.where(clear.all(axis=1), context, np.argmin(clear, axis=1))
