"""Compare greedy decoding here and in other programs on a CPU: one base, one interleaved run.

    python experiments/cpu_peers.py --model 18m
    python experiments/cpu_peers.py --model smollm2 --questions mt_bench_question.jsonl --count 8 --max-new-tokens 64
    python experiments/cpu_peers.py --model 1b
    python experiments/cpu_peers.py --model 3b

Nothing is installed. llama.cpp (packages `llama-cpp-python` and `xllamacpp`), OpenVINO (`openvino-genai`), CTranslate2
(`ctranslate2`) and transformers (with `torch`) run where they are installed, see docs/peers.md. The base is converted
once for each. All continue after EOS, for equal work, and are bound to the same cores.

`--model 1b` and `3b`, random weights, time forward passes over 1 row and 8 rows on one thread instead of decoding.

Tokens must agree: in float32 with hydrajax's, except at a tie of logits, and in hydrajax with a draft with those
without one. The exit code is 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from peer_checks import Difference, Run, differences
from peer_files import random_directory
from peer_picture import PLAIN, rows_picture, rows_table, speed_picture, speed_table
from peer_programs import GREEDY, PROGRAMS, Peer, Variant, variants
from side_by_side import side_by_side

import hydrajax
from hydrajax import assets
from hydrajax.bench.benchmark import step_timer
from hydrajax.bench.questions.held_out import held_out_files, held_out_prompts
from hydrajax.bench.questions.sets import read_questions
from hydrajax.bench.report.drawing import can_draw, save_png
from hydrajax.bench.report.tables import markdown_table, print_table
from hydrajax.bench.timing import Timed
from hydrajax.bench.uncached_forward import last_logits
from hydrajax.cli import options, run_command
from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.files import WholeFile, user_cache
from hydrajax.formats.draft_registry import title_of
from hydrajax.formats.known_bases import KNOWN_BASES, known_base_file
from hydrajax.language_model import LanguageModel
from hydrajax.machine import machine
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.text.templates import make_encoder

TYPES: dict[str, dict[str, str]] = {
    "float32": {"quantize": "none"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "int4-64": {"quantize": "int4-64"},  # 4.5 bits for a weight, as in Q4_0
}
STEPS = 8  # forward passes of one timing
CHECKED = 8  # tokens that are compared where only forward passes are timed


@dataclass(frozen=True)
class Defaults:
    """The measurements of a model, where the arguments choose none."""

    types: tuple[str, ...] = ("float32", "int8", "int4")
    drafts: tuple[str, ...] = ("lookup",)
    rows: tuple[int, ...] = ()


MODELS = {
    "18m": Defaults(drafts=("lookup=chain-5", "draft-model=chain-5", "hydra++=cartesian-2x2")),
    "smollm2": Defaults(drafts=("lookup", "hydra++", "dspark", "lookup-0+dspark")),
    "1b": Defaults(("float32", "bfloat16", "int8", "int4"), rows=(1, 8)),
    "3b": Defaults(("int8", "int4"), rows=(1, 8)),
}
RANDOM = {  # Llama 3.2 1B and 3B without their scaling of rotary frequencies
    "1b": LlamaConfig(128_256, 2048, 8192, 16, 32, 8, 64, 8192, 1e-5, 500_000.0, tied_lm_head=True),
    "3b": LlamaConfig(128_256, 3072, 8192, 28, 24, 8, 128, 8192, 1e-5, 500_000.0, tied_lm_head=True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="18m",
        metavar="NAME|DIR|FILE.gguf",
        help=f"{', '.join(MODELS)}, or any base (default %(default)s, the shipped one)",
    )
    parser.add_argument("--types", metavar="T,T", help=f"of hydrajax: {', '.join(TYPES)} (default: by model)")
    parser.add_argument(
        "--draft",
        action="append",
        metavar="NAME[=TREE]",
        help="hydrajax's draft, repeatable; without a tree its default one (default: by model)",
    )
    parser.add_argument("--assistant", metavar="DIR", help="draft model of other programs (default: the shipped one)")
    known = ", ".join(program.package for program in PROGRAMS)
    parser.add_argument("--peers", metavar="PACKAGE,..", help=f"of {known} (default: all that are installed)")
    parser.add_argument("--rows", type=options.positives, metavar="N,N", help="time forward passes over N tokens")
    parser.add_argument("--context", type=options.positive, default=128, help="of forward passes (default %(default)s)")
    parser.add_argument("--prompts", metavar="FILE", help="file of prompts (default: held-out code)")
    parser.add_argument(
        "--questions", metavar="FILE", help="question set: its first turns, in the chat template, over all categories"
    )
    parser.add_argument("--count", type=options.positive, default=8, help="prompts (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=options.positive, default=64, help="of held-out code (default 64)")
    parser.add_argument("--max-new-tokens", type=options.positive, default=96, help="per prompt (default %(default)s)")
    parser.add_argument("--repeats", type=options.positive, default=5, help="rounds (default %(default)s)")
    parser.add_argument(
        "--threads", type=options.positive, help="of every program (default: all cores, or 1 for forward passes)"
    )
    parser.add_argument("--work", metavar="DIR", type=Path, help="converted files (default: in the user's cache)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="default runs/experiments/cpu_peers_MODEL.json"
    )


def run(args: argparse.Namespace) -> int:
    defaults = MODELS.get(args.model, Defaults(types=("float32",)))
    args.types = args.types.split(",") if args.types else list(defaults.types)
    args.draft, args.rows = args.draft or list(defaults.drafts), args.rows or list(defaults.rows)
    for name in args.types:
        if name not in TYPES:
            raise not_allowed("--types", name, TYPES)
    if args.output is None:
        args.output = Path("runs/experiments") / f"cpu_peers_{Path(args.model).stem}.json"
        args.output.parent.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_platforms", "cpu")
    programs = installed(args.peers)
    with (
        WholeFile(args.output, "--output") as file,
        on_cores(args.threads or (1 if args.rows else None)) as args.threads,
    ):
        base = base_of(args)
        found = [each for program in programs for each in variants_of(args, program, base)]
        results, differing = (time_rows if args.rows else time_decoding)(args, base, found)
        arguments = options.recorded(args)
        content = {"machine": machine(), "arguments": arguments, "results": results}
        content["builds"] = {program.title: program.build() for program in programs}
        content |= {"differences": [each.as_dict() for each in differing]}
        file.write_json(content)
    show(args, content, differing)
    return int(any(not each.allowed for each in differing))


def installed(names: str | None) -> list:
    """Return the programs that are wanted and installed; name the others."""
    wanted = names.split(",") if names is not None else [program.package for program in PROGRAMS]
    known = {program.package: program for program in PROGRAMS}
    for name in wanted:
        if name not in known:
            raise not_allowed("--peers", name, known)
    chosen = [known[name] for name in wanted]
    for program in chosen:
        if not program.is_installed():
            print(f"{program.title} is left out: {program.package} is not installed", flush=True)
    return [program for program in chosen if program.is_installed()]


@contextlib.contextmanager
def on_cores(wanted: int | None) -> Iterator[int]:
    """Bind this process, and those that it starts, to this many cores, where the system can; yield the number."""
    if not hasattr(os, "sched_setaffinity"):
        yield wanted or os.cpu_count()
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, sorted(before)[:wanted])
        yield len(os.sched_getaffinity(0))
    finally:
        os.sched_setaffinity(0, before)


def folder_of(args: argparse.Namespace) -> Path:
    return args.work or user_cache("peers")


def base_of(args: argparse.Namespace) -> Path:
    """Return the Hugging Face directory or the GGUF file of the model."""
    if args.model in KNOWN_BASES:
        return known_base_file(args.model, "--model")
    if args.model in RANDOM:
        return random_directory(folder_of(args) / args.model, RANDOM[args.model])
    return assets.base() if args.model == "18m" else Path(args.model)


def variants_of(args: argparse.Namespace, program, base: Path) -> list[Variant]:
    """Return a program in its types; none if the base cannot be converted, which is printed."""
    assistant = Path(args.assistant) if args.assistant else assets.path("draft_model") if args.model == "18m" else None
    folder = folder_of(args) / f"{base.stem}-{fingerprint(base, assistant)}"
    try:
        found = list(variants(program, args.types, folder, base, assistant))
    except HydrajaxError as error:
        print(f"{program.title} is left out: {error}", flush=True)
        return []
    if not found:
        print(f"{program.title} is left out: it has none of these types or cannot read {base.name}", flush=True)
    return found


def fingerprint(*sources: Path | None) -> str:
    """Return a short name of directories that changes with their files."""
    found = hashlib.sha256()
    for source in filter(None, sources):
        for path in [source] if source.is_file() else sorted(source.iterdir()):
            found.update(f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    return found.hexdigest()[:12]


# --- decoding ---------------------------------------------------------------------------------------------------------


def time_decoding(
    args: argparse.Namespace, base: Path, others: Sequence[Variant]
) -> tuple[list[dict], list[Difference]]:
    """Return a row for each decoder, and the tokens that differ."""
    models = {name: load(args.model, base, name) for name in args.types}
    first = models[args.types[0]]
    prompts = read_prompts(args, first)
    context = max(map(len, prompts)) + args.max_new_tokens + 64
    with contextlib.ExitStack() as stack:
        runs = peer_runs(args, others, prompts, context, first.config.vocab_size, stack)
        for name, m in models.items():
            runs |= own_runs(args, m, name)
        return measured(runs, prompts, args, models.get("float32", first))


def measured(
    runs: Mapping[str, Run], prompts: Sequence[np.ndarray], args: argparse.Namespace, m: LanguageModel
) -> tuple[list[dict], list[Difference]]:
    """Decode with all runs, interleaved; return rows of results and the tokens that differ.

    Args:
        m: gives the logits where tokens differ.
    """
    for_all = {name: lambda run=run: [run.decode(prompt) for prompt in prompts] for name, run in runs.items()}
    outputs, seconds = side_by_side(for_all, args.repeats)
    plain = seconds.get(PLAIN, seconds[next(name for name in runs if name.startswith("hydrajax"))])
    rows = []
    for name, run in runs.items():
        like = run.like if run.like in runs else name
        same = sum(np.array_equal(a, b) for a, b in zip(outputs[name], outputs[like], strict=True))
        rate = len(prompts) * args.max_new_tokens / seconds[name]
        found = {"tokens_per_second": rate, "ratio": plain / seconds[name], "same": same, "same_as": like}
        rows.append({"name": name} | found | {"prompts": len(prompts)})
    return rows, differences(runs, outputs, prompts, partial(logits_after, m))


def logits_after(m: LanguageModel, ids: np.ndarray) -> np.ndarray:
    return last_logits(m.model, m.params.base, [ids])[0]


def load(model: str, base: Path, dtype: str, draft: str | None = None) -> LanguageModel:
    """Load the base in one of `TYPES`. A known name brings its bundled drafts."""
    by_name = {"18m": "shipped", **{name: name for name in KNOWN_BASES}}
    return hydrajax.load(by_name.get(model, base), draft, **TYPES[dtype])


def read_prompts(args: argparse.Namespace, m: LanguageModel) -> list[np.ndarray]:
    if args.questions:
        ask = make_encoder(m.tokenizer, "auto").prompt
        questions = read_questions(args.questions)
        spread = questions[:: max(1, len(questions) // args.count)][: args.count]
        return [np.array(ask([{"role": "user", "content": one.turns[0]}]), np.int32) for one in spread]
    if args.prompts:
        return options.prompts_from(args.prompts, m, args.count)
    found = islice(held_out_prompts(held_out_files(), m.tokenizer, args.prompt_tokens), args.count)
    return [np.array(prompt.ids, np.int32) for prompt in found]


def own_runs(args: argparse.Namespace, m: LanguageModel, dtype: str) -> dict[str, Run]:
    """Return this package's decoders in one type, by name."""
    title = "hydrajax" if dtype == "float32" else f"hydrajax {dtype}"
    wanted = hydrajax.Request(max_new_tokens=args.max_new_tokens)
    plain = f"{title}, autoregressive"
    found = {plain: hydrajax.make_executor(m, m.program(wanted, tree="root", eos_ids=()), wanted)}
    for text in args.draft:
        draft, _, tree_name = text.partition("=")
        drafted = m.with_draft(draft)
        executor = hydrajax.make_executor(drafted, drafted.program(wanted, tree=tree_name or None, eos_ids=()), wanted)
        found[f"{title}, {title_of(drafted.drafter)}{tree_name and f', {tree_name}'}"] = executor
    return {name: Run(name, plain, "equal", partial(decoded, executor)) for name, executor in found.items()}


def decoded(executor, prompt: np.ndarray) -> np.ndarray:
    return np.asarray(executor.decode(prompt[None]).tokens[0])


def peer_runs(
    args: argparse.Namespace,
    found: Sequence[Variant],
    prompts: Sequence[np.ndarray],
    context: int,
    vocabulary: int,
    stack: contextlib.ExitStack,
) -> dict[str, Run]:
    """Return the other programs' decoders, by name. Those that fail at the first prompt are left out and named."""
    runs = {}
    for variant in found:
        for way, draft in variant.drafts.items():
            peer = Peer(variant, draft, args.threads, context, vocabulary)
            stack.callback(peer.close)
            try:
                peer.decode(prompts[0], 2)
            except HydrajaxError as error:
                print(f"left out: {error}", flush=True)
                continue
            name = f"{variant.name}, {way}"
            like, must = (PLAIN, "tie") if variant.float32 else (f"{variant.name}, {GREEDY}", "")
            runs[name] = Run(name, like, must, partial(peer.decode, new_tokens=args.max_new_tokens))
    return runs


# --- forward passes ---------------------------------------------------------------------------------------------------


def time_rows(args: argparse.Namespace, base: Path, others: Sequence[Variant]) -> tuple[list[dict], list[Difference]]:
    """Return the milliseconds of forward passes of each program and type, and the tokens that differ.

    Another program's process lives for one turn, so that only one of them is in memory.
    """
    models = {name: load(args.model, base, name, "lookup") for name in args.types}
    first = models[args.types[0]]
    vocabulary = first.config.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocabulary, 16, dtype=np.int32)
    runs: dict[str, Run] = {}
    turns: dict[str, Callable[[], dict[int, float | None]]] = {}
    outputs: dict[str, list[np.ndarray]] = {}
    for dtype, m in models.items():
        wanted = hydrajax.Request(max_new_tokens=CHECKED)
        plain, *_ = own = own_passes(m, "hydrajax" if dtype == "float32" else f"hydrajax {dtype}", wanted)
        runs |= {run.name: run for run in own}
        outputs |= {run.name: [run.decode(prompt)] for run in own}
        turns[plain.name.partition(",")[0]] = partial(own_turn, own_timers(m, args.rows, args.context))
    for variant in others:
        if not variant.program.rows:
            print(f"{variant.name} is left out: it does not time forward passes", flush=True)
            continue
        peer = Peer(variant, None, args.threads, args.context + 2 * max(args.rows) + STEPS, vocabulary)
        try:
            tokens = peer.decode(prompt, CHECKED)
            peer.time_rows(args.rows[0], args.context, 1)  # a program that fails is left out before the first round
        except HydrajaxError as error:
            print(f"left out: {error}", flush=True)
            continue
        finally:
            peer.close()
        run = Run(f"{variant.name}, {GREEDY}", PLAIN, "tie" if variant.float32 else "", peer.decode)
        runs[run.name], outputs[run.name] = run, [tokens]
        turns[variant.name] = partial(peer_turn, peer, args.rows, args.context)
    differing = differences(runs, outputs, [prompt], partial(logits_after, models.get("float32", first)))
    return medians(turns, args.rows, args.repeats), differing


def own_passes(m: LanguageModel, title: str, wanted: hydrajax.Request) -> list[Run]:
    """Return decoders without a draft and with a chain, whose tokens must be equal."""
    plain = f"{title}, autoregressive"
    programs = {tree: m.program(wanted, tree=tree, eos_ids=()) for tree in ("root", "chain-7")}
    executors = {tree: hydrajax.make_executor(m, program, wanted) for tree, program in programs.items()}
    names = dict(zip(executors, (plain, f"{title}, lookup, chain-7"), strict=True))
    return [Run(names[tree], plain, "equal", partial(decoded, executor)) for tree, executor in executors.items()]


def own_timers(m: LanguageModel, sizes: Sequence[int], context: int) -> dict[int, Timed]:
    """Return a timer of the verification of a chain, by its number of nodes."""
    request = hydrajax.Request(max_new_tokens=STEPS)
    trees = {size: "root" if size == 1 else f"chain-{size - 1}" for size in sizes}
    programs = {size: m.program(request, tree=tree, eos_ids=()) for size, tree in trees.items()}
    executors = {size: hydrajax.make_executor(m, program, request) for size, program in programs.items()}
    return {size: step_timer(executor, 1, context, 2 * STEPS).verify() for size, executor in executors.items()}


def own_turn(timers: Mapping[int, Timed]) -> dict[int, float]:
    return {size: timer() for size, timer in timers.items()}


def peer_turn(peer: Peer, sizes: Sequence[int], context: int) -> dict[int, float | None]:
    """Start the program, time each number of rows after a warm-up, and end it."""
    try:
        found = {}
        for size in sizes:
            peer.time_rows(size, context, 2)
            found[size] = peer.time_rows(size, context, STEPS)
        return found
    finally:
        peer.close()


def medians(
    turns: Mapping[str, Callable[[], dict[int, float | None]]], sizes: Sequence[int], repeats: int
) -> list[dict]:
    """Take all turns once per round in random order; return rows of results with the median milliseconds."""
    times: dict[str, list[dict[int, float | None]]] = {name: [] for name in turns}
    random = np.random.default_rng(0)
    for _ in range(repeats):
        for name in random.permutation(list(turns)):
            times[name].append(turns[name]())
    rows = []
    for name, rounds in times.items():
        columns = {str(size): [one[size] for one in rounds] for size in sizes}
        ms = {size: None if None in found else statistics.median(found) for size, found in columns.items()}
        rows.append({"name": name, "ms": ms})
    return rows


# --- output -----------------------------------------------------------------------------------------------------------


def show(args: argparse.Namespace, content: Mapping[str, Any], differing: Sequence[Difference]) -> None:
    """Print the table and what differs; write the table and the picture next to the results."""
    columns, rows = (rows_table if args.rows else speed_table)(content["results"])
    title = described(args, content)
    print(title)
    print_table(columns, rows, left=(columns[0], "as"))
    notes = [str(each) for each in differing] or ["All tokens that must agree do."]
    print("\n".join(notes))
    table, picture = args.output.with_suffix(".md"), args.output.parent / "figures" / f"{args.output.stem}.png"
    text = [f"# {title}", "", *markdown_table(columns, rows), "", *(f"- {note}" for note in notes)]
    with WholeFile(table, "--output") as file:
        file.write_text("\n".join([*text, ""]))
    written = [args.output, table]
    if can_draw():
        picture.parent.mkdir(exist_ok=True)
        save_png((rows_picture if args.rows else speed_picture)(content), picture, "--output")
        written.append(picture)
    print(f"written: {', '.join(map(str, written))}")


def described(args: argparse.Namespace, content: Mapping[str, Any]) -> str:
    cores = "1 core" if args.threads == 1 else f"{args.threads} cores"
    here = f"{cores} of {content['machine']['device']}, median of {args.repeats} rounds"
    if args.rows:
        return f"{args.model}: forward passes at context {args.context}, {here}"
    count = content["results"][0]["prompts"]
    return f"{args.model}: {count} prompts, {args.max_new_tokens} new tokens each, {here}"


if __name__ == "__main__":
    sys.exit(run_command("cpu_peers.py", __doc__.splitlines()[0], add_arguments, run, sys.argv[1:]))
