"""``hydrajax demo``: the shipped model continues code it has not seen, with and without each kind of draft.

Nothing is downloaded and no file beside the package is needed: the prompts are from the Python source that is here.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from hydrajax import assets
from hydrajax.api import load
from hydrajax.autotune.contest import AUTOREGRESSIVE, Measured, contest
from hydrajax.cli.screen import bar, write_marked
from hydrajax.decoding.executor import Executor
from hydrajax.formats.draft_registry import WITHOUT_WEIGHTS, title_of
from hydrajax.language_model import LanguageModel, make_executor
from hydrajax.questions.contenders import Answerer
from hydrajax.questions.held_out import NamedPrompt, held_out_files, held_out_prompts
from hydrajax.text.marking import pieces
from hydrajax.text.tokenizer import decode_text
from hydrajax.train.data.preview import CLOSE, OPEN
from hydrajax.trees import presets

HELP = "decode code with the shipped model, with and without each kind of draft, and compare"


@dataclass(frozen=True)
class Recipe:
    """The demo's sizes.

    prompts, prompt_tokens, max_new_tokens: the continuations, of which ``shown`` are shown. repeats: timed rounds.
    candidates: trees of which, and of the one that was searched for it, each kind of draft gets the fastest here, found
    with ``trial_prompts``; every further one costs a compilation per kind.
    """

    prompts: int = 16
    shown: int = 3
    prompt_tokens: int = 48
    max_new_tokens: int = 80
    repeats: int = 3
    candidates: tuple[str, ...] = ("chain-4",)
    trial_prompts: int = 2


RECIPE = Recipe()
SEARCHED = "searched tree"

# For a Python without source files. Ours, in nobody's training data. They end before a line break, which shares a token
# with the indentation that follows it.
BUILT_IN_CODE = (
    "def moving_average(values, window):",
    "class BoundedQueue:\n    def __init__(self, limit):",
    "def read_settings(path):\n    with open(path) as file:",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="continue this in place of held-out code")


def run(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    console = Console(highlight=False)
    plain, drafted = load_shipped()
    prompts = make_prompts(RECIPE, plain, args.prompt)
    baseline = {AUTOREGRESSIVE: executor_of(RECIPE, plain, "root")}
    fastest = choose_trees(RECIPE, prompts, baseline, drafted)
    executors = baseline | fastest
    rows = measure(f"decode {len(prompts)} prompts in {len(executors)} ways", RECIPE, prompts, executors)

    best = max(rows[1:], key=lambda row: row.tokens_per_second)
    show_texts(console, prompts, RECIPE.shown, Answerer(best.name, fastest[best.name]))
    console.print(result_table(rows))
    different = [row.name for row in rows if not row.equal]
    console.print(
        "[bold red]Outputs differ from what the base says without a draft.[/]"
        if different
        else "All outputs are token for token what the base says without a draft."
    )
    console.print(verdict(rows))
    console.print(f"The whole run took {time.perf_counter() - began:.0f} s.")
    if different:
        sys.exit(f"hydrajax demo: {', '.join(different)}: the output differs from autoregressive decoding")


class Phase:
    """A part of the run: a bar with the time left while it lasts, then one line with what it took.

    ``total`` counts calls of `advance`. What is set as ``note`` stands at the end of the line.
    """

    def __init__(self, title: str, total: int):
        self.title, self.note = title, ""
        self._bar = bar()
        self._task = self._bar.add_task(title, total=total)

    def advance(self) -> None:
        self._bar.update(self._task, advance=1)

    def __enter__(self) -> Phase:
        self._began = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(self, kind, *_) -> None:
        self._bar.stop()
        if kind is None:
            seconds = time.perf_counter() - self._began
            print(f"{seconds:6.1f} s  {self.title}{self.note and ': '}{self.note}", flush=True)


# --- what is decoded ------------------------------------------------------------------------------------------------


def load_shipped() -> tuple[LanguageModel, dict[str, LanguageModel]]:
    """The base alone, and by title the base with each draft; all share the base's parameters."""
    with Phase("load the shipped model", 1 + len(assets.DRAFTS)) as phase:
        plain = load(assets.base(), dtype="float32")  # outputs must be equal, also where bfloat16 has ties
        phase.advance()
        # A lookahead window pays where many nodes cost as much as one, which on a CPU they do not.
        named = [model for model in map(plain.with_draft, WITHOUT_WEIGHTS) if model.drafter.spec.depth]
        free = [model for model in named if not model.drafter.spec.window_nodes]
        drafted = {title_of(model.drafter): model for model in free}
        for name in assets.DRAFTS:
            model = plain.with_draft(assets.path(name))
            drafted[title_of(model.drafter)] = model
            phase.advance()
        phase.note = f"{size_of(plain.params.base)} parameters, " + ", ".join(
            f"{title} {size_of(model.params.draft)}" for title, model in drafted.items() if model.params.draft
        )
    return plain, drafted


def size_of(params: Any) -> str:
    return f"{sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6:.1f}M"


def make_prompts(recipe: Recipe, model: LanguageModel, own_prompt: str | None) -> list[NamedPrompt]:
    """The user's own prompt, or held-out code, or where this Python has no such source our own beginnings of code."""
    if own_prompt is not None:
        return [NamedPrompt("your prompt", model.prompt_ids(own_prompt, "prompt").tolist())]
    files = held_out_files()
    prompts = list(islice(held_out_prompts(files, model.tokenizer, recipe.prompt_tokens), recipe.prompts))
    return prompts or [NamedPrompt("built in", model.prompt_ids(text, "prompt").tolist()) for text in BUILT_IN_CODE]


# --- decoding -------------------------------------------------------------------------------------------------------


def executor_of(recipe: Recipe, model: LanguageModel, tree: str) -> Executor:
    """An executor of the model with a tree by name, or with the one that was searched for its draft."""
    found = presets.searched(model.draft_directory, 1) if tree == SEARCHED else presets.by_name(tree)
    return make_executor(model, model.spec(tree=found, max_new_tokens=recipe.max_new_tokens))


def trees_for(recipe: Recipe, model: LanguageModel) -> list[str]:
    """Names of the trees that this draft tries."""
    return [*recipe.candidates, *([SEARCHED] if presets.searched(model.draft_directory, 1) else [])]


def choose_trees(
    recipe: Recipe, prompts: Sequence[NamedPrompt], baseline: dict[str, Executor], drafted: dict[str, LanguageModel]
) -> dict[str, Executor]:
    """For each kind of draft the executor with the tree that is fastest on this machine, named after both."""
    tried = {
        title: {f"{title} {tree}": executor_of(recipe, model, tree) for tree in trees_for(recipe, model)}
        for title, model in drafted.items()
    }
    undecided = {name: one for entrants in tried.values() if len(entrants) > 1 for name, one in entrants.items()}
    rate: dict[str, float] = {}
    if undecided:
        title, few = "find the fastest tree of each draft", prompts[: recipe.trial_prompts]
        # Their figures are not reported: the best of several noisy ones looks better than it is.
        rate = {row.name: row.tokens_per_second for row in measure(title, recipe, few, baseline | undecided)}
    names = [max(entrants, key=lambda name: rate.get(name, 0.0)) for entrants in tried.values()]
    return {name: entrants[name] for name, entrants in zip(names, tried.values(), strict=True)}


def measure(
    title: str, recipe: Recipe, prompts: Sequence[NamedPrompt], executors: dict[str, Executor]
) -> list[Measured]:
    """A contest with a bar."""
    ids = [np.array(prompt.ids, np.int32) for prompt in prompts]
    with Phase(f"{title}, {recipe.repeats} times each", len(executors) + recipe.repeats) as phase:
        return contest(executors, ids, batch_size=1, repeats=recipe.repeats, on_status=lambda _: phase.advance())


# --- what is said of it ---------------------------------------------------------------------------------------------


def show_texts(console: Console, prompts: Sequence[NamedPrompt], most: int, best: Answerer) -> None:
    """Continuations with their drafted tokens marked, each up to the end of the function.

    Whole functions that repeat no line come first: a model this small often finds no end.
    """
    tokenizer = best.executor.tokenizer
    whole, others = [], []
    for prompt in prompts:
        beginning, output = decode_text(tokenizer, prompt.ids), best.decode(prompt.ids, 0)
        (whole if is_whole(beginning, output.text) else others).append((prompt, beginning, output))
        if len(whole) == most:
            break
    for number, (prompt, beginning, output) in enumerate([*whole, *others][:most]):
        facts = f"{output.new_tokens} tokens in {output.steps} steps of {best.model_id}"
        console.print(f"\n[bold]{number + 1}. {prompt.name}[/]: {facts}\n", soft_wrap=True)
        console.out(beginning, style="dim", end="", highlight=False)
        marked = cut(pieces(tokenizer, output), function_end(beginning, output.text))
        if not console.is_terminal:  # where colours would be lost
            marked = [(f"{OPEN}{text}{CLOSE}" if is_drafted else text, False) for text, is_drafted in marked]
        write_marked(console, marked)
    sign = "green, underlined" if console.is_terminal else f"{OPEN}in brackets{CLOSE}"
    console.print(f"\nDrafted and accepted tokens are {sign}; the rest the base has chosen.\n")


def is_whole(beginning: str, continuation: str) -> bool:
    """Whether a function ends in the continuation, and no two of the lines before that are the same."""
    end = function_end(beginning, continuation)
    lines = [line.strip() for line in (beginning + continuation[:end]).splitlines() if line.strip()]
    return end < len(continuation) and len(set(lines)) == len(lines)


def function_end(beginning: str, continuation: str) -> int:
    """Where the last function or class that is begun ends in the continuation: before the first line of code that is
    indented no further than its ``def``. The whole length if it goes on, or if none is begun.
    """
    starts = re.findall(r"^( *)(?:async def|def|class) ", beginning, re.MULTILINE)
    if not starts:
        return len(continuation)
    indent = len(starts[-1])
    at = continuation.find("\n") + 1
    while at > 0:
        line = continuation[at:].partition("\n")[0]
        if line.strip() and len(line) - len(line.lstrip(" ")) <= indent:
            return at - 1  # without the line break before it
        at = continuation.find("\n", at) + 1
    return len(continuation)


def cut(marked: Sequence[tuple[str, bool]], length: int) -> list[tuple[str, bool]]:
    """The first ``length`` characters of marked pieces."""
    kept = []
    for text, is_drafted in marked:
        if length <= 0:
            break
        kept.append((text[:length], is_drafted))
        length -= len(text)
    return kept


def result_table(rows: Sequence[Measured]) -> Table:
    """All prompts together, the baseline first; fits 80 columns."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("draft and tree", no_wrap=True)
    widths = {"nodes": 5, "tokens_per_step (τ)": 15, "tokens/s": 8, "speed-up": 8, "step cost": 9}
    for heading, width in widths.items():
        table.add_column(heading, justify="right", min_width=width, max_width=width)
    for _, group in groupby(rows, key=lambda row: row.name.split()[0]):
        table.add_section()
        for row in group:
            table.add_row(
                row.name,
                str(row.nodes),
                f"{row.tokens_per_step:.2f}",
                f"{row.tokens_per_second:.0f}",
                f"{row.speedup:.2f}",
                f"{row.step_seconds / rows[0].step_seconds:.2f}",
            )
    return table


def verdict(rows: Sequence[Measured]) -> str:
    """Whether speculation pays on this device, and why. The first row is the baseline."""
    largest = max(rows, key=lambda row: row.nodes)
    cost = largest.step_seconds / rows[0].step_seconds
    best = max(rows[1:], key=lambda row: row.tokens_per_second)
    if best.speedup > 1:
        found = f"Here it does, best with {best.name}: {best.speedup:.2f} times the speed."
    else:
        found = (
            f"Here it never does: even {best.name} has {best.speedup:.2f} times the speed. "
            "Speculation does not pay on it."
        )
    return (
        f"Step cost is in steps of one node: on this device ({jax.devices()[0].device_kind}) {largest.nodes} nodes "
        f"cost {cost:.1f} times as much as one. A tree pays if its steps emit more tokens (τ) than they cost. {found} "
        "A model this small falls into repetition, which drafts guess easily."
    )
