"""Commands in processes of their own, a tiny model for them, and what all of them must keep to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from attacks.registry import CannotTry, Fell, Place

ROOT = Path(__file__).resolve().parents[2]
# The program with limits of its own, such as on the size of files, set by itself: a process with threads must not run
# code between fork and exec.
LIMITED = """
import json, resource, runpy, sys
for name, most in json.loads(sys.argv.pop(1)).items():
    resource.setrlimit(getattr(resource, name), (most, resource.RLIM_INFINITY))
runpy.run_module("hydrajax", run_name="__main__", alter_sys=True)
"""
EXEC = """
import os, sys
os.execv(sys.executable, [sys.executable, "-m", "hydrajax", *sys.argv[1:]])
"""
VOCAB, WIDTH, CONTEXT = 300, 32, 128


# --- a tiny model -----------------------------------------------------------------------------------------------------


def text(seed: int, words: int) -> str:
    """Sentences of made-up words: enough pattern to learn something from."""
    random = np.random.default_rng(seed)
    return " ".join(random.choice(["the", "tree", "of", "draft", "heads", "grows", "a", "branch."], words))


def texts(place: Place) -> Path:
    """A folder of text files."""

    def make(folder: Path) -> Path:
        for i in range(6):
            (folder / f"{i}.txt").write_text(text(i, 700))
        return folder

    return place.once("texts", make)


def base(place: Place) -> Path:
    """A random base of one layer with a byte-level tokenizer."""

    def make(folder: Path) -> Path:
        import jax
        import jax.numpy as jnp

        from hydrajax.formats.huggingface import export_llama
        from hydrajax.models.base_model import init_base
        from hydrajax.models.llama import Llama
        from hydrajax.models.llama_config import LlamaConfig
        from hydrajax.train.data.corpus import train_tokenizer

        tokenizer = train_tokenizer([path.read_text() for path in sorted(texts(place).iterdir())], VOCAB)
        sizes = {"n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "max_positions": CONTEXT}
        model = Llama(LlamaConfig(VOCAB, WIDTH, 48, **sizes))
        params = jax.tree.map(lambda x: x * 15 if x.ndim > 1 else x, init_base(model, jax.random.key(0)))
        export_llama(folder / "tiny", model, params, tokenizer=tokenizer, dtype=jnp.float32, eos_ids=(0,))
        return folder / "tiny"

    return place.once("base", make)


def prompts(place: Place, count: int) -> Path:
    path = place.folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text(seed, 6)}) + "\n" for seed in range(count)))
    return path


def questions(place: Place, count: int) -> Path:
    path = place.folder / "questions.jsonl"
    lines = [{"question_id": number, "category": "a", "turns": [text(number, 4)]} for number in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def training_config(place: Place, steps: int, checkpoint_every: int) -> Path:
    """JSON is YAML."""
    settings = {
        "task": "heads", "model": str(base(place)), "dtype": "float32", "output": str(place.folder / "run"),
        "draft": {"heads": "hydra", "num_draft_heads": 2, "dropout": 0.2}, "optimizer": {"lr": 3e-3, "warmup_steps": 3},
        "data": {
            "files": [str(texts(place))], "format": "text", "rows": "stream", "length": 32, "held_out": 0.2,
        },
        "batch_size": 4, "steps": steps, "tree": "cartesian-4x2", "log_every": 1, "eval_every": 10, "eval_rows": 4,
        "checkpoint_every": checkpoint_every, "keep_checkpoints": 2,
    }  # fmt: skip
    path = place.folder / "run.yaml"
    path.write_text(json.dumps(settings))
    return path


# --- processes --------------------------------------------------------------------------------------------------------


def start(
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    file_size: int | None = None,
    memory: int | None = None,
    first: str = "",
    within: Sequence[str] = (),
    **popen,
) -> subprocess.Popen:
    """``hydrajax`` with these arguments.

    file_size: bytes that no file may exceed, as on a disk that fills up. memory: bytes of addresses that it may have.
    first: what Python is to do before, in the process that becomes the program. within: a command that runs it.
    """
    limits = {"RLIMIT_FSIZE": file_size, "RLIMIT_AS": memory}
    limits = {name: most for name, most in limits.items() if most is not None}

    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "HYDRAJAX_MEASURE_TREES": "0", **(environment or {})}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    program = ["-c", LIMITED, json.dumps(limits)] if limits else ["-m", "hydrajax"]
    program = ["-c", first + EXEC] if first else program
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a shell's background jobs, and their children, ignore
    try:
        return subprocess.Popen([*within, sys.executable, *program, *map(str, arguments)], env=env, **pipes | popen)
    finally:
        signal.signal(signal.SIGINT, before)


def finish(process: subprocess.Popen, place: Place) -> tuple[int, str, str]:
    """Exit code as a shell reports it, and what was said."""
    try:
        out, err = process.communicate(timeout=place.seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise Fell(f"did not end within {place.seconds:g} seconds") from None
    code = process.returncode
    return (
        code if code >= 0 else 128 - code,
        (out or b"").decode(errors="replace"),
        (err or b"").decode(errors="replace"),
    )


def done(process: subprocess.Popen, place: Place, codes: Sequence[int] = (0,)) -> tuple[int, str, str]:
    """`finish`, and `check_said` of it."""
    code, out, err = finish(process, place)
    check_said(code, err, codes)
    return code, out, err


def check_said(code: int, err: str, codes: Sequence[int] = (0,)) -> None:
    """One of these codes and no traceback; of code 2 with one line of ours."""
    last = " / ".join(err.strip().splitlines()[-3:])
    if code not in codes:
        raise Fell(f"exit code {code}, allowed are {', '.join(map(str, codes))}: {last[-300:]}")
    if "Traceback" in err:
        raise Fell(f"a traceback with code {code}: {last[-300:]}")
    if code == 2 and sum(line.startswith("hydrajax: ") for line in err.splitlines()) != 1:
        raise Fell(f"not one line of ours with code 2: {last[-300:]}")


@contextmanager
def mounted(folder: Path, options: str, image: Path | None = None) -> Iterator[None]:
    """A small disk, in memory or of an image, where this user may mount one."""
    folder.mkdir(exist_ok=True)
    disk = ["-t", "tmpfs", "tmpfs"] if image is None else [str(image)]
    if subprocess.run(["mount", "-o", options, *disk, str(folder)], capture_output=True, check=False).returncode:
        raise CannotTry(f"no {'tmpfs' if image is None else 'image'} can be mounted by this user")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)
