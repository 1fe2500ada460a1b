"""A tiny base, and prompt, question and training files for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tools.faults.registry import Trial

VOCAB, WIDTH, CONTEXT = 300, 32, 128


def text(seed: int, words: int) -> str:
    """Random sentences with enough pattern to learn from."""
    random = np.random.default_rng(seed)
    return " ".join(random.choice(["the", "tree", "of", "draft", "heads", "grows", "a", "branch."], words))


def texts(trial: Trial) -> Path:
    """A directory of text files."""

    def make(folder: Path) -> Path:
        for i in range(6):
            (folder / f"{i}.txt").write_text(text(i, 700))
        return folder

    return trial.once("texts", make)


def base(trial: Trial) -> Path:
    """A random base of one layer with a byte-level tokenizer."""

    def make(folder: Path) -> Path:
        import jax
        import jax.numpy as jnp

        from hydrajax.formats.export_base import export_llama
        from hydrajax.models.init import init_base
        from hydrajax.models.llama import Llama
        from hydrajax.models.llama_config import LlamaConfig
        from hydrajax.train.data.corpus import train_tokenizer

        tokenizer = train_tokenizer([path.read_text() for path in sorted(texts(trial).iterdir())], VOCAB)
        sizes = {"n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "max_positions": CONTEXT}
        model = Llama(LlamaConfig(VOCAB, WIDTH, 48, **sizes))
        params = jax.tree.map(lambda x: x * 15 if x.ndim > 1 else x, init_base(model, jax.random.key(0)))
        export_llama(folder / "tiny", model, params, tokenizer=tokenizer, dtype=jnp.float32, eos_ids=(0,))
        return folder / "tiny"

    return trial.once("base", make)


def write_lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prompts(trial: Trial, count: int) -> Path:
    return write_lines(trial.folder / "prompts.jsonl", [{"prompt": text(seed, 6)} for seed in range(count)])


def questions(trial: Trial, count: int) -> Path:
    records = [{"question_id": number, "category": "a", "turns": [text(number, 4)]} for number in range(count)]
    return write_lines(trial.folder / "questions.jsonl", records)


def training_config(trial: Trial, steps: int, checkpoint_every: int) -> Path:
    settings = {
        "task": "heads", "model": str(base(trial)), "dtype": "float32", "output": str(trial.folder / "run"),
        "draft": {"heads": "hydra", "num_draft_heads": 2, "dropout": 0.2}, "optimizer": {"lr": 3e-3, "warmup_steps": 3},
        "data": {"files": [str(texts(trial))], "format": "text", "rows": "stream", "length": 32, "held_out": 0.2},
        "batch_size": 4, "steps": steps, "tree": "cartesian-4x2", "log_every": 1, "eval_every": 10, "eval_rows": 4,
        "checkpoint_every": checkpoint_every, "keep_checkpoints": 2,
    }  # fmt: skip
    path = trial.folder / "run.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return path
