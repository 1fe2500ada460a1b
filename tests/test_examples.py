"""User stories: train heads on your own text, serve and ask, add a drafter.

They use the public API and the commands only. The base is the small LLaMA of tests/golden, which was trained on Python
code, with its Hydra++ heads. Outputs are compared with the base's greedy text as transformers computes it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jax.numpy as jnp
import pytest

import hydrajax
from hydrajax.cli import main
from hydrajax.drafters.drafter import DrafterSpec, Proposal, SeesAcceptedOnly

PROMPTS = ["def close(self):\n    return self.", "class Names(list):\n    def __init__(self"]
NEW = 48


@pytest.fixture(scope="module")
def base(golden) -> Path:
    """A Hugging Face directory: configuration, weights and tokenizer."""
    return golden / "base" / "mha"


@pytest.fixture(scope="module")
def heads(golden) -> Path:
    """A directory of released Hydra++ heads for that base."""
    return golden / "hydra_pp" / "heads"


@pytest.fixture(scope="module")
def model(base, heads) -> hydrajax.LanguageModel:
    return hydrajax.load(base, heads)


@pytest.fixture(scope="module")
def greedy(base) -> Callable[[str], list[int]]:
    """``greedy(prompt)``: the next ``NEW`` tokens by transformers, each the argmax of the base's logits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)

    def run(prompt: str) -> list[int]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        found = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
        return found[0, ids.shape[1] :].tolist()

    return run


@pytest.mark.slow
def test_train_heads_on_your_own_text(base, greedy, tmp_path):
    """Train Hydra heads on files of yours with the recipe own_text, then generate with them.

    The text is the Python code of this package's drafters. The heads learn the base's predictions on it, and the base
    then accepts some of their guesses; before training it accepts none.
    """
    package = Path(hydrajax.__file__).parent
    settings = [f"model={base}", f"data.files=[{package / 'drafters'}]", f"output={tmp_path}/run"]
    settings += ["steps=120", "optimizer.lr=1e-2", "data.length=64", "mesh.data=1", "mesh.cpu_devices=null"]
    assert main(["train", "--config", "own_text", *settings]) == 0

    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    files = ["--prompts", str(prompts), "--output", str(answers)]
    draft = ["--draft", f"{tmp_path}/run/heads", "--tree", "chain-2", "--max-new-tokens", str(NEW)]
    assert main(["generate", "--base", str(base), *draft, *files]) == 0
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [answer["output_ids"] for answer in found] == [greedy(prompt) for prompt in PROMPTS]
    assert sum(answer["steps"] for answer in found) < 0.9 * sum(answer["new_tokens"] for answer in found)


@pytest.mark.slow
def test_serve_and_ask(base, heads, model, greedy):
    """Start the server, and ask it with OpenAI's client. The answers are the texts that `generate` returns."""
    for package in ("starlette", "uvicorn", "prometheus_client", "openai"):
        pytest.importorskip(package, reason=f"{package} is not installed (hydrajax[serve], hydrajax[test])")
    from openai import OpenAI

    from helpers.serving import serving  # `python -m hydrajax serve` on a free port

    options = ("--base", base, "--draft", heads, "--tree", "chain-2", "--slots", 2, "--max-prompt", 64, "--no-warm-up")
    with serving(*options) as (_, address, _):
        client = OpenAI(base_url=f"{address}/v1", api_key="none", timeout=300, max_retries=0)
        answer = client.completions.create(model="hydrajax", prompt=PROMPTS, max_tokens=NEW, temperature=0)
    expected = model.generate(PROMPTS, tree="chain-2", max_new_tokens=NEW, batch_size=2)
    assert [choice.text for choice in answer.choices] == [result.text for result in expected]
    assert [result.output_ids for result in expected] == [greedy(prompt) for prompt in PROMPTS]


@dataclass(frozen=True)
class UsualFollower(SeesAcceptedOnly):
    """A drafter that proposes after each token the one that usually follows it, in a chain.

    A drafter is a frozen dataclass of its settings. This one has neither parameters nor state.
    """

    followers: tuple[int, ...]  # one token id per token id

    @property
    def spec(self):
        return DrafterSpec(depth=3, default_tree="chain-3")

    def init(self, rng, base):
        return {}

    def init_state(self, batch, slots):
        return {}

    def advance(self, params, state, aux_hidden_states, tokens, counts, bonus_token, base):
        return state

    def propose(self, params, state, root, tree, base, draw=None):
        chain = [root]
        for _ in range(tree.depth):
            chain.append(jnp.asarray(self.followers, jnp.int32)[chain[-1]])
        return Proposal(jnp.stack(chain, axis=1), tree.topology)

    def ranks(self, params, aux_hidden_states, batch, base, chunk_tokens, depth):
        raise NotImplementedError("only `hydrajax tree search` asks for ranks")


def test_add_a_drafter(base, greedy):
    """Write a drafter in thirty lines, and pass it to `generate`. It saves forward passes and cannot change the text.

    Its steps can be counted by hand: a step emits the base's next token and the guesses after it that the base shares.
    """
    model = hydrajax.load(base)
    earlier = model.generate(PROMPTS[1], max_new_tokens=200).output_ids
    pairs = Counter(pairwise(earlier))
    usual = dict(sorted(pairs, key=pairs.get))  # the most frequent pair of each first token comes last, and stays
    drafter = UsualFollower(tuple(usual.get(token, 0) for token in range(model.config.vocab_size)))

    answer = model.generate(PROMPTS[0], draft=drafter, tree="chain-3", max_new_tokens=NEW)
    expected, lengths = greedy(PROMPTS[0]), []
    assert answer.output_ids == expected
    while (start := sum(lengths)) < NEW:
        shared = [drafter.followers[token] == after for token, after in pairwise(expected[start : start + 4])]
        lengths.append(1 + [*shared, False].index(False))
    assert answer.emitted_per_step == lengths
    assert max(lengths) > 1
