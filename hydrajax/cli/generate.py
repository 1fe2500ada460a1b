"""``hydrajax generate``: text from a base with or without draft heads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from hydrajax.cli.options import (
    add_decoding_arguments,
    add_model_arguments,
    add_sampling_arguments,
    load_from,
    positive,
    spec_from,
    tree_from,
)
from hydrajax.cli.screen import write_marked
from hydrajax.decoding.executor import Executor
from hydrajax.errors import HydrajaxError
from hydrajax.generation import generate, stream
from hydrajax.text.answers import AnswerWriter, Generation
from hydrajax.text.marking import pieces, text_of
from hydrajax.text.prompt import PROMPT_FORMATS, Prompt, read_prompts

HELP = "generate text with a base model, faster with draft heads"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("input and output")
    what = files.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="text to continue")
    what.add_argument("--prompts", metavar="FILE", help=PROMPT_FORMATS)
    files.add_argument("--output", metavar="FILE.jsonl", help="write results here instead of text to the screen")
    files.add_argument(
        "--logprobs", action="store_true", help="write to --output each token's log-probability under the base, too"
    )
    files.add_argument(
        "--top-logprobs", metavar="K", type=positive, help="and of the base's K likeliest tokens in the place of each"
    )
    add_model_arguments(parser, apart=True)
    decoding = add_decoding_arguments(parser)
    decoding.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="end before this text; may be given several times"
    )
    decoding.add_argument("--stream", action="store_true", help="print text as it is accepted, one prompt at a time")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> None:
    tree, wanted = tree_from(args), spec_from(args, logprobs=args.top_logprobs or (0 if args.logprobs else None))
    if args.stream and (args.output or args.batch_size > 1):
        raise HydrajaxError("--stream: prints one prompt at a time, it goes with neither --output nor --batch-size")
    if (args.logprobs or args.top_logprobs) and args.output is None:
        flag = "--logprobs" if args.logprobs else "--top-logprobs"
        raise HydrajaxError(f"{flag}: is written to the lines of --output FILE.jsonl, which is not given")
    prompts = read_prompts(args.prompts) if args.prompt is None else [Prompt(args.prompt, "--prompt")]
    totals = Totals()
    with ExitStack() as stack:
        writer = None if args.output is None else stack.enter_context(AnswerWriter(args.output))
        progress = stack.enter_context(ProgressLine(len(prompts)))
        progress.status("loading")
        model = load_from(args, progress.status)
        spec = model.spec(wanted, tree=tree)
        if tree is None:
            ids = model.ids_of_prompts(prompts)  # as far as needed
            spec = model.fastest(ids, spec, args.batch_size, progress.status)
            progress.hide()
        executor = model.executor(spec)
        screen = Screen(model.tokenizer, len(prompts), drafted=spec.longest_path > 0)
        if args.stream:
            results = streamed(executor, prompts, args, progress)
        else:
            results = generate(
                executor, prompts, stop=args.stop, batch_size=args.batch_size, seed=args.seed, on_status=progress.status
            )
        for number, result in enumerate(results):
            totals.add(result, first_of_batch=number % args.batch_size == 0)
            totals.cut += result.finish_reason == "context"
            if writer is not None:
                writer.write(result)
            elif not args.stream:
                progress.hide()  # it may share the terminal with the text
                screen.show(result)
            progress.update(totals)
    if totals.cut:
        context = model.config.max_positions
        outputs = "1 output was" if totals.cut == 1 else f"{totals.cut} outputs were"
        print(f"{outputs} cut by the model's context of {context} tokens, prompt included", file=sys.stderr)
    print(totals.summary(), file=sys.stderr)


def streamed(
    executor: Executor, prompts: list[Prompt], args: argparse.Namespace, progress: ProgressLine
) -> Iterator[Generation]:
    """Print every prompt's text as it comes. Ctrl-C leaves what has come, on a line of its own."""
    for number, prompt in enumerate(prompts):
        if len(prompts) > 1:
            print(f"--- {number + 1} of {len(prompts)}")
        text = stream(executor, prompt, stop=args.stop, seed=args.seed, number=number, on_status=progress.status)
        try:
            for piece in text:
                progress.hide()
                print(piece, end="", flush=True)
        finally:
            progress.hide()
            print(flush=True)
        yield text.result


@dataclass
class Totals:
    """Sums over all prompts so far. ``seconds`` counts each batch once and no compilation."""

    prompts: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    cut: int = 0

    def add(self, result: Generation, first_of_batch: bool) -> None:
        self.prompts += 1
        self.tokens += result.new_tokens
        self.steps += result.steps
        self.seconds += result.wall_time if first_of_batch else 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(self.steps, 1)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def summary(self) -> str:
        return (
            f"{self.tokens} tokens in {self.steps} steps, tokens_per_step {self.tokens_per_step:.2f} (τ), "
            f"{self.tokens_per_second:.1f} tokens/s"
        )


class ProgressLine:
    """What is going on, on stderr; silent unless that is a terminal. A context manager that leaves no trace."""

    def __init__(self, total: int):
        self._line = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("prompts  {task.fields[speed]}"),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,  # stdout is the user's, even where it is the same terminal
            redirect_stderr=False,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._line.add_task("", total=total, speed="")

    def status(self, description: str) -> None:
        """Show the line with this text: loading, compiling, decoding."""
        self._line.update(self._task, description=f"{description} ...")
        self._line.start()

    def hide(self) -> None:
        self._line.stop()

    def update(self, totals: Totals) -> None:
        speed = f"{totals.tokens_per_second:.1f} tokens/s  {totals.tokens_per_step:.2f} tokens per step"
        self._line.update(self._task, completed=totals.prompts, speed=speed)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_) -> None:
        self.hide()


class Screen:
    """Results on stdout: plain text, or on a terminal with the accepted draft tokens marked."""

    def __init__(self, tokenizer: Any, prompts: int, drafted: bool):
        self._tokenizer, self._prompts, self._drafted = tokenizer, prompts, drafted
        self._console = Console(highlight=False) if sys.stdout.isatty() else None
        self._number = 0

    def show(self, result: Generation) -> None:
        self._number += 1
        if self._console is None:
            print(text_of(result), flush=True)
            return
        if self._number == 1 and self._drafted:
            write_marked(Console(stderr=True), [("drafted and accepted", True), (", chosen by the base", False)])
        if self._prompts > 1:
            self._console.out(f"--- {self._number} of {self._prompts}", style="dim")
        write_marked(self._console, pieces(self._tokenizer, result))
