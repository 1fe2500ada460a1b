"""Answer files: they hold what the published scripts read, and are taken up where a run was broken off.

The readers below are written to what these scripts read, not with anything of the package.
"""

import glob
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.answering import FAST, PLAIN, PROMPTER, QUESTIONS, SETTINGS, Decoder, lines_of, run, without_chance
from helpers.refusals import assert_refused
from hydrajax.bench.questions.answer_files import AnswerFiles
from hydrajax.bench.questions.asking import evaluate
from hydrajax.bench.questions.summary import MT_BENCH


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
    for task in ("math", "mt_bench"):
        assert spec_bench_speed(fast, plain, str.split, task)[2] == pytest.approx(5 / 3)

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


@pytest.mark.parametrize("calls", [0, 9, 20, 25])
def test_a_run_that_was_broken_off_is_taken_up(tmp_path, calls):
    whole, part = tmp_path / "whole", tmp_path / "part"
    run(whole, repeats=2)
    decoders = [Decoder(PLAIN, 1, log := []), Decoder(FAST, 2, log)]

    def broken(decoder):
        def decode(ids, seed):
            if len(log) == calls:
                raise KeyboardInterrupt
            return decoder.decode(ids, seed)

        return SimpleNamespace(model_id=decoder.model_id, decode=decode)

    files = AnswerFiles(part, [PLAIN, FAST], SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        evaluate(QUESTIONS, list(map(broken, decoders)), PROMPTER, files, repeats=2)
    asked = []
    files = run(part, repeats=2, on_question=lambda: asked.append(1))
    assert len(asked) == len(QUESTIONS)
    assert files.done == {question.question_id for question in QUESTIONS}
    for model_id in (PLAIN, FAST):
        found, expected = ([without_chance(line) for line in lines_of(folder, model_id)] for folder in (part, whole))
        assert found == expected


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
    evaluate(QUESTIONS[:2], [decoder], PROMPTER, files)
    assert decoder.calls == []
    run(tmp_path)
    assert (tmp_path / f"{FAST}.jsonl").read_text().startswith(content)
    assert len(lines_of(tmp_path, FAST)) == 4


def test_other_settings_are_refused(tmp_path):
    AnswerFiles(tmp_path, [PLAIN], {"rule": "typical"})  # no answers yet: nothing to mix
    run(tmp_path)
    before = (tmp_path / f"{FAST}.jsonl").read_bytes()
    assert_refused(
        lambda settings: run(tmp_path, settings=settings),
        (
            SETTINGS | {"rule": "exact"},
            'settings: rule: got "exact", expected "greedy"; choose another directory, or remove',
        ),
        (SETTINGS | {"seed": 1}, "other settings: seed: got 1, expected null"),
        ({"rule": "greedy"}, "other settings: tree: got null, expected [[0], [0, 0]]"),
    )
    (tmp_path / "settings.json").unlink()
    assert_refused(run, (tmp_path, "holds answers, but no readable settings"))
    assert (tmp_path / f"{FAST}.jsonl").read_bytes() == before


def test_damaged_lines_and_unusable_places(tmp_path):
    run(tmp_path)
    path = tmp_path / f"{FAST}.jsonl"
    first, _, *others = path.read_bytes().splitlines()
    for damage in (b"{}", b"[]", b"", b"nonsense", b'{"choices": [{"turns": []}], "question_id": 5}'):
        path.write_bytes(b"\n".join([first, damage, *others]) + b"\n")
        message = "tiny-hydra.jsonl line 2: ...; the line is damaged or not from this program"
        assert_refused(run, (tmp_path, message))
    assert_refused(
        AnswerFiles,
        (path, [PLAIN], {}, f"output: ...{FAST}.jsonl is a file, expected a directory"),
        (path / "below", [PLAIN], {}, "output: cannot make ...: Not a directory"),
    )
