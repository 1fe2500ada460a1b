"""``hydrajax distill``: generate training text for draft heads with the base itself."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hydrajax.cli.options import add, add_model_arguments, draft_of, positive, tree_from
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.errors import HydrajaxError
from hydrajax.locking import in_use

if TYPE_CHECKING:
    from hydrajax.decoding.executor import Executor
    from hydrajax.train.distill.dialogues import DialogueResult, DistillSpec
    from hydrajax.train.distill.distill_records import RecordFile
    from hydrajax.train.distill.seeds import Seeds
    from hydrajax.train.run_config import TrainConfig

CUTS, CUT_TOKENS = 2000, 64  # default number and length of beginnings
NEW_TOKENS = {False: 192, True: 512}  # of a continuation, and of an answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE.yaml|NAME", required=True,
        help="config of a head-training run, or a recipe in the package, for its model and data",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="FILE.jsonl", required=True,
        help="write one line per text or answer, for training with data.format: generations; resume an interrupted run",
    )  # fmt: skip
    group = parser.add_argument_group("seeds")
    group.add_argument(
        "--seeds", metavar="FILE|NAME|org/name",
        help="conversations (ShareGPT, messages, Alpaca) or questions (as evaluate --set): the base answers each user "
        "turn after its own earlier answers, in the config's chat template (data.template). Default: the config's "
        "data, where conversations are answered and beginnings of other texts continued",
    )  # fmt: skip
    add(group, "--data")
    group.add_argument("--held-out", action="store_true", help="take the config's held-out data, not the rest")
    group.add_argument(
        "--count", metavar="N", type=positive, help=f"first N seeds (default all conversations, or {CUTS} beginnings)"
    )
    group.add_argument(
        "--prompt-tokens", metavar="N", type=positive, help=f"length of a beginning (default {CUT_TOKENS})"
    )
    add_model_arguments(parser, base=False)
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--new-tokens", metavar="N", type=positive,
        help=f"limit of each text (default {NEW_TOKENS[False]}) or answer (default {NEW_TOKENS[True]})",
    )  # fmt: skip
    group.add_argument(
        "--temperatures", metavar="T,T", type=temperatures, default=(0.0, 0.7),
        help="share these evenly among the seeds; 0 is greedy (default 0,0.7)",
    )  # fmt: skip
    add(group, "--batch-size", default=32)
    add(group, "--seed")
    parser.add_argument("overrides", metavar="key.sub=value", nargs="*", help="settings that override the config's")


def temperatures(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 <= value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"got '{text}', expected comma-separated numbers from 0 up")
    return values


def run(args: argparse.Namespace) -> None:
    from hydrajax.api import load
    from hydrajax.bench.questions.contenders import folder_name
    from hydrajax.formats.fingerprint import fingerprint
    from hydrajax.formats.hub import resolve
    from hydrajax.text.templates import make_encoder
    from hydrajax.train.distill.dialogues import DistillSpec
    from hydrajax.train.distill.distill_records import RecordFile
    from hydrajax.train.run_config import load_config

    tree, draft = tree_from(args), draft_of(args)
    if args.seeds is not None and args.held_out:
        raise HydrajaxError("--held-out: selects from the config's data, which --seeds replaces; leave one out")
    config = load_config(args.config, args.overrides)
    if config.task == "base":
        raise HydrajaxError("--config: got task 'base', expected a head-training run")
    base = resolve(config.model, "model")
    model = load(base, draft, dtype=config.dtype, force=args.force, draft_confidence=args.draft_confidence)
    if model.tokenizer is None:
        raise HydrajaxError("model: has no tokenizer, which distillation needs")
    seeds = seeds_of(args, config, model.tokenizer)
    encoder = None
    if seeds.conversations:
        template = config.data.template
        encoder = make_encoder(model.tokenizer, template, field="data.template", tokenizer_field="model")
    sha256 = fingerprint(base)["sha256"]
    spec = DistillSpec(
        draft=draft and folder_name(draft),
        base=sha256[:12],
        temperatures=args.temperatures,
        new_tokens=args.new_tokens or NEW_TOKENS[seeds.conversations],
        batch_size=args.batch_size,
        seed=args.seed,
    )
    room, tokens = spec.room(model.config.max_positions), args.prompt_tokens or CUT_TOKENS
    if not seeds.conversations and tokens > room:
        raise HydrajaxError(f"prompt_tokens: got {tokens}, expected at most {room} with {spec.new_tokens} new tokens")
    tree = tree or model.default_tree(args.batch_size)
    executor = model.executor(model.program(tree=tree, rule=ExactSampling, max_new_tokens=spec.new_tokens))
    with in_use(args.output):
        file = RecordFile(args.output, settings_of(args, config, seeds, spec, sha256))
        if len(file):
            print(f"resuming: {args.output} has {len(file)} records", file=sys.stderr)
        result = write_all(executor, seeds, encoder, spec, file)
    report(result, seeds, file, model.config.max_positions)


def seeds_of(args: argparse.Namespace, config: TrainConfig, tokenizer: Any) -> Seeds:
    from hydrajax.train.data.conversations import summary
    from hydrajax.train.distill import seeds as reading

    if args.seeds is None:
        run, cuts = (config.data, tokenizer, config.seed), (args.count or CUTS, args.prompt_tokens or CUT_TOKENS)
        found = reading.of_config(*run, *cuts, cuts=args.seed, held_out=args.held_out, on_message=print)
        if not found.seeds:
            raise HydrajaxError("data.held_out: got 0, expected more than 0 with --held-out")
    else:
        found, bad = reading.read_seeds(args.seeds, args.data)
        print(f"seeds: {summary(found.seeds, bad)}")
    if found.conversations and args.prompt_tokens is not None:
        raise HydrajaxError("--prompt-tokens: applies to beginnings, but the seeds are conversations; leave it out")
    return found._replace(seeds=found.seeds[: args.count])


def settings_of(
    args: argparse.Namespace, config: TrainConfig, seeds: Seeds, spec: DistillSpec, sha256: str
) -> dict[str, Any]:
    """Return what the tokens of a record depend on; draft, number of seeds and batch size are not part of it."""
    causes = {"seeds": args.seeds}
    if args.seeds is None:
        causes = {f"data.{name}": value for name, value in asdict(config.data).items()}
        causes |= {"held_out": args.held_out, "config.seed": config.seed}
    settings = {"base": sha256, "dtype": config.dtype, "seeds": seeds.digest}
    settings |= {f"from.seeds.{name}": value for name, value in causes.items()}
    if seeds.conversations:
        settings["template"] = config.data.template
    else:
        settings["prompt_tokens"] = args.prompt_tokens or CUT_TOKENS
    return settings | {name: getattr(spec, name) for name in ("new_tokens", "temperatures", "seed")}


def write_all(executor: Executor, seeds: Seeds, encoder: Any, spec: DistillSpec, file: RecordFile) -> DialogueResult:
    """Run `write` with a progress bar and print the speed; on Ctrl-C, print how many records are kept."""
    from hydrajax.cli.generate import Totals
    from hydrajax.cli.screen import resumable
    from hydrajax.train.distill.dialogues import write

    totals = Totals()

    def add(generations):
        seconds = totals.seconds + max(generation.wall_time for generation in generations)
        for generation in generations:
            totals.add(generation, seconds)

    with resumable("write", len(seeds.seeds), lambda _: f"{len(file)} records are kept in {file.path}") as advance:
        result = write(executor, seeds.seeds, encoder, spec, file, on_batch=add, on_end=advance)
    if totals.tokens:
        print(totals.summary())
    return result


def report(result: DialogueResult, seeds: Seeds, file: RecordFile, context: int) -> None:
    what = "conversations" if seeds.conversations else "beginnings"
    print(f"{file.path} has {len(file)} records of {len(seeds.seeds)} {what}")
    if result.too_long:
        print(f"ended early at the context of {context} tokens: {result.too_long} {what}")
    if result.refused:
        where, reason = result.refused[0]
        print(f"ended early by a refused prompt: {len(result.refused)} {what}; the first: {where}: {reason}")
