"""The ``hydrajax`` program: one module per command, each a thin layer over the library.

A command module has ``add_arguments(parser)`` and ``run(args)``; its help text is in `COMMANDS`. Installed packages add
commands as entry points of the group ``hydrajax.commands``. Only the chosen command's module is imported, and none for
``hydrajax --help``; slow imports therefore belong in ``run``.
"""
# PYTHON_ARGCOMPLETE_OK (argcomplete looks for this line where it is switched on for all programs)

import argparse
import io
import os
import platform
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version

from hydrajax import plugins
from hydrajax.cli.signals import Terminated, terminable
from hydrajax.errors import HydrajaxError, hint, one_line

EPILOG = 'Tab completion in this shell: eval "$(register-python-argcomplete hydrajax)"'
COMMANDS = {
    "demo": "compare a model's speed with and without each kind of draft, and show drafted text",
    "generate": "generate text from prompts, with or without a draft",
    "chat": "chat with a model in the terminal, keeping the KV cache between turns",
    "serve": "serve many clients over HTTP through an OpenAI-compatible API",
    "train": "train draft heads or a whole model; the same command resumes an interrupted run",
    "distill": "generate training text for draft heads: the base answers conversations or continues texts",
    "tree": "search the candidate tree that is fastest on this device, or draw a tree",
    "bench": "time decode steps and their phases, with a draft and without",
    "evaluate": "answer MT-Bench, HumanEval and other question sets with and without drafts; compare speed and output",
    "certify": "check that speculative decoding gives the base's tokens or distribution",
    "convert": "export draft heads to other formats, merge an adapter, fetch from and push to the Hub, "
    "measure quantisation",
    "roofline": "predict decode step times on a device",
    "report": "print the tables of the result files in a directory and write them as Markdown",
}
COORDINATOR = "JAX_COORDINATOR_ADDRESS"  # `hydrajax.processes.ADDRESS`, which imports JAX
IN_PROCESSES = frozenset({"generate", "evaluate"})  # train joins its processes itself
IN_ONE_PROCESS = frozenset({"demo", "chat", "serve", "distill", "tree", "bench", "certify"})


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors and exit code 2."""

    def error(self, message: str):
        raise HydrajaxError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


class _Version(argparse.Action):
    """``--version``: one line for bug reports, without the device, which JAX would have to start."""

    def __call__(self, parser, *_):
        from hydrajax.machine import own_version

        print(f"hydrajax {own_version()}, jax {version('jax')}, Python {platform.python_version()}")
        parser.exit()


def build_parser(argv: list[str]) -> argparse.ArgumentParser:
    """Return the parser for a command line, with the arguments of the first command that it names."""
    parser = _Parser(prog="hydrajax", description="Tree speculative decoding in JAX.", epilog=EPILOG)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of hydrajax, JAX and Python")
    parser.set_defaults(run=lambda args: parser.print_help(), flags=frozenset())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    known = plugins.Group("commands")
    named = next((word for word in argv if word in known), None)
    for name in [named] if named else known:
        about = COMMANDS.get(name) or f"command of the package {plugins.package_of(known.name, name)}"
        # No abbreviated flags: a script that uses one would break when a longer flag is added.
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        if named:
            module = known[name]
            module.add_arguments(command)
            command.set_defaults(run=module.run, flags=flags_of(command))
    return parser


def flags_of(parser: argparse.ArgumentParser) -> frozenset[str]:
    """Return the flags of a parser and of its subparsers. Errors name the library's arguments by them."""
    verbs = [action.choices.values() for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    own = frozenset(flag for action in parser._actions for flag in action.option_strings)
    return own.union(*(flags_of(verb) for parsers in verbs for verb in parsers))


def main(argv: list[str] | None = None) -> int:
    """Run the ``hydrajax`` program and return its exit code, see `guarded`."""
    if "_ARGCOMPLETE" in os.environ:
        from hydrajax.cli.completion import complete

        complete(build_parser)
    words = sys.argv[1:] if argv is None else argv
    return guarded(lambda: parse(build_parser(words), words), is_program=argv is None)


def run_command(prog: str, module_help: str, add_arguments: Callable, run: Callable, argv: list[str] | None) -> int:
    """Run a program with a single command, such as ``python -m hydrajax.train``, with the same error handling."""
    parser = _Parser(prog=prog, description=module_help, allow_abbrev=False)
    add_arguments(parser)
    parser.set_defaults(run=run, flags=flags_of(parser))
    return guarded(lambda: parse(parser, sys.argv[1:] if argv is None else argv), is_program=argv is None)


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse a command line, with settings of the form ``key=value`` before, between and after the flags.

    argparse takes a list of positional arguments from one place only.
    """
    args, rest = parser.parse_known_args(argv)
    if "overrides" in args and not any(word.startswith("-") for word in rest):
        args.overrides, rest = [*args.overrides, *rest], []
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}{_hint(rest, args.flags)}")
    return args


def _hint(rest: list[str], flags: frozenset[str]) -> str:
    """Return what to write for the first unknown flag."""
    from hydrajax.decoding.keywords import OTHERS_WORDS

    words = [word[2:].partition("=")[0].replace("_", "-") for word in rest if word.startswith("--")]
    others = {name.replace("_", "-"): meant.replace("_", "-") for name, meant in OTHERS_WORDS.items()}
    known = [flag.removeprefix("--") for flag in flags]
    own = {name: f"--{meant}" for name, meant in others.items() if meant.partition("=")[0] in known}
    absent = {name: meant for name, meant in others.items() if meant.startswith("no ")}
    return hint(words[0], known, own | absent, "--") if words else ""


@terminable()
def guarded(parse: Callable[[], argparse.Namespace], *, is_program: bool) -> int:
    """Run the parsed command and return its exit code, 0 where it returns None.

    Bad input prints one line and returns 2, Ctrl-C returns 130, SIGTERM 143. The two end a program here.
    """
    flags: frozenset[str] = frozenset()
    try:
        args = parse()
        flags = args.flags
        if "command" not in args or args.command:  # else it prints the help
            from hydrajax.compilation import use_compilation_cache

            use_compilation_cache()
        warnings.formatwarning = _as_one_line
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it warns that torch is missing
        if isinstance(sys.stdout, io.TextIOWrapper):  # escape characters that the terminal's encoding lacks
            sys.stdout.reconfigure(errors="backslashreplace")
        code = _run(args)
        sys.stdout.flush()
    except BaseException as error:
        found = _outcome(error, flags)
        if found is None:
            raise
        code, line = found
        if line:
            print(line, file=sys.stderr, flush=True)
            if is_program and isinstance(error, KeyboardInterrupt):
                with suppress(OSError):
                    sys.stdout.flush()
                os._exit(code)  # XLA may still compile in a thread, which crashes in Python's cleanup
        else:  # a broken pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports it again at exit
    return code or 0


def _run(args: argparse.Namespace) -> int | None:
    """Run the command, in the processes that the environment names."""
    command = args.run.__module__.rpartition(".")[2]
    if COORDINATOR in os.environ and command in IN_PROCESSES:
        from hydrajax.cli.hosts import run_together

        return run_together(lambda: args.run(args), lambda error: _outcome(error, args.flags))
    if COORDINATOR in os.environ and command in IN_ONE_PROCESS and os.environ.get("JAX_NUM_PROCESSES") != "1":
        raise HydrajaxError(f"{COORDINATOR}: {command} runs in one process; unset it")
    return args.run(args)


def _outcome(error: BaseException, flags: frozenset[str]) -> tuple[int, str] | None:
    """Return the exit code and the line of an error with a known cause, None for other errors."""
    if isinstance(error, HydrajaxError):
        return 2, f"hydrajax: {' '.join(error.as_flag(flags).split())}"
    if isinstance(error, Terminated):
        return 128 + signal.SIGTERM, "hydrajax: terminated"
    if isinstance(error, KeyboardInterrupt):
        return 130, "hydrajax: interrupted"
    if isinstance(error, BrokenPipeError):  # a reader such as `head` has closed the pipe
        return 128 + 13, ""  # the shell's code for SIGPIPE
    if isinstance(error, OSError) and error.filename is not None:
        return 2, f"hydrajax: cannot use {error.filename}: {error.strerror}"
    if type(error).__name__ == "PanicException":  # of a library in Rust; its module cannot be imported
        return 2, f"hydrajax: a library failed: {one_line(error)}"
    if isinstance(error, Exception) and not isinstance(error, OSError) and (trouble := _platform_error()):
        return 2, f"hydrajax: {trouble}"
    return None


def _platform_error() -> str | None:
    """The error of a ``JAX_PLATFORMS`` that JAX cannot start; JAX raises many types for it."""
    named = os.environ.get("JAX_PLATFORMS")
    if not named:
        return None
    import jax

    try:
        jax.devices()
    except Exception as error:
        return f"JAX_PLATFORMS: got '{named}', which JAX cannot start here: {one_line(error)}"
    return None


_FORMATWARNING = warnings.formatwarning


def _as_one_line(message, category, filename, lineno, line=None) -> str:
    """Format our own warnings as one line, without the position in the code."""
    if str(message).startswith("hydrajax: "):
        return f"{message}\n"
    return _FORMATWARNING(message, category, filename, lineno, line)
