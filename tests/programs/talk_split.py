"""Chat with and serve a base and a draft model on separate devices and on one; report their outputs.

Argument: the folder for ``answer.json``.
"""

from pathlib import Path

import jax
import numpy as np

from helpers import letters
from helpers.lab import Lab, hybrid_lab, shared_lab
from helpers.programs import answer
from hydrajax import make_executor
from hydrajax.conversation import Chat
from hydrajax.decoding.request import Request
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.decoding.state import Params
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.language_model import LanguageModel
from hydrajax.serve.batcher import Batcher
from hydrajax.serve.executor_pool import ExecutorPool, PoolSizes
from hydrajax.sharding import Placement, last_devices

MESSAGES = ["abc" * 12, "cafe", "deed"]
SECONDS = 300


def model(placement: Placement, lab: Lab) -> LanguageModel:
    """Return the lab's base with letters as tokens, and a draft close to the plain base that is often right for it."""
    base, plain, other = letters.model(lab=lab), letters.model(), shared_lab().base(1)
    nearly = jax.tree.map(lambda x, y: 0.98 * x + 0.02 * y, plain.params.base, other)
    params = Params(base.params.base, jax.device_put(nearly, placement.homes()[1]))
    drafter = DraftModel(plain.model, letters.VOCAB)
    return LanguageModel(base.model, drafter, params, base.tokenizer, base.eos_ids, placement)


def turns(m: LanguageModel) -> list:
    """Return the answers of a conversation, the reused prompt tokens of each and the longest accept length."""
    request = Request(ExactSampling(0.6), max_new_tokens=12)
    chat, found = Chat(m.executor(m.program(request, tree="chain-2"), request), seed=3), []
    for message in [*MESSAGES, "bead"]:
        if message == "bead":
            del chat.messages[2:]  # returns to the first turn
        found.append(["".join(chat.send(message)), chat.turn.reused, chat.turn.steps])
    return found


def answers(m: LanguageModel) -> list:
    """Return the answers of a server with two slots to prompts with common prefixes, greedy and sampled."""
    pool = ExecutorPool(make_executor(m, m.program(tree="chain-2")), PoolSizes(slots=2, chunk=16, cache_len=64))
    batcher = Batcher(pool).start()
    random, found = np.random.default_rng(0), []
    try:
        beginning = random.integers(0, 16, 40, dtype=np.int32)
        for number in range(6):
            ids = np.concatenate([beginning[: 20 + 4 * number], random.integers(0, 16, 3, dtype=np.int32)])
            bias = {"logit_bias": {"3": 2.0}} if number == 2 else {}
            request = batcher.request(
                ids, max_new_tokens=6 + 5 * number, temperature=0.8 * (number % 2), seed=number, **bias
            )
            found += batcher.submit([request])
        return [[handle.wait(SECONDS).output_ids, handle.result.steps] for handle in found], batcher.stats().cached
    finally:
        batcher.close()


def main(_: Path) -> dict:
    found = {"kinds": []}
    for name, placement in (("split", Placement(draft=last_devices(1))), ("one device", Placement())):
        m, recurrent = model(placement, shared_lab()), model(placement, hybrid_lab())
        found["kinds"].append(type(m.executor(m.program(tree="chain-2"))).__name__)
        found[name] = {"turns": turns(m), "answers": answers(m), "recurrent": turns(recurrent)}
    return found


if __name__ == "__main__":
    answer(main)
