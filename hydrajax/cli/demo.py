"""``hydrajax demo``: the shipped model continues code it has not seen, with and without each kind of draft heads.

Nothing is downloaded and no file beside the package is needed: the prompts are the running Python's standard library.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hydrajax import assets
from hydrajax.api import Loaded, encode, load
from hydrajax.cli.generate import pieces, write_marked
from hydrajax.generation import generate
from hydrajax.text.answers import Generation
from hydrajax.text.prompt import Prompt
from hydrajax.text.tokenizer import decode_text
from hydrajax.train.data.corpus import SourceFile
from hydrajax.train.data.preview import CLOSE, OPEN
from hydrajax.trees import presets

HELP = "decode code with the shipped model, with and without Medusa, Hydra and Hydra++ heads, and compare"

TITLES = {"medusa": "Medusa", "hydra": "Hydra", "hydra_pp": "Hydra++"}


@dataclass(frozen=True)
class Recipe:
    """The demo's sizes.

    prompts, prompt_tokens, max_new_tokens: the continuations. repeats: timed runs of each. candidates: small trees of
    which each kind of heads gets the one that is fastest here, found with ``trial_prompts``; every further one costs
    a compilation per kind. large: the tree beside it.
    """

    prompts: int = 4
    prompt_tokens: int = 48
    max_new_tokens: int = 96
    repeats: int = 3
    candidates: tuple[str, ...] = ("chain-2", "chain-4", "cartesian-2x2")
    trial_prompts: int = 2
    large: str = "mc_sim_7b_63"


RECIPE = Recipe()

# For a Python without source files. Ours, in nobody's training data.
BUILT_IN_PROMPTS = (
    "def moving_average(values, window):\n",
    "class BoundedQueue:\n    def __init__(self, limit):\n",
    "def read_settings(path):\n    with open(path) as file:\n",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="continue this in place of held-out code")


def run(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    console = Console(highlight=False)
    plain, drafted = load_shipped()
    prompts = make_prompts(RECIPE, plain, args.prompt)
    contenders = []
    fastest = choose_trees(RECIPE, prompts, drafted)
    for name, loaded in drafted.items():
        contenders += [Contender(TITLES[name], tree, loaded) for tree in (fastest[name], RECIPE.large)]
    baseline = Contender("autoregressive", "root", plain)
    title = f"decode {len(prompts)} prompts in {len(contenders) + 1} ways, {RECIPE.repeats} times each"
    measure(title, RECIPE, prompts, [baseline, *contenders])

    report(console, plain.tokenizer, prompts, baseline, contenders)
    console.print(f"The whole run took {time.perf_counter() - began:.0f} s.")
    refuse_differences(prompts, baseline, contenders)


class Phase:
    """A part of the run: a bar with the time left while it lasts, then one line with what it took.

    The bar is on stderr and only on a terminal; it vanishes, also on Ctrl-C. ``total`` counts calls of `advance`.
    """

    def __init__(self, title: str, total: int):
        self.title, self.note = title, ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
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


@dataclass(frozen=True)
class NamedPrompt:
    name: str
    ids: list[int]


def load_shipped() -> tuple[Loaded, dict[str, Loaded]]:
    """The base alone, and the base with each of the shipped heads; all share the base's parameters."""
    with Phase("load the shipped model", 1 + len(assets.DRAFTERS)) as phase:
        plain = load(assets.base())
        phase.advance()
        drafted = {}
        for name in assets.DRAFTERS:
            drafted[name] = plain.with_draft(assets.path(name))
            phase.advance()
        phase.note = f"{size_of(plain.params.base)} parameters, heads " + ", ".join(
            f"{TITLES[name]} {size_of(loaded.params.draft)}" for name, loaded in drafted.items()
        )
    return plain, drafted


def size_of(params: Any) -> str:
    return f"{sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6:.1f}M"


def make_prompts(recipe: Recipe, loaded: Loaded, own_prompt: str | None) -> list[NamedPrompt]:
    """The user's own prompt, or held-out code, or where this Python has no such source our own beginnings of code."""
    if own_prompt is not None:
        return [NamedPrompt("your prompt", encode(loaded, Prompt(own_prompt, "--prompt"), "--prompt").tolist())]
    files = held_out_files(Path(sysconfig.get_paths()["stdlib"]))
    prompts = list(islice(held_out_prompts(files, loaded.tokenizer, recipe.prompt_tokens), recipe.prompts))
    return prompts or [NamedPrompt("built in", encode(loaded, text, "prompt").tolist()) for text in BUILT_IN_PROMPTS]


def held_out_files(library: Path) -> Iterator[SourceFile]:
    """The files that no shipped model was trained on, as far as this Python's library has them."""
    for name in assets.about().get("held_out", []):
        try:
            yield SourceFile(name, (library / name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue


def held_out_prompts(files: Iterable[SourceFile], tokenizer: Any, n_tokens: int) -> Iterator[NamedPrompt]:
    """The first ``n_tokens`` from the first function in the second half of each file that has so many."""
    for file in files:
        lines = file.text.splitlines(keepends=True)
        starts = (n for n, line in enumerate(lines) if n >= len(lines) // 2 and line.lstrip().startswith("def "))
        start = next(starts, 0)
        ids = tokenizer.encode("".join(lines[start : start + n_tokens]), verbose=False)[:n_tokens]
        if len(ids) == n_tokens:
            yield NamedPrompt(f"{file.name}, line {start + 1}", ids)


# --- decoding -------------------------------------------------------------------------------------------------------


@dataclass
class Contender:
    """One way to decode. ``outputs[p]`` and ``seconds(p)``: the generations of prompt p and their median time."""

    heads: str
    tree: str
    loaded: Loaded
    outputs: list[list[Generation]] = field(default_factory=list)

    def seconds(self, prompt: int) -> float:
        return statistics.median(output.wall_time for output in self.outputs[prompt])

    def rate(self, prompt: int) -> float:
        """Tokens per second."""
        return self.output(prompt).new_tokens / self.seconds(prompt)

    @property
    def name(self) -> str:
        return f"{self.heads} {self.tree}" if self.nodes > 1 else self.heads

    @property
    def nodes(self) -> int:
        return presets.by_name(self.tree).size

    def output(self, prompt: int) -> Generation:
        return self.outputs[prompt][0]

    def total(self, of: Callable[[int], float]) -> float:
        return sum(of(prompt) for prompt in range(len(self.outputs)))

    @property
    def tokens_per_step(self) -> float:
        return self.total(lambda p: self.output(p).new_tokens) / self.total(lambda p: self.output(p).steps)

    @property
    def step_seconds(self) -> float:
        """Seconds per decode step; the prompt's forward pass is counted in, as it is in every speed-up."""
        return self.total(self.seconds) / self.total(lambda p: self.output(p).steps)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds


def choose_trees(recipe: Recipe, prompts: list[NamedPrompt], drafted: dict[str, Loaded]) -> dict[str, str]:
    """For each kind of heads the candidate tree that is fastest on this machine."""
    if len(recipe.candidates) == 1:
        return dict.fromkeys(drafted, recipe.candidates[0])
    trials = {name: [Contender(name, tree, loaded) for tree in recipe.candidates] for name, loaded in drafted.items()}
    title = f"find the fastest of {', '.join(recipe.candidates)}"
    everyone = [contender for tried in trials.values() for contender in tried]
    measure(title, recipe, prompts[: recipe.trial_prompts], everyone)
    # Its figures are not reported: the best of several noisy ones looks better than it is.
    return {name: max(tried, key=lambda c: c.tokens_per_second).tree for name, tried in trials.items()}


def measure(title: str, recipe: Recipe, prompts: list[NamedPrompt], contenders: list[Contender]) -> None:
    """Fill in the contenders' outputs. All take turns, so that a busy moment of the machine hits all alike."""

    def decode(contender: Contender, prompt: NamedPrompt) -> Generation:
        tree = presets.by_name(contender.tree)
        return next(generate(contender.loaded, [prompt.ids], tree=tree, max_new_tokens=recipe.max_new_tokens))

    with Phase(title, (len(prompts) * recipe.repeats + 1) * len(contenders)) as phase:
        for contender in contenders:
            decode(contender, prompts[0])  # compiles and warms up
            phase.advance()
        for prompt in prompts:
            for contender in contenders:
                contender.outputs.append([])
            for _ in range(recipe.repeats):
                for contender in contenders:
                    contender.outputs[-1].append(decode(contender, prompt))
                    phase.advance()


# --- what is said of it ---------------------------------------------------------------------------------------------


def report(console: Console, tokenizer, prompts, baseline: Contender, contenders: list[Contender]) -> None:
    """Every continuation with its drafted tokens marked, the table, and what it says."""
    best = max(contenders, key=lambda contender: contender.tokens_per_second)
    for number, prompt in enumerate(prompts):
        output = best.output(number)
        facts = f"{output.new_tokens} tokens in {output.steps} steps of {best.name}"
        console.print(f"\n[bold]{number + 1}. {prompt.name}[/]: {facts}\n", soft_wrap=True)
        console.out(decode_text(tokenizer, prompt.ids), style="dim", end="", highlight=False)
        marked = pieces(tokenizer, output)
        if not console.is_terminal:  # where colours would be lost
            marked = [(f"{OPEN}{text}{CLOSE}" if is_drafted else text, False) for text, is_drafted in marked]
        write_marked(console, marked)
    sign = "green, underlined" if console.is_terminal else f"{OPEN}in brackets{CLOSE}"
    console.print(f"\nDrafted and accepted tokens are {sign}; the rest the base has chosen.\n")

    console.print(result_table(baseline, contenders))
    same = not any(differs(baseline, contender, p) for contender in contenders for p in range(len(prompts)))
    console.print(
        "All outputs are token for token what the base says without heads."
        if same
        else "[bold red]Outputs differ from what the base says without heads.[/]"
    )
    console.print(verdict(baseline, contenders))


def result_table(baseline: Contender, contenders: list[Contender]) -> Table:
    """All prompts together; fits 80 columns."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("heads and tree", no_wrap=True)
    widths = {"nodes": 5, "tokens_per_step (τ)": 15, "tokens/s": 8, "speed-up": 8, "step cost": 9}
    for heading, width in widths.items():
        table.add_column(heading, justify="right", min_width=width, max_width=width)
    before = baseline
    for contender in (baseline, *contenders):
        if contender.heads != before.heads:
            table.add_section()
        before = contender
        table.add_row(
            contender.name,
            str(contender.nodes),
            f"{contender.tokens_per_step:.2f}",
            f"{contender.tokens_per_second:.0f}",
            f"{contender.tokens_per_second / baseline.tokens_per_second:.2f}",
            f"{contender.step_seconds / baseline.step_seconds:.2f}",
        )
    return table


def verdict(baseline: Contender, contenders: list[Contender]) -> str:
    """Whether speculation pays on this device, and why."""
    largest = max(contenders, key=lambda contender: contender.nodes)
    cost = largest.step_seconds / baseline.step_seconds
    best = max(contenders, key=lambda contender: contender.tokens_per_second)
    ratio = best.tokens_per_second / baseline.tokens_per_second
    if ratio > 1:
        found = f"Here it does, best with {best.name}: {ratio:.2f} times the speed."
    else:
        found = f"Here it never does: even {best.name} has {ratio:.2f} times the speed. Speculation does not pay on it."
    return (
        f"Step cost is in steps of one node: on this device ({jax.devices()[0].device_kind}) {largest.nodes} nodes "
        f"cost {cost:.1f} times as much as one. A tree pays if its steps emit more tokens (τ) than they cost. {found} "
        "A model this small falls into repetition, which heads guess easily."
    )


def differs(baseline: Contender, contender: Contender, prompt: int) -> bool:
    expected = baseline.output(prompt).output_ids
    return any(output.output_ids != expected for output in [*contender.outputs[prompt], *baseline.outputs[prompt]])


def refuse_differences(prompts, baseline: Contender, contenders: list[Contender]) -> None:
    """Exit with code 1 if any tree changed what the base says."""
    for number in range(len(prompts)):
        for contender in contenders:
            if differs(baseline, contender, number):
                sys.exit(f"hydrajax demo: prompt {number + 1}: {contender.name} differs from autoregressive decoding")
