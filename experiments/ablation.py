"""Train variants of draft heads that differ in one setting, and compare them. Used by hydra_figure_5.py and others."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import Setup, draft_milliseconds, speed_rows

from hydrajax.decoding.executor import Executor
from hydrajax.errors import HydrajaxError

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "experiments" / "configs" / "demo_hydra.yaml"
OTHERS = ("objective.reconstruction_weight=0", "objective.feature_noise=0")  # settings of EAGLE configurations only
TEXT = ("objective.lm_weight=1", "objective.teacher_weight=0", *OTHERS)
TEACHER = ("objective.lm_weight=0", "objective.teacher_weight=1", *OTHERS)
BOTH = ("objective.lm_weight=1", "objective.teacher_weight=1", *OTHERS)

# Baselines of eagle_table.py and amphista_table.py, trained with `OWN_TEXT` for equally many steps. They share the
# base's lm head, the best choice for this few steps, except Medusa, whose heads need their own.
OWN_TEXT, OWN_TEXT_RUNS = CONFIG.with_name("eagle_table.yaml"), "runs/eagle_table"
SHARED = ("draft.lm_head=shared",)
ALIKE = {
    "Medusa": ("draft.heads=medusa", "draft.lm_head=low_rank", "draft.lm_rank=128", *TEACHER),
    "Hydra": ("draft.heads=hydra", *SHARED, *TEACHER),
    "Hydra++": ("draft.heads=hydra", "draft.prefix=true", *SHARED, *TEACHER),
}

FULL = {"count": 64, "prompt_tokens": 64, "new_tokens": 64, "repeats": 9, "steps": 400}
QUICK = {"count": 8, "repeats": 3, "steps": 80}


MEASURED = [  # remarks for the rows of `measure`
    "tokens_per_step: all prompts; speed and its interval: the first of them",
    "draft_ms: milliseconds of propose and observe",
]


def add_arguments(parser, config: Path = CONFIG, runs: str = "runs/ablations") -> None:
    """Add the flags of `train`."""
    parser.add_argument("--config", default=str(config), help="training configuration (default %(default)s)")
    add_run_arguments(parser, runs)


def add_run_arguments(parser, runs: str) -> None:
    """Add the flags of `train` except ``--config``, for a script whose variants have several configurations."""
    parser.add_argument("--runs", default=runs, help="directory of the trained heads (default %(default)s)")
    help_ = "more settings of every run, with a --runs of their own"
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help=help_)


def add_choice(parser, flag: str, known: Sequence[str]) -> None:
    """Add a flag that selects names, all by default."""
    names, help_ = list(known), f"any of {', '.join(known)} (default: all)"
    parser.add_argument(flag, nargs="+", choices=names, default=names, metavar="NAME", help=help_)


def train(args, variants: Mapping[str, Sequence[str]], jobs: int = 1) -> None:
    """Train variants, given as overrides of the configuration by name, and append their heads to ``args.draft``.

    Finished runs are kept, interrupted ones are resumed.

    Args:
        args: The parsed arguments of the script.
        variants: Overrides by name.
        jobs: Runs at the same time, for a GPU that one run leaves idle.
    """
    if args.draft:
        raise HydrajaxError("--draft: this script trains its heads, leave the flag out")

    def finished(variant: tuple[str, Sequence[str]]) -> Path:
        name, overrides = variant
        folder = name.lower().replace(", ", "-").replace(" ", "_")
        output = Path(args.runs).resolve() / str(args.steps) / folder
        settings = [f"output={output}", f"steps={args.steps}", *args.set]
        if args.base:
            settings.append(f"model={Path(args.base).resolve() if Path(args.base).exists() else args.base}")
        config = str(Path(args.config).resolve())
        command = [sys.executable, "-m", "hydrajax.train", "--config", config, *settings, *overrides]
        if not (output / "heads").exists():  # also heads alone, of a run elsewhere
            print(f"{name}: {shlex.join(['python', *command[1:]])}", flush=True)
            if code := subprocess.run(command).returncode:
                raise SystemExit(code)
        return output / "heads"

    with ThreadPoolExecutor(jobs) as threads:
        try:
            for heads in threads.map(finished, variants.items()):
                args.draft.append(os.path.relpath(heads))  # keeps this machine's paths out of the results
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)  # those that run end as they would alone
            raise


def compare(args, variants: Mapping[str, Sequence[str]]) -> list[dict]:
    """Train variants, decode with each and return the rows of a "speed" result."""
    train(args, variants)
    setup = Setup(args, list(variants))
    return speed_rows(setup.contest({name: setup.executor(name, setup.released(name)) for name in variants}), 1)


def measure(setup: Setup, executors: Mapping[str, Executor], args) -> list[dict]:
    """Return the rows of a "speed" result, with decoding without a draft first.

    Speed is measured on the first ``args.timed`` prompts, tokens per step on all of them. ``draft_ms`` is the time of
    propose and observe.
    """
    rows = speed_rows(setup.contest(executors, timed=args.timed), 1)
    draft_times = draft_milliseconds(executors, args.rounds)
    for row, (name, executor) in zip(rows[1:], executors.items(), strict=True):
        row |= {"tokens_per_step": setup.tokens_per_step(executor), "draft_ms": draft_times[name]}
        print(f"{name:40} τ {row['tokens_per_step']:.3f}, draft {row['draft_ms']:.2f} ms", flush=True)
    return rows
