"""Train draft heads for SmolLM2-135M-Instruct on one GPU, in calls of under ten minutes, on a machine without network.

Here, write two folders with all that the GPU machine needs; each is under 60 MiB:

    python experiments/real_model_text.py PROMPTS_DIR --tokens 20000000 \\
        --seeds runs/smollm2/seeds.jsonl --texts runs/smollm2/texts.jsonl
    python tools/gpu/train_smollm2.py pack runs/gpu

There, in a clone with runs/gpu/0 in the first call and runs/gpu/1 in the second. The clone needs neither an installed
hydrajax nor `hydrajax/assets`, but the packages of the extra `gguf` and tensorboardX:

    python tools/gpu/train_smollm2.py join runs/gpu
    python tools/gpu/train_smollm2.py join runs/gpu && python tools/gpu/train_smollm2.py answers --minutes 6
    python tools/gpu/train_smollm2.py train --minutes 14 --limit 8.5 --out FOLDER     # twice

The shipped heads read conversations in place of answers (130,000 tokens/s on an H200). Two processes trained them
at the same time:

    PYTHONPATH=. python experiments/real_model_dialogues.py --base ~/smollm2/base.gguf --dtype bfloat16 \\
        --batch-size 2048 --length 512 --chunk 512 --tokens 9000000 --seed 11 --output ~/smollm2/answers-dialogues.jsonl
    export XLA_PYTHON_CLIENT_PREALLOCATE=false
    python tools/gpu/train_smollm2.py train --heads dspark --steps 1400 --limit 4 --out FOLDER dtype=bfloat16 \\
        objective.chunk_tokens=8192 optimizer.warmup_steps=40
    python tools/gpu/train_smollm2.py train --heads hydra_pp --steps 700 --limit 4 --out FOLDER dtype=bfloat16 \\
        objective.chunk_tokens=8192 optimizer.lr=6.0e-3 draft.init=HEADS draft.num_draft_heads=3 tree=cartesian-4x4x3

Everything is kept in --work, outside of the clone; a repeated command resumes. `train` splits --minutes evenly among
the heads: 40 steps of each measure the times of a start and of a step, from which the run's steps follow. FOLDER gets
the metrics and, of finished runs, the heads in int8 (NAME.tar). Further arguments replace settings of the configs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare machine has no installed hydrajax

from hydrajax.cli import main as hydrajax
from hydrajax.formats.known_bases import KNOWN_BASES, known_base_file
from hydrajax.train.metrics import FILE, read_metrics
from hydrajax.train.run_config import load_config

CONFIGS = Path(__file__).resolve().parents[2] / "experiments" / "configs" / "smollm2"
PARTS = 2
PROBE = 40  # steps that measure the speed
MARGIN = 0.85  # share of the remaining time that the steps are planned for


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing, joining, distilling, training = map(commands.add_parser, ("pack", "join", "answers", "train"))
    for one in (packing, joining):
        one.add_argument("folder", type=Path, help="the packed folders 0 and 1")
    packing.add_argument("--base", default="smollm2", help="a known base or a GGUF file (default %(default)s)")
    packing.add_argument("--text", type=Path, default=Path("runs/smollm2"), help="folder of seeds.jsonl, texts.jsonl")
    for one in (joining, distilling, training):
        one.add_argument("--work", type=Path, default=Path.home() / "smollm2", help="default %(default)s")
    for one, minutes, sequences in ((distilling, 6.0, 256), (training, 14.0, 64)):
        one.add_argument("--minutes", type=float, default=minutes, help="of all calls (default %(default)s)")
        one.add_argument("--batch-size", type=int, default=sequences, help="sequences (default %(default)s)")
        one.add_argument("overrides", nargs="*", metavar="key.sub=value", help="replace settings of the configs")
    distilling.add_argument("--new-tokens", type=int, default=256, help="limit of an answer (default %(default)s)")
    training.add_argument("--heads", nargs="+", default=["hydra_pp", "hydra", "medusa"], help="configs, in this order")
    training.add_argument("--steps", type=int, help="train for this many, in place of what fits into --minutes")
    training.add_argument("--limit", type=float, default=8.5, help="minutes of this call (default %(default)s)")
    training.add_argument("--out", type=Path, required=True, help="write metrics and heads to this folder")
    return parser.parse_args(argv)


def pack(args: argparse.Namespace) -> None:
    """Write each part of the base to a folder of its own, the first one with the checksum and the text."""
    known = KNOWN_BASES.get(args.base)
    content = (known_base_file(args.base, "base") if known else Path(args.base)).read_bytes()
    size = -(-len(content) // PARTS)
    for number in range(PARTS):
        folder = args.folder / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"base.{number}").write_bytes(content[number * size : (number + 1) * size])
    expected = known.sha256 if known else hashlib.sha256(content).hexdigest()
    (args.folder / "0" / "pack.json").write_text(json.dumps({"base": args.base, "sha256": expected}) + "\n")
    for name in ("seeds", "texts"):
        shutil.make_archive(str(args.folder / "0" / name), "gztar", args.text, f"{name}.jsonl")
    for folder in sorted(args.folder.glob("[0-9]")):
        print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()) / 2**20:.1f} MiB")


def join(args: argparse.Namespace) -> None:
    """Keep what has arrived. With the last part, write the base and check it."""
    args.work.mkdir(parents=True, exist_ok=True)
    for path in args.folder.glob("[0-9]/*"):
        shutil.copy(path, args.work)
    names = ["pack.json", *(f"base.{number}" for number in range(PARTS))]
    if missing := [name for name in names if not (args.work / name).exists()]:
        print(f"{args.work}: {', '.join(missing)} missing; repeat the command with the other folder")
        return
    content = b"".join((args.work / name).read_bytes() for name in names[1:])
    expected, digest = about(args)["sha256"], hashlib.sha256(content).hexdigest()
    if digest != expected:
        sys.exit(f"{args.folder}: got a base with sha256 {digest}, expected {expected}; pack it again")
    for name in ("seeds", "texts"):
        shutil.unpack_archive(args.work / f"{name}.tar.gz", args.work, filter="data")
    (args.work / "base.gguf").write_bytes(content)
    print(f"{args.work / 'base.gguf'}: {len(content) / 1e6:.1f} MB, sha256 as expected")


def about(args: argparse.Namespace) -> dict:
    return json.loads((args.work / "pack.json").read_text())


def answers(args: argparse.Namespace) -> None:
    """Answer all seeds, then again with other random numbers, until the time is over."""
    end = time.monotonic() + 60 * args.minutes
    for number in itertools.count():
        path, began = args.work / f"answers-{number}.jsonl", time.monotonic()
        before = tokens_of(path)
        finished = run(distill_command(args, number), end)
        took, tokens = time.monotonic() - began, tokens_of(path)
        report(answers=path.name, tokens=tokens, tokens_per_second=(tokens - before) / took)
        if not finished:
            return


def tokens_of(path: Path) -> int:
    lines = path.read_text().splitlines() if path.exists() else ()
    return sum(len(json.loads(line)["output_ids"]) for line in lines)


def distill_command(args: argparse.Namespace, number: int) -> list[str]:
    command = ["distill", "--config", CONFIGS / "distill.yaml", "--seeds", args.work / "seeds.jsonl"]
    command += ["--output", args.work / f"answers-{number}.jsonl", "--new-tokens", args.new_tokens, "--seed", number]
    # Greedy answers are the same each time.
    command += ["--batch-size", args.batch_size, "--temperatures", "0.7" if number else "0,0.7"]
    return [*map(str, command), f"model={args.work / 'base.gguf'}", *args.overrides]


def train(args: argparse.Namespace) -> None:
    """Train the heads one after another, and export those that are finished."""
    end = time.monotonic() + 60 * args.limit
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.heads:
        output = args.work / name
        if not (output / "heads").exists() and (steps := args.steps or planned_steps(args, name, end)):
            run(train_command(args, name, output, steps), end)
        finished = (output / "heads").exists()
        lines = train_lines(output)
        rate = statistics.median(line["tokens_per_second"] for line in lines) if lines else None
        report(heads=name, finished=finished, step=lines[-1]["step"] if lines else 0, tokens_per_second=rate)
        if lines:
            shutil.copy(output / FILE, args.out / f"{name}.{FILE}")
        if finished and run(export_command(args, name)):
            shutil.make_archive(str(args.out / name), "tar", args.work / "int8", name)


def planned_steps(args: argparse.Namespace, name: str, end: float) -> int | None:
    """Return the steps that fit into the head's share of the minutes, the same in each call; None without time."""
    plan, probe = args.work / f"{name}.plan.json", args.work / "probe" / name
    if plan.exists():
        return json.loads(plan.read_text())["steps"]
    shutil.rmtree(probe, ignore_errors=True)  # of a call that ended in it
    began = time.monotonic()
    if not run(train_command(args, name, probe, PROBE), end) or not (probe / "heads").exists():
        return None
    took, length = time.monotonic() - began, load_config(CONFIGS / f"{name}.yaml", args.overrides).data.length
    step = args.batch_size * length / train_lines(probe)[-1]["tokens_per_second"]
    start = max(took - PROBE * step, 0.0)
    steps = max(int(MARGIN * (60 * args.minutes / len(args.heads) - took - start) / step), PROBE)
    plan.write_text(json.dumps({"steps": steps, "start_seconds": start, "step_seconds": step}) + "\n")
    report(heads=name, **json.loads(plan.read_text()))
    return steps


def train_lines(output: Path) -> list[dict]:
    return [line for line in read_metrics(output / FILE) if line["kind"] == "train"]


def train_command(args: argparse.Namespace, name: str, output: Path, steps: int) -> list[str]:
    files = [str(path) for path in (*sorted(args.work.glob("answers-*.jsonl")), args.work / "texts.jsonl")]
    settings = {
        "model": str(args.work / "base.gguf"), "output": str(output), "data.files": files, "steps": steps,
        "batch_size": args.batch_size, "mesh.data": 1, "mesh.cpu_devices": None,
        "data.hidden_cache_gb": 0, "data.hidden_cache": None,  # a GPU runs the base faster than it reads a file
        "eval_every": max(steps // 4, PROBE), "checkpoint_every": max(steps // 8, PROBE),
    }  # fmt: skip
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]  # JSON is YAML
    return ["train", "--config", str(CONFIGS / f"{name}.yaml"), *overrides, *args.overrides]


def export_command(args: argparse.Namespace, name: str) -> list[str]:
    command = ["convert", "export", "--base", args.work / "base.gguf", "--base-name", about(args)["base"]]
    command += ["--draft", args.work / name / "heads", "--format", "native", "--dtype", "int8"]
    return [str(word) for word in [*command, "--output", args.work / "int8" / name]]


def run(command: list[str], end: float = float("inf")) -> bool:
    """Run a command of hydrajax, which keeps its work at a SIGTERM. It gets one at ``end``; return False then."""
    left = end - time.monotonic()
    if left <= 0:
        return False
    timer = threading.Timer(min(left, threading.TIMEOUT_MAX), os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True  # no reason to wait at an error
    timer.start()
    try:
        code = hydrajax(command)
    finally:
        timer.cancel()
    if code not in (0, 128 + signal.SIGTERM):
        sys.exit(code)
    return code == 0


def report(**values) -> None:
    print(json.dumps(values), flush=True)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    {"pack": pack, "join": join, "answers": answers, "train": train}[args.command](args)


if __name__ == "__main__":
    main()
