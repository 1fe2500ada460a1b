"""Asking in turns with decoders that are made up, and figures of answers against their definitions."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.answering import FAST, PLAIN, PROMPTER, QUESTIONS, Decoder, run, words
from helpers.refusals import assert_refused
from hydrajax.bench.questions.answer_files import AnswerFiles
from hydrajax.bench.questions.asking import Prompter, evaluate
from hydrajax.bench.questions.sets import Question
from hydrajax.bench.questions.summary import MT_BENCH, RESAMPLES, speedup_interval, summarise
from hydrajax.errors import HydrajaxError
from hydrajax.text.answers import Generation


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


def test_figures_by_category(tmp_path):
    files = run(tmp_path, repeats=3)
    results = summarise(files.answers, QUESTIONS, PLAIN, same_outputs=True)
    assert list(results) == [PLAIN, FAST]
    assert list(results[FAST]) == ["writing", "math", "overall"]
    for name, count, turns in (("writing", 2, 5), ("math", 2, 2), ("overall", 4, 7)):
        plain, fast = results[PLAIN][name], results[FAST][name]
        assert (fast.questions, fast.tokens, fast.steps) == (count, 5 * turns, 3 * turns)
        assert (plain.tokens_per_step, fast.tokens_per_step) == (1, 5 / 3)
        assert plain.tokens_per_second == pytest.approx(100)
        assert fast.tokens_per_second == pytest.approx(500 / 3)
        for figure in (fast.speedup, fast.low, fast.high):
            assert figure == pytest.approx(5 / 3)  # each question has the same ratio: the interval has no width
        assert (plain.speedup, plain.low, plain.high) == (1, 1, 1)
        assert fast.equal is plain.equal is True
    assert results[FAST]["overall"].as_dict()["equal"] is True
    one = summarise(files.answers, QUESTIONS[:1], PLAIN, same_outputs=False)[FAST]["overall"]
    assert (one.low, one.high, one.different, one.equal) == (None, None, None, None)


def test_wall_time_is_the_median_of_the_repeats(tmp_path):
    times = iter([9.0, 1.0, 5.0, 2.0])  # the first is of the warm-up

    def decode(ids, seed):
        return Generation(ids, [1], "a", 1, [1], 1, next(times))

    files = AnswerFiles(tmp_path, [PLAIN], {})
    evaluate(QUESTIONS[1:2], [SimpleNamespace(model_id=PLAIN, decode=decode)], PROMPTER, files, repeats=3)
    (choice,) = files.answers[PLAIN][82]["choices"]
    assert (choice["wall_time"], choice["wall_times"]) == ([2.0], [[1.0, 5.0, 2.0]])


def test_different_outputs_are_counted(tmp_path):
    """Those of another model id, and those of repeats."""
    plain, fast, count = Decoder(PLAIN, 1), Decoder(FAST, 2), iter(range(100))

    def wrong(ids, seed):
        answer = fast.decode(ids, seed)
        if "five" in "".join(map(chr, ids)):
            answer.output_ids[-1] += 1
        return answer

    def unsteady(ids, seed):
        return Generation(ids, [max(next(count), 3)], "a", 1, [1], 1, 1.0)

    files = AnswerFiles(tmp_path / "models", [PLAIN, FAST], {})
    evaluate(QUESTIONS, [plain, SimpleNamespace(model_id=FAST, decode=wrong)], PROMPTER, files)
    results = summarise(files.answers, QUESTIONS, PLAIN, same_outputs=True)[FAST]
    assert {name: row.different for name, row in results.items()} == {"writing": 1, "math": 0, "overall": 1}
    assert [row.equal for row in results.values()] == [False, True, False]
    files = AnswerFiles(tmp_path / "repeats", [PLAIN], {})
    evaluate(QUESTIONS[3:], [SimpleNamespace(model_id=PLAIN, decode=unsteady)], PROMPTER, files, repeats=4)
    assert summarise(files.answers, QUESTIONS[3:], PLAIN, same_outputs=True)[PLAIN]["overall"].equal is False


def test_mt_bench_is_one_group_beside_others(tmp_path):
    questions = [Question(n, name, ("x",)) for n, name in enumerate((*MT_BENCH, "rag"))]
    files = run(tmp_path, questions)
    results = summarise(files.answers, questions, PLAIN, same_outputs=True)[FAST]
    assert list(results) == [*MT_BENCH, "rag", "mt_bench", "overall"]
    assert (results["mt_bench"].questions, results["overall"].questions) == (8, 9)
    assert "mt_bench" not in summarise(files.answers, questions[:8], PLAIN, same_outputs=True)[FAST]


def test_the_interval_is_the_bootstrap_of_the_ratio():
    random = np.random.default_rng(4)
    tokens, plain_tokens = random.integers(20, 200, (2, 40)).astype(float)
    seconds, plain_seconds = tokens * random.uniform(0.002, 0.004, 40), plain_tokens * random.uniform(0.004, 0.006, 40)
    speedup, low, high = speedup_interval(tokens, seconds, plain_tokens, plain_seconds)
    assert speedup == pytest.approx(tokens.sum() * plain_seconds.sum() / seconds.sum() / plain_tokens.sum())

    # Drawn question by question, with other draws.
    found = []
    for _ in range(RESAMPLES):
        i = random.integers(0, 40, 40)
        found.append(tokens[i].sum() * plain_seconds[i].sum() / seconds[i].sum() / plain_tokens[i].sum())
    assert [low, high] == pytest.approx(np.percentile(found, [2.5, 97.5]), rel=0.02)
    assert low < speedup < high
    one = np.ones(1)
    assert speedup_interval(6 * one, 2 * one, 3 * one, 2 * one) == (2.0, None, None)
