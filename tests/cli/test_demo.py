"""`hydrajax demo` on a tiny base and random heads in place of the shipped ones."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from hydrajax import assets
from hydrajax.autotune.contest import Measured
from hydrajax.cli import demo
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.errors import HydrajaxError
from hydrajax.formats.export import export_heads
from hydrajax.formats.huggingface import load_llama
from hydrajax.models.base_model import BoundBase
from hydrajax.questions.held_out import held_out_files, held_out_prompts
from hydrajax.train.data.preview import CLOSE, OPEN
from hydrajax.trees import presets

RECIPE = demo.Recipe(2, 2, 16, 12, repeats=1, candidates=("chain-1", "chain-2"), trial_prompts=1)
# Two that every Python has.
HELD_OUT = [f"standard_library/{name}.py" for name in ("bisect", "no_such_module", "heapq")] + ["elsewhere/a.py"]


@pytest.fixture(scope="module")
def shipped_folder(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    shutil.copytree(base, folder / "base")
    model, params = load_llama(base)
    sizes = (2, model.config.width, model.config.vocab_size)
    drafters = {
        "medusa": MedusaHeads(*sizes),
        "hydra": HydraHeads(*sizes),
        "hydra_pp": HydraHeads(*sizes, n_layers=2).with_prefix(model.config),
    }
    for name, drafter in drafters.items():
        export_heads(folder / name, drafter, drafter.init(jax.random.key(0), BoundBase(model, params)))
    shutil.copytree(base, folder / "draft_model")
    (folder / "ABOUT.json").write_text(json.dumps({"held_out": HELD_OUT}))
    return folder


@pytest.fixture
def shipped(shipped_folder, monkeypatch):
    monkeypatch.setattr(assets, "FOLDER", shipped_folder)
    monkeypatch.setattr(demo, "RECIPE", RECIPE)
    return shipped_folder


def rows_of(out: str) -> dict[str, list[str]]:
    """The table: ``{draft and tree: the other cells}``."""
    lines = [line.rstrip() for line in out.splitlines()]
    kinds = ("autoregressive", "Lookup", "Medusa", "Hydra", "draft model")
    lines = [line for line in lines if line.strip().startswith(kinds)]
    assert all(len(line) <= 80 for line in lines)
    assert "step cost" in out  # no heading is cut either
    return {" ".join(line.split()[:-5]): line.split()[-5:] for line in lines}


def test_own_prompt_is_continued_as_the_base_would(program, shipped, monkeypatch):
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    monkeypatch.setattr(assets, "DRAFTS", ("medusa",))
    monkeypatch.setattr(demo, "RECIPE", replace(RECIPE, candidates=("chain-2",)))
    result = program("demo", "--prompt", "the tree of")
    assert result.code == 0, result.err
    rows = rows_of(result.out)
    assert list(rows) == [
        "autoregressive",
        *(f"{draft} chain-2" for draft in ("Lookup", "Medusa")),
    ]
    assert rows["Medusa chain-2"][0] == "3"  # nodes
    assert (rows["autoregressive"][1], rows["autoregressive"][3:]) == ("1.00", ["1.00", "1.00"])
    assert all(1 <= float(tau) <= 3 for _, tau, *_ in rows.values())  # two tokens ahead
    assert "All outputs are token for token what the base says without a draft." in result.out

    tokenizer = AutoTokenizer.from_pretrained(shipped / "base")
    model = LlamaForCausalLM.from_pretrained(shipped / "base")
    prompt = torch.tensor([tokenizer.encode("the tree of")])
    ids = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=RECIPE.max_new_tokens,
        pad_token_id=0,
    )[0, prompt.shape[1] :]  # fmt: skip
    expected = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "1. your prompt" in result.out
    assert f"the tree of{expected}\n" in result.out.replace(OPEN, "").replace(CLOSE, "")


@pytest.mark.slow
def test_demo_compares_all_drafts_on_held_out_code(program, shipped):
    result = program("demo")
    assert result.code == 0, result.err
    names = [name.rsplit(maxsplit=1) for name in rows_of(result.out)]
    kinds = ("Lookup", "Medusa", "Hydra", "Hydra++", "draft model")
    assert [name[0] for name in names] == ["autoregressive", *kinds]
    assert all(name[1] in RECIPE.candidates for name in names[1:])
    assert "1. bisect.py, line" in result.out
    assert "2. heapq.py, line" in result.out


def test_different_outputs_end_with_exit_code_1(program, shipped, monkeypatch):
    def tampered(executors, *given, **settings):
        return [
            measured(name, one.spec.verified_nodes, 2.0, 10.0, 1.0, equal=not name.startswith("Medusa"))
            for name, one in executors.items()
        ]

    monkeypatch.setattr(demo, "contest", tampered)
    monkeypatch.setattr(demo, "show_texts", lambda *given: None)
    with pytest.raises(SystemExit, match=r"Medusa chain-1: the output differs from autoregressive"):
        program("demo", "--prompt", "the tree")


@pytest.mark.parametrize(("prompt", "message"), [("", "--prompt: is empty"), ("x" * 300, "model's context of 128")])
def test_a_bad_prompt_is_refused_before_decoding(program, shipped, monkeypatch, prompt, message):
    monkeypatch.setattr(demo, "measure", lambda *_: pytest.fail("decoded"))
    result = program("demo", "--prompt", prompt)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert message in result.err


def test_missing_shipped_model(program, monkeypatch, tmp_path):
    monkeypatch.setattr(assets, "FOLDER", tmp_path)
    result = program("demo")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert f"assets: no base in {tmp_path}: the package is installed without its shipped model" in result.err
    with pytest.raises(HydrajaxError, match="found 'eagle', shipped are base, medusa, hydra, hydra_pp, draft_model"):
        assets.path("eagle")


# --- what is shown --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beginning", "continuation", "shown"),
    [
        ("    def f(x):\n", "        return x\n\n    def g():\n        pass\n", "        return x\n"),
        ("def f(x):\n    return", " x\n\n\nclass C:\n", " x\n\n"),
        ("def f(x):\n    return", " x + 1\n    # on and on\n", None),
        ("def f():\n    pass\n\nclass C:\n    def g", "(self):\n        pass\n    x = 1\n", "(self):\n        pass"),
        ("Once upon", " a time\nthere was\n", None),
        ("def f(", "", None),
    ],
)
def test_a_function_is_shown_up_to_its_end(beginning, continuation, shown):
    end = demo.function_end(beginning, continuation)
    assert continuation[:end] == (continuation if shown is None else shown)


@pytest.mark.parametrize(
    ("continuation", "whole"),
    [
        ("    x += 1\n    return x\n\nclass C:\n", True),
        ("    x += 1\n    return x\n", False),  # may go on
        ("    x += 1\n    x += 1\n\nclass C:\n", False),
    ],
)
def test_whole_functions_that_repeat_no_line(continuation, whole):
    assert demo.is_whole("def f(x):\n", continuation) == whole


def test_a_searched_tree_is_tried_too(shipped):
    _, drafted = demo.load_shipped()
    path = presets.searched_path(shipped / "hydra", 1)
    path.write_text("[[0], [1]]")
    try:
        assert demo.trees_for(RECIPE, drafted["Hydra"]) == [*RECIPE.candidates, demo.SEARCHED]
        assert demo.executor_of(RECIPE, drafted["Hydra"], demo.SEARCHED).spec.tree.choices == ((0,), (1,))
    finally:
        path.unlink()
    assert demo.trees_for(RECIPE, drafted["Hydra"]) == list(RECIPE.candidates)
    assert demo.trees_for(RECIPE, drafted["Lookup"]) == list(RECIPE.candidates)


def test_marked_pieces_are_cut_at_a_length():
    marked = [("ab", True), ("cd", False), ("ef", True)]
    assert demo.cut(marked, 3) == [("ab", True), ("c", False)]
    assert demo.cut(marked, 0) == []
    assert demo.cut(marked, 9) == marked


# --- prompts --------------------------------------------------------------------------------------------------------


def test_held_out_files_are_those_this_python_has(shipped, tmp_path):
    (tmp_path / "heapq.py").write_text("text")
    assert list(held_out_files({"standard_library": tmp_path, "packages": tmp_path})) == [("heapq.py", "text")]


def test_held_out_prompts_begin_at_a_function_of_the_second_half(tokenizer):
    text = "def first():\n    pass\n" + "# words\n" * 8 + "    def second(self):\n        return 1234567890\n"
    assert text.splitlines()[10] == "    def second(self):"
    files = [("a.py", text), ("short.py", "x = 1\n"), ("c.py", text)]
    found = list(held_out_prompts(files, tokenizer, 20))
    assert [prompt.name for prompt in found] == ["a.py, line 11", "c.py, line 11"]
    start = tokenizer.decode(found[0].ids, skip_special_tokens=True)
    assert len(found[0].ids) == 20
    assert len(start) > 8
    assert text[text.index("    def second") :].startswith(start)


def test_prompts_are_built_in_where_nothing_held_out_is_found(shipped, monkeypatch):
    monkeypatch.setattr(demo, "held_out_files", lambda: iter(()))
    plain, _ = demo.load_shipped()
    texts = [plain.tokenizer.decode(p.ids, skip_special_tokens=True) for p in demo.make_prompts(RECIPE, plain, None)]
    assert texts == list(demo.BUILT_IN_CODE)


# --- figures, by hand -----------------------------------------------------------------------------------------------


def measured(name: str, nodes: int, tokens_per_step: float, rate: float, speedup: float, equal=True) -> Measured:
    return Measured(name, nodes, tokens_per_step, rate, rate, rate, 1.0, speedup, equal)


@pytest.mark.parametrize(
    ("speedup", "found"),
    [
        (2.0, "Here it does, best with Hydra chain-2: 2.00 times the speed."),
        (0.5, "even Hydra chain-2 has 0.50 times the speed. Speculation does not pay on it."),
    ],
)
def test_verdict(speedup, found):
    plain = measured("autoregressive", 1, 1.0, 20.0, 1.0)
    slow = measured("Hydra mc_sim_7b_63", 64, 4.0, 4.0, 0.2)
    fast = measured("Hydra chain-2", 3, 2.0, 20.0 * speedup, speedup)
    text = demo.verdict([plain, slow, fast])
    assert found in text
    assert "64 nodes cost 20.0 times as much as one" in text  # a second against a twentieth


def test_each_kind_of_draft_gets_its_fastest_tree(monkeypatch):
    rates = {"a chain-1": 1.0, "a chain-2": 2.0, "b chain-1": 2.0, "b chain-2": 1.0}
    monkeypatch.setattr(demo, "executor_of", lambda recipe, model, tree: (model, tree))
    monkeypatch.setattr(demo, "measure", lambda *_: [measured(n, 1, 1.0, r, 1.0) for n, r in rates.items()])
    models = {title: SimpleNamespace(draft_directory=None) for title in ("a", "b")}
    chosen = demo.choose_trees(RECIPE, [], {}, models)
    assert chosen == {"a chain-2": (models["a"], "chain-2"), "b chain-1": (models["b"], "chain-1")}
