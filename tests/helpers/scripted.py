"""A base whose greedy answers are known, with a tokenizer that drops the space before a text's first word."""

import jax
import jax.numpy as jnp

from helpers import small_tokenizer
from helpers.lab import CONFIG
from hydrajax.decoding.state import Params
from hydrajax.drafters.none import NoDrafter
from hydrajax.language_model import LanguageModel
from hydrajax.models.init import init_base
from hydrajax.models.llama import Llama

TEXT = " tre🌳 {"  # after each prompt that ends with " the"
THE, TRE, TREE, BRACE, END = 269, 272, [3 + byte for byte in "🌳".encode()], 273, 2
SAME = jnp.array([276, 3 + ord("}")])  # two tokens of one text, the likeliest after EOS
SPACED = "{% for m in messages %}{{ ' ' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"  # as Vicuna's


def model(chat_template: str = SPACED) -> LanguageModel:
    """Return a base that predicts the next token from the last one alone."""
    tokenizer = small_tokenizer.metaspace()
    tokenizer.chat_template = chat_template
    base = Llama(CONFIG.replace(vocab_size=len(tokenizer), width=320), jnp.dtype("float32"))
    params = jax.tree.map(jnp.zeros_like, init_base(base, jax.random.key(0)))
    chain = jnp.array([THE, TRE, *TREE, BRACE, END])
    head = params["lm_head"].at[chain[:-1], chain[1:]].set(30.0).at[BRACE, SAME].set(jnp.array([20.0, 19.0]))
    params |= {"embedding": jnp.eye(len(tokenizer), 320), "norm": {"scale": jnp.ones(320)}, "lm_head": head}
    return LanguageModel(base, NoDrafter(), Params(params, {}), tokenizer, (END,))
