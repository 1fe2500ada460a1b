"""Type checks of the public interface: correct use passes in strict mode, and each mistake has its error code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USAGE, MISUSE = "tests/typing/usage.py", "tests/typing/misuse.py"


@pytest.mark.slow
def test_correct_use_is_accepted_and_every_mistake_has_its_error_code():
    command = [sys.executable, "-m", "mypy", "--no-pretty", USAGE, MISUSE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = set(re.findall(r"^(.*?):(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE))
    lines = enumerate((ROOT / MISUSE).read_text().splitlines(), start=1)
    expected = {(MISUSE, str(number), line.split("# refused: ")[1]) for number, line in lines if "# refused: " in line}
    assert found == expected
    assert len(expected) > 5
