"""Shared options: the default dtype, the recorded dtype, and limits of numbers."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from hydrajax.cli import bench, build_parser, options
from hydrajax.decoding.request import Request
from hydrajax.errors import HydrajaxError
from hydrajax.formats.export_base import export_llama
from hydrajax.formats.huggingface import load_llama
from hydrajax.ops.trace import Platform, tracing
from hydrajax.trees import presets

LOADING = [
    "generate --base B --prompt x",
    "chat --base B",
    "bench --base B",
    "evaluate --base B --set mt_bench --output O",
    "certify --base B",
    "tree search --base B --prompts P --save",
    "convert int8 --base B",
]


def parsed(*argv):
    return build_parser(list(argv)).parse_args(argv)


def test_the_dtype_is_left_to_the_checkpoint_and_the_device():
    for command in LOADING:
        assert parsed(*command.split()).dtype == "auto", command
        assert parsed(*command.split(), "--dtype", "bfloat16").dtype == "bfloat16", command


WITHOUT_BFLOAT16 = "computing in float16: GPUs of compute capability 7.5 have no bfloat16\n"


@pytest.mark.parametrize(
    ("platform", "chosen", "printed"),
    [
        (Platform("cpu", 1), "float32", ""),
        (Platform("gpu", 1), "bfloat16", ""),
        (Platform("gpu", 1, 8.0), "bfloat16", ""),
        (Platform("gpu", 1, 7.5), "float16", WITHOUT_BFLOAT16),
    ],
)
def test_the_dtype_that_was_chosen_is_recorded(wordless, tmp_path, capsys, platform, chosen, printed):
    export_llama(tmp_path / "base", *load_llama(wordless), dtype=jnp.bfloat16)
    args = parsed("certify", "--base", str(tmp_path / "base"))
    with tracing(platform=platform):
        loaded = options.load_from(args)
    assert loaded.model.dtype == chosen
    assert options.recorded(args)["dtype"] == chosen
    assert capsys.readouterr().err == printed


def test_random_weights_are_float32_unless_told_otherwise(monkeypatch):
    found = []
    monkeypatch.setattr(bench, "random_model", lambda *arguments: found.append(arguments[2]) or (None, None, None))
    monkeypatch.setattr(bench, "_with_own_tree", lambda *arguments: None)
    for flags, dtype in (([], "float32"), (["--dtype", "bfloat16"], "bfloat16")):
        args = parsed("bench", "--random", "tiny", *flags)
        with tracing(platform=Platform("gpu", 1)):
            bench._executor(args, Request())
        assert jnp.dtype(found.pop()) == options.recorded(args)["dtype"] == dtype


def test_only_ascii_digits_are_integers():
    for text in ("1_0", "+1", " 1", "１"):
        for flag in ("--slots", "--port", "--queue", "--grace"):
            with pytest.raises(HydrajaxError, match=f"{flag}: .*expected an integer"):
                parsed("serve", "--base", "B", f"{flag}={text}")
        with pytest.raises(HydrajaxError, match="tree: got 'chain-"):
            presets.by_name(f"chain-{text}")


def test_sizes_of_a_mesh():
    for text in ("data=2,model=4", "model=4, data=2"):
        assert parsed("chat", "--base", "B", "--mesh", text).mesh == {"data": 2, "model": 4}


def test_a_mesh_of_more_devices_than_there_are_is_refused_before_the_base_is_looked_for():
    with pytest.raises(HydrajaxError, match="mesh: got data=1 x model=4096, expected 1 to"):
        options.load_from(parsed("generate", "--base", "nowhere", "--prompt", "x", "--mesh", "model=4096"))
