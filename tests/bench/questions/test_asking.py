"""Asking in turns, with decoders that are made up."""

from __future__ import annotations

import json

from helpers.answering import FAST, PLAIN, PROMPTER, QUESTIONS, Decoder, words
from helpers.refusals import assert_refused
from hydrajax.bench.questions.answer_files import AnswerFiles
from hydrajax.bench.questions.asking import Prompter, evaluate
from hydrajax.errors import HydrajaxError


def test_contenders_take_turns_in_changing_order_and_meet_no_width_untimed(tmp_path):
    log: list[str] = []
    contenders = [Decoder(name, 1, log) for name in "abc"]
    files = AnswerFiles(tmp_path, "abc", {})
    evaluate([QUESTIONS[1], QUESTIONS[3]], contenders, PROMPTER, files, repeats=2)
    # Both prompts are of one width: decoded once untimed, by each.
    assert "".join(log) == "abc" + "abcbca" + "bcacab"


def test_each_continues_its_own_conversation_with_the_same_seeds(tmp_path):
    plain, fast = Decoder(PLAIN, 1), Decoder(FAST, 2)
    files = AnswerFiles(tmp_path, [PLAIN, FAST], {})
    evaluate(QUESTIONS[:1], [plain, fast], PROMPTER, files, seed=3)
    assert plain.calls == fast.calls
    first, second = (json.dumps(ids) for ids in (plain.calls[0][0], plain.calls[-1][0]))
    said = files.answers[PLAIN][81]["choices"][0]["turns"][0]
    history = [{"role": "user", "content": "one"}, {"role": "assistant", "content": said}]
    assert json.loads(first) == words(history[:1])
    assert json.loads(second) == words([*history, {"role": "user", "content": "two"}])
    seeds = list(dict.fromkeys(seed for _, seed in plain.calls))
    assert len(seeds) == 2  # a draw of its own for each turn

    again = Decoder(PLAIN, 1)
    evaluate(QUESTIONS[1::-1], [again], PROMPTER, AnswerFiles(tmp_path / "b", [PLAIN], {}), seed=3)
    assert set(seeds) < {seed for _, seed in again.calls}  # whatever else is asked, and in whatever order


def test_long_prompts_lose_their_beginning_but_not_bos():
    prompter = Prompter(lambda messages: [1, *range(10, 30)], context=16, max_new_tokens=8, bos_id=1)
    assert prompter([]) == ([1, *range(23, 30)], 13)
    assert Prompter(prompter.encode, 16, 8)([]) == ([*range(22, 30)], 13)
    assert Prompter(prompter.encode, 29, 8, 1)([]) == ([1, *range(10, 30)], 0)
    message = "max_new_tokens: got 15, expected at most 14: the model's context of 16"
    assert_refused(Prompter, (prompter.encode, 16, 15, message))


def test_a_question_that_cannot_be_encoded_is_named(tmp_path):
    def refuse(messages):
        raise HydrajaxError("the chat template failed: no")

    files = AnswerFiles(tmp_path, [PLAIN], {})
    arguments = QUESTIONS[3:], [Decoder(PLAIN, 1)], Prompter(refuse, 256, 8), files
    assert_refused(evaluate, (*arguments, 'question "x/4": the chat template failed: no'))
