"""A tiny base with sixteen letters as tokens, for tests of serving."""

import jax.numpy as jnp
import numpy as np

from helpers.lab import VOCAB, WIDTH, Lab, shared_lab
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.request import Request
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.state import Params
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.generation import generate
from hydrajax.language_model import LanguageModel
from hydrajax.loaded_model import make_executor
from hydrajax.models.llama import Llama
from hydrajax.serve.executor_pool import ExecutorPool, PoolSizes
from hydrajax.text.answers import Generation
from hydrajax.trees import presets

CONTEXT, END, ROWS = 96, VOCAB - 1, 10
LETTERS = "abcdefghijklmno "
TREE = presets.cartesian([3, 2])
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


def tokenizer():
    """Each token is a letter except the last, ``</s>``, which is EOS."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: token for token, letter in enumerate(LETTERS)} | {"</s>": END}
    letters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>", chat_template=TEMPLATE)


def model(heads: str = "medusa", lab: Lab | None = None) -> LanguageModel:
    """Return the tests' tiny base, or another lab's, with a longer context and heads; the default ones compile fastest.

    Hydra++ heads have their own KV cache.
    """
    lab = lab or shared_lab()
    config = lab.model.config.replace(max_positions=CONTEXT)
    drafter = lab.drafters["medusa"]
    if heads == "hydra++":
        drafter = HydraHeads(4, WIDTH, VOCAB, n_layers=2).with_prefix(config)
    params = Params(lab.base(0), lab.draft(heads, 0))
    return LanguageModel(Llama(config, jnp.dtype("float32")), drafter, params, tokenizer(), (END,))


def pool(served: LanguageModel, sizes: PoolSizes, *arguments, **settings) -> ExecutorPool:
    """Return the executors of a server for this model."""
    return ExecutorPool(make_executor(served, served.program(tree=TREE)), sizes, *arguments, **settings)


def answers(served: LanguageModel, prompts, rules, limits, seeds, **settings) -> list[Generation]:
    """Return the output of `generate` for each prompt, greedy or sampled.

    seeds: one per prompt, or one for all prompts, which then use their index. Every batch has the same shape, is filled
    with a long prompt whose numbers all have an effect, and mixes greedy and sampled sequences, so that all tests
    share one program. tests/decoding compares mixed batches with separate ones.
    """
    found, program = [], served.program(tree=TREE, rule=ExactSampling, logprobs=0, max_new_tokens=CONTEXT)
    filler = np.zeros(70, np.int32), ExactSampling(0.0, top_k=1, top_p=0.5, min_p=0.5), 60
    for start in range(0, len(prompts), ROWS - 1):
        batch = range(start, min(start + ROWS - 1, len(prompts)))
        empty = ROWS - len(batch)
        texts, kinds, most = (
            [values[at] for at in batch] + [of] * empty
            for values, of in zip((prompts, rules, limits), filler, strict=True)
        )
        own = seeds if isinstance(seeds, int) else [seeds[at] for at in batch] + [0] * empty
        requests = [
            Request(ExactSampling(0.0) if isinstance(rule, Greedy) else rule, max_new_tokens=limit)
            for rule, limit in zip(kinds, most, strict=True)
        ]
        given = {"requests": requests, "batch_size": ROWS, "seed": own} | settings
        found += list(generate(served.executor(program), texts, **given))[: len(batch)]
    return found
