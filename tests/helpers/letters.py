"""A tiny base whose tokens are sixteen letters, for tests of serving."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from helpers.lab import CONFIG, VOCAB, WIDTH, shared_lab
from hydrajax.api import Loaded
from hydrajax.decoding.acceptance import ExactSampling, Greedy
from hydrajax.decoding.either import GreedyOrExact
from hydrajax.decoding.state import Params
from hydrajax.drafters.hydra import HydraHeads
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


def model(heads: str = "medusa") -> Loaded:
    """Heads on the tests' tiny base, with a longer context: those that compile fastest, or others.

    Hydra++ has a cache of its own.
    """
    lab, config = shared_lab(), CONFIG.replace(max_positions=CONTEXT)
    drafter = lab.drafters["medusa"]
    if heads == "hydra++":
        drafter = HydraHeads(4, WIDTH, VOCAB, n_layers=2).with_prefix(config)
    params = Params(lab.base(0), lab.draft(heads, 0))
    return Loaded(Llama(config, jnp.dtype("float32")), drafter, params, tokenizer=tokenizer(), eos_ids=(END,))


def answers(served: Loaded, prompts, rules, limits, seeds, **settings) -> list[Generation]:
    """What `generate` says to each prompt, greedy or sampled.

    seeds: one for each prompt, or one for all, of which the prompts then have their numbers. Every batch is of one
    shape, filled up with a long text, and greedy rows stand beside sampled ones (which `test_either` compares with
    the rules themselves), so that all tests share one program.
    """
    found, filler = [], (np.zeros(70, np.int32), 60)
    for start in range(0, len(prompts), ROWS - 1):
        batch = range(start, min(start + ROWS - 1, len(prompts)))
        empty = ROWS - len(batch)
        texts, most = (
            [values[at] for at in batch] + [of] * empty for values, of in zip((prompts, limits), filler, strict=True)
        )
        own = seeds if isinstance(seeds, int) else [seeds[at] for at in batch] + [0] * empty
        rule = [either(rules[at]) for at in batch] + [either(Greedy())] * empty
        wanted = {"rule": rule, "max_new_tokens": most, "seed": own, "logprobs": True}
        found += list(generate(served, texts, tree=TREE, batch_size=ROWS, **wanted, **settings))[: len(batch)]
    return found


def either(rule: Greedy | ExactSampling) -> GreedyOrExact:
    """The same rule in the kind that a server has."""
    numbers = {} if isinstance(rule, Greedy) else {"temperature": rule.temperature, "top_p": rule.top_p}
    return GreedyOrExact.in_full(VOCAB, penalties=False, **numbers)
