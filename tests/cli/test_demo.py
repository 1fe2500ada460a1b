"""`hydrajax demo` on a tiny base with random heads in place of the shipped ones."""

import json
import re
import shutil

import jax
import pytest

import hydrajax
from hydrajax import assets
from hydrajax.bench.contests.contest import Measured
from hydrajax.bench.questions.held_out import held_out_files, held_out_prompts
from hydrajax.cli import demo
from hydrajax.cli.screen import CLOSE, OPEN
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.errors import HydrajaxError
from hydrajax.formats.export import export_heads
from hydrajax.formats.huggingface import load_llama
from hydrajax.models.base_model import BoundBase
from hydrajax.trees import presets

NEW = 12
# Every Python has two of these.
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
        init = jax.jit(lambda drafter=drafter: drafter.init(jax.random.key(0), BoundBase(model, params)))
        export_heads(folder / name, drafter, init())
    shutil.copytree(base, folder / "draft_model")
    (folder / "ABOUT.json").write_text(json.dumps({"held_out": HELD_OUT}))
    return folder


@pytest.fixture
def shipped(shipped_folder, monkeypatch):
    monkeypatch.setattr(assets, "FOLDER", shipped_folder)
    sizes = {"PROMPTS": 2, "SHOWN": 2, "PROMPT_TOKENS": 16, "NEW_TOKENS": NEW, "REPEATS": 1, "CHAIN": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(demo, name, value)
    return shipped_folder


def rows_of(out: str) -> dict[str, list[str]]:
    """Read the printed table: ``{draft and tree: the other cells}``."""
    lines = [line.rstrip() for line in out.splitlines()]
    kinds = ("autoregressive", "Lookup", "lookup+", "Medusa", "Hydra", "draft model")
    lines = [line for line in lines if line.strip().startswith(kinds)]
    assert all(len(line) <= 80 for line in lines)
    assert "step cost" in out  # no heading is cut either
    return {" ".join(line.split()[:-5]): line.split()[-5:] for line in lines}


def test_own_prompt_is_continued(program, shipped, monkeypatch):
    monkeypatch.setattr(assets, "DRAFTS_OF", {"shipped": {"medusa": "medusa"}})
    result = program("demo", "--prompt", "the tree of")
    rows = rows_of(result.out)
    assert list(rows) == ["autoregressive", "Lookup chain-2", "Medusa chain-2"]
    assert rows["Medusa chain-2"][0] == "3"  # nodes
    assert (rows["autoregressive"][1], rows["autoregressive"][3:]) == ("1.00", ["1.00", "1.00"])
    assert all(1 <= float(tau) <= 3 for _, tau, *_ in rows.values())  # two tokens ahead
    assert "All outputs equal the base's output without a draft, token for token." in result.out
    expected = hydrajax.load(shipped / "base").generate("the tree of", max_new_tokens=NEW).text
    assert "1. your prompt" in result.out
    assert f"the tree of{expected}\n" in result.out.replace(OPEN, "").replace(CLOSE, "")


@pytest.mark.slow
def test_an_instruct_model_answers_questions(program, base, shipped, monkeypatch):
    """Chains are no longer than what a draft proposes."""
    monkeypatch.setattr(demo, "QUESTIONS", {"writing": "a tree", "maths": "1 + 1"})
    monkeypatch.setattr(demo, "CHAIN", 9)
    result = program("demo", "--base", base, "--draft", f"lookup+{shipped / 'medusa'}")
    assert list(rows_of(result.out)) == ["autoregressive", "Lookup chain-9", "lookup+Medusa chain-2"]
    assert "All outputs equal the base's output without a draft, token for token." in result.out
    assert re.search(r"1\. writing: \d+ tokens in .*\n\na tree\n", result.out)
    assert re.search(r"2\. maths: \d+ tokens in .*\n\n1 \+ 1\n", result.out)
    assert demo.REPETITION not in result.out


def test_drafts_of_one_kind_have_names_of_their_own(shipped, tmp_path):
    medusa, copy = str(shipped / "medusa"), str(shutil.copytree(shipped / "medusa", tmp_path / "two"))
    executors = demo.make_executors(demo.load(assets.base()), [medusa, f"lookup+{medusa}", copy])
    heads = [f"{kind} chain-2" for kind in ("Medusa", "lookup+Medusa", "Medusa (two)")]
    assert list(executors) == ["autoregressive", "Lookup chain-2", *heads]


@pytest.mark.slow
def test_demo_compares_all_drafts_on_held_out_code(program, shipped):
    result = program("demo")
    kinds = ("Lookup", "Medusa", "Hydra", "Hydra++", "draft model")
    assert list(rows_of(result.out)) == ["autoregressive", *(f"{kind} chain-2" for kind in kinds)]
    assert "1. bisect.py, line" in result.out
    assert "2. heapq.py, line" in result.out


def test_different_outputs_end_with_exit_code_1(program, shipped, monkeypatch):
    def tampered(executors, *given, **settings):
        return [
            measured(name, one.program.verified_nodes, 2.0, 10.0, 1.0, equal=not name.startswith("Medusa"))
            for name, one in executors.items()
        ]

    monkeypatch.setattr(demo, "contest", tampered)
    monkeypatch.setattr(demo, "show_texts", lambda *given: None)
    with pytest.raises(SystemExit, match=r"Medusa chain-2: the output differs from autoregressive"):
        program("demo", "--prompt", "the tree")


def test_refusals_before_decoding(refused, base, shipped, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "contest", lambda *_, **__: pytest.fail("decoded"))
    plain = shutil.copytree(base, tmp_path / "plain", ignore=shutil.ignore_patterns("*.jinja"))

    refused("--prompt: is empty", "demo", "--prompt", "")
    refused("model's context of 128", "demo", "--prompt", "x" * 300)
    refused("--base: has no chat template, expected an instruct model", "demo", "--base", plain)
    monkeypatch.setattr(assets, "FOLDER", tmp_path)
    refused(f"assets: no base in {tmp_path}: this installation has no bundled model", "demo")
    with pytest.raises(HydrajaxError, match="got 'eagle', expected one of base, medusa, hydra, hydra_pp, draft_model"):
        assets.path("eagle")


def test_a_searched_tree_is_measured_too(shipped):
    path = presets.searched_path(shipped / "hydra", 1)
    path.write_text("[[0], [1]]")
    try:
        executors = demo.make_executors(demo.load(assets.base()), assets.drafts_of("shipped"))
    finally:
        path.unlink()
    assert [name for name in executors if name.endswith(demo.SEARCHED)] == ["Hydra searched tree"]
    assert executors["Hydra searched tree"].program.tree.choices == ((0,), (1,))


def test_held_out_files_are_those_of_this_python(shipped, tmp_path):
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


def test_prompts_are_built_in_without_held_out_files(shipped, monkeypatch):
    monkeypatch.setattr(demo, "held_out_files", lambda: iter(()))
    model = demo.load(assets.base())
    texts = [model.tokenizer.decode(p.ids, skip_special_tokens=True) for p in demo.make_prompts(model, None)]
    assert texts == list(demo.BUILT_IN_CODE)


def measured(name: str, nodes: int, tokens_per_step: float, rate: float, speedup: float, equal=True) -> Measured:
    return Measured(name, nodes, tokens_per_step, rate, rate, rate, 1.0, speedup, equal)


def test_verdict():
    plain = measured("autoregressive", 1, 1.0, 20.0, 1.0)
    slow = measured("Hydra mc_sim_7b_63", 64, 4.0, 4.0, 0.2)
    for speedup, found in {
        2.0: "The fastest here is Hydra chain-2, at 2.00 times the speed without a draft.",
        0.5: "No draft is faster here: the best, Hydra chain-2, has 0.50 times the speed without one.",
    }.items():
        text = demo.verdict([plain, slow, measured("Hydra chain-2", 3, 2.0, 20.0 * speedup, speedup)])
        assert found in text
        assert "64 nodes costs 20.0 times as much as one" in text  # a second against a twentieth
