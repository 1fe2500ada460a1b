"""Settings from YAML: strict keys and types, contradictions, and every shipped configuration."""

import dataclasses
import typing

import pytest
import yaml

from helpers.refusals import assert_refused
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.rope_scaling import RopeScaling
from hydrajax.train.losses import Objective
from hydrajax.train.run_config import DataConfig, TrainConfig, config_from, load_config, recipes

PROJECT_CONFIGS = "experiments/configs"
MINIMAL = {"output": "out", "model": "base", "steps": 3, "data": {"files": ["a.json"]}}
SCRATCH = {"vocab_size": 300, "width": 32, "mlp_width": 48, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8}


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


# ``(override of the minimal settings, part of the message)``
REFUSED = [
    # unknown keys
    ("stepz=3", "unknown key stepz; did you mean steps?"),
    ("optimizer.learning_rate=3", "unknown key optimizer.learning_rate; did you mean optimizer.lr?"),
    ("stream=3", "unknown key stream; expected one of output, task"),
    # wrong types: nothing is guessed
    ("steps=abc", "steps: got 'abc', expected an integer"),
    ("steps=true", "steps: got True, expected an integer"),
    ("draft.prefix=1", "draft.prefix: got 1, expected true or false"),
    ("data.files=a.json", "data.files: got 'a.json', expected a list such as [a, b]"),
    ("draft=null", "draft: got None, expected a section of settings"),
    # outside the range
    ("steps=0", "steps: got 0, expected at least 1"),
    ("epochs=0", "steps, epochs: got both, expected one"),
    ("seed=-1", "seed: got -1, expected an integer from 0"),
    ("optimizer.lr=.nan", "optimizer.lr: got nan, expected a positive number"),
    ("optimizer.clip_norm=0", "optimizer.clip_norm: got 0.0, expected a positive number or null"),
    ("draft.heads=swan", "draft.heads: got 'swan', expected hydra, medusa, eagle, eagle3"),
    ("data.held_out=1", "data.held_out: got 1.0, expected at least 0 and less than 1"),
    ("data.length=2", "data.length: got 2, expected at least 8"),
    ("data.format=csv", "data.format: got 'csv', expected auto, sharegpt"),
    ("dtype=float16", "dtype: got 'float16', expected float32, bfloat16"),
    ("objective.teacher_weight=0", "objective: set at least one of lm_weight"),
    ("objective.lm_weight=-0.1", "objective.lm_weight: got -0.1, expected a finite number of at least 0"),
    ("objective.chunk_tokens=0", "objective.chunk_tokens: got 0, expected at least 1"),
    # contradictions
    ("model=null", "model: got null, but task heads needs a base"),
    ("teacher=there", "teacher: has no effect with task heads"),
    (f"scratch={SCRATCH}", "scratch: has no effect with task heads"),
    ("data.dataset=name", "data: got both, expected either files or dataset"),
    ("data.files=[]", "data: got neither, expected either files or dataset"),
    ("data.format=standard_library", "data: got files, but format standard_library reads neither"),
    ("draft.lm_head=tiny", "draft.lm_head: got 'tiny', expected full, shared, clustered, low_rank"),
    ("draft.lm_head=low_rank", "draft.lm_rank: expected with draft.lm_head low_rank"),
    ("draft={heads: amphista, prefix: true}", "draft.prefix: has no effect with draft.heads amphista, remove it"),
    ("draft.prefix_window=64", "draft.prefix_window: got a value, expected none without draft.prefix=true"),
    ("draft={heads: hydra, prefix: true, prefix_window: 0}", "draft.prefix_window: got 0, expected at least 1"),
    ("draft={heads: amphista, adaptation_layers: -1}", "draft.adaptation_layers: got -1, expected at least 0"),
    ("matmul_precision=tf32", "matmul_precision: got 'tf32', expected default, bfloat16"),
    ("data.new_tokenizer=300", "data.new_tokenizer: has no effect with task heads"),
    ("accumulation=3", "batch_size: got 32, expected a multiple of accumulation x mesh.data = 3"),
    # the override itself
    ("steps", "override: got 'steps', expected key.sub=value"),
    ("steps.x=3", "got steps.x, but 'steps' is a value and not a section"),
    ("steps=[", "steps: got [, which is not YAML"),
    ('output="a\\0b"', "output: got 'a\\x00b', expected text without the character NUL"),
]


def test_refused(load):
    assert_refused(load, *((MINIMAL, override, message) for override, message in REFUSED))


def test_more_contradictions():
    base = {"output": "out", "task": "base", "steps": 3, "scratch": SCRATCH}
    text, short = {"files": ["a"], "format": "text"}, SCRATCH | {"max_positions": 32}
    cases = [
        ({"data": text | {"hidden_cache_gb": 1}}, "data.hidden_cache_gb: has no effect with task base"),
        ({"data": text | {"tokenizer": "t", "new_tokenizer": 300}}, "data: got tokenizer and new_tokenizer"),
        ({"data": {"dataset": "name", "format": "text"}}, "data.format text reads files"),
        ({"data": text | {"length": 64}, "scratch": short}, "got 64, expected at most the base's context 32"),
        ({"data": text, "model": "m"}, "scratch, model: got both, but task base takes one"),
        ({"data": text, "scratch": None}, "scratch, model: got neither, but task base takes one"),
        ({"data": text | {"new_tokenizer": 300}, "teacher": "t"}, "data.new_tokenizer: cannot be used with model or"),
        ({"data": text, "scratch": {"width": 3}}, "scratch.vocab_size, scratch.mlp_width"),
    ]
    assert_refused(config_from, *((base | changes, message) for changes, message in cases))


def test_not_settings(load, tmp_path):
    assert_refused(load_config, *((path, "config: cannot read") for path in (tmp_path / "none.yaml", tmp_path)))
    contents = ("", "- a\n- b", "just text", "a: [1", "a: b: c", "\x00")
    assert_refused(load, *((content, "config: ...run.yaml") for content in contents))


def test_every_setting_has_a_type_that_the_loader_converts():
    """The loader converts these types; a field of another type would fail with a KeyError at its first use."""
    kinds = set()
    stack = [TrainConfig]
    while stack:
        section = stack.pop()
        for field in dataclasses.fields(section):
            if dataclasses.is_dataclass(field.default_factory):
                stack.append(field.default_factory)
            else:
                kinds.add(typing.get_type_hints(section)[field.name])
    assert kinds <= {
        str, int, float, bool, tuple[str, ...], tuple[int, ...], str | None, int | None, float | None,
        LlamaConfig | None, DataConfig,
    }  # fmt: skip


def test_every_shipped_config_loads(pytestconfig):
    found = sorted((pytestconfig.rootpath / PROJECT_CONFIGS).rglob("*.yaml"))
    assert {"base.yaml", "demo_hydra.yaml"} <= {path.name for path in found}
    for path in found:
        load_config(path)


def test_recipes_load_by_name_unless_a_file_has_it(tmp_path, monkeypatch):
    """They are in the wheel; `experiments` is not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hydra").mkdir()
    assert {"medusa1", "hydra", "hydra_pp", "amphista", "own_text"} <= recipes().keys()
    for name, file in recipes().items():
        assert load_config(name) == load_config(file)
    assert_refused(load_config, ("own_txt", "config: cannot read own_txt: ...; recipes: own_text, "))
    (tmp_path / "own_text").write_text("output: mine\nmodel: base\nsteps: 3\ndata: {files: [a.json]}\n")
    assert load_config("own_text").output == "mine"


def test_ablation_overrides_load(pytestconfig):
    """Every override in the ablations' README loads with the configuration that it names."""
    folder = pytestconfig.rootpath / PROJECT_CONFIGS
    readme = (folder / "ablations" / "README.md").read_text()
    rows = [row.split("|") for row in readme.splitlines() if row.startswith("| ") and "`" in row]
    assert len(rows) >= 8
    seen = set()
    for row in rows:
        config, overrides = row[2].strip(" `"), row[3].strip(" `").split()
        changed = load_config(config, [*overrides, "output=x"])
        assert changed not in seen, row  # an override that changes nothing, or the same as another, is no ablation
        seen.add(changed)
