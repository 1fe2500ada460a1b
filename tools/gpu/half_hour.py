"""Run all GPU measurements unattended in half an hour, most important first.

    python tools/gpu/half_hour.py --out FOLDER                  # 28 minutes on a 7B in bfloat16
    python tools/gpu/half_hour.py --out FOLDER --minutes 9      # in several calls, which keep finished parts
    python tools/gpu/half_hour.py --out FOLDER --tiny           # seconds per part, on a CPU, to test the scripts

Every part is a script of this directory in a new process, and writes its result as it runs. Its output goes to
``PART.log``, exit codes and times to ``parts.json``. Delete a part's entry there to run it again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Part:
    """A script with its arguments and its time limit in minutes. ``tiny``: further arguments of a test run."""

    name: str
    minutes: float
    script: str
    arguments: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    suffix: str = "jsonl"

    @property
    def tiny(self) -> str:
        return {
            "device_check": "--prompts 1 --new-tokens 4 --drafts medusa",
            "decode_bench": "--shape tiny --contexts 128 --batches 1 --nodes 8 --steps-only --copy-megabytes 16"
            " --repeats 1",
            "product_bench": "--types bfloat16,int8 --rows 1 --products out --megabytes 1 --turns 1",
            "train_bench": "--shape tiny --length 64 --batches 2 --repeats 1 --dtype float32",
        }[self.script]


WITHOUT_KERNELS, WITHOUT_GRAPHS = {"HYDRAJAX_GPU_KERNELS": "0"}, {"HYDRAJAX_CUDA_GRAPHS": "0"}
SHORT = "--contexts 2048 --nodes 64 --steps-only"
PARTS = (
    Part("check", 4, "device_check", suffix="json"),
    Part("steps", 6, "decode_bench", "--contexts 2048,512 --nodes 64,16 --steps-only"),
    Part("without_graphs", 3, "decode_bench", f"{SHORT} --trace 60", WITHOUT_GRAPHS),
    Part("without_kernels", 3, "decode_bench", SHORT, WITHOUT_KERNELS),
    Part("shared_lm_head", 3, "decode_bench", f"{SHORT} --lm-head shared"),
    Part("int8", 3, "decode_bench", f"{SHORT} --quantize int8 --drafts hydra++"),
    Part("int4", 3, "decode_bench", f"{SHORT} --quantize int4 --drafts hydra++"),
    Part("products", 3, "product_bench"),
    Part("batches", 6, "decode_bench", "--contexts 2048 --batches 8,4,2,16 --nodes 64,8,16,32 --steps-only"),
    Part("eagle", 5, "decode_bench", f"{SHORT} --drafts eagle,eagle3 --dynamic dynamic-60-7-10"),
    Part("training", 4, "train_bench", "--batches 4,8"),
    Part("8b", 5, "decode_bench", f"--shape 8b {SHORT}"),
    Part("phases", 5, "decode_bench", "--contexts 2048 --nodes 64"),
)


def main(parts: Sequence[Part], doc: str) -> int:
    """Run the parts that the command line chooses; ``doc`` begins with the command's description."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=28.0, help="time of this call (default %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="test the scripts in seconds on a CPU")
    parser.add_argument("--only", metavar="PART,PART", help=f"any of {', '.join(part.name for part in parts)}")
    args = parser.parse_args()
    chosen = args.only.split(",") if args.only else [part.name for part in parts]
    if unknown := set(chosen) - {part.name for part in parts}:
        parser.error(f"--only: got {', '.join(sorted(unknown))}, expected names of parts")

    args.out.mkdir(parents=True, exist_ok=True)
    record = args.out / "parts.json"
    done = json.loads(record.read_text()) if record.exists() else {}
    end = time.monotonic() + 60 * args.minutes
    for part in parts:
        if part.name not in chosen or part.name in done:
            continue
        left = min(60 * part.minutes, end - time.monotonic())
        if left < (1 if args.tiny else 45):  # too short to compile anything
            print(f"{part.name}: no time left")
            continue
        done[part.name] = run(part, args, left)
        print(json.dumps({part.name: done[part.name]}), flush=True)
        temporary = record.with_suffix(".partial")
        temporary.write_text(json.dumps(done, indent=1) + "\n")
        temporary.replace(record)
    return 0 if all(one["exit_code"] == 0 for one in done.values()) else 1


def run(part: Part, args: argparse.Namespace, seconds: float) -> dict:
    """Run a part with a time limit. Return its exit code, time and command."""
    out = args.out / f"{part.name}.{part.suffix}"
    words = [part.script + ".py", *part.arguments.split(), *(part.tiny.split() if args.tiny else ())]
    if part.script in ("decode_bench", "train_bench"):  # they stop by themselves between measurements
        words += ["--time-limit", f"{0.8 * seconds:.0f}"]
    command = [sys.executable, str(HERE / words[0]), *words[1:], "--out", str(out)]
    began = time.monotonic()
    with (args.out / f"{part.name}.log").open("w") as log:
        try:
            environment = os.environ | part.environment
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=seconds, env=environment)
            code = code.returncode
        except subprocess.TimeoutExpired:
            code = 124
    shown = " ".join(["python", f"tools/gpu/{words[0]}", *words[1:], "--out", out.name])
    return {"exit_code": code, "seconds": time.monotonic() - began, "command": shown, "environment": part.environment}


if __name__ == "__main__":
    sys.exit(main(PARTS, __doc__))
