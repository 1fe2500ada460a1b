"""Project files: ruff is clean, CI runs the test command of the README, licence and citation are right."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from hydrajax.optional_deps import PACKAGES, needs

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEST_COMMAND = "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/python -m pytest -n 2"
DEMO_COMMAND = "python3 -m venv .venv && .venv/bin/pip install -q . && .venv/bin/hydrajax demo"


def test_ruff_is_clean():
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or "ruff"
    for arguments in (("check",), ("format", "--check")):
        done = subprocess.run([ruff, *arguments, "."], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_install_commands_in_messages_work():
    """Extras that messages name exist and contain the package; other packages are dependencies."""
    project = PYPROJECT["project"]
    for package in PACKAGES:
        message = needs(package)
        what = re.fullmatch(rf".* needs? {package}: pip install (?:'hydrajax\[(\w+)\]'|{package})", message)
        assert what, message
        brings = project["optional-dependencies"][what[1]] if what[1] else project["dependencies"]
        assert any(re.match(rf"{package}\b", one) for one in brings), message


def test_ci_runs_the_readme_test_command_and_the_readme_has_the_demo():
    readme = (ROOT / "README.md").read_text().splitlines()
    assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text().splitlines()
    assert {TEST_COMMAND, DEMO_COMMAND} <= set(readme)


def test_the_licence_is_complete_and_packaged():
    text = (ROOT / "LICENSE").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    project = PYPROJECT["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert (ROOT / "hydrajax" / "py.typed").is_file()  # by which type checkers read the annotations (PEP 561)
    assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"]["hydrajax"]
    assert "recipes/*.yaml" in PYPROJECT["tool"]["setuptools"]["package-data"]["hydrajax.train"]


def test_the_wheel_is_below_67_mb():
    """The bundled models are all but 0.5 MB of it, and compression saves 5% of them."""
    files = [path for path in (ROOT / "hydrajax" / "assets").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) < 70e6


def test_the_citation_names_this_version_and_the_authors_of_the_papers():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["title"].split(":")[0], cited["version"]) == ("hydrajax", PYPROJECT["project"]["version"])
    assert cited["authors"] == [{"name": "The hydrajax authors"}]
    assert set(cited) >= {"cff-version", "message", "type", "license"}
    names = {
        one["identifiers"][0]["value"]: [author["family-names"] for author in one["authors"]]
        for one in cited["references"]
    }
    assert names == {
        "arXiv:2402.05109": ["Ankner", "Parthasarathy", "Nrusimha", "Rinard", "Ragan-Kelley", "Brandon"],
        "arXiv:2401.10774": ["Cai", "Li", "Geng", "Peng", "Lee", "Chen", "Dao"],
    }


def test_paths_in_the_contributing_guide_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert {"docs/design.md", "docs/adding_a_drafter.md"} <= set(targets)
    for path in [*targets, *re.findall(r"`((?:tests|hydrajax|\.ci)/[^` ]+)`", text)]:
        assert (ROOT / path.partition("#")[0]).exists(), path


def test_the_workflow_runs_the_documented_commands():
    """CI covers every supported Python version; notebooks and documentation have separate jobs."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert commands["tests"] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    versions = jobs["tests"]["strategy"]["matrix"]["python"]
    assert versions == ["3.11", "3.13", "3.14"]
    assert PYPROJECT["project"]["requires-python"] == f">={versions[0]}"
    assert commands["lowest"][1].startswith("uv pip compile pyproject.toml --resolution lowest-direct")
    assert commands["lowest"][2:] == ["pip install -e '.[test]' -c lowest.txt", "python -m pytest -n 2"]
    assert "python -m pytest -m slow tests/test_notebooks.py" in commands["notebooks"]
    assert commands["docs"][-1] == "mkdocs build --strict"
    assert all(job["runs-on"] == "ubuntu-latest" for job in jobs.values())
