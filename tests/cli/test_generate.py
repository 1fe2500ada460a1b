"""`hydrajax generate`: its output to files, pipes and terminals."""

import dataclasses
import io
import json
import re
import sys

import jax
import numpy as np
import pytest
from rich.console import Console

import hydrajax
from helpers.outputs import read_answers, write_lines
from hydrajax.cli.generate import ProgressLine, Totals
from hydrajax.cli.screen import DRAFTED, write_marked
from hydrajax.text.answers import Generation
from hydrajax.text.tokenizer import decode_text

NEW = 24
# Of several lengths, in two buckets and in no order; the last batch of three is padded.
LENGTHS = (5, 30, 1, 20)
IDS = [np.random.default_rng(length).integers(3, 300, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("prompts") / "ids.jsonl", [{"prompt_ids": ids} for ids in IDS])


@pytest.fixture(scope="module")
def reference(base):
    """Greedy continuations by transformers, one prompt at a time."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(base)
    outputs = []
    for ids in IDS:
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        found = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=NEW, pad_token_id=0)
        outputs.append(found[0, len(ids) :].tolist())
    return outputs


def generation(output_ids, accept_lengths, text=None) -> Generation:
    return Generation([1], list(output_ids), text, len(accept_lengths), accept_lengths, len(output_ids), 1.0)


def without_time(answers):
    return [dataclasses.replace(answer, wall_time=0.0) for answer in answers]


def test_output_is_the_greedy_output_of_transformers_at_any_batch_size(
    program, base, heads, wide_tree, prompt_file, reference, tokenizer, tmp_path
):
    common = ["generate", "--base", base, "--prompts", prompt_file, "--max-new-tokens", NEW, "--output"]
    drafted = ["--draft", heads, "--tree", wide_tree, "--rule", "greedy"]
    one = program(*common, tmp_path / "one.jsonl", *drafted)
    three = program(*common, tmp_path / "three.jsonl", *drafted, "--batch-size", 3)
    program(*common, tmp_path / "lookup.jsonl", "--draft", "lookup", "--batch-size", 4)
    assert one.out == three.out == ""

    answers = read_answers(tmp_path / "one.jsonl")
    assert without_time(answers) == without_time(read_answers(tmp_path / "three.jsonl"))
    assert [answer.prompt_ids for answer in answers] == IDS
    assert [answer.output_ids for answer in answers] == reference
    assert [answer.text for answer in answers] == [decode_text(tokenizer, ids) for ids in reference]
    assert any(length > 1 for answer in answers for length in answer.emitted_per_step)

    assert [answer.output_ids for answer in read_answers(tmp_path / "lookup.jsonl")] == reference

    first = json.loads((tmp_path / "one.jsonl").read_text().splitlines()[0])
    fields = ["prompt_ids", "output_ids", "text", "steps", "accept_lengths", "new_tokens", "wall_time", "finish_reason"]
    assert list(first) == fields
    tokens, steps = NEW * len(IDS), sum(answer.steps for answer in answers)
    summary = rf"{tokens} tokens in {steps} steps, tokens_per_step {tokens / steps:.2f} \(τ\), [\d.]+ tokens/s\n"
    assert re.fullmatch(summary, one.err), one.err


def test_a_pipe_gets_plain_text(program, base, tokenizer, tmp_path, monkeypatch):
    """Of a prompt on the command line, from a pipe or in a text file."""
    (expected,) = hydrajax.load(base).generate([tokenizer.encode("the tree")], max_new_tokens=8)
    (tmp_path / "p.txt").write_text("the tree\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the tree\n")))
    for source in (["--prompt", "the tree"], ["--prompts", "-"], ["--prompts", tmp_path / "p.txt"]):
        result = program("generate", "--base", base, *source, "--max-new-tokens", 8)
        assert result.out == expected.text + "\n"
        assert result.err.startswith("8 tokens in 8 steps, tokens_per_step 1.00 (τ), ")
        assert result.err.count("\n") == 1


def test_a_terminal_gets_marked_text(program, base, heads, wide_tree, prompt_file, reference, tokenizer, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    args = ["generate", "--base", base, "--prompts", prompt_file, "--draft", heads, "--tree", wide_tree]
    result = program(*args, "--max-new-tokens", NEW, "--batch-size", 3)
    assert "\x1b[4;32m" in result.out
    texts = enumerate((decode_text(tokenizer, ids) for ids in reference), start=1)
    assert without_styles(result.out) == "".join(f"--- {n} of 4\n{text}\n" for n, text in texts)
    compiling = "compiling the rule greedy with a tree of"
    for words in ("loading ...", compiling, "decoding ...", "drafted and accepted, chosen by the base"):
        assert words in without_styles(result.err)


def test_a_base_without_tokenizer_shows_ids(program, wordless, prompt_file, reference, tmp_path):
    args = ["generate", "--base", wordless, "--prompts", prompt_file, "--max-new-tokens", NEW, "--batch-size", 4]
    result = program(*args)
    assert result.out == "".join(" ".join(map(str, ids)) + "\n" for ids in reference)
    program(*args, "--output", tmp_path / "out.jsonl")
    for answer in read_answers(tmp_path / "out.jsonl"):
        assert (answer.text, answer.emitted_per_step) == (None, [1] * NEW)


def test_turns_use_the_chat_template_once_and_only_the_first_turn(program, base, tokenizer, tmp_path):
    prompts = tmp_path / "turns.jsonl"
    lines = [{"question_id": 81, "turns": ["a tree?", "and then?"]}, {"prompt": "a tree?"}]
    prompts.write_text("\n\n".join(map(json.dumps, lines)))
    output = tmp_path / "out.jsonl"
    args = ["generate", "--base", base, "--prompts", prompts, "--output", output]
    program(*args, "--max-new-tokens", 2, "--batch-size", 2)
    chat, plain = (answer.prompt_ids for answer in read_answers(output))
    assert tokenizer.decode(chat) == "<s>[user] a tree?\n[assistant]"
    assert tokenizer.decode(plain) == "<s>a tree?"


def test_output_cut_by_the_context_is_reported(program, base, tmp_path):
    prompts = write_lines(tmp_path / "long.jsonl", [{"prompt_ids": [7] * length} for length in (120, 128, 127)])
    output = tmp_path / "out.jsonl"
    args = ["generate", "--base", base, "--prompts", prompts, "--batch-size", 3, "--output", output]
    result = program(*args, "--max-new-tokens", 10**12)  # beyond the context, and beyond 32 bits: no error
    assert [answer.new_tokens for answer in read_answers(output)] == [8, 0, 1]
    assert "3 outputs cut off: prompt and output fill the context of 128 tokens\n" in result.err


def test_nothing_is_compiled_while_the_clock_runs(base):
    compiled, statuses = [], []

    def listen(event, _seconds, **_):
        if event.endswith("backend_compile_duration") and statuses:
            compiled.append(statuses[-1])

    jax.monitoring.register_event_duration_secs_listener(listen)
    loaded = hydrajax.load(base)
    prompts = [[5, 6, 7], [8] * 20, [9, 10]]
    results = list(loaded.generate(prompts, tree="root", max_new_tokens=7, on_status=statuses.append))
    compiling = [f"compiling the rule greedy with no tree for 1 x {width} prompt tokens" for width in (16, 32)]
    assert statuses == [compiling[0], "decoding", compiling[1], "decoding", "decoding"]
    assert set(compiled) == set(compiling)
    assert len(compiled) == 4  # the prefill and the loop, for two shapes
    assert all(result.wall_time > 0 for result in results)


def test_totals_count_the_seconds_of_decoding_alone(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    progress, totals = ProgressLine(2), Totals()
    for status in ("compiling", "decoding", "decoding", "compiling", "decoding"):
        progress.status(status)
    progress.hide()
    for _ in range(2):
        totals.add(generation([1, 2, 3], [2, 1]), progress.seconds)
    assert (totals.prompts, totals.tokens, totals.steps) == (2, 6, 4)
    assert totals.summary() == f"6 tokens in 4 steps, tokens_per_step 1.50 (τ), {6 / totals.seconds:.1f} tokens/s"
    assert 0 < totals.seconds < next(clock)
    assert Totals().summary() == "0 tokens in 0 steps, tokens_per_step 0.00 (τ), 0.0 tokens/s"


def without_styles(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_long_lines_and_markup_reach_the_terminal_unchanged():
    text = "[bold]not markup[/bold]\t" + "x" * 500 + " 1234 https://a.b :smile:\r\n"
    for marked, expected in (([(text, False)], text + "\n"), ([("ab", True)], "\x1b[4;32mab\x1b[0m\n")):
        out = io.StringIO()
        write_marked(Console(file=out, force_terminal=True, color_system="standard", width=20, _environ={}), marked)
        assert out.getvalue() == expected
    assert DRAFTED == "green underline"


def test_penalties_and_logprobs_are_those_of_the_model(program, base, heads, wide_tree, prompt_file, tmp_path):
    output = tmp_path / "out.jsonl"
    flags = ["--draft", heads, "--tree", wide_tree, "--batch-size", 3, "--repetition-penalty", 1.3]
    flags += ["--max-new-tokens", NEW, "--logprobs", "--top-logprobs", 3]
    program("generate", "--base", base, "--prompts", prompt_file, "--output", output, *flags)
    expected = hydrajax.load(base).generate(IDS, max_new_tokens=NEW, repetition_penalty=1.3, logprobs=3)
    for found, wanted in zip(read_answers(output), expected, strict=True):
        assert found.output_ids == wanted.output_ids
        np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4)
        np.testing.assert_allclose(np.array(found.top_logprobs), np.array(wanted.top_logprobs), atol=1e-4)


def test_streamed_text_is_the_text(program, base, heads, wide_tree, tokenizer):
    common = ["generate", "--base", base, "--draft", heads, "--tree", wide_tree, "--max-new-tokens", NEW]
    whole = program(*common, "--prompt", "the tree")
    streamed = program(*common, "--prompt", "the tree", "--stream")
    assert streamed.out == whole.out
    middle = whole.out[3:6]
    cut = program(*common, "--prompt", "the tree", "--stop", middle, "--stop", "never said")
    assert cut.out == whole.out[: whole.out.index(middle)] + "\n"
    assert program(*common, "--prompt", "the tree", "--stop", middle, "--stream").out == cut.out
