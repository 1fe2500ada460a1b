"""`hydrajax evaluate`: several drafts in one run, its files, its figures, and a run that is killed and taken up."""

import csv
import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import pytest

import hydrajax
from helpers.outputs import write_lines
from hydrajax import plugins
from hydrajax.bench.questions.contenders import Answerer, contenders
from hydrajax.decoding.acceptance import Greedy
from hydrajax.decoding.parameters import parameters_as_arrays
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.request import Request
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.locking import in_use
from hydrajax.trees import presets

TURNS = ["the tree", "a base"]
QUESTIONS = [
    {"question_id": 5, "category": "trees", "turns": TURNS},
    {"question_id": 6, "category": "trees", "turns": ["tree"]},
    {"question_id": 7, "category": "cafés", "turns": ["café"]},
]
QUICK = ["--max-new-tokens", 8]


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    return write_lines(tmp_path_factory.mktemp("set") / "mine.jsonl", QUESTIONS)


@pytest.fixture
def arguments(base, heads, wide_tree, questions):
    return ["evaluate", "--base", base, "--draft", heads, "--tree", wide_tree, "--set", questions, *QUICK]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_chance(record: dict) -> dict:
    """An answer without what differs from run to run: its times, and its random id."""
    choice = {key: value for key, value in record["choices"][0].items() if not key.startswith("wall_time")}
    return {**record, "choices": [choice], "answer_id": None, "tstamp": None}


@pytest.mark.slow
def test_several_trees_in_one_run(program, arguments, base, heads, tokenizer, tmp_path):
    result = program(*arguments, "--tree", "chain-1", "--repeats", 2, "--output", tmp_path)
    plain, wide, chain = (f"tiny-{name}" for name in ("autoregressive", f"{heads.name}-wide", f"{heads.name}-chain-1"))
    files = {f"{name}.jsonl" for name in (plain, wide, chain)} | {"settings.json", "summary.json"}
    assert {path.name for path in tmp_path.iterdir()} == files

    loaded = hydrajax.load(base)
    for model_id in (plain, wide, chain):
        records = read(tmp_path / f"{model_id}.jsonl")
        assert [record["question_id"] for record in records] == [5, 6, 7]
        first = records[0]["choices"][0]
        history = [{"role": "user", "content": TURNS[0]}, {"role": "assistant", "content": first["turns"][0]}]
        history += [{"role": "user", "content": TURNS[1]}]
        for turn, messages in enumerate((history[:1], history)):
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            (expected,) = hydrajax.generate(loaded.executor(loaded.program(max_new_tokens=8)), [ids])
            assert first["output_ids"][turn] == expected.output_ids
            assert first["turns"][turn] == expected.text.strip()
            assert first["prompt_tokens"][turn] == len(ids)
        assert all(len(times) == 2 for times in first["wall_times"])

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["baseline"] == plain
    assert list(summary["results"]) == [plain, wide, chain]
    assert list(summary["results"][wide]) == ["trees", "cafés", "overall"]
    overall = summary["results"][wide]["overall"]
    assert (overall["questions"], overall["equal"]) == (3, True)
    assert overall["tokens_per_step"] > 1
    assert f"{wide}\n" in result.out.replace(" ", "").replace("\r", "")
    assert f"{overall['tokens_per_step']:.2f}" in result.out
    assert all(len(line) <= 120 for line in result.out.splitlines())


@parameters_as_arrays
@dataclass(frozen=True)
class Careless(Greedy):
    """Takes the second-best token where a tree was judged."""

    def accept(self, verified, keys):
        accepted = super().accept(verified, keys)
        return accepted if verified.proposal.tree.size == 1 else accepted._replace(bonus_token=accepted.bonus_token ^ 1)


def test_a_wrong_rule_is_found_out(program, arguments, monkeypatch, tmp_path):
    monkeypatch.setitem(plugins.ADDED["rules"], "greedy", Careless)
    result = program(*arguments, "--output", tmp_path, "--categories", "cafés")
    assert "NO: 1 differ" in result.out
    summary = json.loads((tmp_path / "summary.json").read_text())
    (plain, drafted) = summary["results"].values()
    assert plain["overall"]["equal"] is True
    assert [(row["equal"], row["different"]) for row in drafted.values()] == [(False, 1), (False, 1)]


@pytest.mark.slow
def test_interrupted_grown_and_refused(program, refused, arguments, monkeypatch, tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    program(*arguments, "--output", whole)
    decode, calls = Answerer.decode, []

    def interrupted(way, ids, seed):
        calls.append(way)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return decode(way, ids, seed)

    monkeypatch.setattr(Answerer, "decode", interrupted)
    result = program(*arguments, "--output", part, "--limit", 2, code=130)
    assert "1 of 2 questions are kept; repeat the command to resume" in result.err
    monkeypatch.undo()
    result = program(*arguments, "--output", part)
    assert "resuming: 1 of 3 questions are answered" in result.err
    for path in whole.glob("*.jsonl"):
        assert list(map(without_chance, read(part / path.name))) == list(map(without_chance, read(path)))

    again = [*arguments, "--output", part]
    refused("answers made with other settings: max_new_tokens: got 9, expected 8", *again, "--max-new-tokens", 9)
    refused("other settings: contenders: got ", *again, "--tree", "root")
    with in_use(part):
        refused(f"--output: {part} is in use by process {os.getpid()} on ", *again)


@pytest.mark.slow
def test_speed_bench_at_two_temperatures(program, arguments, questions, tmp_path):
    """The table that others publish, on standard output and as CSV, next to the usual files."""
    arguments = [f"speed-bench:{questions}" if word == questions else word for word in arguments]
    arguments[arguments.index("--set")] = "--questions"
    for temperature, rule in ((0, "Greedy()"), (1, "ExactSampling(temperature=1.0")):
        folder = tmp_path / str(temperature)
        result = program(*arguments, "--temperature", temperature, "--output", folder)
        header, *rows = csv.reader((folder / "acceptance_lengths.csv").read_text().splitlines())
        assert header == ["Model", "cafés", "trees", "Overall"]
        assert f"acceptance length, {rule}" in result.out
        for name, *cells in rows:
            answers = [record["choices"][0]["accept_lengths"] for record in read(folder / f"{name}.jsonl")]
            trees, cafe = (sum(map(statistics.mean, answers[:2])) / 2, statistics.mean(answers[2]))
            assert cells == [f"{value:.2f}" for value in (cafe, trees, (cafe + trees) / 2)]
            assert f"| {' | '.join([name, *cells])} |" in result.out


@pytest.mark.slow
def test_other_rules(program, arguments, tmp_path):
    for rule in ("exact", "typical", "rejection", "traversal"):
        result = program(*arguments, "--tree", "chain-2", "--rule", rule, "--output", tmp_path / rule)
        results = json.loads((tmp_path / rule / "summary.json").read_text())["results"]
        assert {rows["overall"]["equal"] for rows in results.values()} == ({True} if rule == "exact" else {None})
        assert ("outputs not compared" in result.out) == (rule != "exact")


def test_every_way_has_a_name_of_its_own_and_they_share_the_base(base, heads):
    loaded = hydrajax.load(base)
    trees = [("", presets.chain(1)), ("my tree", presets.chain(2)), ("my tree", presets.cartesian([3]))]
    drafts, request = [str(heads), str(heads)], Request(RejectionSampling(0.7, top_k=5), max_new_tokens=8)
    ways = contenders(loaded, "org/tiny@main", drafts, trees, request)
    one = f"tiny_main-{heads.name}"
    names = [one, f"{one}-my_tree", f"{one}-my_tree-2", f"{one}-2", f"{one}-my_tree-3", f"{one}-my_tree-4"]
    assert [way.model_id for way in ways] == ["tiny_main-autoregressive", *names]
    assert ways[0].executor.request.rule == ExactSampling(0.7, top_k=5)
    assert all(way.executor.params.base is loaded.params.base for way in ways)
    assert ways[1].identity() == ways[4].identity() == ways[1].identity() | {"tree": "0"}
    assert ways[1].identity()["heads"] != ways[0].identity()["heads"]
    lookup = contenders(loaded, "tiny", ["lookup"], [], request.replace(rule=Greedy()))[1]
    assert lookup.model_id == "tiny-lookup"
    assert lookup.executor.program.tree == presets.by_name(PromptLookup().spec.default_tree)
