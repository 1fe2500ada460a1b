"""The Dockerfile: common mistakes are absent, its files and options exist, and it builds where a builder works."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from hydrajax.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "Dockerfile").read_text()
BUILDERS = {"docker": ["docker", "info"], "podman": ["podman", "info"], "buildah": ["buildah", "info"]}


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile and their arguments, without comments and line breaks."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def array(value: str) -> list[str]:
    """Return the JSON array at the end of an instruction."""
    return json.loads(value[value.index("[") :])


STEPS = instructions(TEXT)


def argument(name: str) -> str:
    return next(value for each, value in STEPS if each == name)


def test_common_mistakes_are_absent():
    """Of hadolint's rules, those that apply to this file; the image holds no secret and does not run as root."""
    assert all(re.match(r"[\w./-]+:(?!latest\b)[\w.-]+", value) for name, value in STEPS if name == "FROM")
    runs = [value for name, value in STEPS if name == "RUN"]
    assert all("--no-cache-dir" in value for value in runs if "pip install" in value)
    for value in [value for value in runs if "apt-get install" in value]:
        assert "apt-get update" in value
        assert "--no-install-recommends" in value
        assert "rm -rf /var/lib/apt/lists/*" in value
    assert [value for name, value in STEPS if name == "USER"][-1] == "1000"
    assert "ADD" not in dict(STEPS)
    settings = [value for name, value in STEPS if name in ("ENV", "ARG")]
    assert not [value for value in settings if re.search(r"(?i)(key|token|password|secret)\w*\s*=", value)]
    assert all(array(argument(name)) for name in ("CMD", "ENTRYPOINT", "HEALTHCHECK"))


def test_files_extras_and_options_exist():
    """Copied files are not ignored, extras are those of the package, and the command serves at the exposed port."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    copied = [value for each, value in STEPS if each == "COPY" and not value.startswith("--from")]
    for name in [part for value in copied for part in value.split()[:-1]]:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r"\.\[([\w,]+)\$\{EXTRA", TEXT)[1].split(",") + re.findall(r"cuda\d+", TEXT)
    assert set(extras) <= set(project["optional-dependencies"])
    program, *command = array(argument("ENTRYPOINT")) + array(argument("CMD"))
    assert program in project["scripts"]
    args = build_parser(command).parse_args(command)
    assert str(args.port) == argument("EXPOSE")
    assert args.host == "0.0.0.0"


def test_the_health_check_asks_the_server():
    python, flag, program = array(argument("HEALTHCHECK"))
    port, path = re.search(r"\('http://127\.0\.0\.1:(\d+)(/\w+)', timeout=5\)", program).groups()
    assert (python, flag, port) == ("python", "-c", argument("EXPOSE"))
    assert f'Route("{path}", ' in (ROOT / "hydrajax" / "serve" / "app.py").read_text()
    compile(program, "HEALTHCHECK", "exec")


@pytest.mark.slow
def test_the_image_builds_and_generates():
    working = [name for name, check in BUILDERS.items() if shutil.which(name) and succeeds(*check)]
    if not working:
        pytest.skip(f"none of {', '.join(BUILDERS)} works here")
    builder, image, name = working[0], "hydrajax-test", "hydrajax-test-container"
    base = argument("FROM").split()[0]
    if not succeeds(builder, "pull", base) and not succeeds(builder, "inspect", base):
        pytest.skip(f"{builder} cannot pull {base}")
    run_output(builder, "build", "--tag", image, str(ROOT))
    command = ["hydrajax", "generate", "--base", "shipped", "--prompt", "def area(", "--max-new-tokens", "4"]
    try:
        if builder == "buildah":
            run_output(builder, "from", "--name", name, image)
            run = [builder, "run", name, "--"]
        else:
            run = [builder, "run", "--rm", "--entrypoint", "", image]
        assert run_output(*run, "id", "-u").strip() != "0"
        assert "def area(" in run_output(*run, *command)
    finally:
        if builder == "buildah":
            succeeds(builder, "rm", name)
        succeeds(builder, "rmi", image)


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


def run_output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
