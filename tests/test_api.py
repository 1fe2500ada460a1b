"""`hydrajax.load`: the dtype of the loaded parameters, given or automatic."""

import jax
import jax.numpy as jnp
import pytest
import torch
from transformers import LlamaForCausalLM

import hydrajax
from helpers.released import refusal
from hydrajax.ops.trace import Platform, tracing

CPU, GPU, T4 = Platform("cpu", 1), Platform("gpu", 1, 9.0), Platform("gpu", 1, 7.5)


@pytest.fixture(scope="module")
def stored_in(tiny_checkpoint, tmp_path_factory):
    """``stored_in(name) -> Path``: the tiny checkpoint with its weights in this dtype, its norms in ``norms``."""

    def save(name: str, norms: str | None = None):
        folder = tmp_path_factory.mktemp(name)
        model = LlamaForCausalLM.from_pretrained(tiny_checkpoint).to(getattr(torch, name))
        for key, parameter in model.named_parameters():
            if norms is not None and "norm" in key:
                parameter.data = parameter.data.to(getattr(torch, norms))
        model.save_pretrained(folder)
        return folder

    return save


def dtypes(loaded: hydrajax.LanguageModel) -> set[str]:
    """Return the dtypes of the model and of its parameters."""
    return {loaded.model.dtype.name} | {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params.base)}


def test_the_dtype_of_the_checkpoint_and_the_device(stored_in):
    for platform, stored, loaded in (
        (CPU, "bfloat16", "float32"),
        (GPU, "float32", "float32"),
        (GPU, "bfloat16", "bfloat16"),
        (GPU, "float16", "bfloat16"),
        (GPU, "float64", "float32"),
        (T4, "bfloat16", "float16"),  # without bfloat16
        (T4, "float32", "float32"),
    ):
        with tracing(platform=platform):
            assert dtypes(hydrajax.load(stored_in(stored))) == {loaded}, (platform, stored)
    with tracing(platform=GPU):  # a few wide parameters do not count
        assert dtypes(hydrajax.load(stored_in("bfloat16", norms="float32"))) == {"bfloat16"}


def test_an_explicit_dtype(stored_in):
    folder = stored_in("float16")
    for platform in (CPU, GPU):
        for named in ("float32", "bfloat16", jnp.dtype("bfloat16"), "float16"):
            with tracing(platform=platform):
                assert dtypes(hydrajax.load(folder, dtype=named)) == {str(named)}


def test_a_weight_beyond_float16(tiny_checkpoint, tmp_path):
    model = LlamaForCausalLM.from_pretrained(tiny_checkpoint)
    model.model.layers[0].mlp.down_proj.weight.data[3, 5] = 70_000
    model.save_pretrained(tmp_path)
    expected = "dtype: got a weight that float16 cannot hold, expected numbers up to 65,504"
    refusal(lambda: hydrajax.load(tmp_path, dtype="float16"), expected)


def test_unknown_dtype(tiny_checkpoint):
    for name in ("float64", None):
        expected = f"dtype: got '{name}', expected auto, float32, bfloat16, float16"
        refusal(lambda name=name: hydrajax.load(tiny_checkpoint, dtype=name), expected)
