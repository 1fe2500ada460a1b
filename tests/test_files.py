"""Directories with files that cannot be read to their end: every reader refuses them at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hydrajax.bench.report.outputs import find_results
from hydrajax.bench.shapes import PRESETS
from hydrajax.errors import HydrajaxError
from hydrajax.files import LONGEST_TEXT, check_directory
from hydrajax.formats.huggingface import load_llama, read_config
from hydrajax.formats.load import load_draft
from hydrajax.text.tokenizer import load_tokenizer

READERS = {
    "config.json": [read_config, load_llama, lambda folder: load_draft(folder, PRESETS["tiny"])],
    "tokenizer_config.json": [load_llama, load_tokenizer],
    "results.json": [find_results],
}


def test_a_file_without_end_is_refused_by_name(tmp_path):
    def put_much(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(LONGEST_TEXT + 1)

    def put_device(path: Path) -> None:
        path.symlink_to("/dev/zero")

    for put, said in (
        (os.mkfifo, "expected a regular file"),
        (put_device, "expected a regular file"),
        (put_much, f"{LONGEST_TEXT + 1} bytes"),
    ):
        for name, readers in READERS.items():
            folder = tmp_path / f"{put.__name__} {name}"
            folder.mkdir()
            (folder / "tokenizer.json").write_text("{}")
            put(folder / name)
            for read in readers:
                with pytest.raises(HydrajaxError, match=f"{name} .*{said}"):
                    read(folder)


def test_links_as_the_hub_makes_them_are_files(tmp_path):
    """A snapshot of huggingface_hub is links into another folder."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "x").write_text("{}")
    (tmp_path / "snapshot" / "more").mkdir(parents=True)
    for name in ("config.json", "more/y.json"):
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / "x")
    (tmp_path / "snapshot" / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "snapshot" / "circle").symlink_to(tmp_path / "snapshot")
    check_directory(tmp_path / "snapshot", "base")
    os.mkfifo(tmp_path / "snapshot" / "more" / "pipe")
    with pytest.raises(HydrajaxError, match=r"^base: .*more/pipe is a pipe or a device, expected a regular file$"):
        check_directory(tmp_path / "snapshot", "base")
