"""A tiny base with its tokenizer in a directory, text for it, and the training program run in this process."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from helpers.loss_examples import rows_with_gaps

VOCAB, WIDTH, CONTEXT = 300, 32, 64


def invented_text(seed: int, words: int) -> str:
    """Sentences of made-up words with patterns to learn."""
    random = np.random.default_rng(seed)
    return " ".join(random.choice(["the", "tree", "of", "draft", "heads", "grows", "a", "branch."], words))


@pytest.fixture
def example():
    """Inputs of loss tests: hidden states that the drafter reads, the base's hidden states and a batch."""
    return rows_with_gaps()


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """A folder of six text files."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(6):
        (folder / f"{i}.txt").write_text(invented_text(i, 700))
    return folder


@pytest.fixture(scope="session")
def make_base(tmp_path_factory, texts):
    """``make(seed) -> Path``: a random one-layer base with a byte-level tokenizer, as a Hugging Face directory."""
    from hydrajax.formats.export_base import export_llama
    from hydrajax.models.init import init_base
    from hydrajax.models.llama import Llama
    from hydrajax.models.llama_config import LlamaConfig
    from hydrajax.train.data.corpus import train_tokenizer

    def make(seed: int) -> Path:
        tokenizer = train_tokenizer([path.read_text() for path in sorted(texts.iterdir())], VOCAB)
        model = Llama(
            LlamaConfig(VOCAB, WIDTH, 48, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, max_positions=CONTEXT)
        )
        params = jax.device_get(jax.jit(lambda: init_base(model, jax.random.key(seed)))())
        params = jax.tree.map(lambda x: x * 15 if x.ndim > 1 else x, params)
        folder = tmp_path_factory.mktemp("base") / "tiny"
        export_llama(folder, model, params, tokenizer=tokenizer, dtype=jnp.float32, eos_ids=(0,))
        return folder

    return make


@pytest.fixture(scope="session")
def base(make_base) -> Path:
    return make_base(0)


@pytest.fixture(scope="session")
def settings(base, texts) -> dict:
    """A run of Hydra heads with dropout, a few milliseconds a step."""
    return {
        "task": "heads", "model": str(base), "dtype": "float32",
        "draft": {"heads": "hydra", "num_draft_heads": 2, "dropout": 0.2},
        "optimizer": {"lr": 3e-3, "warmup_steps": 3},
        "data": {"files": [str(texts)], "format": "text", "rows": "stream", "length": 32, "held_out": 0.2},
        "batch_size": 4, "steps": 4, "tree": "cartesian-4x2", "log_every": 1, "eval_every": 100, "eval_rows": 4,
        "checkpoint_every": 100,
    }  # fmt: skip


@pytest.fixture
def config_file(tmp_path, settings):
    """``make(**changes) -> Path``: the settings as a YAML file, changed at top level; ``output`` is in tmp_path."""

    def make(**changes) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({"output": str(tmp_path / "run")} | settings | changes))
        return path

    return make


@pytest.fixture
def program(capfd, monkeypatch):
    """``program(*argv, main=...)`` runs a command line in this process: ``code``, ``out`` and ``err``.

    stopped: the step after which a signal stops it.
    """
    from hydrajax.cli import train
    from hydrajax.train import train_loop

    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # the program sets it; this restores it

    def run(*argv, main=train.main, stopped: int = 0) -> SimpleNamespace:
        capfd.readouterr()
        asked = itertools.count(1)
        with monkeypatch.context() as patch:
            if stopped:
                patch.setattr(train_loop.Interrupts, "agreed", lambda self, meeting: next(asked) == stopped)
            code = main([str(arg) for arg in argv])
        return SimpleNamespace(code=code, **capfd.readouterr()._asdict())

    return run


@pytest.fixture
def train(program):
    """``train(*argv)`` runs the training program, which must succeed."""

    def run(*argv, **how) -> SimpleNamespace:
        done = program("--config", *argv, **how)
        assert done.code == 0, done.err
        return done

    return run
