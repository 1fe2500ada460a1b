"""What the base writes of seeds: its own words whatever the draft, the same file however often it was killed."""

import copy
import json
import os
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import hydrajax
from helpers.refusals import assert_refused
from helpers.runs import refused
from hydrajax.bench.uncached_forward import all_logits
from hydrajax.cli import main
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.drafters.none import NoDrafter
from hydrajax.locking import in_use
from hydrajax.text.templates import make_encoder
from hydrajax.train.data import dataset
from hydrajax.train.distill.dialogues import DistillSpec, next_batch, write
from hydrajax.train.distill.distill_records import RecordFile
from hydrajax.train.distill.seeds import Seed
from hydrajax.train.losses import IGNORED
from hydrajax.train.run_config import DataConfig
from hydrajax.trees import presets

CHAT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
NEW = 4
SEEDS = [
    Seed("talks.jsonl", 1, turns=("the tree", "of heads")),
    Seed("talks.jsonl", 2, turns=("a branch. the draft grows a tree",), system="draft"),
    Seed("talks.jsonl", 3, turns=("grows", "a", "heads")),
    Seed("talks.jsonl", 5, turns=("heads", "the branch")),
    Seed("talks.jsonl", 6, turns=("of a tree of heads",)),
]
TURNS = {(number, turn) for number, seed in enumerate(SEEDS) for turn in range(len(seed.turns))}


def distill(argv: list[str]) -> int:
    return main(["distill", *argv])


@pytest.fixture(scope="module", autouse=True)
def few_widths():
    """Prompts are padded to 32 or 64 tokens, not to 16: a third fewer programs to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hydrajax.decoding.prompt_batch.SMALLEST_BUCKET", 32)
        yield


@pytest.fixture(scope="module")
def loaded(base):
    loaded = hydrajax.load(base, dtype="float32")
    loaded.tokenizer.chat_template = CHAT
    return loaded


@pytest.fixture(scope="module")
def drafted(loaded):
    return loaded.with_draft("lookup")


def executor(loaded):
    tree = "root" if isinstance(loaded.drafter, NoDrafter) else "chain-2"
    return loaded.executor(loaded.program(tree=tree, rule=ExactSampling, max_new_tokens=NEW))


def distilled(loaded, path, seeds=SEEDS, **changes) -> list[dict]:
    """The records in the file, after all is written that was not yet in it."""
    settings = {"draft": None, "base": "b", "temperatures": (0, 2.0), "new_tokens": NEW}
    writing = DistillSpec(**settings | {"batch_size": 2, "seed": 3} | changes)
    file = RecordFile(path, {"seed": writing.seed})
    outcome = write(executor(loaded), seeds, make_encoder(loaded.tokenizer), writing, file)
    assert not outcome.refused
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(loaded, tmp_path_factory):
    """``(records, bytes of their file)`` of an unbroken run without a draft."""
    path = tmp_path_factory.mktemp("whole") / "out.jsonl"
    return distilled(loaded, path), path.read_bytes()


def outputs(records: list[dict]) -> dict:
    return {(record["conversation"], record["turn"]): record["output_ids"] for record in records}


def greedy(loaded, prompt: list[int], new_tokens: int) -> list[int]:
    """The whole text through the base for every token, no cache and no loop of the package, up to the EOS 0."""
    text = np.zeros((1, 64), np.int32)
    text[0, : len(prompt)] = prompt
    for at in range(len(prompt), len(prompt) + new_tokens):
        text[0, at] = np.argmax(all_logits(loaded.model, loaded.params.base, text[0])[at - 1])
    out = text[0, len(prompt) : len(prompt) + new_tokens].tolist()
    return out[: out.index(0) + 1] if 0 in out else out


def test_every_answer_is_the_bases_own_and_stands_in_the_next_prompt(loaded, whole):
    records, _ = whole
    said = outputs(records)
    assert set(said) == TURNS
    assert len(records) == len(TURNS)
    kinds = {record["temperature"] for record in records}
    assert kinds == {0, 2}
    for record in records:
        number, turn = record["conversation"], record["turn"]
        seed = SEEDS[number]
        messages = [{"role": "system", "content": seed.system}] if seed.system else []
        for before in range(turn):
            answer = loaded.tokenizer.decode(said[number, before], skip_special_tokens=True).strip()
            messages += [{"role": "user", "content": seed.turns[before]}, {"role": "assistant", "content": answer}]
        messages += [{"role": "user", "content": seed.turns[turn]}]
        prompt = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert record["prompt_ids"] == prompt
        if record["temperature"] == 0:
            assert record["output_ids"] == greedy(loaded, prompt, NEW)
            assert (record["rule"], record["seed"]) == ("greedy", None)
        else:
            drawn = {"rule": "exact", "temperature": 2.0, "seed": record["seed"]}
            (alone,) = loaded.generate([prompt], tree=presets.root(), max_new_tokens=NEW, **drawn)
            assert record["output_ids"] == alone.output_ids != greedy(loaded, prompt, NEW)
            assert record["rule"] == "exact"
        ended = record["output_ids"][-1] == 0
        assert record["finish_reason"] == ("eos" if ended else "length")
        assert (record["source"], record["index"]) == (seed.source, seed.index)
        assert (record["draft"], record["base"]) == (None, "b")


@pytest.mark.slow
def test_with_a_draft_it_is_the_same_text(drafted, whole, tmp_path):
    records = distilled(drafted, tmp_path / "out.jsonl", draft="lookup")
    assert outputs(records) == outputs(whole[0])
    assert {record["draft"] for record in records} == {"lookup"}


@pytest.mark.parametrize(("size", "count"), [(1, 5), (2, 3)])
def test_neither_the_batch_nor_the_other_seeds_change_a_record(loaded, whole, tmp_path, size, count):
    records = distilled(loaded, tmp_path / "out.jsonl", SEEDS[:count], batch_size=size)
    by_key = {(record["conversation"], record["turn"]): record for record in whole[0]}
    assert outputs(records).keys() == {key for key in by_key if key[0] < count}
    assert all(record == by_key[record["conversation"], record["turn"]] for record in records)


def test_another_seed_draws_other_tokens(loaded, whole, tmp_path):
    assert outputs(distilled(loaded, tmp_path / "out.jsonl", seed=4, temperatures=(2.0,))) != outputs(whole[0])


@pytest.mark.parametrize("size", [0, 700, -30])
def test_what_was_killed_is_taken_up_and_ends_as_if_unbroken(loaded, whole, tmp_path, size):
    """Killed at any byte, also within a line and between the lines of one batch."""
    path, content = tmp_path / "out.jsonl", whole[1]
    RecordFile(path, {"seed": 3})
    path.write_bytes(content[:size])
    distilled(loaded, path)
    assert path.read_bytes() == content


def test_a_finished_file_is_left_as_it_is_and_may_grow(loaded, whole, tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    distilled(loaded, path, SEEDS[:3])
    before = path.read_bytes()
    records = distilled(loaded, path, SEEDS)
    assert path.read_bytes().startswith(before)
    assert outputs(records) == outputs(whole[0])
    monkeypatch.setattr("hydrajax.train.distill.dialogues.generate", None)  # nothing is left to decode
    assert distilled(loaded, path, SEEDS) == records


def test_damaged_and_foreign_files_are_refused(loaded, tmp_path):
    path, foreign = tmp_path / "out.jsonl", tmp_path / "notes.txt"
    distilled(loaded, path, SEEDS[:1])
    good = path.read_bytes()
    for bad in (b"{}\n", b"not json\n", good.replace(b'"turn": 0', b'"turn": "x"'), good[: len(good) // 2] + b"\n"):
        path.write_bytes(good + bad)
        message = "output: ...out.jsonl line ...: is damaged or not from this program"
        assert_refused(RecordFile, (path, {"seed": 3}, message))
        assert path.read_bytes() == good + bad
    path.write_bytes(good)
    foreign.write_text("a line without an end")
    assert_refused(
        RecordFile,
        (path, {"seed": 4}, "made with other settings: seed: got 4, expected 3; choose another file"),
        (foreign, {}, "notes.txt holds records, but no readable notes.txt.settings.json"),
        (tmp_path, {}, "is not a regular file"),
    )
    assert foreign.read_text() == "a line without an end"
    assert_refused(distilled, (loaded, path, [SEEDS[2]], "answers another prompt than now"))


def test_a_conversation_ends_where_the_context_does_or_the_template_refuses(loaded, tmp_path):
    long, special = "the tree of the draft heads grows " * 12, "<|endoftext|>"
    seeds = [Seed("s", 1, turns=("a", long, "b")), Seed("s", 2, turns=(long,)), Seed("s", 3, turns=("a", special, "b"))]
    assert loaded.tokenizer.eos_token == special
    file, ended = RecordFile(tmp_path / "out.jsonl", {}), []

    def written(new_tokens):
        writing = DistillSpec(draft=None, base="b", temperatures=(0,), new_tokens=new_tokens, batch_size=2, seed=0)
        encoder = make_encoder(loaded.tokenizer)
        return write(executor(loaded), seeds, encoder, writing, file, on_end=lambda: ended.append(1))

    outcome = written(NEW)
    assert (outcome.too_long, len(file), len(ended)) == (2, 2, 3)
    assert outcome.refused == [("s 3", "message 3 contains the text of the special token <|endoftext|>")]
    assert_refused(written, (63, "new_tokens: got 63, expected at most 62"))


def test_a_batch_is_of_one_kind_and_of_about_one_width():
    widths = [16, 64, 32, 32, 16, 32, 128, 32]
    talks = [SimpleNamespace(number=i, width=width, temperature=i % 2) for i, width in enumerate(widths)]
    assert [talk.number for talk in next_batch(talks, 2)] == [0, 4]  # greedy of width 16 fills a batch
    assert [talk.number for talk in next_batch(talks, 3)] == [3, 5, 7]  # three drawn ones of width 32
    assert [talk.number for talk in next_batch(talks, 4)] == [3, 5, 7, 1]  # and the next in width, not a greedy one


def test_training_takes_every_answer_once(loaded, whole, tmp_path):
    path, tokenizer = tmp_path / "out.jsonl", copy.deepcopy(loaded.tokenizer)
    path.write_bytes(whole[1])
    # The tiny base, which has learnt nothing, also says the ids that its padded vocabulary has beyond the tokenizer's.
    tokenizer.add_tokens([f"<{i}>" for i in range(loaded.model.config.vocab_size - len(tokenizer))])
    config = DataConfig(files=(str(path),), format="generations", length=64, held_out=0.0)
    found = dataset.build(config, tokenizer, 0, lambda line: None)
    learnt = sorted(row[row != IGNORED].tolist() for row in found.train.labels)
    assert learnt == sorted(outputs(whole[0]).values())
    for tokens, record in zip(found.train.tokens, whole[0], strict=True):
        text = record["prompt_ids"] + record["output_ids"]
        assert tokens[: len(text)].tolist() == text


def test_the_program_continues_text_and_refuses_to_mix_runs(program, config_file, make_base, tmp_path):
    output = tmp_path / "out.jsonl"
    common = ("--prompt-tokens", 8, "--new-tokens", 6, "--batch-size", 4, "--output", output)

    def run(*arguments, **changes):
        return program("--config", config_file(**changes), *common, *arguments, main=distill)

    result = run("--count", 5)
    assert result.code == 0, result.err
    assert "tokens_per_step 1.00" in result.out
    assert f"{output} has 5 records of 5 beginnings" in result.out
    records = [json.loads(line) for line in output.read_text().splitlines()]
    temperatures = sorted(record["temperature"] for record in records)
    assert temperatures in ([0, 0, 0, 0.7, 0.7], [0, 0, 0.7, 0.7, 0.7])
    assert all(len(record["prompt_ids"]) == 8 and 1 <= len(record["output_ids"]) <= 6 for record in records)
    assert all(record["source"].endswith(".txt") for record in records)

    before = output.read_bytes()
    result = run("--count", 4, "--draft", "lookup")  # nothing of what it writes changes
    assert result.code == 0, result.err
    assert "has 5 records" in result.err
    for arguments, changes, message in (
        (["--seed", 1], {}, "seed: got 1, expected 0"),
        (["seed=1"], {}, "config.seed: got 1, expected 0"),  # it splits the data
        (["--held-out"], {}, "held_out: got true, expected false"),
        ([], {"model": str(make_base(1))}, "base: got "),
    ):
        assert f"made with other settings: {message}" in refused(run(*arguments, **changes))
    with in_use(output):
        line = refused(run("--count", 6))
    assert line.startswith(f"--output: {output} is in use by process {os.getpid()} on ")
    assert output.read_bytes() == before


def test_the_program_answers_conversations_and_says_what_ctrl_c_leaves(
    program, config_file, settings, tmp_path, monkeypatch
):
    talks, output, add = tmp_path / "talks.jsonl", tmp_path / "out.jsonl", RecordFile.add
    talks.write_text("".join(json.dumps({"turns": list(seed.turns)}) + "\n" for seed in SEEDS))
    data = settings["data"] | {"template": "plain"}
    common = ("--config", config_file(data=data), "--new-tokens", 6, "--temperatures", "0", "--output", output)
    drafted = ("--seeds", talks, "--draft", "lookup", "--tree", "chain-2", "--batch-size", 2)

    def interrupted(self, records):
        add(self, records)
        raise KeyboardInterrupt

    monkeypatch.setattr(RecordFile, "add", interrupted)
    result = program(*common, *drafted, main=distill)
    assert result.code == 130
    assert f"2 records are kept in {output}; repeat the command to resume\n" in result.err
    monkeypatch.setattr(RecordFile, "add", add)
    result = program(*common, *drafted, main=distill)
    assert result.code == 0, result.err
    assert f"{output} has {len(TURNS)} records of 5 conversations" in result.out
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert {(record["conversation"], record["turn"]) for record in records} == TURNS
    assert {(record["draft"], record["source"]) for record in records} == {("lookup", "talks.jsonl")}

    # The conversations may be the config's own data, too.
    record = {"messages": [{"role": "user", "content": "the tree"}, {"role": "assistant", "content": "x"}]}
    talks.write_text(2 * (json.dumps(record) + "\n"))
    data = {"files": [str(talks)], "format": "messages", "template": "plain", "length": 32, "held_out": 0.0}
    other = ("--output", tmp_path / "other.jsonl", "--new-tokens", 6, "--batch-size", 2, "--temperatures", "0")
    result = program("--config", config_file(data=data), *other, main=distill)
    assert result.code == 0, result.err
    assert "other.jsonl has 2 records of 2 conversations" in result.out


REFUSED = [
    *(
        (["--temperatures", text], f"--temperatures: got '{text}', expected comma-separated numbers from 0 up")
        for text in ("", "a", "0,-1", "0.5,,1", "nan", "inf")
    ),
    (["--prompt-tokens", 99999], "--prompt-tokens: got 99999, longer than every document"),
    (["--prompt-tokens", 60], "--prompt-tokens: got 60, expected at most 58 with 6 new tokens"),
    (["--new-tokens", 63], "--new-tokens: got 63, expected at most 62"),
    (["--seeds", "none.jsonl"], "--seeds: got none.jsonl, expected a file"),
    (["--seeds", "mt_bench"], "--data: the set mt_bench needs the directory"),
    (["--seeds", "talks.jsonl", "--held-out"], "--held-out: selects from the config's data, which --seeds replaces"),
    (["--tree", "chain-2"], "--tree: got 'chain-2', expected 'root' without --draft"),
    (["--draft", "none.such"], "--draft: "),
]


def test_refused_on_the_command_line(program, config_file, tmp_path):
    output = tmp_path / "out.jsonl"
    common = ("--config", config_file(), "--output", output, "--new-tokens", 6)
    for arguments, message in REFUSED:
        assert message in refused(program(*common, *arguments, main=distill))
    assert not output.exists()


def test_training_starts_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "--no-such-flag"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("hydrajax.train", run_name="__main__", alter_sys=True)
    assert end.value.code == 2
    assert "see python -m hydrajax.train --help" in capsys.readouterr().err
