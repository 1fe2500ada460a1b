"""The project's own promises: ruff is clean, and CI runs the README's test command."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hydrajax.extras import PACKAGES, needs

ROOT = Path(__file__).parents[1]
TEST_COMMAND = "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/python -m pytest -n 2"
DEMO_COMMAND = "python3 -m venv .venv && .venv/bin/pip install -q . && .venv/bin/hydrajax demo"


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=["lint", "format"])
def test_ruff_is_clean(arguments):
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or "ruff"
    done = subprocess.run([ruff, *arguments, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_missing_is_installed_by_the_command_that_is_named():
    """An extra that a message names exists and holds the package; a plain package is a dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package in PACKAGES:
        message = needs(package)
        what = re.fullmatch(rf".* needs? {package}: pip install (?:'hydrajax\[(\w+)\]'|{package})", message)
        assert what, message
        brings = project["optional-dependencies"][what[1]] if what[1] else project["dependencies"]
        assert any(re.match(rf"{package}\b", one) for one in brings), message


def test_ci_runs_the_readme_test_command():
    assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text().splitlines()
    assert TEST_COMMAND in (ROOT / "README.md").read_text().splitlines()


def test_readme_has_the_demo_command():
    assert DEMO_COMMAND in (ROOT / "README.md").read_text().splitlines()
