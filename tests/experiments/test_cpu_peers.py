"""The comparison with other programs, without them: what is missing, our own rows, conversions and the token checks."""

import json
import textwrap
from pathlib import Path

import cpu_peers
import jax
import numpy as np
import peer_programs
import pytest
from gguf import GGUFReader
from peer_checks import Run, differences
from peer_files import gguf_file, random_directory
from peer_programs import Peer, Program, Variant, variants

import hydrajax
from hydrajax.cli import run_command
from hydrajax.errors import HydrajaxError
from hydrajax.models.llama_config import LlamaConfig

ABSENT = Program("Absent", "absent-program", "absent_program", "absent_peer.py", {"float32": "F32", "int8": "Q8_0"})
FAKE = """
    from peer_answering import answer_requests
    def load(settings):
        print("noise on standard output")
        if settings["kind"] == "broken":
            raise ValueError("no such file")
        return lambda prompt, new_tokens: [sum(prompt)] * new_tokens, lambda rows, context, steps: rows / 2
    answer_requests(load)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A directory of random weights with a tokenizer."""
    return random_directory(tmp_path_factory.mktemp("base") / "tiny", LlamaConfig(300, 32, 80, 1, 4, 2, 8, 64))


def test_only_our_own_decoders(monkeypatch, capsys, base, tmp_path):
    """The results, the table and the picture, and the programs that are missing."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in ([5, 7, 5, 7, 5], [9, 3, 1])))
    output = tmp_path / "tiny.json"
    monkeypatch.setattr(cpu_peers, "PROGRAMS", (ABSENT,))
    argv = ["--model", base, "--draft", "lookup=chain-2", "--max-new-tokens", 6, "--repeats", 1, "--prompts", prompts]
    argv = [str(word) for word in (*argv, "--work", tmp_path / "work", "--output", output)]
    assert run_command("cpu_peers.py", "", cpu_peers.add_arguments, cpu_peers.run, argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Absent is left out: absent-program is not installed\n" in out
    assert "All tokens that must agree do." in out
    content = json.loads(output.read_text())
    names = ["hydrajax, autoregressive", "hydrajax, Lookup, chain-2"]
    assert [row["name"] for row in content["results"]] == names
    assert [row["same"] for row in content["results"]] == [2, 2]
    assert content["results"][0]["ratio"] == 1
    assert content["differences"] == []
    assert content["arguments"]["model"] == str(base)
    lines = output.with_suffix(".md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines[4:6]] == [f"| {name}" for name in names]
    assert (tmp_path / "figures" / "tiny.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_tokens_are_reported():
    """An exact decoder may not differ, another program at a tie only, and low bits everywhere."""
    prompts = [np.array([1, 2]), np.array([3])]
    right = [np.array([4, 5, 6]), np.array([7, 7, 7])]
    wrong = [np.array([4, 5, 9]), np.array([7, 8])]

    def logits_after(ids: np.ndarray) -> np.ndarray:
        logits = np.zeros(10, np.float32)
        logits[[6, 9]] = (1.0, 1.0 - 1e-4) if ids.tolist() == [1, 2, 4, 5] else (np.nan, np.nan)
        logits[[7, 8]] = (3.0, 1.0) if ids.tolist() == [3, 7] else (np.nan, np.nan)
        return logits

    musts = {"plain": "equal", "with a draft": "equal", "another program": "tie", "low bits": ""}
    runs = {name: Run(name, "plain", must, lambda prompt: prompt) for name, must in musts.items()}
    outputs = {name: right if name == "plain" else wrong for name in runs}
    found = differences(runs, outputs, prompts, logits_after)
    assert [(one.name, one.prompt, one.at, one.got, one.expected, one.allowed) for one in found] == [
        ("with a draft", 0, 2, 9, 6, False),
        ("with a draft", 1, 1, 8, 7, False),
        ("another program", 0, 2, 9, 6, True),
        ("another program", 1, 1, 8, 7, False),
    ]
    assert str(found[2]).endswith("got 9, expected 6 as plain; their logits differ by 1.0e-04 (a tie)")
    assert str(found[3]).endswith("their logits differ by 2.0e+00, WRONG")
    assert differences(runs, dict.fromkeys(runs, right), prompts, logits_after) == []
    short = differences(runs, outputs | {"with a draft": [right[0], right[1][:2]]}, prompts, logits_after)[0]
    assert (short.prompt, short.at, short.got, short.allowed) == (1, 2, -1, False)


def test_a_program_in_its_process(tmp_path, monkeypatch):
    """Requests and answers; a program that fails is named with its last line."""
    (tmp_path / "fake_peer.py").write_text(textwrap.dedent(FAKE))
    monkeypatch.setattr(peer_programs, "__file__", str(tmp_path / "peer_programs.py"))
    monkeypatch.setenv("PYTHONPATH", str(Path(cpu_peers.__file__).parent))
    fake = Program("Fake", "json", "json", "fake_peer.py", {})
    variant = Variant(fake, "Fake F32", tmp_path, True, "F32", {"greedy": None})
    peer = Peer(variant, None, 1, 64, 99)
    assert peer.decode(np.array([4, 5]), 3).tolist() == [9, 9, 9]
    assert cpu_peers.peer_turn(peer, [1, 8], 32) == {1: 0.5, 8: 4.0}  # and ends the process
    broken = Peer(Variant(fake, "Fake bad", tmp_path, True, "broken", {}), None, 1, 64, 99)
    with pytest.raises(HydrajaxError, match=r"^Fake bad: its process ended with 1: ValueError: no such file$"):
        broken.decode(np.array([1]), 1)


def test_written_files_are_the_base(base, tmp_path):
    """GGUF files are read back bit for bit, and low-bit ones have the type of their name."""
    found = {each.kind: each for each in variants(ABSENT, ["float32", "int8", "int4"], tmp_path, base)}
    assert sorted(found) == ["F32", "Q8_0"]
    assert found["F32"].float32
    assert not found["Q8_0"].float32
    assert found["F32"].drafts == {"greedy": None}
    ours, theirs = hydrajax.load(base), hydrajax.load(found["F32"].model)
    jax.tree.map(np.testing.assert_array_equal, ours.params.base, theirs.params.base)
    assert ours.tokenizer("ab a")["input_ids"] == theirs.tokenizer("ab a")["input_ids"]
    kinds = {tensor.tensor_type.name for tensor in GGUFReader(found["Q8_0"].model).tensors}
    assert kinds == {"F32", "Q8_0", "F16"}  # F16: rows of 80 numbers are no whole blocks
    before = found["F32"].model.stat().st_mtime_ns
    assert gguf_file(base, tmp_path, "F32").stat().st_mtime_ns == before  # it is kept
    reads_gguf = next(variants(ABSENT, ["float32"], tmp_path, found["Q8_0"].model))
    assert (reads_gguf.name, reads_gguf.float32) == ("Absent Q8_0", False)
