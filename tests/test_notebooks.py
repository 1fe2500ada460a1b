"""The notebooks run from top to bottom, say what they should, and open in Colab."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NAMES = ["01_decode", "02_train_heads", "03_trees_and_speed"]


def executed(name: str, folder: Path) -> list:
    """The code cells with their outputs. Raises where a cell does. Runs elsewhere: nothing may depend on a clone."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cells) -> str:
    return "".join(output.text for cell in cells for output in cell.outputs if output.output_type == "stream")


def pictures(cells) -> int:
    return sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)


@pytest.mark.parametrize("name", NAMES)
def test_what_it_imports_is_there(name):
    """The quick check; the slow tests run the notebooks."""
    cells = [cell.source for cell in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells if is_python(cell)]
    imports = [node for node in ast.walk(ast.parse("\n".join(cells))) if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        found = importlib.import_module(node.module)
        for wanted in node.names:
            assert hasattr(found, wanted.name) or importlib.import_module(f"{node.module}.{wanted.name}")


def is_python(cell) -> bool:
    return cell.cell_type == "code" and "%pip" not in cell.source


@pytest.mark.slow
def test_decode(tmp_path):
    cells = executed("01_decode", tmp_path)
    assert pictures(cells) == 3  # steps, tree, mask
    text = text_of(cells)
    assert "tokens per step" in text
    assert "mc_sim_7b_63        64 nodes" in text


@pytest.mark.slow
def test_train_heads(tmp_path, monkeypatch):
    monkeypatch.setenv("HYDRAJAX_NOTEBOOK_STEPS", "5")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    cells = executed("02_train_heads", tmp_path)
    assert pictures(cells) == 1
    text = text_of(cells)
    assert "step 5: held-out tokens_per_step" in text
    assert "these heads: " in text
    assert list(tmp_path.glob("hydrajax-*/heads/*.safetensors"))


@pytest.mark.slow
def test_trees_and_speed(tmp_path):
    cells = executed("03_trees_and_speed", tmp_path)
    assert pictures(cells) == 4  # accuracies, growth, measured, predicted
    text = text_of(cells)
    rates = re.findall(r"^(autoregressive|\d+ nodes) +\d+ tokens/s +[\d.]+x +τ ([\d.]+)$", text, re.MULTILINE)
    taus = [float(tau) for _, tau in rates]
    assert taus[0] == 1
    assert taus == sorted(taus)  # a tree of the row holds the ones before it
    best = [int(nodes) for nodes in re.findall(r"^batch +\d+: +(\d+) nodes are best", text, re.MULTILINE)]
    assert best == sorted(best, reverse=True)  # the larger the batch, the smaller the tree
    assert best[0] > best[-1]


@pytest.mark.parametrize("name", NAMES)
def test_colab_badge_and_install(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    badge = f"https://colab.research.google.com/github/hydrajax/hydrajax/blob/main/notebooks/{name}.ipynb"
    assert badge in notebook.cells[0].source
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert 'if "google.colab" in sys.modules:\n    %pip install' in first.source


def test_every_notebook_is_tested():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES
