"""The standard library as training text: deterministic, split by file, and packed without loss."""

from __future__ import annotations

import numpy as np
import pytest

from hydrajax.errors import HydrajaxError
from hydrajax.train import corpus


@pytest.fixture
def library(tmp_path):
    """A small stand-in for a library folder, with what must be left out."""
    for name, text in {
        "a.py": "x = 1\n" * 50,
        "pkg/b.py": "def f():\n    return 2\n" * 20,
        "pkg/c.py": "naïve = 'é'\n" * 20,
        "d.py": "import os\n" * 40,
        "test/test_a.py": "TEST\n",
        "pkg/tests/deep.py": "TEST\n",
        "site-packages/other.py": "OTHER\n",
        "notes.txt": "TEXT\n",
        "empty.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"caf\xe9 = 1\n")
    return tmp_path


def test_tests_packages_and_unreadable_files_are_left_out(library):
    names = {file.name for file in corpus.standard_library(10**6, library)}
    assert names == {"a.py", "pkg/b.py", "pkg/c.py", "d.py"}


def test_order_follows_the_seed_and_the_limit_holds(library):
    first, again = corpus.standard_library(10**6, library, seed=3), corpus.standard_library(10**6, library, seed=3)
    assert first == again
    orders = {tuple(file.name for file in corpus.standard_library(10**6, library, seed)) for seed in range(6)}
    assert len(orders) > 1
    assert sum(len(file.text) for file in corpus.standard_library(700, library)) <= 700


def test_the_running_python_has_a_library():
    files = corpus.standard_library(200_000)
    assert sum(len(file.text) for file in files) > 100_000
    assert not any("test" in file.name.split("/")[:-1] for file in files)


def test_a_folder_without_source_is_refused(tmp_path):
    with pytest.raises(HydrajaxError, match="no Python source files"):
        corpus.standard_library(1000, tmp_path)


def test_split_is_disjoint_and_complete(library):
    files = corpus.standard_library(10**6, library)
    train, held_out = corpus.split_files(files, 1)
    assert train + held_out == files
    assert len(held_out) == 1
    with pytest.raises(HydrajaxError, match="held_out: must be between 1 and 3 of 4 files, found 4"):
        corpus.split_files(files, 4)


def test_tokenizer_gives_text_back_and_pack_keeps_every_document(library):
    texts = [file.text for file in corpus.standard_library(10**6, library)]
    tokenizer = corpus.train_tokenizer(texts, 300)
    assert len(tokenizer) <= 300
    documents = [tokenizer.encode(text) for text in texts]
    for text, ids in zip(texts, documents, strict=True):
        assert tokenizer.decode(ids) == text
    windows = corpus.pack(documents, 16, tokenizer.eos_token_id)
    assert windows.shape[1] == 16
    stream = [token for ids in documents for token in [*ids, tokenizer.eos_token_id]]
    assert windows.reshape(-1).tolist() == stream[: windows.size]
    assert len(stream) - windows.size < 16
    with pytest.raises(HydrajaxError, match="vocab_size: must be at least 257"):
        corpus.train_tokenizer(texts, 100)
    with pytest.raises(HydrajaxError, match="window: 1000000 tokens are more than"):
        corpus.pack(documents, 10**6, 0)


def test_batches_visit_every_window_once_an_epoch_and_repeat_by_seed():
    windows = np.arange(12)[:, None] * np.ones((1, 3), np.int32)
    epochs = np.concatenate([batch[:, 0] for batch in corpus.batches(windows, 4, 6, seed=5)]).reshape(2, 12)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(12))
    assert epochs[0].tolist() != epochs[1].tolist()
    again = np.concatenate([batch[:, 0] for batch in corpus.batches(windows, 4, 6, seed=5)])
    np.testing.assert_array_equal(epochs.reshape(-1), again)
    with pytest.raises(HydrajaxError, match="batch_size: must be between 1 and 12 windows, found 13"):
        next(corpus.batches(windows, 13, 1, seed=0))
