"""Shared options: the default dtype, the recorded dtype, and limits of numbers."""

from __future__ import annotations

import re

import jax.numpy as jnp
import pytest

from hydrajax.cli import bench, build_parser, options
from hydrajax.decoding.request import Request
from hydrajax.errors import HydrajaxError
from hydrajax.formats.huggingface import export_llama, load_llama
from hydrajax.ops.trace import Platform, tracing
from hydrajax.trees import presets

LOADING = {
    "generate": ["generate", "--base", "B", "--prompt", "x"],
    "chat": ["chat", "--base", "B"],
    "bench": ["bench", "--base", "B"],
    "evaluate": ["evaluate", "--base", "B", "--set", "mt_bench", "--output", "O"],
    "certify": ["certify", "--base", "B"],
    "tree search": ["tree", "search", "--base", "B", "--prompts", "P", "--save"],
    "convert int8": ["convert", "int8", "--base", "B"],
}


def parsed(*argv):
    return build_parser(list(argv)).parse_args(argv)


@pytest.mark.parametrize("argv", LOADING.values(), ids=LOADING.keys())
def test_the_dtype_is_left_to_the_checkpoint_and_the_device(argv):
    assert parsed(*argv).dtype == "auto"
    assert parsed(*argv, "--dtype", "bfloat16").dtype == "bfloat16"


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


@pytest.mark.parametrize(("flags", "dtype"), [([], "float32"), (["--dtype", "bfloat16"], "bfloat16")])
def test_random_weights_are_float32_unless_told_otherwise(monkeypatch, flags, dtype):
    found = []
    monkeypatch.setattr(bench, "random_model", lambda *arguments: found.append(arguments) or (None, None, None))
    monkeypatch.setattr(bench, "_with_own_tree", lambda *arguments: None)
    args = parsed("bench", "--random", "tiny", *flags)
    with tracing(platform=Platform("gpu", 1)):
        bench._executor(args, Request())
    assert [jnp.dtype(arguments[2]) for arguments in found] == [dtype]
    assert options.recorded(args)["dtype"] == dtype


@pytest.mark.parametrize("text", ["2147483648", "9" * 400])
def test_numbers_that_no_array_counts(text):
    with pytest.raises(
        HydrajaxError, match=r"--batch-size: got '[0-9]+( \.\.\.)?', expected at most 2147483647 \(see"
    ) as error:
        parsed("generate", "--base", "B", "--prompt", "x", "--batch-size", text)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("text", ["1_0", "+1", " 1", "１"])
def test_only_ascii_digits_are_integers(text):
    for flag in ("--slots", "--port", "--queue", "--grace"):
        with pytest.raises(HydrajaxError, match=f"{flag}: .*expected an integer"):
            parsed("serve", "--base", "B", f"{flag}={text}")
    with pytest.raises(HydrajaxError, match="tree: got 'chain-"):
        presets.by_name(f"chain-{text}")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("model=8", {"model": 8}),
        ("data=2,model=4", {"data": 2, "model": 4}),
        ("model=4, data=2", {"model": 4, "data": 2}),
    ],
)
def test_sizes_of_a_mesh(text, sizes):
    assert parsed("chat", "--base", "B", "--mesh", text).mesh == sizes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", "got '8', expected model=M or data=D,model=M"),
        ("tensor=8", "got 'tensor=8', expected model=M or data=D,model=M"),
        ("model=2,model=4", "got 'model=2,model=4', expected model=M or data=D,model=M"),
        ("model=", "got '', expected an integer from 1 up"),
        ("model=0", "got '0', expected an integer from 1 up"),
    ],
)
def test_other_meshes_are_refused(text, message):
    with pytest.raises(HydrajaxError, match=re.escape(f"--mesh: {message}")):
        parsed("serve", "--base", "B", "--mesh", text)


def test_a_mesh_of_more_devices_than_there_are_is_refused_before_the_base_is_looked_for():
    with pytest.raises(HydrajaxError, match="mesh: got data=1 x model=4096, expected 1 to"):
        options.load_from(parsed("generate", "--base", "nowhere", "--prompt", "x", "--mesh", "model=4096"))
