"""`LanguageModel.autotune` and ``tree="auto"`` measure once per device and store; `generate` measures nothing."""

import dataclasses
import datetime
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hydrajax
from helpers.compilations import no_compilation
from hydrajax import Params, Typical, assets, stored_trees
from hydrajax.bench.contests import fastest
from hydrajax.bench.contests.contest import Measured
from hydrajax.decoding.rejection import RejectionSampling
from hydrajax.decoding.request import Request
from hydrajax.decoding.sampling import ExactSampling
from hydrajax.drafters.eagle import Eagle
from hydrajax.errors import HydrajaxError
from hydrajax.language_model import LanguageModel
from hydrajax.loaded_model import make_executor
from hydrajax.machine import machine
from hydrajax.models.base_model import BoundBase
from hydrajax.stored_trees import FastestTree
from hydrajax.text.built_in import BEGINNINGS
from hydrajax.trees import DynamicTree, presets
from hydrajax.trees.tree_json import content_of

PROMPTS = [np.arange(1, 9, dtype=np.int32)]


def choose(executor, prompts, *where):
    """Return the stored choice, or measure one. where: the batch size and the directory of the draft."""
    return stored_trees.stored(executor, *where) or fastest.measure(executor, prompts, *where)


@pytest.fixture(scope="module")
def loaded():
    return hydrajax.load(assets.base(), "lookup")


@pytest.fixture
def executor(loaded):
    return make_executor(loaded, loaded.program(tree="root"))


@pytest.fixture
def speeds(monkeypatch, tmp_path):
    """The speed of each tree in a fake contest. ``.names``: the measured trees of each contest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(stored_trees.OFF)

    class Speeds(dict):
        names, prompts = [], []
        lowest = 0.95, 95.0  # ends of the intervals

    def contest(executors, prompts, *, batch_size, repeats, divided, on_status):
        assert divided
        table.names.append(list(executors))
        table.prompts = [len(prompt) for prompt in prompts]
        assert len(prompts) == repeats * batch_size
        lowest, low = table.lowest
        speeds = [1.0, *(table[name] for name in list(executors)[1:])]
        return [
            Measured(name, 4, 2.0, 100 * speed, low, 105.0, 0.5, speed, True, speed * lowest, speed * 1.05)
            for name, speed in zip(executors, speeds, strict=True)
        ]

    table = Speeds({"chain-2": 1.2, "chain-4": 1.5, "cartesian-2x2": 1.1, "chain-5": 1.4})
    monkeypatch.setattr(fastest, "contest", contest)
    return table


def test_the_fastest_is_taken_and_cached(executor, speeds):
    now = choose(executor, PROMPTS, 1)
    assert now == FastestTree(presets.chain(4), "chain-4", 1.5, None)
    assert str(now) == "tree: chain-4, 1.50x the speed without a draft (measured just now; name a tree to override)"
    later = choose(executor, PROMPTS, 1)
    assert later == dataclasses.replace(now, date=datetime.date.today().isoformat())
    assert len(speeds.names) == 1
    assert speeds.names[0] == ["autoregressive", "chain-2", "chain-4", "cartesian-2x2", "chain-5"]


def test_other_settings_are_measured_anew(loaded, executor, speeds):
    base = dict(loaded.params.base, embedding=loaded.params.base["embedding"] + 1)
    other_base = dataclasses.replace(loaded, params=loaded.params._replace(base=base))
    for _ in range(2):
        choose(executor, PROMPTS, 1)
        choose(executor, PROMPTS, 2)
        choose(executor.with_request(rule=ExactSampling(0.5)), PROMPTS, 1)
        choose(make_executor(other_base, executor.program), PROMPTS, 1)
        assert len(speeds.names) == 4


def test_no_tree_if_none_is_faster(executor, speeds):
    speeds.update({name: speed / 2 for name, speed in speeds.items()})
    choice = choose(executor, PROMPTS, 1)
    assert choice.tree is None
    assert "tree: none, decoding without the draft: the fastest tree, chain-4, has 0.75x the speed" in str(choice)
    assert choose(executor, PROMPTS, 1).tree is None  # remembered too
    # Typical acceptance without a draft would be another text.
    assert choose(executor.with_request(rule=Typical()), PROMPTS, 1).tree == presets.chain(4)


def test_nothing_is_measured_without_a_draft_or_if_switched_off(executor, speeds, monkeypatch):
    assert choose(executor.autoregressive(), PROMPTS, 1) is None
    monkeypatch.setenv(stored_trees.OFF, "0")
    assert choose(executor, PROMPTS, 1) is None
    assert not speeds.names


def test_a_cache_that_cannot_be_used_is_measured_again(executor, speeds, monkeypatch, tmp_path):
    choose(executor, PROMPTS, 1)
    (path,) = stored_trees.cache_folder().iterdir()
    for damage in ("", "{", "[]", '{"choices": [[5]], "taken": true}', '{"taken": false}'):
        path.write_text(damage)
        assert choose(executor, PROMPTS, 1).tree == presets.chain(4)
    assert len(speeds.names) == 6
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert choose(executor, PROMPTS, 1).tree == presets.chain(4)


@pytest.mark.parametrize(("device", "taken"), [("this", True), ("another", False)])
def test_a_searched_tree_is_taken_if_it_was_searched_here(executor, speeds, tmp_path, device, taken):
    """One that was searched elsewhere is a candidate, and another one is another question to the cache."""
    here = machine() | ({} if device == "this" else {"device": device})
    provenance = {"machine": here, "measured": [{"name": "4", "nodes": 4, "speedup": 1.3}], "date": "2026-01-02"}
    content = {"choices": [[0], [0, 0], [0, 0, 0]], "provenance": provenance}
    presets.searched_path(tmp_path, 1).write_text(json.dumps(content))
    speeds["the searched one of 4 nodes"] = 1.6
    choose(executor, PROMPTS, 1)
    choice = choose(executor, PROMPTS, 1, tmp_path)
    assert choice.tree == presets.chain(3)
    assert f"the searched one of 4 nodes, {1.3 if taken else 1.6:.2f}x" in str(choice)
    assert len(speeds.names) == 2 - taken
    assert "the searched one of 4 nodes" not in speeds.names[0]


def test_prompts_of_a_measurement(loaded, executor, speeds):
    """Texts are repeated if there are too few; built-in ones follow the user's own."""
    few = [np.arange(1, 2 + n, dtype=np.int32) for n in range(4)]
    choose(executor, iter(few), 1)
    assert speeds.prompts == [1, 2, 3, 4, 1, 2]
    choose(executor, iter(few * 9), 2)
    assert speeds.prompts == [1, 2, 3, 4] * 3
    program = loaded.with_tree(loaded.program(), Request(rule=ExactSampling(0.3)), "auto", prompts=PROMPTS)
    assert program.tree == presets.chain(4)
    built_in = [len(next(loaded.ids_of_prompts([text]))) for text in BEGINNINGS.values()]
    assert speeds.prompts == [8, *built_in, 8]


def test_a_measurement_whose_rounds_disagree_is_not_kept(loaded, speeds, capsys):
    """The draft's own tree remains, and the next call measures again."""
    for lowest in ((0.65, 95.0), (0.95, 85.0)):
        speeds.lowest = lowest
        assert loaded.with_tree(loaded.program(), Request(), "auto", prompts=PROMPTS).tree == loaded.default_tree()
        assert "tree: the draft's own, as timings disagree (chain-4: " in capsys.readouterr().err
        assert not stored_trees.cache_folder().exists()
    speeds.lowest = 0.8, 95.0
    assert loaded.with_tree(loaded.program(), Request(), "auto", prompts=PROMPTS).tree == presets.chain(4)
    assert len(speeds.names) == 3


def test_autotune_stores_what_generate_uses(loaded, speeds, capsys):
    m = loaded.with_draft("lookup")
    choice = m.autotune("import", quiet=True)
    assert (choice.name, len(speeds.names), capsys.readouterr().err) == ("chain-4", 1, "")
    assert m.autotune() == dataclasses.replace(choice, date=datetime.date.today().isoformat())
    assert capsys.readouterr().err.startswith("tree: chain-4, 1.50x the speed without a draft (measured on 2")
    assert (m.measured_tree().name, m.measured_tree(2)) == ("chain-4", None)  # which a server asks for
    speeds.update({name: speed / 2 for name, speed in speeds.items()})
    assert (m.autotune(again=True).tree, len(speeds.names)) == (None, 2)
    capsys.readouterr()
    for later in (m, m, loaded.with_draft("lookup")):
        assert later.generate([PROMPTS[0]], max_new_tokens=6)[0].steps == 6
    # One line for each model whose draft is not used.
    assert capsys.readouterr().err.count("tree: none, decoding without the draft: the fastest tree, chain-4,") == 2
    assert loaded.autotune(draft="none") is None
    assert len(speeds.names) == 2


@pytest.mark.slow
def test_generate_without_a_tree_measures_nothing(loaded, speeds, capsys):
    """In a fresh home directory nothing is compiled that a given tree does not need."""
    m = loaded.with_draft("lookup")
    assert m.with_tree(m.program(), Request()).tree == m.default_tree()
    m.generate("x", tree=m.default_tree(), max_new_tokens=6)
    with no_compilation():
        m.generate("x", max_new_tokens=6)
    assert (speeds.names, capsys.readouterr().err, stored_trees.cache_folder().exists()) == ([], "", False)
    assert m.generate("x", tree="auto", max_new_tokens=2)
    assert (len(speeds.names), speeds.names[0][1]) == (1, "chain-2")


@pytest.fixture
def eagle(tiny_model):
    model, params = tiny_model
    drafter = Eagle.for_base(model.config, jnp.float32)
    draft = jax.jit(lambda: drafter.init(jax.random.key(0), BoundBase(model, params)))()
    return LanguageModel(model, drafter, Params(params, draft))


def test_a_searched_dynamic_tree_is_taken_if_the_rule_supports_it(eagle, speeds, tmp_path, monkeypatch):
    """It was measured with static trees, one of them of the same size."""
    rows = [{"name": "8", "nodes": 8, "speedup": 1.1}, {"name": "dynamic-8-2-4", "nodes": 8, "speedup": 1.6}]
    content = content_of(DynamicTree(8, 2, 4)) | {"provenance": {"machine": machine(), "measured": rows}}
    presets.searched_path(tmp_path, 1).write_text(json.dumps(content))
    eagle = dataclasses.replace(eagle, draft_directory=tmp_path)
    assert eagle.default_tree() == DynamicTree(8, 2, 4)
    executor = make_executor(eagle, eagle.program(tree="root"))
    choice = choose(executor, PROMPTS, 1, tmp_path)
    assert (choice.tree, choice.speedup, choice.name) == (DynamicTree(8, 2, 4), 1.6, "the searched dynamic-8-2-4")
    assert not speeds.names

    def refuse(self, tree):
        if isinstance(tree, DynamicTree):
            raise HydrajaxError("tree: not this one")

    monkeypatch.setattr(ExactSampling, "check", refuse)
    speeds["eagle_26"] = 1.3
    assert choose(executor.with_request(rule=ExactSampling(0.8)), PROMPTS, 1, tmp_path).name == "chain-4"


def test_a_dynamic_tree_is_tried_and_cached_if_the_drafter_supports_it(eagle, speeds):
    speeds |= {"dynamic-8-2-4": 1.9, "eagle_26": 1.3}
    executor = make_executor(eagle, eagle.program(tree="root"))
    now = choose(executor, PROMPTS, 1)
    assert now.tree == DynamicTree(8, 2, 4)
    later = choose(executor, PROMPTS, 1)
    assert later == dataclasses.replace(now, date=datetime.date.today().isoformat())
    assert len(speeds.names) == 1
    assert choose(executor.with_request(rule=RejectionSampling(0.8)), PROMPTS, 1).name == "dynamic-8-2-4"
