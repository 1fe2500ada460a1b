"""Settings from YAML: strict keys and types, contradictions refused, and every config that is shipped."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from hydrajax.errors import HydrajaxError
from hydrajax.models.llama_config import LlamaConfig, RopeScaling
from hydrajax.train.losses import Objective
from hydrajax.train.run_config import DataConfig, TrainConfig, config_from, load_config

PROJECT_CONFIGS = "experiments/configs"
MINIMAL = {"output": "out", "model": "base", "steps": 3, "data": {"files": ["a.json"]}}
SCRATCH = {
    "vocab_size": 300,
    "width": 32,
    "mlp_width": 48,
    "n_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "head_dim": 16,
}


@pytest.fixture
def load(tmp_path):
    """``load(text or dict, *overrides)``."""

    def load(content, *overrides) -> TrainConfig:
        path = tmp_path / "run.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return load_config(path, overrides)

    return load


def test_defaults_are_the_dataclasses_own(load):
    expected = TrainConfig("out", model="base", steps=3, data=DataConfig(files=("a.json",)))
    assert load(MINIMAL) == expected


def test_every_kind_of_value(load):
    text = """
    output: out
    task: base
    scratch: {vocab_size: 300, width: 32, mlp_width: 48, n_layers: 1, n_heads: 2, n_kv_heads: 1, head_dim: 16,
              rope_theta: 1e6, tied_lm_head: true, rope_scaling: {kind: linear, factor: 2}}
    objective: {lm_weight: 1, teacher_weight: 0.5}
    optimizer: {lr: 3e-4, clip_norm: null, warmup_steps: 7}
    data: {files: [a.txt, "b c.txt"], format: text, length: 16, new_tokenizer: 300}
    epochs: 2
    """
    config = load(text)
    scratch = LlamaConfig(
        300, 32, 48, 1, 2, 1, 16, rope_theta=1e6, tied_lm_head=True, rope_scaling=RopeScaling("linear", 2.0)
    )  # fmt: skip
    assert config.scratch == scratch
    assert config.objective == Objective(lm_weight=1.0, teacher_weight=0.5)
    assert type(config.objective.lm_weight) is float  # an int would be another jit key, and another JSON
    assert config.optimizer.lr == 3e-4  # which PyYAML reads as text
    assert config.optimizer.clip_norm is None
    assert config.data.files == ("a.txt", "b c.txt")
    assert config.epochs == 2.0
    hash(config)  # a static argument of jit: no list is left anywhere


def test_overrides(load):
    config = load(MINIMAL, "data.files=[x.json, y.json]", "optimizer.lr=1e-3", "mesh.data=2", "tree=chain-2", "seed=7")
    assert config.data.files == ("x.json", "y.json")
    assert (config.optimizer.lr, config.mesh.data, config.tree, config.seed) == (1e-3, 2, "chain-2", 7)
    assert load(MINIMAL, "steps=null", "epochs=1").steps is None
    assert load(MINIMAL, "output=a=b").output == "a=b"


# Override of the minimal settings, and what the message must hold.
REFUSED = [
    # unknown keys
    ("stepz=3", "unknown key stepz; did you mean steps?"),
    ("draft.num_draft_head=3", "unknown key draft.n_head; did you mean draft.num_draft_heads?"),
    ("optimizer.xyz=3", "unknown key optimizer.xyz; allowed are name, lr, schedule"),
    ("scratch.widht=3", "unknown key scratch.widht; did you mean scratch.width?"),
    # wrong types: nothing is guessed
    ("steps=abc", "steps: must be an integer, found 'abc'"),
    ("steps=1.5", "steps: must be an integer, found 1.5"),
    ("steps=true", "steps: must be an integer, found True"),
    ("batch_size=null", "batch_size: must be an integer, found None"),
    ("optimizer.lr=fast", "optimizer.lr: must be a number, found 'fast'"),
    ("optimizer.lr=true", "optimizer.lr: must be a number, found True"),
    ("draft.prefix=1", "draft.prefix: must be true or false, found 1"),
    ("data.files=a.json", "data.files: must be a list such as [a, b], found 'a.json'"),
    ("data.files=[1]", "data.files[0]: must be text, found 1"),
    ("output=null", "output: must be text, found None"),
    ("model=[a]", "model: must be text, found ['a']"),
    ("draft=null", "draft: must hold settings by name, found None"),
    ("draft=hydra", "draft: must hold settings by name, found 'hydra'"),
    # outside the range
    ("steps=0", "steps: got 0, expected at least 1"),
    ("epochs=0", "steps, epochs: give one of the two"),
    ("seed=-1", "seed: must be an integer from 0"),
    ("optimizer.lr=.nan", "optimizer.lr: must be positive, found nan"),
    ("optimizer.lr=0", "optimizer.lr: must be positive, found 0"),
    ("optimizer.clip_norm=0", "optimizer.clip_norm: must be positive or null"),
    ("draft.heads=swan", "draft.heads: found 'swan', allowed are hydra, medusa, amphista, eagle, eagle3"),
    ("draft.dropout=1", "draft.dropout: got 1.0, expected at least 0 and less than 1"),
    ("data.held_out=1", "data.held_out: must be from 0 up to"),
    ("data.length=2", "data.length: got 2, expected at least 8"),
    ("data.format=csv", "data.format: found 'csv', allowed are auto, sharegpt"),
    ("dtype=float16", "dtype: found 'float16', allowed are float32, bfloat16"),
    ("objective.teacher_weight=0", "objective: one of lm_weight"),
    # contradictions
    ("model=null", "model: is needed for task heads"),
    ("teacher=there", "teacher: contradicts task heads"),
    (f"scratch={SCRATCH}", "scratch: contradicts task heads"),
    ("data.dataset=name", "data: give either files or dataset, found both"),
    ("data.files=[]", "data: give either files or dataset, found neither"),
    ("data.format=standard_library", "format standard_library needs neither files nor dataset"),
    ("draft.lm_head=tiny", "draft.lm_head: found 'tiny', allowed are full, shared, low_rank"),
    ("draft.lm_head=low_rank", "draft.lm_rank: expected with draft.lm_head low_rank"),
    ("draft={heads: amphista, prefix: true}", "draft.prefix: means nothing for draft.heads amphista, leave it out"),
    ("draft={heads: amphista, dropout: 0.2}", "draft.dropout: means nothing for draft.heads amphista"),
    ("draft={heads: eagle, prefix: true}", "draft.prefix: means nothing for draft.heads eagle"),
    ("draft.prefix_window=64", "draft.prefix_window: got a value, expected none without draft.prefix=true"),
    ("draft={heads: hydra, prefix: true, prefix_window: 0}", "draft.prefix_window: got 0, expected at least 1"),
    ("draft={heads: eagle, prefix_window: 64}", "draft.prefix_window: means nothing for draft.heads eagle"),
    ("draft.reads_token=false", "draft.reads_token: means nothing for draft.heads hydra"),
    ("draft={heads: amphista, adaptation_layers: -1}", "draft.adaptation_layers: got -1, expected at least 0"),
    ("draft={heads: amphista, auto_embedding_layers: -1}", "draft.auto_embedding_layers: got -1, expected at least 0"),
    ("draft={heads: amphista, mlp_width: 0}", "draft.mlp_width: got 0, expected at least 1"),
    ("matmul_precision=tf32", "matmul_precision: found 'tf32', allowed are default, bfloat16"),
    ("data.new_tokenizer=300", "data.new_tokenizer: contradicts task heads"),
    ("accumulation=3", "batch_size: must be a multiple of accumulation x mesh.data = 3, found 32"),
    # the override itself
    ("steps", "override: must look like key.sub=value"),
    ("steps.x=3", "steps.x goes through 'steps', which is a value and not a section"),
    ("steps=[", "steps: the value is not YAML"),
    ("steps=2026-13-41", "steps: the value is not YAML"),
    ('output="a\\0b"', "output: must be without the character NUL"),
]


@pytest.mark.parametrize(("override", "message"), REFUSED, ids=[override for override, _ in REFUSED])
def test_refused(load, override, message):
    with pytest.raises(HydrajaxError) as error:
        load(MINIMAL, override)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_more_contradictions():
    base = {"output": "out", "task": "base", "steps": 3, "scratch": SCRATCH}
    text = {"files": ["a"], "format": "text"}
    for changes, message in [
        ({"data": text | {"hidden_cache_gb": 1}}, "data.hidden_cache_gb: contradicts task base"),
        ({"data": text | {"tokenizer": "t", "new_tokenizer": 300}}, "exclude each other"),
        ({"data": {"dataset": "name", "format": "text"}}, "data.dataset: contradicts data.format text"),
        (
            {"data": text | {"length": 64}, "scratch": SCRATCH | {"max_positions": 32}},
            "at most the base's context 32",
        ),
        ({"data": text, "model": "m"}, "scratch, model: task base takes one of the two, found both"),
        ({"data": text, "scratch": None}, "scratch, model: task base takes one of the two, found neither"),
        ({"data": text | {"new_tokenizer": 300}, "teacher": "t"}, "data.new_tokenizer: contradicts model and teacher"),
        ({"data": text, "scratch": {"width": 3}}, "scratch.vocab_size, scratch.mlp_width"),
    ]:
        with pytest.raises(HydrajaxError, match=message):
            config_from(base | changes)


@pytest.mark.parametrize("content", ["", "- a\n- b", "just text", "a: [1", "a: b: c", "\x00"])
def test_not_settings(load, content):
    with pytest.raises(HydrajaxError, match=r"config: .*run.yaml"):
        load(content)


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(HydrajaxError, match="config: cannot read"):
            load_config(path)


def test_a_new_setting_of_an_unknown_kind_is_noticed():
    """The loader knows these kinds: a field of another one would be refused with a KeyError at its first use."""
    kinds = set()
    stack = [TrainConfig]
    while stack:
        for field in dataclasses.fields(stack.pop()):
            if dataclasses.is_dataclass(field.default_factory):
                stack.append(field.default_factory)
            else:
                kinds.add(str(field.type))
    assert kinds <= {
        "str", "int", "float", "bool", "tuple[str, ...]", "tuple[int, ...]", "str | None", "int | None", "float | None",
        "LlamaConfig | None", "DataConfig",
    }  # fmt: skip


def shipped_configs(root):
    return sorted((root / PROJECT_CONFIGS).rglob("*.yaml"))


def test_every_shipped_config_loads(pytestconfig):
    found = shipped_configs(pytestconfig.rootpath)
    names = {path.name for path in found}
    assert {"medusa1.yaml", "hydra.yaml", "hydra_pp.yaml", "amphista.yaml"} <= names
    for path in found:
        load_config(path)


def test_ablation_overrides_load(pytestconfig):
    """Every one-line override in the ablations' README, on the configuration that it names."""
    folder = pytestconfig.rootpath / PROJECT_CONFIGS
    readme = (folder / "ablations" / "README.md").read_text()
    rows = [row.split("|") for row in readme.splitlines() if row.startswith("| ") and "`" in row]
    assert len(rows) >= 8
    seen = set()
    for row in rows:
        config, overrides = row[2].strip(" `"), row[3].strip(" `").split()
        changed = load_config(folder / config, [*overrides, "output=x"])
        assert changed not in seen, row  # an override that changes nothing, or the same as another, is no ablation
        seen.add(changed)
