"""`--draft mtp`: the module in the base's own files, through the commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hydrajax.drafters.mtp import MTP
from hydrajax.families.family_layout import decoder_layer
from hydrajax.formats.huggingface import read_config
from hydrajax.formats.tensors import save_safetensors
from hydrajax.models.layout import shapes

TEXT = ["--max-new-tokens", 16, "--limit", 2]


@pytest.fixture(scope="module")
def with_module(base, tmp_path_factory) -> Path:
    """The tiny base with a random module after its last layer."""
    folder = Path(shutil.copytree(base, tmp_path_factory.mktemp("mtp") / "tiny"))
    config = json.loads((folder / "config.json").read_text())
    layer, prefix = MTP.layer_of(read_config(folder)), f"model.layers.{config['num_hidden_layers']}."
    wanted = shapes(decoder_layer((), prefix, layer)) | {f"{prefix}eh_proj.weight": (layer.width, 2 * layer.width)}
    wanted |= {f"{prefix}{name}.weight": (layer.width,) for name in ("enorm", "hnorm", "shared_head.norm")}
    random = np.random.default_rng(0)
    own = {
        name: (0.3 * random.standard_normal(shape) + (len(shape) == 1)).astype(np.float32)
        for name, shape in wanted.items()
    }
    save_safetensors(folder / "model.safetensors", load_file(folder / "model.safetensors") | own)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder


def test_export_and_back(program, with_module, tmp_path):
    own, first, last = (tmp_path / name for name in ("own", "first", "last"))
    for draft, folder, flags in (("mtp", own, ["--format", "native"]), ("mtp", first, []), (own, last, [])):
        result = program("convert", "export", "--base", with_module, "--draft", draft, "--output", folder, *flags)
        assert result.err == ""
    own, tensors, again = (load_file(at / "model.safetensors") for at in (with_module, first, last))
    assert tensors.keys() == again.keys() == {name for name in own if name.startswith("model.layers.1.")}
    for name, x in tensors.items():
        np.testing.assert_array_equal(x, own[name])
        np.testing.assert_array_equal(x, again[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "tree"),
    [("greedy", "chain-3"), ("exact", "dynamic-8-2-3"), ("rejection", "dynamic-8-2-3"), ("typical", "chain-3")],
)
def test_certify(program, with_module, rule, tree):
    flags = [] if rule == "greedy" else ["--temperature", 0.8, "--samples", 1024]
    result = program("certify", "--base", with_module, "--draft", "mtp", "--tree", tree, "--rule", rule, *TEXT, *flags)
    assert result.out.endswith("\ncertified\n")
