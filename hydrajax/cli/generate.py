"""``hydrajax generate``: generate text with a base, with or without a draft."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import jax
from rich.console import Console
from rich.progress import SpinnerColumn

from hydrajax import processes
from hydrajax.cli import options
from hydrajax.cli.options import add
from hydrajax.cli.prompt_files import PROMPT_FORMATS, read_prompts
from hydrajax.cli.screen import bar, write_marked
from hydrajax.decoding.executor import Executor
from hydrajax.errors import HydrajaxError
from hydrajax.generation import generate, stream
from hydrajax.language_model import AUTO
from hydrajax.text.answers import AnswerWriter, Generation
from hydrajax.text.marking import pieces, text_of
from hydrajax.text.prompt import Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("input and output")
    source = files.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="continue this text")
    add(source, "--prompts", help=f"read prompts from FILE: {PROMPT_FORMATS}")
    files.add_argument("--output", metavar="FILE.jsonl", help="write results to this file (default: print the text)")
    files.add_argument(
        "--logprobs", action="store_true", help="also write each token's log-probability under the base to --output"
    )
    files.add_argument(
        "--top-logprobs", metavar="K", type=options.positive,
        help="also write the K most likely tokens at each position, with their log-probabilities, to --output",
    )  # fmt: skip
    options.add_model_arguments(parser, apart=True, corpus=True)
    decoding = options.add_decoding_arguments(parser)
    decoding.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="end each output before this text; repeatable"
    )
    decoding.add_argument("--stream", action="store_true", help="print tokens as they are accepted, prompt by prompt")
    options.add_sampling_arguments(parser)
    options.add_grammar_arguments(parser)


def run(args: argparse.Namespace) -> None:
    logprobs = args.top_logprobs or (0 if args.logprobs else None)
    tree, request = options.tree_from(args, measures=True), options.request_from(args)
    if args.stream and (args.output or args.batch_size > 1):
        raise HydrajaxError("--stream: prints one prompt at a time; leave out --output and --batch-size")
    if (args.logprobs or args.top_logprobs) and args.output is None:
        flag = "--logprobs" if args.logprobs else "--top-logprobs"
        raise HydrajaxError(f"{flag}: requires --output FILE.jsonl, where log-probabilities are written")
    if request.grammar is not None:
        processes.refuse_several("grammar")
    prompts = read_prompts(args.prompts) if args.prompt is None else [Prompt(args.prompt, "--prompt")]
    totals = Totals()
    with ExitStack() as stack:
        writes = args.output is not None and processes.is_main()
        writer = stack.enter_context(AnswerWriter(args.output)) if writes else None
        progress = ProgressLine(len(prompts))
        stack.callback(progress.hide)
        progress.status("loading")
        model = options.load_from(args, progress.status)
        program = model.program(request, tree=None if tree == AUTO else tree, logprobs=logprobs)
        if jax.process_count() > 1:
            ids = [found.tolist() for found in model.ids_of_prompts(prompts)]
            chosen = args.mesh, args.tree, args.batch_size, args.seed, args.stop, args.stream
            processes.check_same("prompts or arguments", options.described(model, program, request), ids, chosen)
        ids = model.ids_of_prompts(prompts)
        program = model.with_tree(program, request, tree, args.batch_size, ids, progress.status)
        progress.hide()
        executor = model.executor(program, program.fitting(request))
        if args.stream:
            results = print_streams(executor, prompts, args, progress)
        else:
            results = generate(
                executor, prompts, stop=args.stop, batch_size=args.batch_size, seed=args.seed,
                executor_for=partial(model.for_batch, executor) if tree in (None, AUTO) else None,
                on_status=progress.status,
            )  # fmt: skip
        for number, result in enumerate(results):
            totals.add(result, progress.seconds)
            if writer is not None:
                writer.write(result)
            elif not args.stream:
                progress.hide()  # it may share the terminal with the text
                print_result(executor, result, number, len(prompts))
            progress.update(totals)
    if totals.cut:
        context, outputs = model.config.max_positions, "output" if totals.cut == 1 else "outputs"
        print(
            f"{totals.cut} {outputs} cut off: prompt and output fill the context of {context} tokens", file=sys.stderr
        )
    if totals.stuck:
        print(f"{totals.stuck} cut off: no token can continue them, or the grammar is too complex", file=sys.stderr)
    print(totals.summary(), file=sys.stderr)


def print_streams(
    executor: Executor, prompts: list[Prompt], args: argparse.Namespace, progress: ProgressLine
) -> Iterator[Generation]:
    """Print each prompt's text as it is generated, and end the line also after Ctrl-C."""
    for number, prompt in enumerate(prompts):
        if len(prompts) > 1:
            print(f"--- {number + 1} of {len(prompts)}")
        request = executor.request.replace(stop=args.stop, seed=args.seed, number=number)
        text = stream(executor, prompt, request, on_status=progress.status)
        try:
            for piece in text:
                progress.hide()
                print(piece, end="", flush=True)
        finally:
            progress.hide()
            print(flush=True)
        yield text.result


def print_result(executor: Executor, result: Generation, number: int, count: int) -> None:
    """Print the text of prompt ``number`` of ``count``; on a terminal with drafted tokens marked."""
    if not sys.stdout.isatty():
        print(text_of(result), flush=True)
        return
    console = Console(highlight=False)
    if number == 0 and executor.program.longest_path > 0:
        write_marked(Console(stderr=True), [("drafted and accepted", True), (", chosen by the base", False)])
    if count > 1:
        console.out(f"--- {number + 1} of {count}", style="dim")
    write_marked(console, pieces(executor.tokenizer, result))


@dataclass
class Totals:
    """Sums over all results."""

    prompts: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0  # since decoding began, without compilation
    cut: int = 0  # outputs that the context cut off
    stuck: int = 0  # outputs that the grammar's parser ended before they were complete

    def add(self, result: Generation, seconds: float) -> None:
        self.prompts += 1
        self.tokens += result.new_tokens
        self.steps += result.steps
        self.seconds = seconds
        self.cut += result.finish_reason == "context"
        self.stuck += result.finish_reason == "grammar"

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
    """A line of progress on stderr, if that is a terminal."""

    def __init__(self, total: int):
        # stdout holds results, even where it is the same terminal.
        self._line = bar("prompts", SpinnerColumn(), redirect_stdout=False, redirect_stderr=False)
        self._task, self._speed = self._line.add_task("", total=total), ""
        self._decoded, self._since = 0.0, None  # before and since decoding went on

    @property
    def seconds(self) -> float:
        """Time in the status "decoding"."""
        return self._decoded + (0.0 if self._since is None else time.perf_counter() - self._since)

    def status(self, description: str) -> None:
        self._decoded, self._since = self.seconds, time.perf_counter() if description == "decoding" else None
        self._line.update(self._task, description=f"{self._speed}{description} ...")
        self._line.start()

    def hide(self) -> None:
        self._line.stop()

    def update(self, totals: Totals) -> None:
        self._speed = f"{totals.tokens_per_second:.1f} tokens/s  {totals.tokens_per_step:.2f} tokens per step  "
        self._line.update(self._task, completed=totals.prompts, description=self._speed)
