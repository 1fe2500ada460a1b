"""``hydrajax distill``: text that a base writes itself, for its draft heads to learn from.

``python -m hydrajax.train.distill`` is the same command.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from hydrajax.cli import run_command
from hydrajax.cli.options import add_model_arguments, draft_of, positive, seed, tree_from
from hydrajax.errors import HydrajaxError
from hydrajax.locking import in_use

if TYPE_CHECKING:
    from hydrajax.decoding.executor import Executor
    from hydrajax.distill.distill_records import RecordFile
    from hydrajax.distill.seeds import Seeds
    from hydrajax.distill.talks import Outcome, Writing
    from hydrajax.train.run_config import TrainConfig

PROG = "python -m hydrajax.train.distill"
HELP = "let a base answer seed conversations, or continue its training text, for heads to learn from"
CUTS, CUT_TOKENS = 2000, 64  # how many beginnings, and how long, where nothing is said
NEW_TOKENS = {False: 192, True: 512}  # of a text that is continued, and of an answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE.yaml", required=True, help="a head-training run: its model and data")
    parser.add_argument(
        "--output",
        metavar="FILE.jsonl",
        required=True,
        help="a line for each text or answer, as training reads it (data.format: generations); the same command goes "
        "on where one was killed",
    )
    group = parser.add_argument_group("seeds")
    group.add_argument(
        "--seeds",
        metavar="FILE|NAME|org/name",
        help="conversations (ShareGPT, messages, Alpaca) or questions (as of evaluate --set): the base answers every "
        "turn of the user, after its own earlier answers, in the chat template of the config (data.template). Without "
        "it the config's data: conversations are answered, beginnings cut out of any other text are continued",
    )
    group.add_argument("--data", metavar="DIR", help="where the files of named question sets lie")
    group.add_argument("--held-out", action="store_true", help="take the config's held-out data in place of the rest")
    group.add_argument(
        "--count", metavar="N", type=positive, help=f"the first N seeds (default all conversations, or {CUTS} cuts)"
    )
    group.add_argument(
        "--prompt-tokens", metavar="N", type=positive, help=f"of a beginning that is cut out (default {CUT_TOKENS})"
    )
    add_model_arguments(parser, base=False)
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--new-tokens",
        metavar="N",
        type=positive,
        help=f"most of each text or answer (default {NEW_TOKENS[False]}, of answers {NEW_TOKENS[True]})",
    )
    group.add_argument(
        "--temperatures",
        metavar="T,T",
        type=temperatures,
        default=(0.0, 0.7),
        help="shared out evenly over the seeds; 0 is greedy (default 0,0.7)",
    )
    group.add_argument("--batch-size", metavar="B", type=positive, default=32, help="default %(default)s")
    group.add_argument("--seed", metavar="S", type=seed, default=0, help="default %(default)s")
    parser.add_argument("overrides", metavar="key.sub=value", nargs="*", help="settings that replace the file's")


def temperatures(text: str) -> tuple[float, ...]:
    """An argparse type: temperatures from 0 up, with commas between them."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 <= value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"must be numbers from 0 up with commas between, found '{text}'")
    return values


def run(args: argparse.Namespace) -> None:
    from hydrajax.api import load
    from hydrajax.distill.distill_records import RecordFile
    from hydrajax.distill.talks import Writing
    from hydrajax.formats.fingerprint import fingerprint
    from hydrajax.formats.hub import resolve
    from hydrajax.questions.contenders import folder_name
    from hydrajax.text.templates import make_encoder
    from hydrajax.train.run_config import load_config

    tree, draft = tree_from(args), draft_of(args)
    if args.seeds is not None and args.held_out:
        raise HydrajaxError("--held-out: is about the config's data, which --seeds replaces")
    config = load_config(args.config, args.overrides)
    if config.task == "base":
        raise HydrajaxError("--config: distillation needs the config of a head-training run")
    base = resolve(config.model, "model")
    model = load(base, draft, dtype=config.dtype, force=args.force, draft_confidence=args.draft_confidence)
    if model.tokenizer is None:
        raise HydrajaxError("model: has no tokenizer, and seeds are text")
    seeds = seeds_of(args, config, model.tokenizer)
    encoder = None
    if seeds.conversations:
        template = config.data.template
        encoder = make_encoder(model.tokenizer, template, field="data.template", tokenizer_field="model")
    sha256 = fingerprint(base)["sha256"]
    writing = Writing(
        draft=draft and folder_name(draft),
        base=sha256[:12],
        temperatures=args.temperatures,
        new_tokens=args.new_tokens or NEW_TOKENS[seeds.conversations],
        batch_size=args.batch_size,
        seed=args.seed,
    )
    check_room(args, seeds, writing, model.config.max_positions)
    tree = tree or model.default_tree(args.batch_size)
    executor = model.executor(model.spec(tree=tree, max_new_tokens=writing.new_tokens))
    with in_use(args.output):
        file = RecordFile(args.output, settings_of(args, config, seeds, writing, sha256))
        if len(file):
            print(f"{args.output} holds {len(file)} records of this run", file=sys.stderr)
        outcome = write_all(executor, seeds, encoder, writing, file)
    report(outcome, seeds, file, model.config.max_positions)


def seeds_of(args: argparse.Namespace, config: TrainConfig, tokenizer: Any) -> Seeds:
    """The seeds asked for, the first ``--count`` of them."""
    from hydrajax.distill import seeds as reading
    from hydrajax.train.data.conversations import summary

    if args.seeds is None:
        run, cuts = (config.data, tokenizer, config.seed), (args.count or CUTS, args.prompt_tokens or CUT_TOKENS)
        found = reading.of_config(*run, *cuts, cuts=args.seed, held_out=args.held_out, say=print)
        if not found.seeds:
            raise HydrajaxError("data.held_out: nothing is held out, found 0")
    else:
        found, bad = reading.read_seeds(args.seeds, args.data)
        print(f"seeds: {summary(found.seeds, bad)}")
    if found.conversations and args.prompt_tokens is not None:
        raise HydrajaxError("--prompt-tokens: is of beginnings cut out of text, and the seeds are conversations")
    return found._replace(seeds=found.seeds[: args.count])


def check_room(args: argparse.Namespace, seeds: Seeds, writing: Writing, context: int) -> None:
    """Refuse more tokens than the context holds, before anything is decoded."""
    room, tokens = writing.room(context), args.prompt_tokens or CUT_TOKENS
    if not seeds.conversations and tokens > room:
        raise HydrajaxError(f"prompt_tokens: must be at most {room} with {writing.new_tokens} new ones, found {tokens}")


def settings_of(
    args: argparse.Namespace, config: TrainConfig, seeds: Seeds, writing: Writing, sha256: str
) -> dict[str, Any]:
    """All that a record's tokens depend on: so not the draft, nor how many seeds there are or stand in a batch."""
    settings = {"base": sha256, "dtype": config.dtype, "seeds": seeds.digest}
    if seeds.conversations:
        settings["template"] = config.data.template
    else:
        settings["prompt_tokens"] = args.prompt_tokens or CUT_TOKENS
    return settings | {name: getattr(writing, name) for name in ("new_tokens", "temperatures", "seed")}


def write_all(executor: Executor, seeds: Seeds, encoder: Any, writing: Writing, file: RecordFile) -> Outcome:
    """`hydrajax.distill.talks.write` with a bar on a terminal, and the speed at its end. Ctrl-C says what is kept."""
    from hydrajax.cli.generate import Totals
    from hydrajax.cli.screen import bar
    from hydrajax.distill.talks import write

    totals = Totals()

    def add(generations):
        for row, generation in enumerate(generations):
            totals.add(generation, first_of_batch=row == 0)

    with bar() as progress:
        task = progress.add_task("write", total=len(seeds.seeds))
        calls = {"on_batch": add, "on_end": lambda: progress.advance(task)}
        try:
            outcome = write(executor, seeds.seeds, encoder, writing, file, **calls)
        except KeyboardInterrupt:
            progress.stop()
            print(f"{len(file)} records are kept in {file.path}; the same command goes on", file=sys.stderr)
            raise
    if totals.tokens:
        print(totals.summary())
    return outcome


def report(outcome: Outcome, seeds: Seeds, file: RecordFile, context: int) -> None:
    what = "conversations" if seeds.conversations else "beginnings"
    print(f"{file.path} holds {len(file)} records of {len(seeds.seeds)} {what}")
    if outcome.too_long:
        print(f"ended early, as the context of {context} tokens had no room for more: {outcome.too_long} {what}")
    if outcome.refused:
        where, reason = outcome.refused[0]
        print(f"ended early by a prompt that was refused: {len(outcome.refused)} {what}; the first: {where}: {reason}")


def main(argv: list[str] | None = None) -> int:
    return run_command(PROG, HELP, add_arguments, run, sys.argv[1:] if argv is None else argv)
