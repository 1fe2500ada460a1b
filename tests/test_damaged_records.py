"""Whatever stands in a record that is read back: it is used, done without, or refused in one line that names its file.

Checkpoints of models and heads have their own tests (`tests/formats/test_fuzz.py`).
"""

import copy
import io
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax.numpy as jnp
import pytest
from rich.console import Console

from helpers import answering
from helpers.damage import places
from helpers.report_examples import RATE, result, write_to
from hydrajax import stored_trees
from hydrajax.bench.questions.summary import summarise
from hydrajax.bench.report.markdown import write_report
from hydrajax.bench.report.outputs import find_results
from hydrajax.bench.report.records import of_evaluate, of_tree_search
from hydrajax.decoding.program import Program
from hydrajax.drafters.lookup import PromptLookup
from hydrajax.errors import HydrajaxError
from hydrajax.formats.directories import exported
from hydrajax.machine import machine
from hydrajax.text.records import OBJECT
from hydrajax.train.checkpoints import RECORD, TrainCheckpoints
from hydrajax.train.data import hidden_cache
from hydrajax.train.distill.distill_records import RecordFile
from hydrajax.train.metrics import TrainMetrics, read_metrics
from hydrajax.train.run_config import TrainConfig, load_config
from hydrajax.train.train_loop import check_settings, settings_of
from hydrajax.trees import presets
from hydrajax.trees.dynamic import guesses_of
from hydrajax.trees.tree_json import read_tree
from scoring.score_files import score_answers
from scoring.score_protocol import Scored

DEEP = 900 * "[" + 900 * "]"  # the deepest nesting that Python reads
MISSING = object()
VALUES = [
    *([], {}, [1], {"a": 1}, None, True, "", "1", "1e5", -1, 2.5, 10**30, 2**31),
    *(float("nan"), float("inf"), [[]], [None], [{}], {"a": None}, "x" * 5000, "a\nb\u2028", "\ud800", MISSING),
]  # fmt: skip


def with_value(content, place: tuple, value):
    """Return a copy of nested JSON with another value at a place, or without it if the value is `MISSING`."""
    if not place:
        return value
    outer = changed = copy.deepcopy(content)
    for key in place[:-1]:
        outer = outer[key]
    if value is MISSING:
        del outer[place[-1]]
    else:
        outer[place[-1]] = value
    return changed


def wrong_fields(text: str, few: bool = False) -> Iterator[tuple[str, str]]:
    """Yield ``(description, text)`` with one error each."""
    content = json.loads(text)
    firsts = [place for place in places(content) if all(key == 0 for key in place if isinstance(key, int))]
    for place in [(), *firsts]:  # only the first item of lists
        for value in VALUES[::3] if few else VALUES:
            if place or value is not MISSING:
                what = "missing" if value is MISSING else repr(value)[:20]
                yield f"{place} is {what}", json.dumps(with_value(content, place, value))
        if not few:
            yield f"{place} is deep", json.dumps(with_value(content, place, "DEEP")).replace('"DEEP"', DEEP)


def wrong_texts(text: str) -> Iterator[tuple[str, bytes]]:
    """Yield the whole text truncated, empty or replaced."""
    whole = text.encode()
    yield "truncated", whole[: len(whole) // 2]
    yield "without its last byte", whole[:-1]
    yield "empty", b""
    yield "NUL", bytes(len(whole))
    yield "binary", bytes(range(256)) * 9
    yield "UTF-16", text.encode("utf-16")
    yield "too deep", 100_000 * b"["
    yield "digits", 9999 * b"7"
    yield "twice", whole + whole


class Record(NamedTuple):
    """make: writes the record, and what belongs to it, into a directory and returns its path. read: the directory."""

    make: Callable[[Path], Path]
    read: Callable[[Path], object]


def text_at(path: Path, *lines) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


WRITTEN = {"conversation": 0, "turn": 0, "prompt_ids": [1, 2], "output_ids": [3]}


def evaluated(folder: Path) -> Path:
    answering.run(folder)
    return folder / f"{answering.FAST}.jsonl"


def taken_up(folder: Path):
    files = answering.run(folder)
    return summarise(files.answers, answering.QUESTIONS, answering.PLAIN, same_outputs=True)


def distilled(folder: Path) -> Path:
    RecordFile(folder / "out.jsonl", {"seed": 1, "temperatures": [0, 1]}).add([WRITTEN, WRITTEN | {"turn": 1}])
    return folder / "out.jsonl"


def gone_on_with(folder: Path) -> None:
    file = RecordFile(folder / "out.jsonl", {"seed": 1, "temperatures": [0, 1]})
    file.output((0, 0), [1, 2])
    file.add([WRITTEN])


class Length:
    """Of an answer's text."""

    def of(self, question, texts):
        return Scored({"length": float(len(texts[0]))}, {"texts": list(texts)})

    def identity(self):
        return {"score": "length"}


def scored(folder: Path) -> Path:
    rescored(folder)
    return folder / "scores" / "length" / "plain.jsonl"


def rescored(folder: Path):
    answers = {"plain": {q.question_id: {"choices": [{"output_ids": [[1, 2]]}]} for q in answering.QUESTIONS}}
    return score_answers("length", Length(), answering.QUESTIONS, answers, folder, lambda ids: "ab")


def logged(folder: Path) -> Path:
    lines = [{"step": step, "kind": "train", "loss": 0.5, "top1": [0.1, 0.2]} for step in range(1, 4)]
    return text_at(folder / "metrics.jsonl", *lines)


def resumed(folder: Path) -> None:
    with TrainMetrics(folder, 2, 9, Console(file=io.StringIO())) as metrics:
        metrics.log(3, "train", {"loss": 0.1})
    assert read_metrics(folder / "metrics.jsonl")[-1]["step"] == 3


CONFIG = {
    "task": "heads", "model": "x", "output": "y", "steps": 3, "draft": {"heads": "hydra", "num_draft_heads": 2},
    "data": {"files": ["a.txt"], "format": "text"}, "optimizer": {"lr": 3e-3},
}  # fmt: skip


DYNAMIC = {"dynamic": {"nodes": 6, "expansions": 1, "top_k": 3}}


def read_every_way(folder: Path) -> None:
    path = folder / "tree_b1.json"
    tree = read_tree(path)
    assert tree == presets.by_name(str(path))
    with suppress(HydrajaxError):  # deeper or wider than a drafter is, which this file cannot know
        tree.check(4, 300)
        guesses_of(tree)  # makes the arrays of a static one


def searched(folder: Path) -> Path:
    rows = [{"name": "3", "nodes": 3, "speedup": 1.3, "expected_tokens_per_step": 1.5, **RATE}]
    here = {"machine": machine(), "measured": rows, "date": "2026-01-02", "arguments": {"draft": "d", "batch_size": 1}}
    return text_at(folder / "tree_b1.json", {"choices": [[0], [0, 0]], "provenance": here} | of_tree_search(here))


def searched_here(folder: Path) -> None:
    program = Program(PromptLookup(2, 4), presets.chain(2))
    executor = SimpleNamespace(program=program, model=SimpleNamespace(quantize=None))
    choice = stored_trees._searched_here(executor, folder, 1)
    str(choice)


def remembered(folder: Path) -> Path:
    stored_trees._write(folder / "m.json", stored_trees.FastestTree(presets.chain(2), "chain-2", 1.2, None))
    return folder / "m.json"


def reported(folder: Path) -> None:
    found, _ = find_results(folder)
    write_report(found, folder / "REPORT.md")


def result_file(folder: Path) -> Path:
    write_to(folder / "r.json", result("speed", "hydra figure 2", remarks=["one"]))
    return folder / "r.json"


def summary(folder: Path) -> Path:
    figures = {"questions": 3, **RATE, "equal": True}
    content = {
        "machine": {},
        "arguments": {"set": "mt_bench", "rule": "greedy"},
        "results": {"a": {"overall": figures}},
    }
    return text_at(folder / "summary.json", content | of_evaluate(content))


def exported_before(folder: Path) -> Path:
    replaced(folder)
    return folder / "heads" / "config.json"


def replaced(folder: Path) -> None:
    with exported(folder / "heads", overwrite=False) as (new, config):
        (new / "x").write_text("")
        config["y"] = 1


RECORDS = {
    "answers of evaluate": Record(evaluated, taken_up),
    "settings of evaluate": Record(lambda folder: evaluated(folder).with_name("settings.json"), taken_up),
    "records of distill": Record(distilled, gone_on_with),
    "settings of distill": Record(lambda f: distilled(f).with_name("out.jsonl.settings.json"), gone_on_with),
    "scores": Record(scored, rescored),
    "metrics": Record(logged, lambda folder: read_metrics(folder / "metrics.jsonl")),
    "metrics of a resumed run": Record(logged, resumed),
    "metrics in a report": Record(
        lambda folder: text_at(
            folder / "metrics.jsonl", {"step": 3, "kind": "eval", **{f"top{n}": [0.5] for n in range(1, 6)}}
        ),
        reported,
    ),
    "training settings": Record(
        lambda folder: text_at(folder / "c.yaml", CONFIG), lambda folder: load_config(folder / "c.yaml", ["seed=1"])
    ),
    "hidden states": Record(
        lambda folder: text_at(folder / "hidden.json", {"shape": [1, 2], "dtype": "float32", "rows": "abc"}),
        lambda folder: hidden_cache._known(folder / "hidden.json"),
    ),
    "tree": Record(lambda folder: text_at(folder / "tree_b1.json", [[0], [0, 0], [1]]), read_every_way),
    "dynamic tree": Record(lambda folder: text_at(folder / "tree_b1.json", DYNAMIC), read_every_way),
    "searched tree": Record(searched, searched_here),
    "searched tree in a report": Record(searched, reported),
    "tree that was measured here": Record(remembered, lambda folder: str(stored_trees._read(folder / "m.json"))),
    "result": Record(result_file, reported),
    "summary of evaluate": Record(summary, reported),
    "export": Record(exported_before, replaced),
}


def one_line_about(error: HydrajaxError, path: Path) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 1000
    assert path.name in str(error) or str(path.parent) in str(error)


def read_whatever(record: Record, folder: Path, path: Path, text: bytes, what: str) -> HydrajaxError | None:
    """Anything but `HydrajaxError` fails the test, naming what was wrong."""
    path.write_bytes(text)
    try:
        record.read(folder)
    except HydrajaxError as error:
        return error
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    return None


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr("hydrajax.files.os.fsync", lambda file: None)
    monkeypatch.setattr("hydrajax.bench.questions.summary.RESAMPLES", 9)


@pytest.mark.slow
def test_any_field_may_be_wrong(tmp_path):
    for name in RECORDS:  # PyYAML takes its time, and so does asking anew
        check_fields(name, tmp_path / name, few=name in ("training settings", "answers of evaluate"))


def made(record: Record, folder: Path) -> tuple[Path, dict[Path, bytes]]:
    """Write a record; return its path and the content of all files."""
    folder.mkdir(exist_ok=True)
    return record.make(folder), {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def check_fields(name: str, folder: Path, few: bool) -> None:
    record, refused = RECORDS[name], 0
    made(record, folder)
    record.read(folder)
    path, whole = made(record, folder)
    lines = path.read_text(encoding="utf-8").split("\n")
    in_lines = path.suffix == ".jsonl"
    chosen = 1 if in_lines and len(lines) > 2 else 0
    for what, text in wrong_fields(lines[chosen] if in_lines else path.read_text(encoding="utf-8"), few):
        changed = "\n".join([*lines[:chosen], text, *lines[chosen + 1 :]]) if in_lines else text
        error = read_whatever(record, folder, path, changed.encode(), f"{name}: {what}")
        if error is not None:
            refused += 1
            if name != "training settings":  # whose messages name the setting alone
                one_line_about(error, path)
        restore(folder, whole)
    assert refused or name in DONE_WITHOUT


def test_the_whole_text_may_be_wrong(tmp_path):
    for name, record in RECORDS.items():
        folder = tmp_path / name
        path, whole = made(record, folder)
        for what, text in wrong_texts(path.read_text(encoding="utf-8")):
            error = read_whatever(record, folder, path, text, f"{name}: {what}")
            if error is not None:
                one_line_about(error, path)
            restore(folder, whole)


# Of these a damaged one is made anew, with or without a word.
DONE_WITHOUT = {"scores", "metrics of a resumed run", "hidden states", "tree that was measured here"}
DONE_WITHOUT |= {"searched tree in a report", "summary of evaluate", "metrics in a report"}


def restore(folder: Path, whole: dict[Path, bytes]) -> None:
    for file in [file for file in folder.rglob("*") if file.is_file() and file not in whole]:
        file.unlink()
    for file, content in whole.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def test_a_checkpoint_with_a_wrong_record_is_as_good_as_the_one_before(tmp_path):
    """Also of an older version, without a checksum: then nothing but the fields themselves can tell."""
    settings = settings_of(TrainConfig(output="", model="", steps=1))
    how = {"keep": 3, "higher_is_better": True, "meta_fields": {"settings": OBJECT}}
    with TrainCheckpoints(tmp_path, **how) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.arange(3.0)}, {"settings": settings}, 0.5)
    first, second = (json.loads((tmp_path / step / RECORD).read_text()) for step in ("1", "2"))
    told, whole = 0, json.dumps({name: value for name, value in second.items() if name != "checksum"})
    with TrainCheckpoints(tmp_path, **how) as checkpoints:
        for what, text in [*wrong_fields(whole, few=True), *wrong_texts(whole)]:
            (tmp_path / "2" / RECORD).write_bytes(text if isinstance(text, bytes) else text.encode())
            meta = checkpoints.meta()
            told += meta == first["meta"]
            assert isinstance(meta["settings"], dict), what
            with suppress(HydrajaxError):
                check_settings(meta, settings)
    assert told > 50
