"""``hydrajax chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import io
import sys
from contextlib import suppress

from rich.console import Console

from hydrajax.cli import options
from hydrajax.cli.signals import Terminated
from hydrajax.conversation import Chat
from hydrajax.errors import HydrajaxError

HELP = "talk with a model; the cache is kept between turns"
COMMANDS = {"/reset": "begin a new conversation", "/exit": "leave (or Ctrl-D)"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_arguments(parser, apart=True)
    parser.add_argument(
        "--template",
        metavar="NAME",
        default="auto",
        help="chat template: auto (the tokenizer's own), vicuna, plain or raw",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=options.most_tokens, default=512, help="default %(default)s"
    )
    parser.add_argument("--seed", metavar="S", type=options.seed, default=0, help="default %(default)s")
    options.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> None:
    tree, wanted = options.tree_from(args), options.spec_from(args)
    console = Console(stderr=True, highlight=False)
    model = options.load_from(args)
    spec = model.spec(wanted, tree=tree)
    if tree is None and model.tokenizer is not None:
        with console.status("finding the fastest tree") as line:
            spec = model.fastest(options.prompts_from(None, model), spec, 1, line.update)
    chat = Chat(model.executor(spec), template=args.template, seed=args.seed)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    chat.messages = list(system)
    if isinstance(sys.stdin, io.TextIOWrapper):  # a line that is no text is refused by itself, and no crash
        sys.stdin.reconfigure(errors="surrogateescape")
    if at_terminal():
        edit_lines()
        console.print(", ".join(f"{name}: {what}" for name, what in COMMANDS.items()), style="dim")
    while (line := read_line()) is not None:
        if line.strip() == "/exit":
            break
        if line.strip() == "/reset":
            chat.reset()
            chat.messages = list(system)
        elif line.strip():
            answer(chat, line, console)


def at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()  # there is none in a process that was started without


def edit_lines() -> None:
    """Let `input` move within a line and bring back earlier ones, which are kept in memory only."""
    with suppress(ImportError):  # there is none on Windows, whose terminal does it
        import readline  # noqa: F401 (that it is imported is all)


def read_line() -> str | None:
    """A message, None at the end of the input. Ctrl-C at the prompt ends the program, as everywhere."""
    if sys.stdin is None:
        return None
    try:
        return input("> " if at_terminal() else "")
    except EOFError:
        return None


def answer(chat, line: str, console: Console) -> None:
    """Print the answer as it comes; Ctrl-C breaks it off and leaves the conversation as far as it went, SIGTERM ends
    the program."""
    pieces = chat.say(line)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
    except HydrajaxError as error:
        console.print(f"{error}", style="red", markup=False)
        return
    except KeyboardInterrupt as interrupt:
        pieces.close()
        print(flush=True)
        if isinstance(interrupt, Terminated):
            raise
        console.print("broken off", style="dim")
    turn = chat.turn
    rate = turn.new_tokens / turn.seconds if turn.seconds else 0.0
    console.print(
        f"τ {turn.new_tokens / max(turn.steps, 1):.2f}, {rate:.1f} tokens/s, {turn.new_tokens} tokens; "
        f"{turn.reused} of {turn.prompt_tokens} prompt tokens were in the cache"
        + ("; cut by the model's context" if turn.full else ""),
        style="dim",
    )
