"""A base that is loaded here as the reference: our own decoding without a draft."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hydrajax.bench.uncached_forward import all_logits
from hydrajax.certify.servers.answers import Answer, Token
from hydrajax.certify.servers.client import Refused, Reply
from hydrajax.certify.servers.comparison import NEAR_TOKENS
from hydrajax.certify.servers.questions import Question
from hydrajax.certify.servers.sides import Reference
from hydrajax.errors import HydrajaxError
from hydrajax.language_model import LanguageModel
from hydrajax.text.answers import Generation
from hydrajax.text.continuation import Continuation

BATCH_SIZE = 8
MOST_LIKELY = 64  # tokens of which the texts are compared
FINISH_REASONS = {"eos": "stop", "stop": "stop"}


class LocalReference(Reference):
    """Answers of a model without a draft.

    Grammars differ between servers, for example in white space, so structured output and tool calls are not compared
    with a base.
    """

    shares_grammars = False

    def __init__(self, model: LanguageModel, name: str):
        if model.tokenizer is None:
            raise HydrajaxError("base: has no tokenizer, which the texts of a server need")
        self._model, self._name = model.with_draft("none"), name
        self._generations: dict[tuple[Any, ...], Generation] = {}

    def __str__(self) -> str:
        return f"{self._name} without a draft"

    def prepare(self, questions: Sequence[Question]) -> None:
        plain = [each for each in questions if not each.more and each.n == 1 and not each.stop and not each.temperature]
        groups = [[each for each in plain if bool(each.chat) == chat] for chat in (False, True)]
        for group in groups:
            missing = {_key(each): each for each in group if _key(each) not in self._generations}
            if missing:
                try:
                    found = self._generate(list(missing.values()))
                except HydrajaxError:  # one of them is refused: `ask` finds out which
                    continue
                self._generations |= dict(zip(missing, found, strict=True))

    def ask(self, question: Question) -> Reply:
        if question.more:
            raise Refused("a base has other grammars than the server")
        if question.chat and not self._model.tokenizer.chat_template:
            raise Refused("the base has no chat template")
        try:
            if question.n > 1 or question.temperature:
                seeds = [(question.seed or 0) + number for number in range(question.n)]
                found = self._generate([question] * question.n, seed=seeds, temperature=question.temperature)
            else:
                self.prepare([question])
                found = [self._generations[_key(question)]] if _key(question) in self._generations else []
                found = found or self._generate([question], stop=question.stop)
                self._generations[_key(question)] = found[0]
        except HydrajaxError as error:
            raise Refused(str(error)) from None
        return tuple(self._answer(each, index) for index, each in enumerate(found))

    def tokens_near(self, question: Question, answer: Answer, at: int) -> Sequence[Token]:
        """Score the last tokens before a character of the answer, and the most likely tokens in their place."""
        generation = self._generations.get(_key(question))
        if generation is None or answer.tokens is None:
            return ()
        ids = generation.output_ids
        last = max((number for number, token in enumerate(answer.tokens) if token.start <= at), default=-1)
        if generation.finish_reason == "length" and at >= len(answer.text):
            last = len(ids)  # the base would go on
        text = np.concatenate([np.asarray(generation.prompt_ids, np.int32), np.asarray(ids, np.int32)])
        logits = all_logits(self._model.model, self._model.params.base, text)[len(generation.prompt_ids) - 1 :]
        found = []
        for number in range(max(0, last - NEAR_TOKENS + 1), min(last, len(logits) - 1) + 1):
            found.append(self._scored(generation, number, logits[number].astype(np.float64)))
        return found

    def _scored(self, found: Generation, number: int, logits: np.ndarray) -> Token:
        logits = logits - logits.max()
        logits -= np.log(np.exp(logits).sum())
        ids, answer = found.output_ids, Continuation(self._model.tokenizer, found.prompt_ids)
        for token in ids[:number]:
            answer.read(token)

        def text(token: int) -> str:
            return "" if token in self._model.eos_ids else (answer.begun + answer.data(token)).decode(errors="replace")

        top: dict[str, float] = {}
        for token in np.argsort(-logits, kind="stable")[:MOST_LIKELY].tolist():
            if (piece := text(token)) or token in self._model.eos_ids:
                top.setdefault(piece, float(logits[token]))
        chosen = ids[number] if number < len(ids) else int(logits.argmax())
        return Token(text(chosen), float(logits[chosen]), top, answer.offset)

    def _generate(self, questions: Sequence[Question], **choices: Any) -> list[Generation]:
        contents = [_content(each) for each in questions]
        limits = [each.max_tokens for each in questions]
        size = min(BATCH_SIZE, len(questions))
        logprobs = None if "temperature" in choices else 0
        return self._model.generate(
            contents, tree="root", max_new_tokens=limits, batch_size=size, logprobs=logprobs, **choices
        )

    def _answer(self, found: Generation, index: int) -> Answer:
        reason = FINISH_REASONS.get(found.finish_reason or "", "length")
        tokens = None
        if found.logprobs is not None:
            tokens, answer = [], Continuation(self._model.tokenizer, found.prompt_ids)
            for token, logprob in zip(found.output_ids, found.logprobs, strict=True):
                start, _ = answer.offset, answer.read(token)
                tokens.append(Token((found.text or "")[start : answer.offset], logprob, {}, start))
        return Answer(found.text or "", reason, None if tokens is None else tuple(tokens), index=index)


def _content(question: Question) -> Any:
    if question.chat:
        return [{"role": "user", "content": question.content}]
    return question.content if isinstance(question.content, str) else list(question.content)


def _key(question: Question) -> tuple[Any, ...]:
    return question.content, question.chat, question.max_tokens, question.stop
