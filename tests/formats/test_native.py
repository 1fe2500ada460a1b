"""Draft heads in our own format: loaded bit for bit with the same drafter, and refused if any byte has changed."""

import dataclasses
import gc
import json
import math
import shutil
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from orbax.checkpoint import StandardCheckpointer

from helpers import draft_heads
from helpers.draft_heads import VOCAB, config_in, identical, random_params
from helpers.released import refusal
from hydrajax.amphista.heads import AmphistaHeads
from hydrajax.drafters.draft_lm_head import LmHead
from hydrajax.drafters.vocabulary import Vocabulary
from hydrajax.formats.export import export_heads
from hydrajax.formats.load import load_draft

heads_of = partial(draft_heads.heads_of, num_draft_heads=2, n_layers=3)
SEPARATE = {"share_blocks": False, "hidden_state_offset": 1, "dropout": 0.25}
OTHERS = {  # the kind, or amphista; settings
    "separate blocks": ("hydra++", SEPARATE),
    "in bfloat16": ("ungrounded", SEPARATE | {"dtype": jnp.dtype(jnp.bfloat16)}),
    "amphista's alpha": (
        "amphista", {"auto_embedding_layers": 2, "mlp_width": 20, "small_lm_head": LmHead(rank=5)}
    ),
    "amphista, ablated": (
        "amphista",
        {"num_draft_heads": 3, "adaptation_layers": 1, "reads_token": False, "position_encoding": False},
    ),
    "shared lm head": ("medusa", {"small_lm_head": LmHead(shared=True)}),
    "clustered lm head": ("medusa", {"small_lm_head": LmHead(shared=True, clustered=True)}),
    "lm head of low rank": ("hydra++", {"small_lm_head": LmHead(bias=True, rank=5)}),
    "lm head of some tokens": ("medusa", {"small_lm_head": LmHead(vocabulary=Vocabulary([60, 3, 7]))}),
    "lm head of both": ("hydra++", {"small_lm_head": LmHead(bias=True, rank=2, vocabulary=Vocabulary(range(9)))}),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_settings_that_no_other_format_has(tiny_model, tmp_path, name):
    """Plain heads are in tests/formats/test_conformance.py."""
    kind, settings = OTHERS[name]
    config = tiny_model[0].config
    if kind == "amphista":
        drafter = dataclasses.replace(AmphistaHeads.for_base(config, jnp.float32), **settings)
    else:
        drafter = heads_of(kind, config, **settings)
    params = random_params(drafter, tiny_model)
    export_heads(tmp_path / "heads", drafter, params, format="native", dtype=None)
    loaded, ours = load_draft(tmp_path / "heads", config, None)
    assert loaded == drafter
    identical(params, ours)
    if "small_lm_head" in settings:
        for format in ("hydra", "medusa", "vllm-medusa"):
            refusal(lambda format=format: export_heads(tmp_path / "other", drafter, params, format=format), "export: ")
        assert not (tmp_path / "other").exists()


def test_a_relative_path_which_no_file_names(tiny_model, tmp_path, monkeypatch):
    drafter = heads_of("medusa")
    params = random_params(drafter, tiny_model)
    monkeypatch.chdir(tmp_path)
    export_heads("heads", drafter, params, format="native", dtype=None)
    loaded, ours = load_draft("heads", tiny_model[0].config, None)
    assert loaded == drafter
    identical(params, ours)
    files = [path for path in (tmp_path / "heads").rglob("*") if path.is_file()]
    assert files
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in files)


def test_settings_that_an_older_file_does_not_have(tiny_model, tmp_path):
    """Missing settings get the defaults."""
    drafter = heads_of("medusa", n_layers=1)
    params = random_params(drafter, tiny_model)
    export_heads(tmp_path, drafter, params, format="native", dtype=None)
    settings = config_in(tmp_path)["drafter"]["settings"]
    old = {name: settings[name] for name in ("num_draft_heads", "width", "vocab_size", "dtype")}
    with rewritten(tmp_path, "drafter", "settings", to=old):
        loaded, ours = load_draft(tmp_path, tiny_model[0].config, None)
    assert loaded == drafter
    identical(params, ours)


def test_dtype_of_the_file_and_of_what_is_loaded(tiny_model, tmp_path):
    """Rounded once, as torch rounds. The arrays may go to any device."""
    drafter = heads_of("medusa")
    in_half = heads_of("medusa", dtype=jnp.dtype(jnp.bfloat16))
    params = random_params(drafter, tiny_model)
    rounded = jax.tree.map(lambda x: torch.tensor(np.asarray(x)).bfloat16().float().numpy(), params)
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), rounded)
    export_heads(tmp_path / "whole", drafter, params, format="native", dtype=None)
    export_heads(tmp_path / "half", drafter, params, format="native")
    for folder, dtype, expected, known_as in (
        ("whole", None, params, drafter),
        ("whole", jnp.bfloat16, half, in_half),
        ("half", None, half, in_half),
        ("half", jnp.float32, rounded, drafter),
    ):
        loaded, ours = load_draft(tmp_path / folder, tiny_model[0].config, dtype)
        assert loaded == known_as
        identical(expected, ours)
        assert not any(leaf.committed for leaf in jax.tree.leaves(ours))


def test_matrices_in_int8(tiny_model, tmp_path):
    """Each output's largest weight becomes 127, as in an independent formula; biases and norms keep every bit."""
    config = tiny_model[0].config
    drafter = heads_of("hydra++", config)
    params = random_params(drafter, tiny_model)
    for name, dtype in (("int8", jnp.int8), ("float", None)):
        export_heads(tmp_path / name, drafter, params, format="native", dtype=dtype)
    loaded, ours = load_draft(tmp_path / "int8", config, None)
    assert loaded == drafter

    def expected(x):
        x = np.asarray(x)
        if x.ndim == 1 or len(x) == 2:  # norms, biases, and biases of two fused layers
            return x
        steps = np.maximum(np.abs(x).max(axis=0), 1e-30) / 127
        return np.round(x / steps) * steps

    def close(x, y):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)

    jax.tree.map(close, ours, jax.tree.map(expected, params))
    assert any(np.any(np.asarray(x) != y) for x, y in zip(*map(jax.tree.leaves, (params, ours)), strict=True))
    # Of the stored arrays: orbax's own files vary in number and size with the timing of its writes.
    stored = [StandardCheckpointer().metadata(tmp_path / name / "params" / "state") for name in ("int8", "float")]
    sizes = [
        sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree.item_metadata.tree)) for tree in stored
    ]
    assert sizes[0] < 0.6 * sizes[1]
    text = refusal(
        lambda: export_heads(tmp_path / "other", drafter, params, format="hydra", dtype=jnp.int8), "export: "
    )
    assert "dtype: got int8 for the format hydra, expected native" in text


def refused(directory: Path, config, *pieces: str) -> str:
    return refusal(lambda: load_draft(directory, config), *pieces)


@pytest.fixture(scope="module")
def written(tiny_model, tmp_path_factory) -> Path:
    """Hydra++ heads, which tests must not change."""
    folder = tmp_path_factory.mktemp("native") / "heads"
    drafter = heads_of("hydra++", tiny_model[0].config)
    export_heads(folder, drafter, random_params(drafter, tiny_model), format="native", dtype=None)
    return folder


@pytest.fixture
def copied(written, tmp_path) -> Path:
    return shutil.copytree(written, tmp_path / "heads")


def files_of(folder: Path) -> list[Path]:
    files = sorted(path for path in (folder / "params").rglob("*") if path.is_file())
    assert len(files) > 5
    return files


def test_every_byte_counts(tiny_model, copied):
    """One bit of each file at its start, middle and end; files that are shorter, longer, missing or a circular link."""
    config = tiny_model[0].config
    for path in files_of(copied):
        whole = path.read_bytes()
        changed = {whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0"} - {whole}
        for place in {0, len(whole) // 2, len(whole) - 1} if whole else ():
            changed.add(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        for content in changed:
            path.write_bytes(content)
            refused(copied, config, "draft", str(path), "damaged")
        path.unlink()
        refused(copied, config, "draft", f"{path.relative_to(copied)} is missing from {copied}")
        path.symlink_to(path)
        refused(copied, config, "draft", f"{path.relative_to(copied)} is missing from {copied}")
        path.unlink()
        path.write_bytes(whole)
    load_draft(copied, config)


def test_files_that_were_not_written(tiny_model, copied):
    for name in ("params/notes.txt", "params/d/0a1b", "params/.hidden"):
        (copied / name).parent.mkdir(exist_ok=True)
        (copied / name).touch()
        refused(copied, tiny_model[0].config, "draft", name, "not written")
        (copied / name).unlink()
    shutil.rmtree(copied / "params")
    refused(copied, tiny_model[0].config, "draft", "params/", "is missing from")
    (copied / "params").touch()
    refused(copied, tiny_model[0].config, "draft", "params/", "is missing from")


def test_other_files_in_the_directory_may_be_anything(tiny_model, copied):
    """The Hub adds .gitattributes, and users edit the model card."""
    (copied / "README.md").write_text("better")
    (copied / ".gitattributes").touch()
    (copied / "notes").mkdir()
    load_draft(copied, tiny_model[0].config)


ABSENT = object()


@contextmanager
def rewritten(folder: Path, *path: str, to):
    """Replace or remove a field of config.json, given by its path, for the duration of the block."""
    file = folder / "config.json"
    before = file.read_text()
    config = json.loads(before)
    at = config
    for name in path[:-1]:
        at = at[name]
    if to is ABSENT:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    file.write_text(json.dumps(config))
    yield
    file.write_text(before)


SMALL = {"bias": True, "shared": False, "rank": 3, "vocabulary": [1, 2]}
REFUSED = [  # path of the field, values, the message; other types are in tests/formats/test_conformance.py
    ("hydrajax_draft", [3, 0, "1", None, [1], 1.5], "hydrajax_draft: got"),
    ("drafter", [ABSENT, None, {}, [], "params", 3], "drafter is invalid"),
    ("files", [ABSENT, None, {}, [], "params", 3], "files: got"),
    ("drafter.heads", [ABSENT, None, "eagle", "swan", "Hydra", ["hydra"], {}, 3], ""),
    ("drafter.settings", [ABSENT, None, {}, [], "num_draft_heads", 3], "drafter is invalid"),
    ("drafter.prefix", [ABSENT, None, "yes", 1, [], {}], ""),
    ("drafter.prefix_window", [0, -1, True, 2.0, "5", [5], {}], "prefix_window: got"),
    ("drafter.settings.num_draft_heads", [ABSENT, 3.0, 0, 1, 3, 200, 256], ""),
    ("drafter.settings.n_layers", [3.0, 0, 1], ""),
    ("drafter.settings.width", [ABSENT, 0, -32, 31], ""),
    ("drafter.settings.vocab_size", [ABSENT, 0, -61, 62], ""),
    ("drafter.settings.hidden_state_offset", [3], "hidden_state_offset: got 3, expected 0 to 2"),  # of two layers
    ("drafter.settings.share_blocks", [0, 1, "true", False], ""),
    ("drafter.settings.dropout", ["0.1", -0.1, 1.0, 1.5, float("nan"), [0.1]], ""),
    (
        "drafter.settings.dtype",
        [ABSENT, 3, "", "int32", "bool", "complex64", "object", "U5", ["float32"], {"a": 1}],
        "",
    ),
    (
        "drafter.settings.small_lm_head",
        [3, "full", [], {}, SMALL | {"bias": 1}, SMALL | {"shared": None}, SMALL | {"vocabulary": 3}]
        + [SMALL | {"rank": rank} for rank in (0, -1, "3", True, 10**9, 10**20)]
        + [SMALL | {"vocabulary": tokens} for tokens in ([], [-1], [VOCAB], [1.0], ["1"], [[1]], [10**20])]
        + [SMALL, SMALL | {"shared": True}],  # no such were written
        "",
    ),
    ("drafter.settings.lm_head_bias", [False], "drafter is invalid"),  # of Medusa heads
    ("drafter.settings.__class__", [False], "drafter is invalid"),
    (
        "drafter.settings.small_lm_head",
        [SMALL | {"vocabulary": [VOCAB]}],
        f"vocabulary of small_lm_head: got token {VOCAB}",
    ),
    ("drafter.settings.small_lm_head", [SMALL | {"rank": 33}], "rank of small_lm_head: got 33, expected at most"),
]


@pytest.mark.parametrize(("path", "values", "message"), REFUSED, ids=[path for path, _, _ in REFUSED])
def test_fields_that_were_not_written(tiny_model, copied, path, values, message):
    for value in values:
        with rewritten(copied, *path.split("."), to=value):
            refused(copied, tiny_model[0].config, "draft", message)


def test_other_versions_and_kinds(tiny_model, copied):
    config = tiny_model[0].config
    with rewritten(copied, "hydrajax_draft", to=2):  # int8, which these are not
        refused(copied, config, "draft", "params is damaged")
    with rewritten(copied, "hydrajax_draft", to=ABSENT):
        refused(copied, config, "draft", "no draft heads of a supported format")
    settings = config_in(copied)["drafter"]["settings"] | {"lm_head_bias": True}
    with rewritten(copied, "drafter", to={"heads": "medusa", "prefix": True, "settings": settings}):
        refused(copied, config, "draft", "another base")
    with rewritten(copied, "drafter", "prefix", to=False):
        refused(copied, config, "draft", "another base")
    refused(copied, config.replace(width=64), "draft", "made for another base", "width: got 32, expected 64")
    refused(copied, config.replace(vocab_size=62), "draft", "made for another base", "vocabulary: got 61, expected 62")


def test_checksums_of_other_files(tiny_model, copied):
    name = next(iter(config_in(copied)["files"]))
    for value in (None, [], {}, [1], [1, 2, 3], "x", [0, 0]):
        with rewritten(copied, "files", name, to=value):
            refused(copied, tiny_model[0].config, "draft", name)
    (copied.parent / "outside").touch()
    for name in ("config.json", "../outside", "/etc/hostname", "params", "params/", "a\nb", "\ud800"):
        with rewritten(copied, "files", name, to=[0, 0]):
            refused(copied, tiny_model[0].config, "draft", name.replace("\n", " ").replace("\ud800", ""))


@pytest.mark.parametrize("change", [{"n_kv_heads": 4}, {"mlp_width": 96}, {"head_dim": 16}], ids=str)
def test_a_prefix_layer_of_another_base(tiny_model, copied, change, monkeypatch):
    """In one line, with no later complaint of a background task."""
    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    refused(copied, tiny_model[0].config.replace(**change), "draft")
    gc.collect(1)  # all that is new
    assert not complaints
