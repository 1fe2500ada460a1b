"""``hydrajax roofline``: printed and written predictions. Errors are in tests/cli/test_errors.py."""

import json
from functools import partial

import pytest

from helpers import commands
from hydrajax.cli import main


@pytest.fixture
def program(capsys):
    return partial(commands.run, main, capsys, "roofline")


@pytest.mark.slow
def test_command_predicts_eagle_and_a_dynamic_tree(program):
    rows = []
    for tree in ((), ("--tree", "dynamic-60-7-10")):
        rows += json.loads(program("--shape", "7b", "--draft-kind", "eagle", "--json", *tree).out)["rows"]
    assert [row["predicted"]["nodes"] for row in rows] == [1, 4, 16, 26, 60]
    assert rows[4]["predicted"]["tree"] == "dynamic-60-7-10"
    assert rows[4]["predicted"]["propose"] > rows[3]["predicted"]["propose"]  # seven levels in place of four


@pytest.mark.slow
def test_command_predicts_a_mesh_and_what_fits(program):
    heads = ("--shape", "70b", "--draft-kind", "medusa", "--tree-sizes", "1,16", "--device", "TPUv5e")
    shown = program(*heads, "--mesh", "model=8", "--quantize", "int8", "--batch-sizes", "1,256")
    for words in ("int8 weights in the base, on 8 TPUv5e (1 x 8)", "100 GB/s between devices", "10 us each"):
        assert words in shown.out
    assert [line.split()[-2:] for line in shown.out.splitlines()[-3:-1]] == [["all", "trees"], ["19.90", "no"]]
    assert "…" not in shown.out
    grid = ("--mesh", "data=2,model=4", "--batch-sizes", "2", "--json")
    (_, row) = json.loads(program(*heads, *grid).out)["rows"]
    found = row["predicted"]
    assert not found["fits"]
    assert found["collectives"] == 2 * 80 + 1 + 1 + 8
    assert found["collective_time"] == pytest.approx(
        1e3 * (found["collectives"] * 10e-6 + found["collective_bytes"] / 100e9)
    )


def test_command_reads_the_shape_of_a_base(program, tmp_path):
    config = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 172}
    config |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    few = ("--draft-kind", "medusa", "--tree-sizes", "1,4", "--batch-sizes", "1,8", "--context", "64,128")
    few += ("--device", "H200")
    file = tmp_path / "roofline.json"
    shown = program("--base", tmp_path, *few, "--json", file)
    report, same = json.loads(file.read_text()), json.loads(program("--shape", "tiny", *few, "--json").out)
    assert report["rows"] == same["rows"]
    assert report["device"]["name"] == "H200"
    cells = [row["predicted"] for row in report["rows"]]
    found = [(cell["context"], cell["batch"], cell["nodes"]) for cell in cells]
    assert found == [(s, b, n) for s in (64, 128) for b in (1, 8) for n in (1, 4)]
    assert f"{cells[-1]['break_even']:.2f}" in shown.out
    assert "…" not in shown.out


def test_command_counts_the_windows_of_short_convolutions(program, tmp_path):
    """LFM2-1.2B as published: 6 layers keep keys and values, 10 the last two inputs of their convolution."""
    config = {"model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "block_ff_dim": 12288}
    config |= {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    few = ("--draft-kind", "medusa", "--tree-sizes", "1", "--context", "1024", "--json")
    found = json.loads(program("--base", tmp_path, *few).out)["rows"][0]["predicted"]
    keys_values, windows, hidden, length = 1025 * 6 * 2 * 8 * 64, 10 * 2 * 2048, 2048, 2
    assert found["cache_memory"] == 2 * (keys_values + windows + hidden + length)
    layers = 16 * (3 * 2048 * 8192 + 2 * 2048) + 10 * (4 * 2048 + 3) * 2048 + 6 * (2 * 2048 * (2048 + 512) + 2 * 64)
    assert found["base_memory"] == 2 * (65536 * 2048 + layers + 2048)
