"""The project's own promises: ruff is clean, and CI runs the README's test command."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEST_COMMAND = "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/python -m pytest -n 2"
DEMO_COMMAND = "python3 -m venv .venv && .venv/bin/pip install -q . && .venv/bin/hydrajax demo"


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=["lint", "format"])
def test_ruff_is_clean(arguments):
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or "ruff"
    done = subprocess.run([ruff, *arguments, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ci_runs_the_readme_test_command():
    assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text().splitlines()
    assert TEST_COMMAND in (ROOT / "README.md").read_text().splitlines()


def test_readme_has_the_demo_command():
    assert DEMO_COMMAND in (ROOT / "README.md").read_text().splitlines()
