"""GGUF files: tensors bit by bit, logits, tokens and tokenizers of transformers, the cache, and errors of one line."""

import contextlib
import functools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoTokenizer

import hydrajax
from helpers import small_tokenizer
from helpers.gguf_files import llama3_factors, write_gguf
from helpers.released import refusal
from hydrajax.errors import HydrajaxError
from hydrajax.formats.checkpoint import Checkpoint
from hydrajax.formats.hub import resolve
from hydrajax.formats.huggingface import load_llama, read_config
from hydrajax.formats.tensors import GGUF_INDEX, open_tensors
from hydrajax.lowbit import gguf as module
from hydrajax.lowbit import gguf_tensors
from hydrajax.lowbit.gguf_tensors import GgufFiles
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BoundBase
from hydrajax.models.layout import MODEL
from hydrajax.models.rope_scaling import RopeScaling
from hydrajax.ops import trace
from hydrajax.text.tokenizer import load_tokenizer

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
TEXTS = [*small_tokenizer.SAMPLE, "the  tree\n\n 12 of 345", "<s>the</s> tree"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hydrajax"


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer.byte_level()


@pytest.fixture
def models(llama_checkpoint, tokenizer):
    """``models(family="llama", **settings)``: a transformers model whose matrices have rows of whole blocks."""
    sizes = {"intermediate_size": 96, "vocab_size": len(tokenizer), "eos_token_id": 2}

    def make(family="llama", **settings):
        directory = llama_checkpoint(model_type=family, **(sizes | settings))
        return AutoModelForCausalLM.from_pretrained(directory).eval()

    return make


@pytest.fixture
def write(models, tokenizer, tmp_path):
    """``write(kind="F32", **more) -> Path`` of a tiny LLaMA with a tokenizer, see `write_gguf`."""
    return lambda kind="F32", **more: write_gguf(tmp_path / "tiny.gguf", models(), tokenizer, kind, **more)


@functools.partial(jax.jit, static_argnums=0)
def all_logits(model, params, tokens):
    width = tokens.shape[1]
    hidden = model.apply({"params": params}, tokens, np.arange(width)[None], causal_mask(width)).hidden
    return BoundBase(model, params).logits(hidden)


def logits_of(model, params, ids: list[int]) -> np.ndarray:
    return np.asarray(all_logits(model, params, np.array([ids], np.int32)))[0]


def torchs_logits(model, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def as_transformers_reads(file: Path, **settings):
    """transformers asks for accelerate, which it does not use on one CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.modeling_utils.is_accelerate_available", lambda *_: True)
        return AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, **settings
        ).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_dequantised_exactly(write, models, kind):
    """Rows of queries and keys, which the file has in another order, are in the order of the model."""
    directory = resolve(write(kind), "base")
    files = open_tensors(directory, MODEL, "base")
    state = models().state_dict()
    assert set(files) == state.keys()
    for name, tensor in state.items():
        stored = Type[kind] if tensor.ndim > 1 else Type.F32
        expected = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), stored), stored)
        ours = files.read(name)
        assert files.shape(name) == ours.shape == expected.shape
        np.testing.assert_array_equal(ours.astype(np.float32).view(np.uint32), expected.view(np.uint32), err_msg=name)
        for rows in (1, 5, 8, 1000):
            np.testing.assert_array_equal(files.read(name, rows), ours[:rows])
        dtype = {"F32": "float32", "BF16": "bfloat16"}.get(stored.name, "float16")
        assert files.dtype(name) == dtype
        assert ours.dtype == (dtype if kind in ("F32", "F16", "BF16") else np.float32)
    assert Checkpoint(directory).dtype == {"F32": "float32", "BF16": "bfloat16"}.get(kind, "float16")


@pytest.mark.parametrize("kind", module.K_QUANTS)
def test_k_quants_are_dequantised_exactly(tmp_path, monkeypatch, kind):
    """`gguf` cannot write them, so the blocks are random bytes."""
    monkeypatch.setattr(gguf_tensors, "GGUF_ROWS", 4)  # of 6
    _, size = gguf.GGML_QUANT_SIZES[Type[kind]]
    blocks = np.random.default_rng(0).integers(0, 256, (6, 2 * size), np.uint8)
    blocks &= 0b10111111  # no scale is infinite
    (tmp_path / "file").write_bytes(b"12345" + blocks.tobytes())
    tensor = {"type": kind, "shape": [6, 512], "offset": 5, "bytes": blocks.size}
    files = GgufFiles(tmp_path / "file", {"x": tensor}, "base")
    expected = gguf.quants.dequantize(blocks, Type[kind])
    assert expected.shape == (6, 512)
    np.testing.assert_array_equal(files.read("x"), expected)
    np.testing.assert_array_equal(files.read("x", 4), expected[:4])


@pytest.mark.quick("llama-Q4_1-settings1", "qwen2-F16-settings4", "qwen3-Q8_0-settings5")
@pytest.mark.parametrize(
    ("family", "kind", "settings"),
    [
        ("llama", "F32", {}),
        ("llama", "Q4_1", {"tie_word_embeddings": True}),
        ("llama", "Q8_0", {"head_dim": 16, "rope_theta": 500.0}),
        ("qwen2", "Q4_0", {"tie_word_embeddings": True}),
        ("qwen2", "F16", {}),
        ("qwen3", "Q8_0", {"head_dim": 16}),
    ],
)
def test_logits_are_those_of_transformers(models, tokenizer, tmp_path, family, kind, settings):
    """transformers loads the same file."""
    model = models(family, **settings)
    file = write_gguf(tmp_path / "tiny.gguf", model, tokenizer, kind)
    # Of Qwen3's files transformers does not read head_dim.
    theirs = as_transformers_reads(file, **({"config": model.config} if family == "qwen3" else {}))
    m = hydrajax.load(file, dtype="float32")
    assert m.model.config.tied_lm_head == bool(settings.get("tie_word_embeddings"))
    ids = tokenizer(TEXTS[0]).input_ids
    np.testing.assert_allclose(logits_of(m.model, m.params.base, ids), torchs_logits(theirs, ids), atol=1e-4)


@pytest.mark.skipif(not trace.has_few_bits(), reason="the CPU kernels were not built, or several devices")
@pytest.mark.parametrize(("kind", "stored"), [("Q4_1", "int4"), ("Q4_0", "int4"), ("Q8_0", None), ("F16", None)])
def test_a_file_of_4_bits_is_computed_in_4_bits(write, kind, stored):
    """Q4_1 has the file's weights, as gguf reads them. Groups of Q4_0 without a largest number are rounded again."""
    file = write(kind)
    m = hydrajax.load(file, "lookup")
    assert (m.model.quantize, m.model.dtype) == (stored, np.float32)
    if stored is None:
        return
    (tensor,) = (tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.0.ffn_down.weight")
    expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).T
    difference = np.abs(m.params.base["layers_0"]["down"].dequantized() - expected).max()
    assert difference == 0 if kind == "Q4_1" else 0 < difference < 0.1
    count = sum(leaf.size for leaf in jax.tree.leaves(hydrajax.load(file, quantize="none").params.base))
    assert f" with {count / 1e6:.1f}M parameters, float32 with int4 weights" in repr(m)


def test_who_wants_float_weights_gets_them(write, monkeypatch):
    file = write("Q4_0")
    for given in ({"quantize": "none"}, {"dtype": "float32"}, {"dtype": "bfloat16"}):
        assert hydrajax.load(file, **given).model.quantize is None
    monkeypatch.setattr(trace, "has_few_bits", lambda: False)
    with pytest.warns(UserWarning, match="base: its 4-bit weights are widened, as the CPU kernels were not built"):
        assert hydrajax.load(file).model.quantize is None
    refusal(lambda: hydrajax.load(file, quantize="int3"), "quantize: got 'int3', expected none, int8")


@pytest.mark.parametrize("kind", ["F32", pytest.param("Q8_0", marks=pytest.mark.slow)])
def test_gemma_3_whose_norms_have_one_added(models, tokenizer, tmp_path, kind):
    """Seven layers: the sixth has no window. The logits are those of the model that was written, and rounded for Q8_0.

    The scores' scale is that of the head size, as in all but one released file.
    """
    local, full = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    model = models(
        "gemma3_text", num_hidden_layers=7, head_dim=16, query_pre_attn_scalar=16, sliding_window=5, pad_token_id=0,
        rope_parameters={"sliding_attention": local, "full_attention": full},
    )  # fmt: skip
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    directory = resolve(write_gguf(tmp_path / "tiny.gguf", model, None, kind, fields=scaling), "base")
    ids = tokenizer(TEXTS[0]).input_ids
    assert len(ids) > 5
    ours, params = load_llama(directory)
    assert [layer.sliding_window for layer in ours.config.kinds] == [5] * 5 + [None, 5]
    expected = torchs_logits(model, ids)
    if kind == "F32":
        np.testing.assert_allclose(logits_of(ours, params, ids), expected, atol=1e-4)
    else:
        assert np.corrcoef(logits_of(ours, params, ids).ravel(), expected.ravel())[0, 1] > 0.99
    names = {name: tensor for name, tensor in model.state_dict().items() if name.endswith("layernorm.weight")}
    for name, tensor in names.items():
        np.testing.assert_allclose(open_tensors(directory, MODEL, "base").read(name), tensor.numpy(), atol=1e-6)


def test_llama3_scaling_is_recognised_by_its_factors(models, tokenizer, tmp_path):
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    model = models(rope_parameters=scaling)
    factors = llama3_factors(8, 500_000.0, 4.0)
    assert len(set(factors)) == 3
    file = write_gguf(tmp_path / "tiny.gguf", model, tokenizer, extra={"rope_freqs.weight": factors})
    directory = resolve(file, "base")
    assert read_config(directory).rope_scaling == RopeScaling("llama3", 4.0)
    ids = tokenizer(TEXTS[0]).input_ids
    np.testing.assert_allclose(logits_of(*load_llama(directory), ids), torchs_logits(model, ids), atol=1e-4)


def test_other_scaling(write):
    file = write(extra={"rope_freqs.weight": np.ones(4, np.float32)})
    assert read_config(resolve(file, "base")).rope_scaling is None  # factors of one
    file = write(fields={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert read_config(resolve(file, "base")).rope_scaling == RopeScaling("linear", 4.0)


def test_tokens_that_end_generation(write):
    for more, ids in (({}, (2,)), ({"eot": 7}, (2, 7)), ({"eot": 2, "eom": 9}, (2, 9)), ({"eos": None}, ())):
        fields = {f"tokenizer.ggml.{name}_token_id": token for name, token in more.items()}
        assert Checkpoint(resolve(write(fields=fields), "base")).eos_ids == ids


def test_the_tokenizer_is_the_original_one(write, tokenizer, tmp_path):
    file = write()
    ours = load_tokenizer(resolve(file, "base"))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert ours.chat_template == theirs.chat_template == small_tokenizer.CHAT
    assert ours.get_vocab() == tokenizer.get_vocab()
    assert (ours.bos_token, ours.eos_token, ours.unk_token) == ("<s>", "</s>", "<unk>")
    assert "<|endoftext|>" not in ours.get_vocab()  # which GPT-2's class adds, with an id beyond the vocabulary
    for text in TEXTS:
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids == tokenizer(text).input_ids
        assert ours.decode(ids[1:]) == text


def test_a_file_without_a_tokenizer(models, tmp_path):
    assert hydrajax.load(write_gguf(tmp_path / "tiny.gguf", models())).tokenizer is None


def test_torch_is_not_asked_for_and_an_unknown_way_to_split_is_warned_of(write, monkeypatch):
    with pytest.warns(UserWarning, match="tokenizer.ggml.pre: got 'new'"):
        resolve(write(fields={"tokenizer.ggml.pre": "new"}), "base")
    directory = resolve(write(), "base")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert load_tokenizer(directory)("the tree").input_ids[0] == 1


def test_the_second_start_reads_the_cache(write, cache, monkeypatch):
    file = write()
    directory = resolve(file, "base")
    assert directory.parent == cache / "gguf"
    assert "tokenizer.json" in os.listdir(directory)
    assert sum(path.stat().st_size for path in directory.iterdir()) < file.stat().st_size  # weights are not copied
    monkeypatch.setattr(gguf, "GGUFReader", None)
    assert resolve(file, "base") == directory
    assert hydrajax.load(file).tokenizer is not None


def test_a_changed_file_has_another_directory(write, tmp_path):
    """An index from elsewhere could name any file of this machine."""
    first = resolve(write(), "base")
    file = write("Q8_0")
    second = resolve(file, "base")
    os.utime(file, ns=(1, 1))
    third = resolve(file, "base")
    assert len({first, second, third}) == 3
    refusal(lambda: load_llama(second), "describes no present GGUF file")
    third.rename(tmp_path / "elsewhere")
    refusal(lambda: load_llama(tmp_path / "elsewhere"), "base: ", "describes no present GGUF file")
    (tmp_path / "elsewhere" / GGUF_INDEX).write_text("{}")
    refusal(lambda: load_llama(tmp_path / "elsewhere"), "base: ", "describes no present GGUF file")


def test_threads_make_one_directory(write, monkeypatch):
    file, calls, describe = write(), [], module._describe
    monkeypatch.setattr(module, "_describe", lambda *args: (calls.append(args), time.sleep(0.2), describe(*args)))
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(resolve, [file] * 4, ["base"] * 4))
    assert len(set(made)) == len(calls) == 1


REFUSED = [  # fields, the message
    ({"general.architecture": "gemma2"}, "general.architecture: got 'gemma2', expected 'llama' or 'qwen2' or"),
    ({"llama.block_count": None}, "field 'llama.block_count' is missing"),
    ({"llama.block_count": "two"}, "llama.block_count: got 'two', expected an integer"),
    ({"llama.block_count": 2_000_000_000}, "block_count: got 2000000000 layers with 21 tensors"),
    ({"llama.block_count": 3}, "missing tensors 'model.layers.2."),
    ({"llama.attention.head_count": 0}, "n_heads: got 0"),
    ({"llama.embedding_length": 64}, "got shape [300, 32], expected [300, 64]"),
    ({"llama.rope.dimension_count": 4}, "rope.dimension_count: got 4, expected 8"),
    ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type: got 'yarn', expected 'none' or 'linear'"),
    ({"llama.attention.causal": False}, "attention.causal: got False"),
    ({"split.count": 3}, "split.count: got 3, expected one file"),
    ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model: got 'bert'"),
    ({"tokenizer.ggml.bos_token_id": 5000}, "bos_token_id: got id 5000, expected at most 299"),
]
TENSORS = [  # further tensors, the message
    ({"blk.0.ffn_gate_exps.weight": np.zeros((2, 32), np.float32)}, "unexpected tensor 'blk.0.ffn_gate_exps.weight'"),
    ({"blk.0.attn_q.bias": np.zeros(32, np.float32)}, "unexpected tensor 'model.layers.0.self_attn.q_proj.bias'"),
    ({"rope_freqs.weight": np.full(4, 8, np.float32)}, "rope_freqs.weight: got other factors"),
    ({"rope_freqs.weight": np.full(2, 1, np.float32)}, "rope_freqs.weight: got other factors"),
]


def test_fields_and_tensors_that_are_refused(write, cache):
    for more, rows in (("fields", REFUSED), ("extra", TENSORS)):
        for changes, message in rows:
            file = write(**{more: changes})
            refusal(lambda file=file: resolve(file, "base"), f"base: {file}", message)
    assert not [path for path in (cache / "gguf").iterdir() if path.is_dir()]  # nothing is half-written
    file = write(endian=gguf.GGUFEndian.BIG)
    refusal(lambda: resolve(file, "base"), "got a big-endian file, expected little-endian numbers")


def test_a_type_that_is_refused(write):
    file = write()
    content = file.read_bytes()
    name = b"blk.0.attn_q.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions and the dimensions
    assert content[at : at + 4] == b"\0\0\0\0"
    file.write_bytes(content[:at] + (26).to_bytes(4, "little") + content[at + 4 :])
    refusal(lambda: resolve(file, "base"), "tensor 'blk.0.attn_q.weight': got 'I32', expected F32, F16")


def test_a_truncated_file(write, cache):
    file = write()
    content = file.read_bytes()
    for keep in (0, 3, 20, 200, len(content) // 10, len(content) // 2, len(content) - len(content) // 1000):
        file.write_bytes(content[:keep])
        refusal(lambda: resolve(file, "base"), f"base: {file} is damaged or not a GGUF file")
    assert not [path for path in (cache / "gguf").iterdir() if path.is_dir()]


def test_a_length_beyond_the_file(write):
    """Without our check, gguf would read empty arrays until it has as many elements as the length states."""
    file = write()
    content = file.read_bytes()
    at = content.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    assert int.from_bytes(content[at : at + 8], "little") == 300
    file.write_bytes(content[:at] + (2**50).to_bytes(8, "little") + content[at + 8 :])
    refusal(lambda: resolve(file, "base"), "is damaged or not a GGUF file: ValueError: the file ends too early")


def test_random_damage_ends_in_one_line(write):
    """Other bytes in the metadata are refused, or change a name, text or number that no check can find wrong."""
    file = write()
    whole = file.read_bytes()
    for seed in range(8):
        random, content = np.random.default_rng(seed), bytearray(whole)
        for at in random.integers(0, content.index(b"tokenizer.ggml.tokens"), 3):
            content[at] = random.integers(256)
        file.write_bytes(content)
        with contextlib.suppress(HydrajaxError):  # any other error fails the test
            load_llama(resolve(file, "base"))


def test_a_file_that_shrinks_after_the_index_was_read(write):
    file = write()
    files = open_tensors(resolve(file, "base"), MODEL, "base")
    file.write_bytes(file.read_bytes()[:-4000])
    refusal(lambda: [files.read(name) for name in files], "tiny.gguf ends within tensor")


def test_without_gguf(write, monkeypatch):
    file = write("Q4_0")
    directory = resolve(file, "base")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refusal(lambda: load_llama(directory), r"base: GGUF files need gguf: pip install 'hydrajax[gguf]'")
    os.utime(file, ns=(1, 1))
    refusal(lambda: resolve(file, "base"), r"base: GGUF files need gguf: pip install 'hydrajax[gguf]'")


def test_names_that_are_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal(lambda: resolve("none.gguf", "base"), "base: no such file: none.gguf")
    refusal(lambda: resolve("models/none.gguf", "base"), "base: no such file: models/none.gguf")
    os.mkfifo("pipe.gguf")
    refusal(lambda: resolve("pipe.gguf", "base"), "base: no such file: pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert resolve("folder.gguf", "base").name == "folder.gguf"  # a directory comes first
