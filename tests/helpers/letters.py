"""A tiny base whose tokens are sixteen letters, for tests of serving."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from lab import CONFIG, VOCAB, WIDTH, shared_lab

from hydrajax.api import Loaded
from hydrajax.decoding.acceptance import ExactSampling, Greedy
from hydrajax.decoding.state import Params
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.prefix import WithPrefix
from hydrajax.generation import generate
from hydrajax.models.llama import Llama
from hydrajax.text.answers import Generation
from hydrajax.trees import presets

CONTEXT, END, ROWS = 96, VOCAB - 1, 10
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


def answers(served: Loaded, prompts, rules, limits, seeds, **settings) -> list[Generation]:
    """What `generate` says to each prompt, greedy and sampled ones in batches of their own.

    seeds: one for each prompt, or one for all, of which the prompts then have their numbers. Every batch is of one
    shape, filled up with a long text, so that all tests share two programs.
    """
    found: list = [None] * len(prompts)
    filler = np.zeros(70, np.int32), 60
    for kind, example in ((Greedy, Greedy()), (ExactSampling, ExactSampling(0.9, top_p=0.9))):
        some = [at for at, rule in enumerate(rules) if type(rule) is kind]
        for start in range(0, len(some), ROWS - 1):
            batch = some[start : start + ROWS - 1]
            empty = ROWS - len(batch)
            texts, most = (
                [values[at] for at in batch] + [of] * empty
                for values, of in zip((prompts, limits), filler, strict=True)
            )
            own = seeds if isinstance(seeds, int) else [seeds[at] for at in batch] + [0] * empty
            wanted = {"rule": [rules[at] for at in batch] + [example] * empty, "max_new_tokens": most, "seed": own}
            results = generate(served, texts, tree=TREE, batch_size=ROWS, logprobs=True, **wanted, **settings)
            for at, result in zip(batch, results, strict=False):
                found[at] = result
    return found
