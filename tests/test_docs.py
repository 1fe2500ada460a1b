"""README and docs pages: samples run, commands parse, link targets exist and the site builds."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hydrajax.cli import COMMANDS, build_parser
from hydrajax.errors import HydrajaxError
from hydrajax.train.run_config import load_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language. Python fragments that do not run on their own are marked ``py``."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


SAMPLES = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.quick("README")
@pytest.mark.parametrize("page", SAMPLES, ids=[page.stem for page in SAMPLES])
def test_python_samples_run(page, tmp_path, monkeypatch, capfd, unchecked):
    """Run all samples of a page in order in an empty directory, on the shipped model, which is no download."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "sample"}
    for number, block in enumerate(blocks(page, "python")):
        block = block.replace('"smollm2"', '"shipped"')
        exec(compile(block, f"{page.name}, sample {number}", "exec", dont_inherit=True), names)
    assert list(tmp_path.iterdir()) == []  # a sample that writes files should say so
    assert capfd.readouterr().out.strip()


def test_commands_parse():
    shell = "".join(block for page in PAGES for block in blocks(page, "bash")).replace("\\\n", " ")
    for line in shell.splitlines():
        words = shlex.split(line, comments=True)
        if words[:3] == ["python", "-m", "hydrajax.train"]:
            words = ["hydrajax", "train", *words[3:]]
        if words[:1] == ["hydrajax"] and words[1] in COMMANDS:
            try:
                build_parser(words[1:]).parse_args(words[1:])
            except HydrajaxError as error:
                pytest.fail(f"{line}: {error}")
        elif words[:1] == ["hydrajax"]:
            assert words[1].startswith("--"), line
        for word in words:
            if word.startswith("experiments/"):
                assert (ROOT / word).exists(), f"{line}: there is no {word}"


def test_yaml_samples_load(tmp_path):
    for block in [block for page in PAGES for block in blocks(page, "yaml")]:
        (tmp_path / "run.yaml").write_text(block, encoding="utf-8")
        load_config(tmp_path / "run.yaml")


def test_link_targets_exist():
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, _ = target.partition("#")
            if path and ":" not in path:
                assert (page.parent / path).exists(), f"{page.name}: {target}"


def speeds() -> dict[str, list[str]]:
    """Return the cells of the table of speeds, by draft."""
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    table = re.search(r"<!-- speeds: begin.*?<!-- speeds: end -->", text, re.DOTALL)[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return {cells[0].split("`")[0]: cells[1:] for cells in rows[2:]}


def test_the_table_of_speeds_shows_its_result_file():
    rows = json.loads((ROOT / "experiments" / "results" / "real_model_mt_bench.json").read_text())["rows"]
    expected = {}
    for row in rows:
        low, high = row["speedup_low"], row["speedup_high"]
        name, interval = ("no draft", "") if row["nodes"] == 1 else (row["draft"], f" ({low:.2f} to {high:.2f})")
        expected[name] = [
            f"{row['tokens_per_step']:.2f}", f"{row['tokens_per_second']:.1f}", f"{row['speedup']:.2f}x{interval}",
        ]  # fmt: skip
    assert speeds() == expected


def test_other_pages_give_ratios_that_quote_the_table():
    ratios = {cells[2][:4] for cells in speeds().values()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert page.name in ("performance.md", "README.md") or "tokens/s" not in text, page.name
        quoted = re.findall(r"\[(\d\.\d\d)[^\]]*\]\([^)]*performance\.md#speeds\)", text)
        assert set(quoted) <= ratios, page.name


def test_the_first_page_shows_the_run_of_its_picture():
    rows = json.loads((ROOT / "experiments" / "results" / "cpu_peers_smollm2.json").read_text())["results"]
    speeds = {f"{row['tokens_per_second']:.3g}" for row in rows if re.match("hydrajax( int4)?,", row["name"])}
    table = re.search(r"<!-- table of speeds: begin.*?end -->", PAGES[0].read_text(encoding="utf-8"), re.DOTALL)[0]
    assert {cell for line in table.splitlines()[4:-2] for cell in line.split(" | ")[1:4:2]} == speeds


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) == pages | {"index.md"}  # which is made of README.md


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},  # hides the theme's note about a successor of mkdocs
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    heading = re.search(r"^## (.+)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heading[1] in home
    assert 'href="usage.html"' in home
    reference = (tmp_path / "reference" / "python.html").read_text(encoding="utf-8")
    assert re.search(r"<td>\s*<code>quantize</code>", reference)  # an argument, in a table
    assert re.search(r"<td><code><span[^>]*>accept_lengths</span></code></td>", reference)  # a field, in a table
