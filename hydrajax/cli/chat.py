"""``hydrajax chat``: a conversation in the terminal."""

import argparse
import io
import sys
from contextlib import suppress

from rich.console import Console

from hydrajax.cli import options
from hydrajax.cli.signals import Terminated
from hydrajax.conversation import Chat
from hydrajax.errors import HydrajaxError

SLASH_COMMANDS = {"/reset": "start a new conversation", "/exit": "leave (or Ctrl-D)"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_arguments(parser, apart=True, corpus=True)
    group = options.add_decoding_arguments(parser, max_new_tokens=512, batch=False)
    options.add(group, "--template")
    group.add_argument("--system", metavar="TEXT", help="start the conversation with this system message")
    options.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> None:
    tree, request = options.tree_from(args, measures=True), options.request_from(args)
    console = Console(stderr=True, highlight=False)
    model = options.load_from(args)
    with console.status("choosing the tree") as line:
        program = model.with_tree(model.program(request), request, tree, on_status=line.update)
    chat = Chat(model.executor(program, program.fitting(request)), template=args.template, seed=args.seed)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    chat.messages = list(system)
    if isinstance(sys.stdin, io.TextIOWrapper):  # so that a line of invalid text does not end the program
        sys.stdin.reconfigure(errors="surrogateescape")
    if at_terminal():
        edit_lines()
        console.print(", ".join(f"{name}: {what}" for name, what in SLASH_COMMANDS.items()), style="dim")
    while (line := read_line()) is not None:
        if line.strip() == "/exit":
            break
        if line.strip() == "/reset":
            chat.reset()
            chat.messages = list(system)
        elif line.strip():
            answer(chat, line, console)


def at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()  # None in a process without standard input


def edit_lines() -> None:
    """Let `input` edit lines and recall earlier ones, which are kept in memory only."""
    with suppress(ImportError):  # missing on Windows, whose terminal edits lines itself
        import readline  # noqa: F401


def read_line() -> str | None:
    """Return the next message, None at the end of the input."""
    if sys.stdin is None:
        return None
    try:
        return input("> " if at_terminal() else "")
    except EOFError:
        return None


def answer(chat: Chat, line: str, console: Console) -> None:
    """Print the answer as it is generated. Ctrl-C ends the answer and keeps its beginning; SIGTERM ends the program."""
    pieces = chat.send(line)
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
    rate = "" if turn.tokens_per_second is None else f", then {turn.tokens_per_second:.1f} tokens/s"
    console.print(
        f"τ {turn.new_tokens / max(turn.steps, 1):.2f}, {turn.new_tokens} tokens; first after "
        f"{turn.first_seconds:.1f} s{rate}; "
        f"{turn.reused} of {turn.prompt_tokens} prompt tokens were cached"
        + ("; cut off: the context is full" if turn.full else ""),
        style="dim",
        soft_wrap=True,
    )
