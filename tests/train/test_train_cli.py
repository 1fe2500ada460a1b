"""`python -m hydrajax.train`: refusals, the guard against NaN, and a base and data of others."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from helpers.runs import refused
from hydrajax import load
from hydrajax.api import make_autoregressive_fn, make_decode_fn
from hydrajax.decoding.state import Params
from hydrajax.formats.load import load_draft
from hydrajax.locking import in_use
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.trees import presets


def train_lines(output) -> list[dict]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def test_missing_and_empty_inputs(program, config_file, settings, texts, tmp_path):
    missing = tmp_path / "nowhere"
    assert refused(program("--config", config_file(model=str(missing)))) == f"model: no such directory: {missing}"
    assert refused(program("--config", config_file(), f"data.tokenizer={missing}")).startswith("data.tokenizer: ")
    assert str(texts) in refused(program("--config", config_file(model=str(texts))))  # a folder without a model
    assert str(missing) in refused(program("--config", config_file(), f"data.files=[{missing}]"))
    (tmp_path / "empty.txt").write_text("")
    assert "found no text" in refused(program("--config", config_file(), f"data.files=[{tmp_path / 'empty.txt'}]"))


def test_data_the_base_cannot_read(program, config_file, base, texts, tmp_path):
    assert refused(program("--config", config_file(), "data.length=65")).startswith(
        "data.length: got 65, expected at most the base's context 64"
    )
    from hydrajax.train.data.corpus import train_tokenizer

    other = tmp_path / "other"
    words = " ".join(f"word{i} tree" for i in range(300))
    train_tokenizer([words] + [path.read_text() for path in texts.iterdir()], 600).save_pretrained(other)
    data = tmp_path / "words.d"
    shutil.copytree(texts, data)
    for i in range(3):
        (data / f"w{i}.txt").write_text(words)
    line = refused(program("--config", config_file(), f"data.tokenizer={other}", f"data.files=[{data}]"))
    assert line.startswith("data.tokenizer: got token id ")
    assert line.endswith("expected 0 to 299, the base's vocabulary; use the base's tokenizer")


@pytest.mark.parametrize("task", ["heads", "base", "joint"])
def test_a_second_run_in_one_output(program, config_file, tmp_path, task):
    (tmp_path / "run").mkdir()
    with in_use(tmp_path / "run"):
        line = refused(program("--config", config_file(task=task)))
    assert line.startswith(f"output: {tmp_path / 'run'} is in use by process {os.getpid()} on ")
    assert list((tmp_path / "run").iterdir()) == []


def test_output_that_cannot_be_written(program, config_file, tmp_path):
    (tmp_path / "file").write_text("in the way")
    line = refused(program("--config", config_file(output=str(tmp_path / "file" / "run"))))
    assert line.startswith(f"output: cannot make the directory {tmp_path / 'file' / 'run'}")
    assert refused(program("--config", config_file(output=str(tmp_path / "file")))).startswith("output: cannot make")


@pytest.mark.slow
def test_a_vocabulary_of_the_most_frequent_targets(program, config_file, base, texts, tmp_path):
    """The vocabulary is that of the training text, decoding stays exact, and initial heads keep theirs."""
    config = config_file(draft={"heads": "medusa", "num_draft_heads": 2, "vocabulary": 9})
    done = program("--config", config, "steps=1", f"output={tmp_path / 'first'}")
    assert done.code == 0, done.err
    evaluated = [json.loads(line) for line in (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()][-1]
    assert 1 <= evaluated["tokens_per_step"] <= 3
    loaded = load(base, tmp_path / "first" / "heads", dtype="float32")
    tokens = loaded.drafter.vocabulary.tokens.tolist()
    ids = [loaded.tokenizer(path.read_text())["input_ids"] for path in texts.iterdir()]
    counts = Counter(token for text in ids for token in text)
    assert {token for token, _ in counts.most_common(5)} < set(tokens)  # the text has nine words
    assert len(tokens) == 9

    prompts = np.array([text[:8] for text in ids], np.int32)
    settings = {"max_new_tokens": 16}
    tree = make_decode_fn(loaded.model, loaded.drafter, presets.cartesian([4, 2]), **settings)
    plain = make_autoregressive_fn(loaded.model, **settings)(Params(loaded.params.base, {}), prompts)
    np.testing.assert_array_equal(tree(loaded.params, prompts).tokens, plain.tokens)

    other = tmp_path / "other.txt"
    other.write_text("branch. draft heads " * 900)
    overrides = f"draft.init={tmp_path / 'first' / 'heads'}", f"data.files=[{other}]", "steps=1"
    done = program("--config", config, *overrides, f"output={tmp_path / 'second'}")
    assert done.code == 0, done.err
    assert load(base, tmp_path / "second" / "heads").drafter.vocabulary == loaded.drafter.vocabulary
    line = refused(program("--config", config, *overrides, "draft.vocabulary=8", f"output={tmp_path / 'third'}"))
    assert line.startswith("draft.init: ")


def test_steps_that_are_not_finite_are_skipped_counted_and_end_the_run(program, config_file, settings, tmp_path):
    """The learning rate makes the weights infinite at the first step."""
    optimizer = {"lr": 1e38, "warmup_steps": 0, "clip_norm": None}
    config = config_file(optimizer=optimizer, max_bad_steps=3, steps=9, checkpoint_every=1)
    line = refused(program("--config", config))
    assert line.startswith("max_bad_steps: got 3 steps in a row, up to step 4, with a non-finite loss or gradient")
    assert "optimizer.lr" in line
    assert str(tmp_path / "run" / "checkpoints") in line
    found = train_lines(tmp_path / "run")
    assert [line["bad_steps"] for line in found] == [0, 1, 2]  # the fourth line is the message
    assert np.isfinite(found[0]["loss"])
    assert not all(np.isfinite([line["loss"], line["grad_norm"]]).all() for line in found[1:])


def test_heads_for_another_base_from_conversations(program, golden, settings, tmp_path):
    """Conversations in FastChat's format. The base has no chat template, so the configuration must name one."""
    conversations = [
        {
            "id": f"sum_{i}",
            "conversations": [
                {"from": "human", "value": f"Which number follows {i}?"},
                {"from": "gpt", "value": f"{i + 1} follows {i}."},
                {"from": "human", "value": f"Write a function that adds {i} to its argument."},
                {"from": "gpt", "value": f"def add(value):\n    return value + {i}\n"},
            ],
        }
        for i in range(60)
    ]
    text = tmp_path / "conversations.json"
    text.write_text(json.dumps(conversations))
    base = golden / "base" / "mha"

    data = {
        "files": [str(text)],
        "template": "vicuna",
        "length": 64,
        "rows": "pack",
        "held_out": 0.1,
        "limit": 60,
    }
    draft = {"heads": "hydra", "num_draft_heads": 2}
    changes = {"model": str(base), "data": data, "draft": draft, "steps": 3, "output": str(tmp_path / "run")}
    config = tmp_path / "golden.yaml"
    config.write_text(yaml.safe_dump(settings | changes))
    line = refused(program("--config", config, "data.template=auto"))
    assert "template" in line
    result = program("--config", config)
    assert result.code == 0, result.err
    found = train_lines(tmp_path / "run")
    assert len(found) == 3
    assert np.isfinite([line["loss"] for line in found]).all()
    c = json.loads((base / "config.json").read_text())
    shape = LlamaConfig(
        c["vocab_size"], c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"], c["num_attention_heads"],
        c["num_key_value_heads"], c["hidden_size"] // c["num_attention_heads"], c["max_position_embeddings"],
    )  # fmt: skip
    drafter, _ = load_draft(tmp_path / "run" / "heads", shape, jnp.float32)
    assert drafter.spec.depth == 2
    tensors = load_file(next((tmp_path / "run" / "heads").glob("*.safetensors")))
    assert all(np.isfinite(tensor).all() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "nowhere"}, "JAX_COORDINATOR_ADDRESS: got 'nowhere', expected host:port"),
        ({"JAX_COORDINATOR_ADDRESS": "host:99999"}, "JAX_COORDINATOR_ADDRESS: got 'host:99999', expected host:port"),
        ({"JAX_PROCESS_ID": "first"}, "JAX_PROCESS_ID: got 'first', expected an integer from 0 up"),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
            "JAX_PROCESS_ID: got 2, expected less than JAX_NUM_PROCESSES = 2",
        ),
    ],
)
def test_invalid_settings_of_several_processes(program, config_file, monkeypatch, variables, message):
    for name, value in ({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234"} | variables).items():
        monkeypatch.setenv(name, value)
    assert message in refused(program("--config", config_file()))
