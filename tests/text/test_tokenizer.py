"""Loading a tokenizer: without torch where the files allow it, and equal to what AutoTokenizer loads."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from hydrajax import assets
from hydrajax.errors import HydrajaxError
from hydrajax.text.tokenizer import load_tokenizer, without_panic_text

TEXT = "def area(width, height):\n\treturn  width * 1234.5  # Fläche <|endoftext|>"


def test_the_shipped_one_is_read_without_torch():
    """torch takes seconds to import, and most machines that train have it."""
    code = "import sys; from hydrajax.text.tokenizer import load_tokenizer; t = load_tokenizer(sys.argv[1]); t('x');"
    code += "print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(assets.base())]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast", None])
def test_it_is_the_one_of_auto_tokenizer(tmp_path, named):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(assets.base() / name, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["tokenizer_class"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | ({"tokenizer_class": named} if named else {})))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = ours(TEXT)["input_ids"]
    assert ids == theirs(TEXT)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids)
    assert (ours.eos_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert ours.chat_template == theirs.chat_template


@pytest.fixture
def damaged(tmp_path):
    """``damaged(**changes)``: a copy of the shipped base whose ``tokenizer.json`` has other fields; of a dict, some."""
    shutil.copytree(assets.base(), tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "tokenizer.json").read_text())

    def write(**changes):
        for name, change in changes.items():
            content[name] = content[name] | change if name == "model" else change
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return tmp_path

    return write


STRIP = {"type": "Strip", "content": "a", "start": 5, "stop": 5}
NO_SPACE = {"type": "Replace", "pattern": {"String": ""}, "content": "b"}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"continuing_subword_prefix": "ByteLevel"}},  # panics
        {"model": {"continuing_subword_prefix": "x"}},  # ends the process
        {"decoder": STRIP},  # panics for single tokens only
        {
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": ""}, NO_SPACE]}
        },  # for some texts
    ],
)
def test_damage_ends_in_one_line(damaged, changes, capfd):
    directory = damaged(**changes)
    with pytest.raises(HydrajaxError, match=r"^draft: cannot read the tokenizer in "):
        load_tokenizer(directory, "draft")
    assert capfd.readouterr().err == ""  # no text of the panic


def test_other_text_on_stderr_is_kept(capfd):
    for text in (
        b"one\n\nthread '<unnamed>' (12) panicked at src/lib.rs:1:2:\nindex\nnote: run with\n",
        b"two, three\n",
    ):
        with without_panic_text():
            os.write(2, text)
    assert capfd.readouterr().err == "one\ntwo, three\n"
