"""Training with the hidden-state cache equals training without it, and a stale cache is noticed."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.runs import heads_file, refused
from hydrajax.formats.huggingface import load_llama
from hydrajax.train.data.hidden_cache import fingerprint
from hydrajax.train.data.packing import Rows
from hydrajax.train.metrics import read_metrics

BYTES = 32 * 4  # per token: width 32, float32


def data(settings, **changes) -> dict:
    return {"data": settings["data"] | {"hidden_cache_gb": 0.5} | changes}


def same_lines(output, expected) -> None:
    """Compare the metrics of two runs."""
    for ours, theirs in zip(*(read_metrics(run / "metrics.jsonl") for run in (output, expected)), strict=True):
        assert ours.keys() == theirs.keys()
        for name in {"loss", "teacher", "agreement", "tokens_per_step"} & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), (ours["step"], name)


@pytest.mark.slow
def test_same_run_with_and_without(train, config_file, settings, make_base, tmp_path):
    plain, cached = tmp_path / "plain", tmp_path / "cached"
    train(config_file(output=str(plain)))
    config = config_file(output=str(cached), **data(settings))
    first = train(config)
    record = json.loads((cached / "hidden.json").read_text())
    size = sum((cached / name).stat().st_size for name in ("hidden.bin", "best.bin"))
    assert size == np.prod(record["shape"]) * 4 + np.prod(record["shape"][:-1]) * 4 > 50 * 32 * BYTES
    # The size is printed before anything is written.
    told = f"hidden states: {size / 1e9:.2f} GB to write to {cached} (limit 0.5 GB)"
    assert told in first.out

    same_lines(cached, plain)
    expected = load_file(heads_file(plain))
    for name, tensor in load_file(heads_file(cached)).items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)

    # The next run with the same data reads it; a run with other data does not.
    before = (cached / "hidden.bin").read_bytes()
    shutil.rmtree(cached / "checkpoints")
    assert f"hidden states: {size / 1e9:.2f} GB, found in " in train(config).out
    shutil.rmtree(cached / "checkpoints")
    assert told in train(config, f"model={make_base(1)}").out
    assert (cached / "hidden.bin").read_bytes() != before
    shutil.rmtree(cached / "checkpoints")
    (cached / "hidden.json").write_text(json.dumps(record))  # of the first base again, but the file is cut off
    (cached / "hidden.bin").write_bytes(before[:-1])
    assert told in train(config).out
    assert (cached / "hidden.bin").read_bytes() == before


@pytest.mark.slow
def test_heads_with_a_vocabulary_share_a_cache(train, config_file, settings, tmp_path):
    """The base's best tokens come from the cache: the loss of tokens outside the vocabulary stays 0."""
    small = {"draft": settings["draft"] | {"lm_head": "shared", "vocabulary": 40}}
    plain, first, second = (tmp_path / name for name in ("plain", "first", "second"))
    train(config_file(output=str(plain), **small))
    shared = data(settings, hidden_cache=str(tmp_path / "cache")) | small
    assert "to write to" in train(config_file(output=str(first), **shared)).out
    assert "found in" in train(config_file(output=str(second), **shared)).out
    assert not (first / "hidden.bin").exists()
    for output in (first, second):
        same_lines(output, plain)


def test_other_data_is_noticed(tmp_path, base, settings):
    """The fingerprint alone: other tokens, other segments, another base."""
    _, params = load_llama(base, jnp.float32)
    tokens, segments = np.arange(12, dtype=np.int32).reshape(2, 6), np.ones((2, 6), np.int32)
    rows = Rows(tokens, tokens, segments)
    scaled = params | {"norm": {"scale": params["norm"]["scale"] * 1.01}}
    prints = [
        fingerprint(rows, params),
        fingerprint(rows._replace(tokens=tokens[::-1].copy()), params),
        fingerprint(rows._replace(segments=segments * 2), params),
        fingerprint(rows._replace(segments=None), params),
        fingerprint(rows, scaled),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint(rows._replace(labels=tokens * 0), params) == prints[0]  # no hidden state depends on labels


def test_refused(program, config_file, settings, tmp_path, monkeypatch):
    """A cache that is too large, that cannot be written, or for several processes."""

    def full(*_):
        raise OSError(28, "No space left on device")

    output = tmp_path / "run"
    result = program("--config", config_file(**data(settings, hidden_cache_gb=1e-6)))
    assert refused(result).startswith("data.hidden_cache_gb: got 1e-06 (free disk ")
    assert "hidden states: 0.00 GB to write" in result.out
    assert not (output / "hidden.bin").exists()
    config = config_file(**data(settings))
    monkeypatch.setattr("hydrajax.train.data.hidden_cache.write", full)
    line = refused(program("--config", config))
    assert line.startswith(f"data.hidden_cache_gb: cannot write to {output}: No space left")
    assert not (output / "hidden.json").exists()
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("hydrajax.processes.from_main", lambda work: work())  # without asking others
    assert refused(program("--config", config)) == "data.hidden_cache_gb: got 0.5, expected 0 with several processes"
