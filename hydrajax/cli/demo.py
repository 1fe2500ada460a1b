"""``hydrajax demo``: the whole way on one machine, from text to a trained base, draft heads and faster decoding.

Nothing is downloaded and no file beside the package is needed: the text is the running Python's standard library.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hydrajax.api import Loaded, generate
from hydrajax.cli.generate import pieces, write_marked
from hydrajax.cli.options import seed
from hydrajax.config import LlamaConfig
from hydrajax.decoding.decode import check_prompt
from hydrajax.decoding.step import Params
from hydrajax.drafters.autoregressive import NoDrafter
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.errors import HydrajaxError
from hydrajax.evaluation.answers import Generation
from hydrajax.evaluation.prompts import Prompt
from hydrajax.models.llama import Llama, init_base
from hydrajax.train import corpus
from hydrajax.train.step import init_draft, make_base_step, make_head_step, make_optimizer
from hydrajax.trees import presets

HELP = "train a tiny model and draft heads on Python's own library, then decode with and without the heads"


FULL_CONFIG = LlamaConfig(1024, 128, 336, n_layers=8, n_heads=2, n_kv_heads=2, head_dim=64, max_positions=512)


@dataclass(frozen=True)
class Recipe:
    """The demo's sizes. Steps and not seconds are fixed, so that a seed gives the same model on the same machine.

    chars, held_out_files: text to read, and how many of its files are kept for the prompts. vocab_size: of the BPE.
    window, base_batch, base_steps, base_lr: training of the base; draft_*: of each drafter's heads. trees: what to
    decode with, the one to show first. prompts, prompt_tokens, max_new_tokens: the continuations. repeats: timed runs
    of each.
    """

    chars: int = 3_000_000
    held_out_files: int = 12
    vocab_size: int = 1024
    config: LlamaConfig = FULL_CONFIG
    window: int = 128
    base_batch: int = 4
    base_steps: int = 700
    base_lr: float = 3.5e-3
    draft_heads: int = 4
    draft_batch: int = 4
    draft_steps: int = 400
    draft_lr: float = 5e-3
    trees: tuple[str, ...] = ("chain-3", "cartesian-2x2", "mc_sim_7b_63")
    prompts: int = 4
    prompt_tokens: int = 32
    max_new_tokens: int = 96
    repeats: int = 5


FULL = Recipe()
# Seconds instead of minutes, and text to match: to see that everything runs.
QUICK = replace(
    FULL,
    chars=300_000,
    held_out_files=6,
    vocab_size=320,
    config=LlamaConfig(320, 32, 88, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=16, max_positions=256),
    window=64,
    base_steps=30,
    draft_heads=2,
    draft_steps=20,
    trees=("chain-2", "cartesian-2x2"),
    prompts=2,
    max_new_tokens=32,
    repeats=3,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="continue this in place of held-out code")
    parser.add_argument("--quick", action="store_true", help="a far smaller model in seconds, to see that all works")
    parser.add_argument("--seed", metavar="S", type=seed, default=0, help="default %(default)s")


def run(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    recipe = QUICK if args.quick else FULL
    console = Console(highlight=False)
    tokenizer, windows, prompts = prepare(recipe, args.prompt, args.seed)
    model, base_params = train_base(recipe, windows, args.seed)
    shapes = (recipe.draft_heads, recipe.config.width, recipe.config.vocab_size)
    drafters = {"Hydra": HydraHeads(*shapes), "Medusa": MedusaHeads(*shapes)}
    loaded = {}
    for name, drafter in drafters.items():
        params = Params(base_params, train_heads(recipe, name, model, base_params, drafter, windows, args.seed))
        loaded[name] = Loaded(model, drafter, params, tokenizer, (tokenizer.eos_token_id,))
    plain = Loaded(model, NoDrafter(), Params(base_params, {}), tokenizer, (tokenizer.eos_token_id,))
    baseline = Contender("autoregressive", "root", plain)
    contenders = [Contender("Hydra", tree, loaded["Hydra"]) for tree in recipe.trees]
    contenders.append(Contender("Medusa", recipe.trees[0], loaded["Medusa"]))
    measure(recipe, prompts, baseline, contenders)

    report(console, tokenizer, prompts, baseline, contenders)
    console.print(f"\nThe whole run took {time.perf_counter() - began:.0f} s.")
    refuse_differences(prompts, baseline, contenders)


class Phase:
    """A part of the run: a bar with loss and time left while it lasts, then one line with what it took.

    The bar is on stderr and only on a terminal; it vanishes, also on Ctrl-C. ``total`` counts calls of `advance`.
    """

    def __init__(self, title: str, total: int):
        self.title, self.note = title, ""
        self._losses: list[float] = []
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(title, total=total, loss="")

    def advance(self, loss: Any = None) -> None:
        """One more step is done; ``loss`` (an array, averaged) is waited for and shown as a mean of the last 20."""
        if loss is not None:
            self._losses.append(float(np.mean(loss)))
            self.note = f"loss {statistics.fmean(self._losses[-20:]):.2f}"
        self._bar.update(self._task, advance=1, loss=self.note)

    def __enter__(self) -> Phase:
        self._began = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(self, kind, *_) -> None:
        self._bar.stop()
        if kind is None:
            seconds = time.perf_counter() - self._began
            print(f"{seconds:6.1f} s  {self.title}{self.note and ': '}{self.note}", flush=True)


# --- training -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedPrompt:
    name: str
    ids: list[int]


def prepare(recipe: Recipe, own_prompt: str | None, seed: int) -> tuple[Any, np.ndarray, list[NamedPrompt]]:
    """``(tokenizer, training windows int32 [n, window], prompts)``. Refuses a bad own prompt before any training."""
    with Phase("read the standard library and train a tokenizer on it", 3) as phase:
        train, held_out = corpus.split_files(corpus.standard_library(recipe.chars, seed=seed), recipe.held_out_files)
        phase.advance()
        texts = [file.text for file in train]
        tokenizer = corpus.train_tokenizer(texts, recipe.vocab_size)
        phase.advance()
        if own_prompt is None:
            prompts = held_out_prompts(held_out, tokenizer, recipe.prompts, recipe.prompt_tokens)
        else:
            prompts = [NamedPrompt("your prompt", Prompt(own_prompt, "--prompt").ids(tokenizer))]
            check_prompt(np.asarray(prompts[0].ids), "--prompt", recipe.config)
        windows = corpus.pack(tokenizer(texts)["input_ids"], recipe.window, tokenizer.eos_token_id)
        phase.note = f"{len(train)} files, {windows.size / 1e6:.2f}M tokens of {len(tokenizer)}"
        phase.advance()
    return tokenizer, windows, prompts


def held_out_prompts(
    files: Iterable[corpus.SourceFile], tokenizer: Any, count: int, n_tokens: int
) -> list[NamedPrompt]:
    """The first ``n_tokens`` from the first function in the second half of each file, ``count`` files."""
    prompts = []
    for file in files:
        lines = file.text.splitlines(keepends=True)
        starts = (n for n, line in enumerate(lines) if n >= len(lines) // 2 and line.lstrip().startswith("def "))
        start = next(starts, 0)
        ids = tokenizer.encode("".join(lines[start : start + n_tokens]))[:n_tokens]
        if len(ids) == n_tokens:
            prompts.append(NamedPrompt(f"{file.name}, line {start + 1}", ids))
    if not prompts:
        raise HydrajaxError(f"standard library: no held-out file has {n_tokens} tokens")
    return prompts[:count]


def train_base(recipe: Recipe, windows: np.ndarray, seed: int) -> tuple[Llama, Any]:
    model = Llama(recipe.config)

    @jax.jit
    def init(rng):
        # The usual std of 0.02 suits widths of thousands; a narrow model learns much faster from 1 / sqrt(width).
        scale = recipe.config.width**-0.5 / 0.02
        return jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, init_base(model, rng))

    optimizer = make_optimizer(recipe.base_lr, recipe.base_steps, warmup=recipe.base_steps // 10, final_fraction=0.05)
    step = make_base_step(model, optimizer)
    params = init(jax.random.key(seed))
    with Phase(f"train a LLaMA of {size_of(params)} parameters", recipe.base_steps) as phase:
        opt_state = optimizer.init(params)
        for tokens in corpus.batches(windows, recipe.base_batch, recipe.base_steps, seed):
            params, opt_state, loss = step(params, opt_state, tokens)
            phase.advance(loss)
    return model, params


def train_heads(recipe: Recipe, name: str, model: Llama, base_params, drafter, windows: np.ndarray, seed: int) -> Any:
    steps = recipe.draft_steps
    optimizer = make_optimizer(recipe.draft_lr, steps, warmup=steps // 10, final_fraction=0.05)
    step = make_head_step(model, drafter, optimizer)
    params = init_draft(model, drafter, base_params, jax.random.key(seed + 1))
    with Phase(
        f"train {drafter.depth} {name} heads of {size_of(params)} parameters on the frozen base", steps
    ) as phase:
        opt_state = optimizer.init(params)
        for tokens in corpus.batches(windows, recipe.draft_batch, steps, seed + 1):
            params, opt_state, losses = step(params, opt_state, base_params, tokens)
            phase.advance(losses)
    return params


def size_of(params: Any) -> str:
    return f"{sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6:.2f}M"


# --- decoding -------------------------------------------------------------------------------------------------------


@dataclass
class Contender:
    """One way to decode. ``outputs[p]`` and ``seconds[p]``: the generations of prompt p and their median time."""

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


def measure(recipe: Recipe, prompts: list[NamedPrompt], baseline: Contender, contenders: list[Contender]) -> None:
    """Fill in the contenders' outputs. All take turns, so that a busy moment of the machine hits all alike."""
    everyone = [baseline, *contenders]

    def decode(contender: Contender, prompt: NamedPrompt) -> Generation:
        tree = presets.by_name(contender.tree)
        return next(generate(contender.loaded, [prompt.ids], tree=tree, max_new_tokens=recipe.max_new_tokens))

    title = f"decode {len(prompts)} prompts in {len(everyone)} ways, {recipe.repeats} times each"
    with Phase(title, len(prompts) * len(everyone) * (recipe.repeats + 1)) as phase:
        for prompt in prompts:
            for contender in everyone:
                contender.outputs.append([])
            for attempt in range(recipe.repeats + 1):
                for contender in everyone:
                    generation = decode(contender, prompt)
                    if attempt > 0:  # the first compiles and warms up
                        contender.outputs[-1].append(generation)
                    phase.advance()


def report(console: Console, tokenizer, prompts, baseline: Contender, contenders: list[Contender]) -> None:
    """Every continuation with its drafted tokens marked, a table per prompt and one over all, and what they say."""
    best = max(contenders, key=lambda contender: contender.tokens_per_second)
    marks = f" (marked: drafted by {best.name})" if console.is_terminal else ""
    for number, prompt in enumerate(prompts):
        console.print(f"\n[bold]{number + 1}. {prompt.name}[/]{marks}\n")
        console.out(tokenizer.decode(prompt.ids), style="dim", end="", highlight=False)
        write_marked(console, pieces(tokenizer, best.output(number)))

    table = result_table("prompt", "equal", last="tokens/s")
    for number in range(len(prompts)):
        table.add_section()
        for contender in (baseline, *contenders):
            output, rate = contender.output(number), contender.rate(number)
            table.add_row(
                str(number + 1) if contender is baseline else "",
                "" if contender is baseline else "no" if differs(baseline, contender, number) else "yes",
                contender.name,
                f"{output.new_tokens / output.steps:.2f}",
                f"{rate / baseline.rate(number):.2f}",
                f"{rate:.0f}",
            )
    console.print("\n[bold]Each prompt[/]. Equal: token for token what the base says without heads", table, sep="\n")

    table = result_table("nodes", "ms", last="cost")
    for contender in (baseline, *contenders):
        table.add_row(
            str(contender.nodes),
            f"{contender.step_seconds * 1e3:.2f}",
            contender.name,
            f"{contender.tokens_per_step:.2f}",
            f"{contender.tokens_per_second / baseline.tokens_per_second:.2f}",
            f"{contender.step_seconds / baseline.step_seconds:.2f}",
        )
    console.print("[bold]All prompts[/]. ms: of a step. Cost: of a step, in one-node steps", table, sep="\n")

    largest = max(contenders, key=lambda contender: contender.nodes)
    cost = largest.step_seconds / baseline.step_seconds
    winners = [contender.name for contender in contenders if contender.tokens_per_second > baseline.tokens_per_second]
    verdict = f"Here it does with {', '.join(winners)}." if winners else "Here it never does: speculation does not pay."
    console.print(
        f"On this device ({jax.devices()[0].device_kind}) a step of {largest.nodes} nodes costs {cost:.1f} times a "
        f"step of one node. A tree pays if its steps emit more tokens (τ) than the one-node steps they cost. {verdict}"
    )
    # Two minutes of training give a model that repeats itself, and repetition is easy to draft.
    console.print("A model this small falls into repetition, which heads guess easily: expect a lower τ of a real one.")


def result_table(*first: str, last: str) -> Table:
    """Fits 80 columns."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading, width in zip(first, (6, 5), strict=True):
        table.add_column(heading, justify="right", min_width=width)
    table.add_column("heads and tree", no_wrap=True)
    table.add_column("tokens_per_step (τ)", justify="right", min_width=15, max_width=15)
    table.add_column("speed-up", justify="right", min_width=8)
    table.add_column(last, justify="right", min_width=9)
    return table


def differs(baseline: Contender, contender: Contender, prompt: int) -> bool:
    expected = baseline.output(prompt).output_ids
    return any(output.output_ids != expected for output in [*contender.outputs[prompt], *baseline.outputs[prompt]])


def refuse_differences(prompts, baseline: Contender, contenders: list[Contender]) -> None:
    """Exit with code 1 if any tree changed what the base says."""
    for number in range(len(prompts)):
        for contender in contenders:
            if differs(baseline, contender, number):
                sys.exit(f"hydrajax demo: prompt {number + 1}: {contender.name} differs from autoregressive decoding")
