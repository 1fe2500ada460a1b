"""Log-probabilities of the most likely tokens at each position, on a server with ``--top-logprobs``."""

import numpy as np
import openai
import pytest

from helpers import letters
from helpers.compilations import no_compilation
from helpers.log_probabilities import check_answer
from helpers.serving import SECONDS, running
from hydrajax.language_model import LanguageModel
from hydrajax.serve.executor_pool import PoolSizes

pytestmark = pytest.mark.slow  # compiles its own programs
TOP = 5
CHAT = {"model": "letters", "messages": [{"role": "user", "content": "a bad cafe"}], "max_completion_tokens": 25}
SAMPLED = {"temperature": 1.3, "seed": 4}


@pytest.fixture(scope="module")
def pool(served):
    """Several batch sizes and cache lengths, so that sequences move."""
    found = letters.pool(served, PoolSizes(slots=2, chunk=16, cache_len=64, logprobs=TOP))
    found.warm_up()
    return found


@pytest.fixture(scope="module")
def client(pool):
    with running(pool, model="letters") as (address, _):
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=SECONDS)


@pytest.fixture(scope="module")
def wanted(served: LanguageModel):
    """``wanted(prompt, **numbers)``: the answer of `generate`, checked against an uncached pass."""

    def answer(prompt: str, **numbers):
        rule = "exact" if numbers else "greedy"
        settings = {"tree": letters.TREE, "max_new_tokens": 25, "logprobs": TOP}
        found = served.generate(prompt, rule=rule, **settings, **numbers)
        check_answer(served.model, served.params.base, found, TOP)
        return found

    return answer


def test_sequences_that_join_and_leave_keep_their_own(served, pool, start):
    """Greedy and sampled, short and long, more of them than slots; nothing is compiled."""
    random = np.random.default_rng(0)
    batcher = start(pool)
    with no_compilation():
        requests = [
            batcher.request(
                random.integers(0, 16, random.integers(1, 50), dtype=np.int32),
                max_new_tokens=int(random.integers(1, 40)), temperature=1.2 * (number % 2), seed=number,
            )
            for number in range(12)
        ]  # fmt: skip
        answers = [handle.wait(SECONDS) for handle in batcher.submit(requests)]
    for answer in answers:
        check_answer(served.model, served.params.base, answer, TOP)


@pytest.mark.parametrize("numbers", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_chat_completions(served, client, wanted, numbers):
    expected = wanted("a bad cafe ", **numbers)
    text = [served.tokenizer.decode([token]) for token in range(letters.VOCAB)]
    for k in (0, 2, TOP):
        settings = CHAT | numbers | {"logprobs": True, "top_logprobs": k}
        whole = client.chat.completions.create(**settings).choices[0].logprobs.content
        pieces = client.chat.completions.create(**settings, stream=True)
        streamed = [token for found in of_pieces(pieces) for token in found.content]
        for found in (whole, streamed):
            assert [token.token for token in found] == [text[token] for token in expected.output_ids]
            for token, place in zip(found, expected.top_logprobs, strict=True):
                assert [one.token for one in token.top_logprobs] == [text[other] for other, _ in place[:k]]
                assert [one.logprob for one in token.top_logprobs] == pytest.approx([p for _, p in place[:k]], abs=1e-3)
                assert all(bytes(one.bytes).decode() == one.token.replace("</s>", "") for one in token.top_logprobs)


def of_pieces(events) -> list:
    return [choice.logprobs for event in events for choice in event.choices if choice.logprobs]


def test_completions(served, client, wanted):
    """As in OpenAI's API, the chosen token is always included."""
    expected = wanted("abc", **SAMPLED)
    text = [served.tokenizer.decode([token]) for token in range(letters.VOCAB)]
    settings = {"model": "letters", "prompt": "abc", "max_tokens": 25, "logprobs": 2} | SAMPLED
    whole = client.completions.create(**settings).choices[0].logprobs.top_logprobs
    pieces = client.completions.create(**settings, stream=True)
    streamed = [place for found in of_pieces(pieces) for place in found.top_logprobs]
    sizes = set()
    for found in (whole, streamed):
        for place, token, logprob, likeliest in zip(
            found, expected.output_ids, expected.logprobs, expected.top_logprobs, strict=True
        ):
            its = {text[other]: p for other, p in likeliest[:2]} | {text[token]: logprob}
            assert place == pytest.approx(its, abs=1e-3)
            sizes.add(len(place))
    assert sizes == {2, 3}
