"""The package of docs/adding_a_drafter.md is built, installed with pip and used, without a change of hydrajax."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import hydrajax

ROOT = Path(hydrajax.__file__).parents[1]
USE = """
import sys
from hydrajax.cli import main

assert "bigram_draft" not in sys.modules
for draft, tree in (("none", "root"), ("bigram", "chain-2"), (sys.argv[1], "dynamic-8-3-4")):
    assert main(["generate", "--base", "shipped", "--draft", draft, "--tree", tree,
                 "--prompt", "def area(width, height):", "--max-new-tokens", "24"]) == 0
    print("<end>")
assert main(["generate", "--base", "shipped", "--draft", "bigrams", "--prompt", "x"]) == 2
print("<end>")
try:
    main(["generate", "--help"])
except SystemExit:
    pass
"""


def package(folder: Path) -> Path:
    """Write the package of the documentation."""
    page = (ROOT / "docs" / "adding_a_drafter.md").read_text(encoding="utf-8")
    blocks = {
        language: re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        for language in ("python", "toml", "py")
    }
    source = blocks["python"][0].partition("\nm = hydrajax.load")[0] + "\n".join(blocks["py"])
    folder.mkdir()
    (folder / "pyproject.toml").write_text(blocks["toml"][0])
    (folder / "bigram_draft.py").write_text(source)
    return folder


def heads(folder: Path) -> Path:
    """Write random heads in the package's format."""
    config = json.loads((ROOT / "hydrajax" / "assets" / "base" / "config.json").read_text())
    rng, shape = np.random.default_rng(0), (config["vocab_size"], 4)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"bigram_rank": 4}))
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name in ("embedding", "lm_head")}
    save_file(tensors, folder / "bigram.safetensors")
    return folder


@pytest.fixture(scope="module")
def used(tmp_path_factory) -> list[str]:
    """Return what the commands of `USE` print, and at the end the errors."""
    folder = tmp_path_factory.mktemp("stranger")
    target = folder / "installed"
    install = ["install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", *install, str(package(folder / "package"))], check=True, timeout=120)
    path = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", USE, str(heads(folder / "heads"))],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [*done.stdout.split("<end>\n"), done.stderr]


def test_its_drafter_and_its_format_decode_the_bases_own_text(used):
    plain, named, loaded = used[:3]
    assert plain
    assert named == plain
    assert loaded == plain


def test_help_and_errors_list_its_drafter(used):
    assert "bigram (the token that followed each token before)" in used[4]
    assert "no such directory: bigrams; known names: bigram, " in used[5]
