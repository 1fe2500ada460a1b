"""``hydrajax demo``: decode with and without each kind of draft, and compare speeds.

By default the shipped model continues held-out Python code, from the source files of this installation, and nothing is
downloaded. With ``--base``, an instruct model answers a few questions.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from hydrajax import assets
from hydrajax.api import load
from hydrajax.bench.contests.contest import AUTOREGRESSIVE, Measured, contest
from hydrajax.bench.questions.contenders import folder_name
from hydrajax.bench.questions.held_out import NamedPrompt, held_out_files, held_out_prompts
from hydrajax.cli.screen import CLOSE, OPEN, status, write_marked
from hydrajax.decoding.executor import Executor
from hydrajax.errors import HydrajaxError
from hydrajax.formats.draft_registry import title_of, without_weights
from hydrajax.generation import generate
from hydrajax.language_model import LanguageModel
from hydrajax.loaded_model import make_executor
from hydrajax.text.built_in import QUESTIONS
from hydrajax.text.marking import pieces
from hydrajax.text.tokenizer import decode_text
from hydrajax.trees import presets

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 12, 48, 80
SHOWN = 3  # continuations
REPEATS, QUESTION_REPEATS = 3, 1  # timed rounds; a round of questions is longer
WITH_LOOKUP = " with lookup"
REPETITION = "Small models repeat themselves, which is easy to draft."
CHAIN, SEARCHED = 4, "searched tree"  # each draft runs with both, if a tree was searched for it
# For a Python without source files. Written for this demo, so no model was trained on them. They end before a line
# break, which shares a token with the indentation that follows it.
BUILT_IN_CODE = (
    "def moving_average(values, window):",
    "class BoundedQueue:\n    def __init__(self, limit):",
    "def read_settings(path):\n    with open(path) as file:",
)
# Of the function that a prompt begins.
ENDS = ("\n\n\n", "\ndef ", "\nclass ", "\n    def ", "\n\n    @", "\n@", "\nif ")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="continue this text (default: held-out Python code)")
    parser.add_argument(
        "--base", metavar="DIR|NAME",
        help="let this instruct model answer --prompt or a few built-in questions (default: the shipped model of code)",
    )  # fmt: skip
    parser.add_argument(
        "--draft", metavar="DIR|NAME", action="append", default=[],
        help="compare this draft with lookup, repeatable (default: the bundled drafts of the base)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    console = Console(highlight=False)
    model = load(args.base or assets.base(), dtype="float32")  # so that outputs are equal: bfloat16 has ties
    drafts = args.draft or assets.drafts_of(args.base or "shipped")
    if args.base:
        questions = QUESTIONS if args.prompt is None else {"your prompt": args.prompt}
        prompts = question_prompts(model, questions)
    else:
        prompts = make_prompts(model, args.prompt)
    with status("loading drafts") as update:
        executors = make_executors(model, drafts)
        ids = [np.array(prompt.ids, np.int32) for prompt in prompts]
        repeats = QUESTION_REPEATS if args.base else REPEATS
        rows = contest(executors, ids, batch_size=1, repeats=repeats, on_status=update)
        best = max(rows[1:], key=lambda row: row.tokens_per_second)
    show_texts(console, prompts, best.name, executors[best.name], questions if args.base else None)
    console.print(result_table(rows))
    different = [row.name for row in rows if not row.equal]
    if not different:
        console.print("All outputs equal the base's output without a draft, token for token.")
    console.print(verdict(rows) if args.base else f"{verdict(rows)} {REPETITION}")
    console.print(f"The whole run took {time.perf_counter() - began:.0f} s.")
    if different:
        sys.exit(f"hydrajax demo: {', '.join(different)}: the output differs from autoregressive decoding")


def make_prompts(model: LanguageModel, text: str | None) -> list[NamedPrompt]:
    """Return the user's prompt, else held-out code, else the built-in code."""
    if text is not None:
        return [NamedPrompt("your prompt", model.prompt_ids(text, "prompt").tolist())]
    prompts = list(islice(held_out_prompts(held_out_files(), model.tokenizer, PROMPT_TOKENS), PROMPTS))
    return prompts or [NamedPrompt("built in", model.prompt_ids(code, "prompt").tolist()) for code in BUILT_IN_CODE]


def question_prompts(model: LanguageModel, questions: Mapping[str, str]) -> list[NamedPrompt]:
    if model.tokenizer is None or not model.tokenizer.chat_template:
        raise HydrajaxError("--base: has no chat template, expected an instruct model; --base is for these only")
    conversations = [[{"role": "user", "content": question}] for question in questions.values()]
    return [
        NamedPrompt(name, ids.tolist())
        for name, ids in zip(questions, model.ids_of_prompts(conversations), strict=True)
    ]


def make_executors(model: LanguageModel, drafts: Sequence[str | Path]) -> dict[str, Executor]:
    """Return an executor for the base alone, and for lookup and each draft with each tree, named after both."""
    # Lookahead is left out: it pays only where many nodes cost as much as one, which is not so on a CPU.
    named = [found for found in map(model.with_draft, without_weights()) if found.drafter.spec.depth]
    # The corpus is too: all executors generate the same texts.
    drafted = [found for found in named if not (found.drafter.spec.window_nodes or found.drafter.spec.remembers)]
    titles = [title_of(each.drafter) for each in drafted]
    for draft in drafts:
        drafted.append(model.with_draft(draft))
        title = title_of(drafted[-1].drafter)
        if title.endswith(WITH_LOOKUP):  # the table is at most 80 columns wide
            title = f"lookup+{title.removesuffix(WITH_LOOKUP)}"
        titles.append(f"{title} ({folder_name(str(draft))})" if title in titles else title)
    executors = {AUTOREGRESSIVE: make_executor(model, model.program(tree="root", max_new_tokens=NEW_TOKENS))}
    for title, each in zip(titles, drafted, strict=True):
        chain = f"chain-{min(CHAIN, each.drafter.spec.depth)}"
        trees = {chain: presets.by_name(chain), SEARCHED: presets.searched(each.draft_directory, 1)}
        for name, tree in trees.items():
            if tree is not None:
                program = each.program(tree=tree, max_new_tokens=NEW_TOKENS)
                executors[f"{title} {name}"] = make_executor(each, program)
    return executors


def show_texts(
    console: Console, prompts: Sequence[NamedPrompt], name: str, executor: Executor, questions: Mapping[str, str] | None
) -> None:
    """Print answers to questions, else continuations: first whole functions without repeated lines."""
    results = generate(executor, [prompt.ids for prompt in prompts], stop=ENDS if questions is None else ())

    def repeats_or_is_cut(pair) -> bool:
        lines = [line.strip() for line in pair[1].text.splitlines() if line.strip()]
        return pair[1].finish_reason != "stop" or len(set(lines)) < len(lines)

    shown: Iterable[tuple] = zip(prompts, results, strict=True)  # answers are printed as they come
    if questions is None:
        shown = sorted(shown, key=repeats_or_is_cut)[:SHOWN]
    for number, (prompt, result) in enumerate(shown, start=1):
        facts = f"{result.new_tokens} tokens in {result.steps} steps of {name}"
        console.print(f"\n[bold]{number}. {prompt.name}[/]: {facts}\n", soft_wrap=True)
        before = f"{questions[prompt.name]}\n\n" if questions else decode_text(executor.tokenizer, prompt.ids)
        console.out(before, style="dim", end="", highlight=False)
        write_marked(console, pieces(executor.tokenizer, result))
    sign = "green and underlined" if console.is_terminal else f"{OPEN}in brackets{CLOSE}"
    console.print(f"\nDrafted and accepted tokens are {sign}. The base has chosen the others.\n")


def result_table(rows: Sequence[Measured]) -> Table:
    """Return the table of results, the baseline first, at most 80 columns wide."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("draft and tree", overflow="fold")  # long names wrap, figures do not
    widths = {"nodes": 5, "tokens_per_step (τ)": 15, "tokens/s": 8, "speed-up": 8, "step cost": 9}
    for heading, width in widths.items():
        table.add_column(heading, justify="right", min_width=width, max_width=width)
    for _, group in groupby(rows, key=lambda row: row.name.split()[0]):
        table.add_section()
        for row in group:
            figures = (row.tokens_per_step, row.tokens_per_second, row.speedup, step_cost(row, rows))
            cells = (f"{figure:.{digits}f}" for figure, digits in zip(figures, (2, 0, 2, 2), strict=True))
            table.add_row(row.name, str(row.nodes), *cells)
    return table


def step_cost(row: Measured, rows: Sequence[Measured]) -> float:
    return row.step_seconds / rows[0].step_seconds


def verdict(rows: Sequence[Measured]) -> str:
    """Explain whether drafting is faster on this device. The first row is the baseline."""
    largest = max(rows, key=lambda row: row.nodes)
    best = max(rows[1:], key=lambda row: row.tokens_per_second)
    found = f"The fastest here is {best.name}, at {best.speedup:.2f} times the speed without a draft."
    if best.speedup <= 1:
        found = f"No draft is faster here: the best, {best.name}, has {best.speedup:.2f} times the speed without one."
    return (
        f"Step cost is in steps without a draft: on this device ({jax.devices()[0].device_kind}) verifying "
        f"{largest.nodes} nodes costs {step_cost(largest, rows):.1f} times as much as one. A tree is faster if its "
        f"steps emit more tokens (τ) than they cost. {found}"
    )
