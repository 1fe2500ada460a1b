"""Input errors of `make_decode_fn` and `decode_fn`, and the padding of prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding

from helpers.lab import shared_lab
from hydrajax.api import make_autoregressive_fn, make_decode_fn
from hydrajax.decoding.prompt_batch import bucket
from hydrajax.decoding.state import Params
from hydrajax.drafters.corpus import Corpus
from hydrajax.errors import HydrajaxError
from hydrajax.language_model import LanguageModel
from hydrajax.models.init import init_base
from hydrajax.trees import presets

WIDTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_bucket_is_the_next_width_within_the_context(length, context):
    width = bucket(length, context)
    assert width >= length
    if length <= context:
        assert width == min(next(one for one in WIDTHS if one >= length), context)


def test_max_new_tokens_must_be_positive(lab):
    with pytest.raises(HydrajaxError, match="max_new_tokens: got 0, expected at least 1"):
        make_decode_fn(lab.model, lab.drafters["hydra"], presets.chain(2), max_new_tokens=0)


WRONG_PROMPTS = [
    (np.zeros((2, 41), int), None, "prompt 0: got 41 tokens, expected at most the model's context of 40"),
    (np.zeros((2, 41), int), [40, 41], "prompt 1: got 41 tokens, expected at most the model's context of 40"),
    (np.zeros((2, 0), int), None, "prompt 0: got no tokens"),
    (np.zeros((2, 5), int), [5, 0], "prompt 1: got no tokens"),
    (np.array([[1, 2], [3, 17]]), None, r"prompt 1: got token id 17, expected 0 to 16"),
    (np.array([[1, -1]]), None, "prompt 0: got token id -1, expected 0 to"),
    (np.array([[1, 2**32 + 1]]), None, "prompt 0: got token id 4294967297, expected 0 to"),
    (np.zeros((2, 5), int), [5], "lengths: got shape"),
    (np.zeros((2, 5), int), [5, 6], "lengths: got 6 for prompt 1, expected 0 to its 5 columns"),
    (np.zeros((2, 5), int), [-1, 5], "lengths: got -1 for prompt 0"),
    (np.zeros((2, 5), int), [1, [2]], r"lengths: got \[1, \[2\]\], expected int32 \[batch\]"),
    (np.zeros((1, 5), int), [3.9], r"lengths: got float64, expected int32 \[batch\]"),
    ([[1, 2], [3]], None, r"prompt: got \[\[1, 2\], \[3\]\], expected int32 \[batch, tokens\]"),
    (np.zeros((0, 5), int), None, r"prompt: got int64 \[0, 5\], expected int32 \[batch, tokens\]"),
    (BatchEncoding({"input_ids": [[1]]}), None, r"prompt: got a mapping \(BatchEncoding\), .*; pass its input_ids"),
    (np.zeros(5, np.int32), None, r"prompt: got int32 \[5\], expected int32 \[batch, tokens\]"),
    (np.zeros((1, 5), np.float32), None, r"prompt: got float32 \[1, 5\], expected int32 \[batch, tokens\]"),
]


def test_bad_prompts_are_rejected(lab):
    params, decode_fn = Params(lab.base(0), lab.draft("hydra", 0)), lab.decode_fn("hydra", "random", 24)
    for prompt, lengths, message in WRONG_PROMPTS:
        with pytest.raises(HydrajaxError, match=message):
            decode_fn(params, prompt, lengths)
    with pytest.raises(HydrajaxError, match=r"lengths: got shape \(1,\) for prompts \(2, 16\)"):
        jax.jit(decode_fn)(params, np.zeros((2, 16), np.int32), np.ones(1, np.int32))


def cast(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def quantized():
    return init_base(shared_lab().model.clone(quantize="int8"), jax.random.key(0))


WRONG = [  # the message, and a base and a draft, made of the right ones
    (r".base\['embedding'\]: got bfloat16 \[17, 32\], expected float32 \[17, 32\]", lambda b, d: (cast(b), d)),
    (r".base\['embedding'\]: got nothing", lambda b, d: (None, d)),
    (r".base\['embedding'\]: got 'x'", lambda b, d: (b | {"embedding": "x"}, d)),
    (r".base\['embedding'\]: got float32 \[16, 32\]", lambda b, d: (b | {"embedding": b["embedding"][1:]}, d)),
    (r".base\['layers_2'\].* expected nothing", lambda b, d: (b | {"layers_2": b["layers_1"]}, d)),
    (r".base\['layers_1'\].* got nothing", lambda b, d: ({k: b[k] for k in b if k != "layers_1"}, d)),
    (r".base\['layers_0'\]\['down'\]: got quantized ", lambda b, d: (quantized(), d)),
    (r".draft\['head_0'\].* got bfloat16 ", lambda b, d: (b, cast(d))),
    (r".draft\['corpus'\].* got bfloat16 \[99\], expected int32", lambda b, d: (b, d | {"corpus": cast(Corpus(99))})),
    (r".draft\['head_0'\].* got nothing", lambda b, d: (b, {})),
    (r".draft\['head_0'\].* got ", lambda b, d: (b, shared_lab().draft("medusa", 0))),
]


def test_parameters_of_another_model_are_rejected(lab):
    decode_fn, prompt = lab.decode_fn("hydra", "random", 24), np.ones((1, 4), int)
    for message, changed in WRONG:
        wrong = Params(*changed(lab.base(0), lab.draft("hydra", 0)))
        with pytest.raises(HydrajaxError, match=f"^params{message}"):
            decode_fn(wrong, prompt)
        model = LanguageModel(lab.model, lab.drafters["hydra"], wrong)
        with pytest.raises(HydrajaxError, match=f"^params{message}"):
            model.executor(model.program(tree="chain-1"))
    for params in ({"a": 1}, None, ({}, {})):
        with pytest.raises(
            HydrajaxError, match=rf"^params: got {type(params).__name__}, expected Params\(base, draft\)"
        ):
            decode_fn(params, prompt)


def test_parameters_are_compared_by_shape_and_dtype_alone(lab):
    """NumPy's arrays, float64 as JAX reads it, another device and tracers are right, and give the same tokens."""
    decode_fn, prompt = lab.decode_fn("hydra", "random", 24), np.full((2, 16), 3, np.int32)
    params = Params(lab.base(0), lab.draft("hydra", 0))
    expected = np.asarray(decode_fn(params, prompt).tokens)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    for same in (jax.device_get(params), wide, jax.device_put(params, jax.devices()[-1])):
        np.testing.assert_array_equal(decode_fn(same, prompt).tokens, expected)
    np.testing.assert_array_equal(jax.jit(decode_fn)(params, prompt).tokens, expected)


def test_a_quantized_base_refuses_float_kernels(lab):
    decode_fn = make_autoregressive_fn(lab.model.clone(quantize="int8"), max_new_tokens=2)
    decode_fn(Params(quantized(), {}), np.ones((1, 4), int))
    with pytest.raises(HydrajaxError, match=r"^params.base\['.*'\]: got float32 .*, expected quantized "):
        decode_fn(Params(lab.base(0), {}), np.ones((1, 4), int))


def test_token_ids_in_the_padding_are_ignored(lab):
    """Padding can contain any number, such as -1 or 10**6, without effect on the tokens."""
    decode_fn = make_decode_fn(lab.model, lab.drafters["medusa"], presets.chain(2), max_new_tokens=4)
    params = Params(lab.base(0), lab.draft("medusa", 0))
    lengths = np.array([3, 1], np.int32)
    outs = []
    for padding in (0, -1, 10**6):
        prompt = np.full((2, 6), padding)
        prompt[0, :3], prompt[1, :1] = [4, 5, 6], [7]
        outs.append(jax.device_get(decode_fn(params, prompt, lengths)))
    for out in outs[1:]:
        np.testing.assert_array_equal(out.tokens, outs[0].tokens)
