"""Asking in turns, answer files that are taken up, and figures against their definitions; decoders are made up here.

The readers below are written to what the published scripts read, not with anything of the package.
"""

from __future__ import annotations

import glob
import json
import os

import numpy as np
import pytest

from hydrajax.errors import HydrajaxError
from hydrajax.questions.evaluate import (
    MT_BENCH,
    RESAMPLES,
    AnswerFiles,
    Contender,
    Prompter,
    evaluate,
    speedup_interval,
    summarise,
)
from hydrajax.questions.sets import Question
from hydrajax.text.answers import Generation

QUESTIONS = [
    Question(81, "writing", ("one", "two")),
    Question(82, "math", ("three",)),
    Question(83, "writing", ("four", "five", "six")),
    Question("x/4", "math", ("seven",)),
]
SETTINGS = {"rule": "greedy", "tree": [[0], [0, 0]]}
PLAIN, FAST = "tiny-autoregressive", "tiny-hydra"


class Decoder:
    """Says the sum and the count of the prompt's ids and three more tokens; a step takes 10 ms and makes ``per_step``.

    calls: the prompts and seeds it was given. log: is shared, and gets the name at every call.
    """

    def __init__(self, name: str, per_step: int, log: list[str] | None = None):
        self.name, self.per_step, self.calls, self.log = name, per_step, [], [] if log is None else log

    def __call__(self, ids: list[int], seed: int) -> Generation:
        self.calls.append((ids, seed))
        self.log.append(self.name)
        output = [sum(ids) % 97, len(ids) % 97, seed % 97, 5, 6]
        steps = -(-len(output) // self.per_step)
        lengths = [min(self.per_step, len(output) - step * self.per_step) for step in range(steps)]
        text = f" says {' '.join(map(str, output))} ü\n"
        return Generation(ids, output, text, steps, lengths, len(output), 0.01 * steps, "length")

    def contender(self) -> Contender:
        return Contender(self.name, self)


def words(messages: list[dict[str, str]]) -> list[int]:
    """BOS (1), then an id for every character, with the role in front."""
    return [1] + [ord(c) for m in messages for c in f"{m['role']}:{m['content']}\n"]


PROMPTER = Prompter(words, context=256, max_new_tokens=56, bos_id=1)


def run(folder, questions=QUESTIONS, fast=2, settings=SETTINGS, **more) -> AnswerFiles:
    decoders = Decoder(PLAIN, 1), Decoder(FAST, fast)
    files = AnswerFiles(folder, [PLAIN, FAST], settings)
    evaluate(questions, [decoder.contender() for decoder in decoders], PROMPTER, files, **more)
    return files


def lines_of(folder, model_id):
    return [json.loads(line) for line in (folder / f"{model_id}.jsonl").read_text().splitlines()]


def without_chance(record: dict) -> dict:
    """A line without its time stamp and its random id."""
    return {key: value for key, value in record.items() if key not in ("answer_id", "tstamp")}


# --- what the published scripts read ----------------------------------------------------------------------------------


def spec_bench_speed(path, base_path, tokenizer, task):
    """As ``speed`` of hemingkx/Spec-Bench, evaluation/speed.py (commit 132ba4c): speeds, ratio, accepted tokens."""

    def read(name):
        with open(name, encoding="utf-8") as file:
            records = [json.loads(line) for line in file]
        if task == "mt_bench":
            return [record for record in records if record["category"] in MT_BENCH]
        return [record for record in records if task in ("overall", record["category"])]

    speeds, accepted, plain_speeds = [], [], []
    for record in read(path):
        choice = record["choices"][0]
        speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
        accepted.extend(choice["accept_lengths"])
    for record in read(base_path):
        choice = record["choices"][0]
        count = sum(len(tokenizer(text)) - 1 for text in choice["turns"])  # the baseline's are counted anew, less BOS
        plain_speeds.append(count / sum(choice["wall_time"]))
    return np.mean(speeds), np.mean(speeds) / np.mean(plain_speeds), np.mean(accepted)


def fastchat_answers(folder) -> dict:
    """As ``load_model_answers`` of lm-sys/FastChat, fastchat/llm_judge/common.py (commit 007ecd0)."""
    answers = {}
    for name in sorted(glob.glob(os.path.join(folder, "*.jsonl"))):
        with open(name) as file:
            answers[os.path.basename(name)[:-6]] = {line["question_id"]: line for line in map(json.loads, file)}
    return answers


def fastchat_prompts(questions, answers, model) -> list[str]:
    """What ``check_data`` and ``run_judge_single`` take of an answer, and the match's name in gen_judgment.py."""
    prompts = []
    for question in questions:
        assert question.question_id in answers[model]
        answer = answers[model][question.question_id]
        assert answer["model_id"] == model
        turns = answer["choices"][0]["turns"]
        said = zip(question.turns, turns, strict=True)
        prompts.append("\n".join("Q: {}\nA: {}".format(*pair) for pair in said))
    return prompts


def reorganised(path) -> list[str]:
    """As ``reorg_answer_file`` of all of them, which Medusa's and EAGLE's scripts call at the end."""
    with open(path) as file:
        by_id = {json.loads(line)["question_id"]: line for line in file}
    return [by_id[question_id] for question_id in sorted(by_id)]


def test_the_files_hold_what_published_scripts_read(tmp_path):
    questions = QUESTIONS[:3]
    files = run(tmp_path, questions, repeats=2)
    fast, plain = (tmp_path / f"{name}.jsonl" for name in (FAST, PLAIN))

    # Five tokens of 10 ms each, against three steps of 2, 2 and 1. The texts have seven words.
    speed, ratio, accepted = spec_bench_speed(fast, plain, lambda text: text.split()[:6], "overall")
    assert (speed, accepted) == (pytest.approx(5 / 0.03), pytest.approx(5 / 3))
    assert ratio == pytest.approx(5 / 3)
    assert spec_bench_speed(fast, plain, str.split, "math")[2] == pytest.approx(5 / 3)
    assert spec_bench_speed(fast, plain, str.split, "mt_bench")[2] == pytest.approx(5 / 3)

    answers = fastchat_answers(tmp_path)
    assert set(answers) == {PLAIN, FAST}  # and no other file of the directory is taken for a model's
    prompts = fastchat_prompts(questions, answers, FAST)
    assert prompts[0].count("A: says ") == 2
    assert prompts[0].startswith("Q: one\nA: says ")
    assert reorganised(fast) == fast.read_text().splitlines(keepends=True)
    assert fast.read_bytes().isascii()

    for model_id in (PLAIN, FAST):
        for question, record in zip(questions, lines_of(tmp_path, model_id), strict=True):
            assert list(record) == ["question_id", "category", "answer_id", "model_id", "choices", "tstamp"]
            (choice,) = record["choices"]
            assert choice["index"] == 0
            for field in ("turns", "decoding_steps", "idxs", "new_tokens", "wall_time", "output_ids", "wall_times"):
                assert len(choice[field]) == len(question.turns)
            assert choice["idxs"] == [steps - 1 for steps in choice["decoding_steps"]]  # Medusa, EAGLE count from 0
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
            assert all(isinstance(length, int) for length in choice["accept_lengths"])
            assert all(text == text.strip() for text in choice["turns"])
            assert files.answers[model_id][question.question_id] == record


# --- asking -----------------------------------------------------------------------------------------------------------


def test_contenders_take_turns_in_changing_order_and_meet_no_width_untimed(tmp_path):
    log: list[str] = []
    contenders = [Decoder(name, 1, log).contender() for name in "abc"]
    files = AnswerFiles(tmp_path, "abc", {})
    evaluate([QUESTIONS[1], QUESTIONS[3]], contenders, PROMPTER, files, repeats=2)
    # Both prompts are of one width: decoded once untimed, by each.
    assert "".join(log) == "abc" + "abcbca" + "bcacab"


def test_each_continues_its_own_conversation_with_the_same_seeds(tmp_path):
    plain, fast = Decoder(PLAIN, 1), Decoder(FAST, 2)
    files = AnswerFiles(tmp_path, [PLAIN, FAST], {})
    evaluate(QUESTIONS[:1], [plain.contender(), fast.contender()], PROMPTER, files, seed=3)
    assert plain.calls == fast.calls
    first, second = (json.dumps(ids) for ids in (plain.calls[0][0], plain.calls[-1][0]))
    said = files.answers[PLAIN][81]["choices"][0]["turns"][0]
    history = [{"role": "user", "content": "one"}, {"role": "assistant", "content": said}]
    assert json.loads(first) == words(history[:1])
    assert json.loads(second) == words([*history, {"role": "user", "content": "two"}])
    seeds = list(dict.fromkeys(seed for _, seed in plain.calls))
    assert len(seeds) == 2  # a draw of its own for each turn

    again = Decoder(PLAIN, 1)
    evaluate(QUESTIONS[1::-1], [again.contender()], PROMPTER, AnswerFiles(tmp_path / "b", [PLAIN], {}), seed=3)
    assert set(seeds) < {seed for _, seed in again.calls}  # whatever else is asked, and in whatever order


def test_long_prompts_lose_their_beginning_but_not_bos():
    prompter = Prompter(lambda messages: [1, *range(10, 30)], context=16, max_new_tokens=8, bos_id=1)
    assert prompter([]) == ([1, *range(23, 30)], 13)
    assert Prompter(prompter.encode, 16, 8)([]) == ([*range(22, 30)], 13)
    assert Prompter(prompter.encode, 29, 8, 1)([]) == ([1, *range(10, 30)], 0)
    with pytest.raises(
        HydrajaxError, match="--max-new-tokens: must be at most 14, found 15: the model's context of 16"
    ):
        Prompter(prompter.encode, 16, 15)


def test_a_question_that_cannot_be_encoded_is_named(tmp_path):
    def refuse(messages):
        raise HydrajaxError("the chat template failed: no")

    files = AnswerFiles(tmp_path, [PLAIN], {})
    with pytest.raises(HydrajaxError, match='question "x/4": the chat template failed: no'):
        evaluate(QUESTIONS[3:], [Decoder(PLAIN, 1).contender()], Prompter(refuse, 256, 8), files)


# --- taking up --------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.mark.parametrize("calls", [0, 3, 9, 14, 20, 25])
def test_a_run_that_was_broken_off_is_taken_up(tmp_path, calls):
    whole, part = tmp_path / "whole", tmp_path / "part"
    run(whole, repeats=2)
    decoders = [Decoder(PLAIN, 1, log := []), Decoder(FAST, 2, log)]

    def broken(decoder):
        def decode(ids, seed):
            if len(log) == calls:
                raise Killed
            return decoder(ids, seed)

        return Contender(decoder.name, decode)

    files = AnswerFiles(part, [PLAIN, FAST], SETTINGS)
    with pytest.raises(Killed):
        evaluate(QUESTIONS, list(map(broken, decoders)), PROMPTER, files, repeats=2)
    asked = []
    files = run(part, repeats=2, on_question=lambda: asked.append(1))
    assert len(asked) == len(QUESTIONS)
    assert files.done == {question.question_id for question in QUESTIONS}
    for model_id in (PLAIN, FAST):
        assert list(map(without_chance, lines_of(part, model_id))) == list(
            map(without_chance, lines_of(whole, model_id))
        )


def test_what_a_kill_may_leave_is_mended(tmp_path):
    run(tmp_path)
    plain, fast = (tmp_path / f"{name}.jsonl" for name in (PLAIN, FAST))
    whole = {path: path.read_bytes() for path in (plain, fast)}
    lines = whole[fast].splitlines(keepends=True)
    fast.write_bytes(b"".join(lines[:2]) + lines[2][:40])  # killed while it wrote the third answer of the second file
    files = AnswerFiles(tmp_path, [PLAIN, FAST], SETTINGS)
    assert files.done == {81, 82}
    assert fast.read_bytes() == b"".join(lines[:2])
    assert plain.read_bytes() == b"".join(whole[plain].splitlines(keepends=True)[:2])
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([plain.name, fast.name, "settings.json"])

    run(tmp_path)
    for path, content in whole.items():
        wanted = [without_chance(json.loads(line)) for line in content.splitlines()]
        assert [without_chance(json.loads(line)) for line in path.read_bytes().splitlines()] == wanted


def test_a_finished_run_asks_nothing_and_may_grow(tmp_path):
    run(tmp_path, QUESTIONS[:2])
    content = (tmp_path / f"{FAST}.jsonl").read_text()
    decoder = Decoder(PLAIN, 1)
    files = AnswerFiles(tmp_path, [PLAIN, FAST], SETTINGS)
    evaluate(QUESTIONS[:2], [decoder.contender()], PROMPTER, files)
    assert decoder.calls == []
    run(tmp_path)
    assert (tmp_path / f"{FAST}.jsonl").read_text().startswith(content)
    assert len(lines_of(tmp_path, FAST)) == 4


def test_other_settings_are_refused(tmp_path):
    AnswerFiles(tmp_path, [PLAIN], {"rule": "typical"})  # no answers yet: nothing to mix
    run(tmp_path)
    before = (tmp_path / f"{FAST}.jsonl").read_bytes()
    found = r'other settings: rule was "greedy", now it is "exact"; take another directory, or remove'
    with pytest.raises(HydrajaxError, match=found):
        run(tmp_path, settings=SETTINGS | {"rule": "exact"})
    with pytest.raises(HydrajaxError, match="other settings: seed was null, now it is 1"):
        run(tmp_path, settings=SETTINGS | {"seed": 1})
    with pytest.raises(HydrajaxError, match=r"other settings: tree was \[\[0\], \[0, 0\]\], now it is null"):
        run(tmp_path, settings={"rule": "greedy"})
    (tmp_path / "settings.json").unlink()
    with pytest.raises(HydrajaxError, match="holds answers, but no readable settings"):
        run(tmp_path)
    assert (tmp_path / f"{FAST}.jsonl").read_bytes() == before


@pytest.mark.parametrize("damage", [b"{}", b"[]", b"", b"nonsense", b'{"choices": [{"turns": []}], "question_id": 5}'])
def test_a_damaged_line_is_named(tmp_path, damage):
    run(tmp_path)
    path = tmp_path / f"{FAST}.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], damage, *lines[2:]]) + b"\n")
    with pytest.raises(HydrajaxError, match=r"tiny-hydra\.jsonl line 2: is damaged, or no answer of this program"):
        run(tmp_path)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HydrajaxError, match=r"--output: .*file is a file, the name of a directory is needed"):
        AnswerFiles(tmp_path / "file", [PLAIN], {})
    with pytest.raises(HydrajaxError, match=r"--output: cannot make .*: Not a directory"):
        AnswerFiles(tmp_path / "file" / "below", [PLAIN], {})


# --- figures ----------------------------------------------------------------------------------------------------------


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
    evaluate(QUESTIONS[1:2], [Contender(PLAIN, decode)], PROMPTER, files, repeats=3)
    (choice,) = files.answers[PLAIN][82]["choices"]
    assert (choice["wall_time"], choice["wall_times"]) == ([2.0], [[1.0, 5.0, 2.0]])


def test_different_outputs_are_counted(tmp_path):
    plain, fast = Decoder(PLAIN, 1), Decoder(FAST, 2)

    def wrong(ids, seed):
        answer = fast(ids, seed)
        if "five" in "".join(map(chr, ids)):
            answer.output_ids[-1] += 1
        return answer

    files = AnswerFiles(tmp_path, [PLAIN, FAST], {})
    evaluate(QUESTIONS, [plain.contender(), Contender(FAST, wrong)], PROMPTER, files)
    results = summarise(files.answers, QUESTIONS, PLAIN, same_outputs=True)[FAST]
    assert {name: row.different for name, row in results.items()} == {"writing": 1, "math": 0, "overall": 1}
    assert [row.equal for row in results.values()] == [False, True, False]


def test_repeats_that_differ_are_counted(tmp_path):
    count = iter(range(100))

    def unsteady(ids, seed):
        return Generation(ids, [max(next(count), 3)], "a", 1, [1], 1, 1.0)

    files = AnswerFiles(tmp_path, [PLAIN], {})
    evaluate(QUESTIONS[3:], [Contender(PLAIN, unsteady)], PROMPTER, files, repeats=4)
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


def test_the_interval_has_the_width_of_the_delta_method():
    """Many questions: the ratio of sums is nearly normal, with the variance of its linear part."""
    random = np.random.default_rng(5)
    count = 400
    totals = random.uniform(50, 150, (4, count))
    speedup, low, high = speedup_interval(*totals)
    tokens, seconds, plain_tokens, plain_seconds = (row / row.mean() for row in totals)
    error = speedup * np.std(tokens - seconds - plain_tokens + plain_seconds) / np.sqrt(count)
    assert [low, high] == pytest.approx([speedup - 1.96 * error, speedup + 1.96 * error], abs=0.25 * error)


def test_no_interval_of_one_question():
    one = np.ones(1)
    assert speedup_interval(6 * one, 2 * one, 3 * one, 2 * one) == (2.0, None, None)
