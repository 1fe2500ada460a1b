"""Answers that grow token by token, as streams and as whole responses. Needs hydrajax[serve]."""

from types import SimpleNamespace

from hydrajax.serve.draft_counts import DraftCounts
from hydrajax.serve.replies import ReplyChoice, ReplyFormat
from hydrajax.text.answers import Generation
from hydrajax.text.continuation import Continuation
from hydrajax.text.tokenizer import decode_text


def reply(form, tokenizer) -> ReplyChoice:
    request = SimpleNamespace(ids=[5], wanted=SimpleNamespace(seed=None))
    handle = SimpleNamespace(result=None, done=False, request=request, drafts=DraftCounts(0))
    return ReplyChoice(0, handle, lambda ids: Continuation(tokenizer, ids), False, calls=form)


def result_of(tokenizer, ids: list[int], stop: str = "") -> Generation:
    """Return the answer of these tokens, whose text ends before a stop string."""
    text = decode_text(tokenizer, ids).rstrip("\ufffd")
    return Generation([5], ids, text.partition(stop)[0] if stop else text, 1, [1], len(ids), 0.0, "eos")


def streamed(form, tokenizer, ids: list[int]):
    """Return the choice of a finished stream, its joined texts, and the pieces of its calls."""
    choice, parts, calls = reply(form, tokenizer), {"content": "", "reasoning_content": ""}, []
    for length in range(1, len(ids) + 2):
        choice.handle.result = result_of(tokenizer, ids[:length])
        choice.handle.done = length > len(ids)
        for event in ReplyFormat("m", True).events(choice):
            delta = event["choices"][0]["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for name in parts:
                parts[name] += delta.get(name, "")
            calls += delta.get("tool_calls", ())
    return choice, parts, calls


def whole(form, tokenizer, ids: list[int], reasoning: bool = True) -> dict:
    """Return the message of a whole response."""
    choice, response = reply(form, tokenizer), ReplyFormat("m", True)
    choice.handle.result, response.reasoning = result_of(tokenizer, ids), reasoning
    return response.whole([choice], {})["choices"][0]["message"]
