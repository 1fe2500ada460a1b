"""The standard library as training text: deterministic, split by file, and packed without loss."""

import pytest

from helpers.refusals import assert_refused
from hydrajax.train.data import corpus


@pytest.fixture
def library(tmp_path):
    """A small stand-in for a library folder, with what must be left out."""
    for name, text in {
        "a.py": "x = 1\n" * 50, "pkg/b.py": "def f():\n    return 2\n" * 20, "pkg/c.py": "naïve = 'é'\n" * 20,
        "d.py": "import os\n" * 40, "test/test_a.py": "TEST\n", "pkg/tests/deep.py": "TEST\n",
        "site-packages/other.py": "OTHER\n", "notes.txt": "TEXT\n", "empty.py": "",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"caf\xe9 = 1\n")
    return tmp_path


def test_files_up_to_a_size_in_the_order_of_the_seed(library):
    """Tests, packages, unreadable, absent and empty files are left out."""
    names = {file.name for file in corpus.standard_library(10**6, library)}
    assert names == {"a.py", "pkg/b.py", "pkg/c.py", "d.py"}
    assert sum(len(file.text) for file in corpus.standard_library(700, library)) <= 700
    seeds = [0, 0, 1, 2, 3, 4, 5]
    orders = [tuple(file.name for file in corpus.standard_library(10**6, library, seed)) for seed in seeds]
    assert orders[0] == orders[1]
    assert len(set(orders)) > 1
    listed = ["a.py", "pkg/b.py", "pkg/c.py", "pkg/absent.py", "empty.py"]
    found = {file.name for file in corpus.as_many_as_fit(listed, library, 10**6, seed=0)}
    assert found == {"a.py", "pkg/b.py", "pkg/c.py"}
    assert len(list(corpus.as_many_as_fit(listed, library, 700, seed=0))) == 2


def test_the_running_python_has_a_library():
    files = corpus.standard_library(200_000)
    assert sum(len(file.text) for file in files) > 100_000
    assert not any("test" in file.name.split("/")[:-1] for file in files)


def test_tokenizer_gives_text_back(library):
    texts = [file.text for file in corpus.standard_library(10**6, library)]
    tokenizer = corpus.train_tokenizer(texts, 300)
    assert len(tokenizer) <= 300
    documents = [tokenizer.encode(text) for text in texts]
    for text, ids in zip(texts, documents, strict=True):
        assert tokenizer.decode(ids) == text
    assert_refused(corpus.train_tokenizer, (texts, 100, "vocab_size: got 100, expected at least 257"))
    (library / "empty").mkdir()
    assert_refused(corpus.standard_library, (1000, library / "empty", "found no Python source"))
