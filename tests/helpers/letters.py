"""A tiny base whose tokens are sixteen letters, for tests of serving."""

from __future__ import annotations

import jax.numpy as jnp
from lab import CONFIG, VOCAB, WIDTH, shared_lab

from hydrajax.api import Loaded
from hydrajax.decoding.state import Params
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.prefix import WithPrefix
from hydrajax.models.llama import Llama
from hydrajax.trees import presets

CONTEXT, END = 96, VOCAB - 1
LETTERS = "abcdefghijklmno "
TREE = presets.cartesian([3, 2])
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


def tokenizer():
    """A token is a letter; the last one, ``</s>``, ends a text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: token for token, letter in enumerate(LETTERS)} | {"</s>": END}
    letters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>", chat_template=TEMPLATE)


def model() -> Loaded:
    """Hydra++ on the tests' tiny base, with a longer context."""
    lab, config = shared_lab(), CONFIG.replace(max_positions=CONTEXT)
    drafter = WithPrefix(HydraHeads(4, WIDTH, VOCAB, n_layers=2), config)
    params = Params(lab.base(0), lab.draft("hydra++", 0))
    return Loaded(Llama(config, jnp.dtype("float32")), drafter, params, tokenizer=tokenizer(), eos_ids=(END,))
