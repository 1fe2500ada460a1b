"""Requests for `serve_load.py` with their expected answers: chunks of code, or a mix of chat, edits and summaries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import held_out_chunks

from hydrajax.decoding.acceptance import ExactSampling, Greedy
from hydrajax.errors import HydrajaxError
from hydrajax.language_model import LanguageModel
from hydrajax.questions.held_out import held_out_files
from hydrajax.questions.sets import read_questions
from hydrajax.text.built_in import built_in_prompts
from hydrajax.text.prompt import Prompt
from hydrajax.trees import presets

TEMPERATURE, TOP_P = 0.8, 0.95
BATCH = 16  # batch size of the expected answers
EDIT_LINES, HEAD_LINES = 24, 3  # of code, and of its beginning after the request to write it again
SUMMARY_LINES = 30


class Question(NamedTuple):
    """A request and its expected answer."""

    ids: list[int]
    limit: int
    seed: int | None
    answer: str


def questions_for(args, loaded: LanguageModel, count: int, *, random_sizes: bool) -> list[Question]:
    """Return greedy requests of one length, or requests of random lengths of which every other one is sampled."""
    random, most = np.random.default_rng(args.seed), args.new_tokens
    prompts = mixed(args, loaded, count) if args.load == "mixed" else held_out_chunks(
        loaded.tokenizer, count, args.prompt_tokens
    )  # fmt: skip
    limits, seeds = [most] * count, [None] * count
    if random_sizes:
        prompts = [ids[: random.integers(1, len(ids) + 1)] for ids in prompts]
        limits = random.integers(1, most + 1, count).tolist()
        seeds = [at if at % 2 else None for at in range(count)]
    tree, found = tree_of(args, loaded), [""] * count
    for rule in (Greedy(), ExactSampling(TEMPERATURE, top_p=TOP_P)):
        some = [at for at in range(count) if (seeds[at] is None) == isinstance(rule, Greedy)]
        settings = {"tree": tree, "rule": rule, "batch_size": BATCH}
        if not isinstance(rule, Greedy):
            settings["seed"] = [seeds[at] for at in some]
        texts, ends = [prompts[at] for at in some], [limits[at] for at in some]
        for at, result in zip(some, loaded.generate(texts, max_new_tokens=ends, **settings), strict=True):
            found[at] = result.text
    return [Question(list(map(int, ids)), *rest) for ids, *rest in zip(prompts, limits, seeds, found, strict=True)]


def tree_of(args, loaded: LanguageModel):
    return presets.by_name(args.tree) if args.tree else loaded.default_tree()


def mixed(args, loaded: LanguageModel, count: int) -> list[np.ndarray]:
    """Return prompts of several kinds in turn, cut to what the context leaves for the answer.

    The kinds are the categories of the question files in ``--prompts``, by default built-in chat, edits of held-out
    code, which repeat it, and its summaries.
    """
    if loaded.tokenizer is None:
        raise HydrajaxError("--load: got mixed, expected code: this base has no tokenizer")
    kinds = _of_files(args.prompts) if args.prompts else _built_in(loaded)
    found = [prompt for turn in itertools.zip_longest(*kinds.values()) for prompt in turn if prompt is not None]
    most = loaded.config.max_positions - args.new_tokens
    encoded = [np.array(prompt.ids(loaded.tokenizer)[-most:], np.int32) for prompt in found[:count]]
    return list(itertools.islice(itertools.cycle(encoded), count))


def _of_files(path: Path) -> dict[str, list[Prompt]]:
    files = sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")]) if path.is_dir() else [path]
    if not files:
        raise HydrajaxError(f"--prompts: got {path}, expected question files (.jsonl, .jsonl.gz) in it")
    kinds: dict[str, list[Prompt]] = {}
    for file in files:
        for question in read_questions(str(file)):
            name = f"{file.name}, {question.question_id}"
            kinds.setdefault(question.category, []).append(Prompt(question.turns[0], name))
    return kinds


def _built_in(loaded: LanguageModel) -> dict[str, list[Prompt]]:
    code = list(_pieces(max(EDIT_LINES, SUMMARY_LINES)))

    def edited(lines: Sequence[str]) -> str:
        old = "".join(lines[:EDIT_LINES])
        return f"# Before\n{old}\n# After: the same with more comments\n{''.join(lines[:HEAD_LINES])}"

    def summarised(lines: Sequence[str]) -> str:
        return "".join(lines[:SUMMARY_LINES]) + '\n"""Summary: this module'

    return {
        "chat": built_in_prompts(loaded.tokenizer),
        "edits": [Prompt(edited(lines), f"edit {number}") for number, lines in enumerate(code)],
        "summaries": [Prompt(summarised(lines), f"summary {number}") for number, lines in enumerate(code)],
    }


def _pieces(n_lines: int) -> Iterator[list[str]]:
    """Yield some lines from the middle of each held-out file."""
    for _, text in held_out_files():
        lines = text.splitlines(keepends=True)
        if len(lines) >= 2 * n_lines:
            yield lines[len(lines) // 2 :][:n_lines]
