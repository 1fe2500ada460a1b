"""Draft heads in our own format: loaded bit for bit with the same drafter, and refused if any byte has changed."""

from __future__ import annotations

import copy
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
from helpers.draft_heads import VOCAB, WIDTH, identical
from helpers.released import refusal
from hydrajax.amphista.heads import AmphistaHeads
from hydrajax.drafters import head_stack as heads_module
from hydrajax.drafters.draft_lm_head import LmHead, Vocabulary
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.formats.export import export_heads
from hydrajax.formats.load import load_draft

KINDS = ["hydra", "hydra++", "medusa", "medusa++", "ungrounded"]
heads_of = partial(draft_heads.heads_of, num_draft_heads=2, n_layers=3)


def shapes_of(drafter) -> dict[str, tuple[int, ...]]:
    """Every parameter by its path, from the formulas of the papers and the layout of `hydrajax.drafters.head_stack`."""
    heads, shapes = drafter, {}
    for k in range(heads.num_draft_heads):
        head = {"lm_kernel": (WIDTH, VOCAB)}
        plain = heads.n_layers
        if isinstance(heads, HydraHeads):
            plain -= 1
            head |= {"conditioned.shared_kernel": (2 * WIDTH, 2, WIDTH), "conditioned.bias": (2, WIDTH)}
            if k:
                head["conditioned.path_kernel"] = (k * WIDTH, 2, WIDTH)
        if isinstance(heads, HydraHeads) or heads.lm_head_bias:
            head["lm_bias"] = (VOCAB,)
        for i in range(min(plain, 1) if heads.share_blocks else plain):
            head |= {f"blocks_{i}.kernel": (WIDTH, WIDTH), f"blocks_{i}.bias": (WIDTH,)}
        shapes |= {f"head_{k}.{name}": shape for name, shape in head.items()}
    if drafter.prefix is None:
        return shapes
    c = drafter.prefix.config
    layer = {
        "qkv": (WIDTH, c.n_kv_heads, c.n_heads // c.n_kv_heads + 2, c.head_dim),
        "out": (c.n_heads * c.head_dim, WIDTH),
        "gate_up": (WIDTH, 2, c.mlp_width),
        "down": (c.mlp_width, WIDTH),
        "attention_norm.scale": (WIDTH,),
        "mlp_norm.scale": (WIDTH,),
    }
    shapes = {f"heads.{name}": shape for name, shape in shapes.items()}
    return shapes | {f"prefix.layer.{name}": shape for name, shape in layer.items()} | {"prefix.norm.scale": (WIDTH,)}


def random_params(drafter, dtype=np.float32) -> dict:
    """Random bit patterns, so also huge and subnormal numbers and negative zeros, but no NaN."""
    random, tree = np.random.default_rng(4), {}
    for name, shape in shapes_of(drafter).items():
        *parents, last = name.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        bits = random.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
        array = bits.view(dtype).reshape(shape)
        with np.errstate(invalid="ignore"):
            at[last] = jnp.asarray(np.where(np.isfinite(array), array, np.array(-0.0, dtype)).astype(dtype))
    return tree


@pytest.mark.parametrize(("share", "dtype"), [(True, jnp.bfloat16), (False, jnp.float32)], ids=["shared", "separate"])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(tiny_model, tmp_path, kind, share, dtype):
    config = tiny_model[0].config
    drafter = heads_of(kind, config, share_blocks=share, dtype=jnp.dtype(dtype), hidden_state_offset=1, dropout=0.25)
    params = random_params(drafter, dtype)
    export_heads(tmp_path / "heads", drafter, params, format="native", dtype=None)
    loaded, ours = load_draft(tmp_path / "heads", config, None)
    assert loaded == drafter
    identical(params, ours)


@pytest.mark.parametrize("format", ["native", "hydra"])
def test_the_prefix_layers_window(tiny_model, tmp_path, format):
    config = tiny_model[0].config
    drafter = heads_of("hydra++", config).with_prefix(config, 5)
    export_heads(tmp_path / "heads", drafter, random_params(drafter), format=format, dtype=None)
    assert load_draft(tmp_path / "heads", config, None)[0].prefix.window == 5


AMPHISTA = {
    "": {},
    "alpha": {"auto_embedding_layers": 2, "mlp_width": 20, "small_lm_head": LmHead(rank=5)},
    "ablated": {"num_draft_heads": 3, "adaptation_layers": 1, "reads_token": False, "position_encoding": False},
}


@pytest.mark.parametrize("name", AMPHISTA)
def test_amphista(tiny_model, tmp_path, name):
    config = tiny_model[0].config
    drafter = dataclasses.replace(AmphistaHeads.for_base(config, jnp.float32), **AMPHISTA[name])
    params = draft_heads.random_params(drafter, tiny_model)
    export_heads(tmp_path / "heads", drafter, params, dtype=None)
    loaded, ours = load_draft(tmp_path / "heads", config, None)
    assert loaded == drafter
    identical(params, ours)
    if name:
        return
    for setting, values in {
        "num_draft_heads": [1, 0, 10**9, "4", None],
        "adaptation_layers": [-1, 1, 5, 2.0, "2"],
        "auto_embedding_layers": [-1, 0, 10**9, True],
        "position_encoding": [0, "yes", False],
        "reads_token": [None, 1, False],
        "mlp_width": [0, -1, 7, 10**9, "80", 8.0, True],
        "config": [3, {}, {"width": 1}, {"n_layers": 2}],
        "share_blocks": [True],
    }.items():
        for value in values:
            if setting == "config" and value and value != 3:
                value = dataclasses.asdict(drafter.config) | value
            with rewritten(tmp_path / "heads", "drafter", "settings", setting, to=value):
                refused(tmp_path / "heads", config, "draft")
    with rewritten(tmp_path / "heads", "drafter", "prefix", to=True):
        refused(tmp_path / "heads", config, "draft", "amphista has no prefix layer")


SMALL_LM_HEADS = [
    LmHead(shared=True),
    LmHead(bias=True, rank=5),
    LmHead(vocabulary=Vocabulary([60, 3, 7])),
    LmHead(bias=True, rank=2, vocabulary=Vocabulary(range(9))),
]


@pytest.mark.parametrize(("kind", "lm_head"), [*zip(["medusa", "hydra++"] * 2, SMALL_LM_HEADS, strict=True)], ids=str)
def test_small_lm_heads(tiny_model, tmp_path, kind, lm_head):
    """They load again, and other formats, which cannot express them, refuse them."""
    config = tiny_model[0].config
    drafter = heads_of(kind, config, num_draft_heads=1, n_layers=1, small_lm_head=lm_head)
    params = draft_heads.random_params(drafter, tiny_model)
    export_heads(tmp_path / "heads", drafter, params, dtype=None)
    loaded, ours = load_draft(tmp_path / "heads", config, None)
    assert loaded == drafter
    identical(params, ours)
    for format in ("hydra", "medusa", "vllm-medusa"):
        refusal(lambda format=format: export_heads(tmp_path / "other", drafter, params, format=format), "export: ")
    assert not (tmp_path / "other").exists()


def test_a_relative_path(tiny_model, tmp_path, monkeypatch):
    drafter = heads_of("medusa", tiny_model[0].config)
    params = random_params(drafter)
    monkeypatch.chdir(tmp_path)
    export_heads("heads", drafter, params, format="native", dtype=None)
    loaded, ours = load_draft("heads", tiny_model[0].config, None)
    assert loaded == drafter
    identical(params, ours)


def test_no_file_names_where_it_was_written(tiny_model, tmp_path):
    drafter = heads_of("medusa", tiny_model[0].config)
    export_heads(tmp_path / "heads", drafter, random_params(drafter), format="native", dtype=None)
    files = [path for path in (tmp_path / "heads").rglob("*") if path.is_file()]
    assert files
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in files)


def test_loaded_arrays_may_go_to_any_device(tiny_model, tmp_path):
    drafter = heads_of("medusa", tiny_model[0].config)
    export_heads(tmp_path / "heads", drafter, random_params(drafter), format="native", dtype=None)
    for dtype in (None, jnp.float16):
        _, ours = load_draft(tmp_path / "heads", tiny_model[0].config, dtype)
        assert not any(leaf.committed for leaf in jax.tree.leaves(ours))


def test_settings_that_an_older_file_does_not_have(tiny_model, tmp_path):
    """Missing settings get the defaults."""
    config = tiny_model[0].config
    drafter = heads_of("medusa", config, n_layers=1)
    params = random_params(drafter)
    export_heads(tmp_path / "heads", drafter, params, format="native", dtype=None)
    settings = json.loads((tmp_path / "heads" / "config.json").read_text())["drafter"]["settings"]
    old = {name: settings[name] for name in ("num_draft_heads", "width", "vocab_size", "dtype")}
    with rewritten(tmp_path / "heads", "drafter", "settings", to=old):
        loaded, ours = load_draft(tmp_path / "heads", config, None)
    assert loaded == drafter
    identical(params, ours)


@pytest.mark.parametrize("kind", ["hydra++", "medusa"])
@pytest.mark.quick("medusa")
def test_dtype_of_the_file_and_of_what_is_loaded(tiny_model, tmp_path, kind):
    """Rounded once, as torch rounds."""
    config = tiny_model[0].config
    drafter = heads_of(kind, config)
    params = jax.tree.map(
        lambda x: np.random.default_rng(1).standard_normal(x.shape, np.float32), random_params(drafter)
    )
    rounded = jax.tree.map(lambda x: torch.tensor(x).bfloat16().float().numpy(), params)
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), rounded)
    export_heads(tmp_path / "whole", drafter, params, format="native", dtype=None)
    export_heads(tmp_path / "half", drafter, params, format="native")
    in_half = heads_of(kind, config, dtype=jnp.dtype(jnp.bfloat16))
    for folder, dtype, expected, known_as in (
        ("whole", None, params, drafter),
        ("whole", jnp.float32, params, drafter),
        ("whole", jnp.bfloat16, half, in_half),
        ("half", None, half, in_half),
        ("half", jnp.bfloat16, half, in_half),
        ("half", jnp.float32, rounded, drafter),
    ):
        loaded, ours = load_draft(tmp_path / folder, config, dtype)
        assert loaded == known_as
        identical(expected, ours)


@pytest.mark.parametrize("kind", ["hydra++", "medusa"])
@pytest.mark.quick("hydra++")
def test_matrices_in_int8(tiny_model, tmp_path, kind):
    """Each output's largest weight becomes 127, as in an independent formula; biases and norms keep every bit."""
    config = tiny_model[0].config
    drafter = heads_of(kind, config)
    params = draft_heads.random_params(drafter, tiny_model)
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


# --- what is refused ------------------------------------------------------------------------------------------


def refused(directory: Path, config, *pieces: str) -> str:
    return refusal(lambda: load_draft(directory, config), *pieces)


@pytest.fixture(scope="module")
def written(tiny_model, tmp_path_factory) -> Path:
    """Hydra++ heads, which tests must not change."""
    folder = tmp_path_factory.mktemp("native") / "heads"
    drafter = heads_of("hydra++", tiny_model[0].config)
    export_heads(folder, drafter, random_params(drafter), format="native", dtype=None)
    return folder


@pytest.fixture
def copied(written, tmp_path) -> Path:
    return shutil.copytree(written, tmp_path / "heads")


def files_of(folder: Path) -> list[Path]:
    files = sorted(path for path in (folder / "params").rglob("*") if path.is_file())
    assert len(files) > 5
    return files


def test_every_byte_counts(tiny_model, copied):
    """One bit of each file, at its start, middle and end."""
    config = tiny_model[0].config
    for path in files_of(copied):
        whole = path.read_bytes()
        for place in {0, len(whole) // 2, len(whole) - 1} if whole else ():
            changed = bytearray(whole)
            changed[place] ^= 1
            path.write_bytes(changed)
            refused(copied, config, "draft", str(path), "damaged")
        path.write_bytes(whole)
    load_draft(copied, config)


def test_truncated_longer_and_missing_files(tiny_model, copied):
    config = tiny_model[0].config
    for path in files_of(copied):
        whole = path.read_bytes()
        for content in {whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0"} - {whole}:
            path.write_bytes(content)
            refused(copied, config, "draft", str(path), "damaged")
        path.unlink()
        refused(copied, config, "draft", f"{path.relative_to(copied)} is missing from {copied}")
        path.write_bytes(whole)
    load_draft(copied, config)


def test_a_link_in_a_circle_for_a_file(tiny_model, copied):
    path = files_of(copied)[0]
    path.unlink()
    path.symlink_to(path)
    refused(copied, tiny_model[0].config, "draft", f"{path.relative_to(copied)} is missing from {copied}")


@pytest.mark.parametrize("name", ["params/notes.txt", "params/d/0a1b", "params/.hidden"])
def test_file_that_was_not_written(tiny_model, copied, name):
    (copied / name).parent.mkdir(exist_ok=True)
    (copied / name).touch()
    refused(copied, tiny_model[0].config, "draft", name, "not written")


def test_no_parameters(tiny_model, copied):
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


def test_other_versions(tiny_model, copied):
    for version in (3, 0, "1", None, [1], 1.5):
        with rewritten(copied, "hydrajax_draft", to=version):
            refused(copied, tiny_model[0].config, "draft", "hydrajax_draft", repr(version), "1 or 2")
    with rewritten(copied, "hydrajax_draft", to=2):  # int8, which these are not
        refused(copied, tiny_model[0].config, "draft", "params is damaged")


def test_without_the_version_the_format_is_unknown(tiny_model, copied):
    with rewritten(copied, "hydrajax_draft", to=ABSENT):
        refused(copied, tiny_model[0].config, "draft", "no draft heads of a supported format")


@pytest.mark.parametrize(
    "to", [ABSENT, None, {}, [], "params", 3], ids=lambda to: "absent" if to is ABSENT else repr(to)
)
@pytest.mark.parametrize("field", ["drafter", "files"])
def test_fields_of_the_wrong_type(tiny_model, copied, field, to):
    with rewritten(copied, field, to=to):
        refused(copied, tiny_model[0].config, "draft", "config.json", field)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("heads", [ABSENT, None, "eagle", "swan", "Hydra", ["hydra"], {}, 3]),
        ("settings", [ABSENT, None, {}, [], "num_draft_heads", 3]),
        ("prefix", [ABSENT, None, "yes", 1, [], {}]),
        ("prefix_window", [0, -1, True, 2.0, "5", [5], {}]),
    ],
)
def test_the_drafter_of_the_wrong_type(tiny_model, copied, field, values):
    for value in values:
        with rewritten(copied, "drafter", field, to=value):
            refused(copied, tiny_model[0].config, "draft")


SMALL = {"bias": True, "shared": False, "rank": 3, "vocabulary": [1, 2]}
NUMBERS = [ABSENT, None, "3", 3.0, True, [3], {}]
SETTINGS = {
    "num_draft_heads": [*NUMBERS, 0, -1, 1, 3],
    "n_layers": [*NUMBERS, 0, -1, 1],
    "width": [*NUMBERS, 0, -32, 31],
    "vocab_size": [*NUMBERS, 0, -61, 62],
    "hidden_state_offset": [*NUMBERS[1:], -1, 3],  # the base has two layers
    "share_blocks": [None, 0, 1, "true", False],
    "dropout": [None, "0.1", -0.1, 1.0, 1.5, float("nan"), [0.1]],
    "small_lm_head": [3, "full", [], {}, SMALL | {"bias": 1}, SMALL | {"shared": None}, SMALL | {"vocabulary": 3}]
    + [SMALL | {"rank": rank} for rank in (0, -1, "3", True, 10**9, 10**20)]
    + [SMALL | {"vocabulary": tokens} for tokens in ([], [-1], [VOCAB], [1.0], ["1"], [[1]], [10**20])]
    + [SMALL, SMALL | {"shared": True}],  # no such were written
    "dtype": [ABSENT, None, 3, "", "int32", "bool", "complex64", "object", "U5", "float33", ["float32"]],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_were_not_written(tiny_model, copied, name):
    for value in SETTINGS[name]:
        with rewritten(copied, "drafter", "settings", name, to=value):
            refused(copied, tiny_model[0].config)


def test_unknown_settings(tiny_model, copied):
    for name in ("lm_head_bias", "parent", "__class__"):  # the first is one of Medusa heads
        with rewritten(copied, "drafter", "settings", name, to=False):
            refused(copied, tiny_model[0].config, "draft", "drafter", name)


def test_heads_of_the_other_kind(tiny_model, copied):
    config = json.loads((copied / "config.json").read_text())
    settings = copy.deepcopy(config["drafter"]["settings"]) | {"lm_head_bias": True}
    with rewritten(copied, "drafter", to={"heads": "medusa", "prefix": True, "settings": settings}):
        refused(copied, tiny_model[0].config, "draft", "another base")
    with rewritten(copied, "drafter", "prefix", to=False):
        refused(copied, tiny_model[0].config, "draft", "another base")


@pytest.mark.parametrize("name", ["num_draft_heads", "n_layers"])
def test_a_slip_in_a_number_is_refused_at_once(tiny_model, tmp_path, monkeypatch, name):
    """A billion heads or blocks must be refused before they are listed."""
    drafter = heads_of("medusa", None, share_blocks=False)
    export_heads(tmp_path / "heads", drafter, random_params(drafter), format="native", dtype=None)
    made = 0

    def counted(make):
        def call(*args, **settings):
            nonlocal made
            made += 1
            if made > 100:
                pytest.fail("lists them all")
            return make(*args, **settings)

        return call

    monkeypatch.setattr(MedusaHeads, "head", counted(MedusaHeads.head))
    monkeypatch.setattr(heads_module, "ResidualBlock", counted(heads_module.ResidualBlock))
    with rewritten(tmp_path / "heads", "drafter", "settings", name, to=10**9):
        refused(tmp_path / "heads", tiny_model[0].config)


@pytest.mark.parametrize("value", [None, [], {}, [1], [1, 2, 3], "x", [0, 0]])
def test_checksums_of_the_wrong_type(tiny_model, copied, value):
    name = next(iter(json.loads((copied / "config.json").read_text())["files"]))
    with rewritten(copied, "files", name, to=value):
        refused(copied, tiny_model[0].config, "draft", name)


@pytest.mark.parametrize("name", ["config.json", "../outside", "/etc/hostname", "params", "params/"])
def test_files_that_are_none_of_the_parameters(tiny_model, copied, name):
    (copied.parent / "outside").touch()
    with rewritten(copied, "files", name, to=[0, 0]):
        refused(copied, tiny_model[0].config, "draft", name)


def test_another_base(tiny_model, copied):
    config = tiny_model[0].config
    refused(copied, config.replace(width=64), "draft", "made for another base", "width: got 32, expected 64")
    refused(copied, config.replace(vocab_size=62), "draft", "made for another base", "vocabulary: got 61, expected 62")


@pytest.mark.quick("{'n_kv_heads': 4}")
@pytest.mark.parametrize("change", [{"n_kv_heads": 4}, {"mlp_width": 96}, {"head_dim": 16}], ids=str)
def test_a_prefix_layer_of_another_base(tiny_model, copied, change, monkeypatch):
    """In one line, with no later complaint of a background task."""
    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    refused(copied, tiny_model[0].config.replace(**change), "draft")
    gc.collect(1)  # all that is new
    assert not complaints
