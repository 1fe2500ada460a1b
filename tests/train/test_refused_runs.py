"""Runs whose settings, base, data or output are refused in one line; nothing is written."""

import os
import shutil

import pytest

from helpers.runs import JOINT, refused
from hydrajax.locking import in_use
from hydrajax.train.data.corpus import train_tokenizer

# ``(overrides of the settings, beginning of the message)``
OF_HEADS = [
    ("draft={heads: eagle, num_draft_heads: 3}", "draft.num_draft_heads: has no effect with draft.heads eagle, remove"),
    ("draft={heads: eagle, vocabulary: 301}", "draft.vocabulary: got 301, expected at most the base's 300 tokens"),
    ("draft={heads: eagle3, aux_hidden_layers: [1, 1]}", "draft.aux_hidden_layers: got [1, 1], expected ascending"),
    ("draft={heads: eagle3, aux_hidden_layers: [0, 9]}", "draft.aux_hidden_layers: got 9, expected at most the base's"),
    ("objective.loss=kl", "objective.loss: got 'kl', expected cross_entropy, tv, lk, lk_hybrid"),
    ("objective.position_weights=d-pace", "objective.position_weights: got 'd-pace', expected decay, d_pace"),
    ("objective.d_pace_alpha=0", "objective.d_pace_alpha: got 0.0, expected more than 0, at most 1"),
    ("objective.teacher_temperature=0", "objective.teacher_temperature: got 0, expected a positive number"),
    (
        "draft={heads: p-eagle, retention: 0.7}; objective.position_weights=d_pace",
        "objective.position_weights: got d_pace",
    ),
    ("draft.hidden_state_offset=9", "draft.hidden_state_offset"),
    ("tree=dynamic-8-2-4; draft={heads: eagle}", "tree: got dynamic-8-2-4, expected a static tree"),
    ("draft={heads: dflash}; tree=best-8", "tree: got best-8, expected a static tree"),
    ("tree=chain-4", "tree: got a depth of 4, expected at most"),
    ("tree=none", "tree: got 'none', expected root, chain-K"),
    ("draft={heads: dflash, block_size: 1}", "draft.block_size: got 1, expected at least 2"),
    ("draft={heads: dflash}; tree=chain-7; objective.noise_alpha=1", "objective.noise_alpha: got 1.0, expected"),
    ("draft={heads: hydra}; objective.distance_weight=1", "objective.distance_weight: got 1.0, expected 0 for Hydra"),
    ("task=joint; draft={heads: dflash}", "draft.heads: got dflash, expected heads of every position"),
    ("batch_size=4000", "batch_size: got 4000, expected 1 to "),
    ("mesh.data=64; batch_size=64", "mesh: got data=64"),
]
OF_JOINT = [
    ("joint.heads_alone_steps=6", "joint.heads_alone_steps: got 6, expected less than the run's 6 steps"),
    ("steps=null; epochs=0.03", "joint.heads_alone_steps: got 2, expected less than the run's 1 steps"),
    ("data.hidden_cache_gb=1", "data.hidden_cache_gb: has no effect with task joint, remove it"),
    ("optimizer.name=muon", "optimizer.name: got muon, expected adamw with task joint"),
    ("draft.lm_head=shared", "adapter.targets: got lm_head, but "),
    ("draft={heads: eagle}", "adapter.targets: got lm_head, but "),
    ("adapter.targets=[lm_heads]", "adapter.targets: got 'lm_heads', expected one of q_proj, k_proj"),
    ("joint.heads_weight=0", "joint.heads_weight: got 0.0, expected a positive number"),
    ("task=heads", "joint: has no effect with task heads, remove it"),
]


@pytest.mark.parametrize(("changes", "cases"), [({}, OF_HEADS), (JOINT, OF_JOINT)], ids=["heads", "joint"])
def test_contradictions(program, config_file, tmp_path, changes, cases):
    config = config_file(**changes)
    for overrides, message in cases:
        assert refused(program("--config", config, *overrides.split("; "))).startswith(message)
    assert not any((tmp_path / "run" / name).exists() for name in ("base", "heads"))


def test_missing_and_empty_inputs(program, config_file, texts, tmp_path):
    missing, empty = tmp_path / "nowhere", tmp_path / "empty.txt"
    empty.write_text("")
    config = config_file()
    for override, message in (
        (f"model={missing}", f"model: no such directory: {missing}"),
        (f"model={texts}", str(texts)),  # a folder without a model
        (f"data.tokenizer={missing}", "data.tokenizer: "),
        (f"data.files=[{missing}]", str(missing)),
        (f"data.files=[{empty}]", "found no text"),
        ("data.length=65", "data.length: got 65, expected at most the base's context 64"),
    ):
        assert message in refused(program("--config", config, override)), override
    assert "--config: cannot read" in refused(program("--config", missing))
    assert "--config" in refused(program())


def test_a_tokenizer_of_another_base(program, config_file, texts, tmp_path):
    other, data = tmp_path / "other", tmp_path / "words.d"
    words = " ".join(f"word{i} tree" for i in range(300))
    train_tokenizer([words] + [path.read_text() for path in texts.iterdir()], 600).save_pretrained(other)
    shutil.copytree(texts, data)
    for i in range(3):
        (data / f"w{i}.txt").write_text(words)
    line = refused(program("--config", config_file(), f"data.tokenizer={other}", f"data.files=[{data}]"))
    assert line.startswith("data.tokenizer: got token id ")
    assert line.endswith("expected 0 to 299, the base's vocabulary; use the base's tokenizer")


def test_outputs(program, config_file, tmp_path):
    """An output in use by another run, or one that cannot be made."""
    output, file = tmp_path / "run", tmp_path / "file"
    output.mkdir()
    with in_use(output):
        for task in ("heads", "base", "joint"):
            line = refused(program("--config", config_file(task=task)))
            assert line.startswith(f"output: {output} is in use by process {os.getpid()} on ")
    assert list(output.iterdir()) == []
    file.write_text("in the way")
    for wrong in (file, file / "run"):
        line = refused(program("--config", config_file(output=str(wrong))))
        assert line.startswith(f"output: cannot make the directory {wrong}")


def test_settings_of_several_processes(program, config_file, monkeypatch):
    for variables, message in (
        ({"COORDINATOR_ADDRESS": "nowhere"}, "JAX_COORDINATOR_ADDRESS: got 'nowhere', expected host:port"),
        ({"COORDINATOR_ADDRESS": "host:99999"}, "JAX_COORDINATOR_ADDRESS: got 'host:99999', expected host:port"),
        ({"PROCESS_ID": "first"}, "JAX_PROCESS_ID: got 'first', expected an integer from 0 up"),
        ({"NUM_PROCESSES": "2", "PROCESS_ID": "2"}, "got 2, expected less than JAX_NUM_PROCESSES = 2"),
    ):
        with monkeypatch.context() as patch:
            for name, value in ({"COORDINATOR_ADDRESS": "127.0.0.1:1234"} | variables).items():
                patch.setenv(f"JAX_{name}", value)
            assert message in refused(program("--config", config_file()))
