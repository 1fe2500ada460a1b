"""Random bases and trees, and reference decoding: the whole text is fed again for every token, without a cache."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hydrajax.decoding.processing import NodeContext, TokenCounts, count_tokens, process
from hydrajax.decoding.random_keys import position_keys
from hydrajax.decoding.request import SamplingParams
from hydrajax.models.attention import causal_mask
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.rope_scaling import RopeScaling
from hydrajax.trees.dynamic import DynamicTree
from hydrajax.trees.static_tree import TreeTopology

# Rounding changes logits by about 1e-6 of their spread. Noise of 1e-4 is added to copies of them: where it changes the
# token, the position is a tie, and later positions are not compared.
ROUNDING, COPIES = 1e-4, 7


def random_config(random: random.Random) -> LlamaConfig:
    """Unusual shapes: any number of queries per key, small heads, sliding windows, odd widths."""
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


def random_tree(random: random.Random, depth: int, vocab_size: int, dynamic: bool) -> TreeTopology | DynamicTree:
    """A static tree, whose ranks mostly have gaps, or a dynamic tree where the drafter supports one."""
    if dynamic and depth and random.random() < 0.3:
        expansions, top_k = random.randrange(min(depth, 4)), random.randrange(1, min(vocab_size, 4) + 1)
        return DynamicTree(1 + random.randint(1, min(top_k + expansions * top_k**2, 20)), expansions, top_k)
    known = {()}
    for _ in range(random.choice((0, 1, 3, 8, 20)) if depth else 0):
        parent = random.choice(sorted(path for path in known if len(path) < depth))
        known.add((*parent, random.randrange(min(vocab_size, 9))))
    return TreeTopology.from_choices(known - {()})


def noise(shapes: Any, seed: int) -> Any:
    """Random arrays of these shapes, large enough that attention is uneven and logits differ by more than rounding."""
    random = np.random.default_rng(seed)

    def leaf(shape) -> np.ndarray:
        drawn = random.standard_normal(shape.shape).astype(np.float32)
        return 1 + 0.2 * drawn if drawn.ndim == 1 else 0.3 * drawn

    return jax.tree.map(leaf, shapes)


@dataclass(frozen=True)
class Reference:
    """A base that decodes without draft or cache."""

    config: LlamaConfig

    @cached_property
    def model(self) -> Llama:
        return Llama(self.config)

    @cached_property
    def shapes(self) -> Any:
        return jax.eval_shape(lambda: init_base(self.model, jax.random.key(0)))

    @cached_property
    def _decode(self):
        context = self.config.max_positions

        def decode(params, texts, starts, sampling):
            batch, slots = len(texts), jnp.arange(context)
            positions = jnp.broadcast_to(slots, texts.shape)

            def chosen(logits, texts, last):
                counts = None
                if count_tokens(sampling.processors):
                    is_token = texts[:, :, None] == jnp.arange(self.config.vocab_size)
                    emitted = (slots >= starts[:, None]) & (slots <= last)
                    counts = TokenCounts(
                        jnp.any(is_token & (slots < starts[:, None])[:, :, None], axis=1),
                        jnp.sum(is_token & emitted[:, :, None], axis=1, dtype=jnp.int32),
                    )
                logits = process(sampling.processors, logits, NodeContext(jnp.zeros(batch, jnp.int32), counts))
                return sampling.rule.first_root(logits, position_keys(sampling.rng, last + 1 - starts))

            def grow(last, carry):
                texts, clear = carry
                hidden = self.model.apply({"params": params}, texts, positions, causal_mask(context)).hidden[:, last]
                logits = self.model.apply({"params": params}, hidden, method="logits")
                noisy = jax.random.normal(jax.random.key(last), (COPIES, *logits.shape)).at[0].set(0)
                noisy = logits + ROUNDING * jnp.std(logits, axis=-1, keepdims=True) * noisy
                tokens = jax.vmap(lambda one: chosen(one, texts, last))(noisy)
                token, same = tokens[0], jnp.all(tokens == tokens[0], axis=0)
                grows = starts <= last + 1
                texts = texts.at[:, last + 1].set(jnp.where(grows, token, texts[:, last + 1]))
                return texts, clear.at[:, last + 1].set(~grows | same)

            first = jnp.ones((batch, context), bool)
            return jax.lax.fori_loop(jnp.min(starts) - 1, context - 1, grow, (texts, first))

        return jax.jit(decode, compiler_options={"xla_backend_optimization_level": 0})

    def decode(self, params, prompts: list[list[int]], sampling: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
        """Continue each prompt to the end of the context.

        Args:
            sampling: Rule, processors and one key per sequence. Limits are ignored.

        Returns:
            Prompts and continuations, int32 ``[B, context]``, and the first position after a tie, int32 ``[B]``.
        """
        context = self.config.max_positions
        texts = np.zeros((len(prompts), context), np.int32)
        for row, prompt in zip(texts, prompts, strict=True):
            row[: len(prompt)] = prompt
        starts = np.array([len(prompt) for prompt in prompts], np.int32)
        texts, clear = jax.device_get(self._decode(params, texts, starts, sampling))
        return texts, np.where(clear.all(axis=1), context, np.argmin(clear, axis=1))
