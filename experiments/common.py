"""Shared parts of the experiment scripts: arguments, models, prompts, trees and the result file.

Every script is one command, by default on the shipped model and held-out files:

    python experiments/hydra_figure_2.py [--quick] [--base B --draft D --draft D2 --prompts FILE.jsonl] [--output FILE]

``hydrajax report DIR`` prints its tables.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import hydrajax
from hydrajax import api, assets
from hydrajax.bench.benchmark import step_timer
from hydrajax.bench.calibration import Calibration, calibrate
from hydrajax.bench.contests.contest import AUTOREGRESSIVE, Measured, contest
from hydrajax.bench.questions.held_out import held_out_files
from hydrajax.bench.report.results import Result, write_result
from hydrajax.bench.rounds import in_rounds
from hydrajax.bench.trees.search import Proposals, simulated
from hydrajax.bench.trees.simulation import accepted_lengths, walk
from hydrajax.cli import options, run_command
from hydrajax.cli.prompt_files import read_prompts
from hydrajax.decoding.acceptance import AcceptanceRule, Greedy
from hydrajax.decoding.executor import Executor
from hydrajax.decoding.prompt_batch import batches
from hydrajax.decoding.request import Request
from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.language_model import LanguageModel
from hydrajax.loaded_model import make_executor
from hydrajax.locking import in_use
from hydrajax.machine import machine
from hydrajax.trees import TreeTopology, presets
from hydrajax.trees.dynamic import CandidateTree

RELEASED = "mc_sim_7b_63"
BATCH = 32  # sequences decoded at once where time is not measured
CONSOLE = Console(stderr=True)


# --- a script ---------------------------------------------------------------------------------------------------------


def program(
    doc: str, run: Callable, full: Mapping[str, Any], quick: Mapping[str, Any], add: Callable | None = None
) -> int:
    """Run a script and return its exit code, 2 after one line about bad input.

    Args:
        doc: The script's docstring.
        run: Called with the parsed arguments.
        full: Settings (numbers and lists of numbers) that become flags, with their defaults.
        quick: Values of ``--quick``, which takes minutes on two cores.
        add: Adds further arguments to the parser.
    """

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--base", metavar="DIR|NAME", help="base model (default: the shipped one)")
        parser.add_argument("--draft", metavar="DIR|NAME", action="append", default=[], help="draft, repeatable")
        parser.add_argument("--prompts", metavar="FILE.jsonl", help="prompts (default: held-out files)")
        parser.add_argument("--dtype", choices=list(api.DTYPES), default="float32")
        parser.add_argument("--output", metavar="FILE.json", help="result (default: runs/experiments/SCRIPT.json)")
        add_settings(parser, full, quick)
        if add:
            add(parser)

    def run_with_settings(args: argparse.Namespace) -> None:
        set_defaults(args, full, quick)
        if args.output is None:
            args.output = Path("runs/experiments") / f"{Path(sys.argv[0]).stem}.json"
            args.output.parent.mkdir(parents=True, exist_ok=True)
        with in_use(args.output, "--output"):
            with WholeFile(args.output, "--output") as args.file:  # an unwritable path fails before the measurements
                args.parts = Parts(Path(f"{args.output}.parts"), settings_of(args) | {"machine": machine()})
                run(args)
            args.parts.remove()
        print(f"written: {args.output}")

    return run_command(Path(sys.argv[0]).name, doc.splitlines()[0], add_arguments, run_with_settings, sys.argv[1:])


def add_settings(parser: argparse.ArgumentParser, full: Mapping[str, Any], quick: Mapping[str, Any]) -> None:
    """Add ``--quick`` and a flag for each setting, see `program`."""
    parser.add_argument("--quick", action="store_true", help=", ".join(f"{k} {v}" for k, v in quick.items()))
    for name, value in full.items():
        kind = options.positives if isinstance(value, list) else options.positive
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=f"default {value}")


def set_defaults(args: argparse.Namespace, full: Mapping[str, Any], quick: Mapping[str, Any]) -> None:
    """Set the settings that were not given, and add ``args.settings`` and ``args.command``."""
    for name, value in full.items():
        if getattr(args, name) is None:
            setattr(args, name, quick.get(name, value) if args.quick else value)
    args.settings = {name: getattr(args, name) for name in full}
    args.command = shlex.join(["python", f"experiments/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def write(
    args: argparse.Namespace, kind: str, source: str, title: str, rows: list[dict], remarks: Sequence[str] = ()
) -> None:
    """Write the result file of a script."""
    result = Result(kind, source, title, rows, args.command, machine(), settings_of(args), list(remarks))
    write_result(args.file, result)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    settings = {"base": args.base or "the shipped model", "dtype": args.dtype, **args.settings}
    return settings | {name: found for name in ("draft", "prompts") if (found := getattr(args, name))}


class Parts:
    """Measured parts of a script, so that the same command resumes after an interruption.

    They lie in a file of JSON lines next to the result, which is removed at the end. A file with other settings or from
    another machine is ignored.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self._path, self._rows = path, {}
        header = json.dumps(settings)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        if lines[:1] == [header]:
            for line in lines[1:]:
                with contextlib.suppress(ValueError, TypeError):  # a damaged part is measured again
                    key, rows = json.loads(line)
                    self._rows[key] = rows
            print(f"{len(self._rows)} parts are already measured: {path}")
        with WholeFile(path, "--output") as file:
            file.write_text("".join(f"{line}\n" for line in [header, *map(json.dumps, self._rows.items())]))

    def rows(self, key: str, measure: Callable[[], list[dict]]) -> list[dict]:
        """Return the rows of a part, measured now unless they were before."""
        if key not in self._rows:
            self._rows[key] = measure()
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, self._rows[key]]) + "\n")
        return self._rows[key]

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


# --- models and prompts -----------------------------------------------------------------------------------------------


def draft_model_of(args: argparse.Namespace) -> str | Path:
    """Return the draft model of a script that measures one, by default the shipped one."""
    if len(args.draft) > 1:
        raise HydrajaxError(f"--draft: got {len(args.draft)} draft models, expected one")
    if args.base and not args.draft:
        raise HydrajaxError("--draft: got none, expected a draft model for this base")
    return args.draft[0] if args.draft else assets.path("draft_model")


def prompts_of(args: argparse.Namespace, loaded: LanguageModel) -> list[np.ndarray]:
    """Return the first ``args.count`` prompts of ``--prompts``, by default chunks of held-out files."""
    if args.prompts:
        return list(loaded.ids_of_prompts(read_prompts(args.prompts)[: args.count]))
    return held_out_chunks(loaded.tokenizer, args.count, args.prompt_tokens)


class Setup:
    """The base, its draft heads by name, and prompts: ``measured``, and ``calibration`` to search trees.

    Args:
        args: The parsed arguments of `program`.
        names: Names for the heads of ``args.draft`` (default: those of their directories).
    """

    def __init__(self, args: argparse.Namespace, names: Sequence[str] = ()):
        if args.base and not args.draft:
            raise HydrajaxError("--draft: got none, expected draft heads for this base")
        self.args = args
        drafts = args.draft or [assets.path(name) for name in assets.HEADS]
        self.base = hydrajax.load(args.base or assets.base(), dtype=args.dtype)
        names = names or [Path(draft).name for draft in drafts]
        self.heads = {name: self.base.with_draft(draft) for name, draft in zip(names, drafts, strict=True)}
        if len(self.heads) < len(drafts):
            raise HydrajaxError("--draft: got two directories of one name, expected distinct names")
        count, n_calibration = args.count, getattr(args, "calibration", 0)
        self._new_tokens = getattr(args, "new_tokens", 128)  # scripts that only time steps have no such setting
        found = self._read(count + n_calibration)
        self.measured, self.calibration = found[:count], found[count:]
        self._calibrations: dict[str, Calibration] = {}
        self._grown: dict[tuple[str, int], Proposals] = {}

    def _read(self, count: int) -> list[np.ndarray]:
        if not self.args.prompts:
            return held_out_chunks(self.base.tokenizer, count, self.args.prompt_tokens)
        found = read_prompts(self.args.prompts)
        if len(found) < count:
            raise HydrajaxError(f"--prompts: got {len(found)} in {self.args.prompts}, expected at least {count}")
        return list(self.base.ids_of_prompts(found[:count]))

    def executor(self, heads: str, tree: CandidateTree, rule: AcceptanceRule | None = None) -> Executor:
        """Return an executor for these heads and this tree, greedy by default."""
        request, m = Request(rule or Greedy(), max_new_tokens=self._new_tokens), self.heads[heads]
        return make_executor(m, m.program(request, tree=tree), request)

    def autoregressive(self, rule: AcceptanceRule | None = None) -> Executor:
        """Return an executor for decoding without a draft, greedy by default."""
        request = Request(rule or Greedy(), max_new_tokens=self._new_tokens)
        return make_executor(self.base, self.base.program(request, tree="root"), request)

    def released(self, heads: str) -> TreeTopology:
        """Return the released 63-choice tree, cut to the depth of the heads."""
        return cut(presets.by_name(RELEASED), self.heads[heads].drafter.spec.depth)

    def calibrated(self, heads: str) -> Calibration:
        """Calibrate the heads on the base's continuations of the calibration prompts."""
        if heads not in self._calibrations:
            with CONSOLE.status(f"calibrating {heads}") as line:
                self._calibrations[heads] = calibrate(
                    self.executor(heads, presets.root()),
                    self.calibration,
                    batch_size=min(BATCH, len(self.calibration)),
                    on_progress=lambda done, total: line.update(f"calibrating {heads}, {done} of {total}"),
                )
        return self._calibrations[heads]

    def grown(self, heads: str, largest: int) -> Proposals:
        """Search trees up to this size by simulated decoding of the calibration text."""
        if (heads, largest) not in self._grown:
            found = self.calibrated(heads)
            self._grown[heads, largest] = simulated(found.ranks, found.spans, largest)
        return self._grown[heads, largest]

    def grown_trees(self, heads: str, sizes: Sequence[int]) -> dict[str, TreeTopology]:
        """Return the searched trees of these sizes, named ``T_size``."""
        proposals = self.grown(heads, max(sizes))
        return {f"T_{size}": proposals.tree(size) for size in sizes if size <= proposals.largest}

    def expected(self, heads: str, tree: TreeTopology) -> float:
        """Return the tokens per step that the calibration text predicts."""
        found = self.calibrated(heads)
        accepted = accepted_lengths(tree, found.ranks)
        steps = sum(len(walk(accepted[row], start, end)) for row, start, end in found.spans)
        return sum(end - start for _, start, end in found.spans) / max(steps, 1)

    def measure_trees(
        self,
        heads: str,
        trees: Mapping[str, TreeTopology],
        prompts: Sequence[np.ndarray],
        batch_size: int,
        repeats: int,
    ) -> list[Measured]:
        with CONSOLE.status("") as line:
            executor = self.executor(heads, presets.root())
            entrants = {name: executor.with_program(tree=tree) for name, tree in trees.items()}
            return contest(
                {AUTOREGRESSIVE: executor.autoregressive()} | entrants,
                prompts,
                batch_size=batch_size,
                repeats=repeats,
                on_status=lambda text: line.update(f"{heads}, batch {batch_size}: {text}"),
            )[1:]

    def fastest_tree(self, heads: str, batch_size: int, sizes: Sequence[int], repeats: int = 5) -> TreeTopology:
        """Return the searched tree that is fastest on calibration prompts, which are not measured later."""
        trees = {name: tree for name, tree in self.grown_trees(heads, sizes).items() if tree.size > 1}
        rates = self.measure_trees(heads, trees, self.calibration[: max(4, batch_size)], batch_size, repeats)
        return trees[max(rates, key=lambda rate: rate.tokens_per_second).name]

    def contest(
        self,
        executors: Mapping[str, Executor],
        batch_size: int = 1,
        timed: int | None = None,
        rule: AcceptanceRule | None = None,
    ) -> list[Measured]:
        """Time decoding without a draft and all executors on the measured prompts, or on the first ``timed``.

        ``rule``: that of decoding without a draft, greedy by default.
        """
        with CONSOLE.status("") as line:
            return contest(
                {AUTOREGRESSIVE: self.autoregressive(rule)} | dict(executors),
                self.measured[:timed],
                batch_size=batch_size,
                repeats=self.args.repeats,
                on_status=lambda text: line.update(f"batch {batch_size}: {text}"),
            )

    def tokens_per_step(self, executor: Executor, prompts: Sequence[np.ndarray] = ()) -> float:
        """Return the tokens per step on these prompts (default: the measured ones), in large batches."""
        tokens = steps = 0
        prompts = prompts or self.measured
        for prompt, lengths, n_real in batches(prompts, min(BATCH, len(prompts))):
            out = executor.decode(prompt, lengths, jax.random.key(0))  # for rules that sample
            tokens += int(out.lengths[:n_real].sum())
            steps += int(out.steps[:n_real].sum())
        return tokens / steps


def draft_milliseconds(executors: Mapping[str, Executor], rounds: int, context: int = 256) -> dict[str, float]:
    """Return the milliseconds of drafting (propose and observe) in a step at this context, batch 1. Medians."""
    timers = {name: step_timer(executor, 1, context) for name, executor in executors.items()}
    timed = {(name, "propose"): timer.propose() for name, timer in timers.items()}
    timed |= {(name, "observe"): timer.observe() for name, timer in timers.items()}
    times = in_rounds(timed, rounds)
    drafting = {name: zip(times[name, "propose"], times[name, "observe"], strict=True) for name in timers}
    return {name: statistics.median(map(sum, pairs)) for name, pairs in drafting.items()}


def speed_rows(rates: Sequence[Measured], batch_size: int) -> list[dict]:
    """Print measurements and return the rows of a "speed" result."""
    for rate in rates:
        figures = f"{rate.tokens_per_second:8.0f} tokens/s, {rate.speedup:.2f}x, τ {rate.tokens_per_step:.2f}"
        mark = "  OUTPUT DIFFERS" if rate.equal is False else ""
        print(f"batch {batch_size}  {rate.name:40} {figures}{mark}", flush=True)
    return [{"batch": batch_size} | asdict(rate) for rate in rates]


def contest_of_trees(setup: Setup, batch_size: int, sizes: Sequence[int]) -> list[dict]:
    """Time each kind of heads with its fastest searched tree and the released one, against no draft."""
    executors = {}
    for heads in setup.heads:
        executors[f"{heads}, searched tree"] = setup.executor(heads, setup.fastest_tree(heads, batch_size, sizes))
        executors[f"{heads}, released tree"] = setup.executor(heads, setup.released(heads))
    return speed_rows(setup.contest(executors, batch_size), batch_size)


def cut(tree: TreeTopology, depth: int) -> TreeTopology:
    """Cut a tree at this depth."""
    return TreeTopology.from_choices([path for path in tree.choices if len(path) <= depth])


def held_out_chunks(tokenizer, count: int, prompt_tokens: int) -> list[np.ndarray]:
    """Return random disjoint chunks of files on which the shipped model was not trained."""
    if tokenizer is None:
        raise HydrajaxError("--prompts: got none, expected a file, as this base has no tokenizer")
    chunks = []
    for ids in tokenizer([text for _, text in held_out_files()])["input_ids"]:
        starts = range(0, len(ids) - prompt_tokens + 1, prompt_tokens)
        chunks += [np.array(ids[start : start + prompt_tokens], np.int32) for start in starts]
    if len(chunks) < count:
        raise HydrajaxError(f"--count: got {count}, expected at most {len(chunks)} (chunks of the held-out files)")
    return [chunks[i] for i in np.random.default_rng(0).permutation(len(chunks))[:count]]
