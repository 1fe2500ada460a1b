"""Loading a tokenizer: without torch where the files allow it, and equal to what AutoTokenizer loads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from hydrajax import assets
from hydrajax.text.tokenizer import load_tokenizer

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
