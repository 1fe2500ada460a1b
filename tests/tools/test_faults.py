"""`python -m tools.faults`: its counts, every fault with one seed, and checks that can fail."""

import importlib
import random
import re

import pytest

from helpers.scripts import ROOT, TOOLS
from hydrajax.decoding import acceptance
from hydrajax.decoding.program import Program
from hydrajax.formats.draft_registry import KINDS
from hydrajax.trees import presets


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def test_failures_are_counted_with_the_first_seed(monkeypatch, tmp_path):
    from tools.faults import registry

    monkeypatch.setattr(registry, "FAULTS", faults := {})

    def fails(trial):
        number = trial.random.random()
        if len(drawn) in (2, 3):
            drawn.append(number)
            raise registry.Failure("it failed")
        if len(drawn) == 5:
            raise ZeroDivisionError("a bug of the fault")
        drawn.append(number)
        return 10

    def lacks(trial):
        raise registry.Unsupported("no disk")

    drawn: list[float] = []
    faults |= {"fails": registry.Fault(fails, 6), "lacks": registry.Fault(lacks, 1)}
    found = registry.run("fails", range(7, 13), 60, 60, tmp_path, {})
    assert (found.trials, found.failures, found.first_seed, found.message) == (33, 3, 9, "it failed")
    drawn, before = [], drawn
    registry.run("fails", range(9, 10), 60, 60, tmp_path, {})
    assert drawn == before[2:3]  # a seed reproduces its trial
    found = registry.run("lacks", range(3), 60, 60, tmp_path, {})
    assert (found.trials, found.failures, found.message) == (0, 0, "not tried: no disk")


def test_every_fault_is_described_and_every_kind_of_draft_is_covered(capsys):
    """In the page of the tool."""
    main = importlib.import_module("tools.faults.__main__").main
    from tools.faults.drafts import DRAFTS
    from tools.faults.registry import FAULTS

    listed = re.findall(r"^\| `([\w-]+)` \|", (TOOLS / "faults" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(FAULTS)
    assert {name.removeprefix("lookup+") for name in DRAFTS} == set(KINDS)
    assert main(["--only", "wind"]) == 2


# The trials of one seed, if their number is fixed.
TRIALS = {
    "train-settings": 17, "shard-indexes": 20, "safetensors-headers": 29, "stdin": 8, "serve-options": 20,
    "serve-requests": 22, "serve-connections": 60, "call-arguments": 12, "train-process-loss": 1, "train-diverges": 1,
    "report-values": 1, "command-lines": None, "drafts-cached": None, "stop-strings": None, "drafts-on-devices": None,
    "chat-terminal": None, "chat-no-stdin": None,
}  # fmt: skip
NEED_ROOT = ("train-power-cut", "train-network")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRIALS, *NEED_ROOT])
def test_faults_have_no_failures(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module("tools.faults.__main__").main
    assert main(["--only", name, "--seeds", "1", "--folder", str(tmp_path)]) == 0
    err = capsys.readouterr().err
    assert re.search(rf"{name}: {TRIALS.get(name) or '[1-9][0-9]*'} trials, 0 failures", err) or (
        name in NEED_ROOT and "not tried: " in err
    ), err


@pytest.mark.slow
def test_decoding_passes_with_long_paths_and_fails_if_it_accepts_too_much(monkeypatch):
    from tools.faults import drafts, registry

    case = drafts.Case.drawn(random.Random(2), "hydra")
    drafter = case.program.drafter if case.has_oracle else drafts.with_oracle(case.program.drafter)
    program = Program(drafter, presets.chain(3), max_new_tokens=20)
    case = case._replace(program=program, request=program.request(), batch=3)
    longest, check = [], drafts.check_bookkeeping

    def watched(case, out, prompts, limits):
        longest.append(out.accept_lengths.max())
        check(case, out, prompts, limits)

    monkeypatch.setattr(drafts, "check_bookkeeping", watched)
    assert drafts.check_case(case, random.Random(1), 6) == 18
    assert max(longest) == 3  # of a chain of three, which untrained heads would not find
    accepted = acceptance.accepted_nodes
    monkeypatch.setattr(acceptance, "accepted_nodes", lambda agrees, tree: accepted(agrees | True, tree))
    with pytest.raises(registry.Failure, match=r"Greedy.*token .* differs"):
        drafts.check_case(case, random.Random(1), 6)


@pytest.mark.slow
def test_repeated_calls(monkeypatch, tmp_path):
    from tools.faults import process, registry

    monkeypatch.setattr(process, "CALLS", 12)
    found = registry.run("repeated-calls", range(1), 600, 300, tmp_path, {})
    assert (found.trials, found.message) == (12, "")
    monkeypatch.setattr(process, "PROGRAMS", -99)
    assert "new kinds of call" in registry.run("repeated-calls", range(1), 600, 300, tmp_path, {}).message
