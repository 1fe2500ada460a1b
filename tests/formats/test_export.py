"""Exported draft heads load bit for bit, and golden heads keep every tensor of the official file."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from helpers.draft_heads import heads_of, identical, random_params
from helpers.released import refusal
from hydrajax.drafters.none import NoDrafter
from hydrajax.formats.export import export_heads
from hydrajax.formats.huggingface import load_llama
from hydrajax.formats.hydra_format import Hydra
from hydrajax.formats.load import load_draft


@pytest.mark.parametrize(("share", "dtype"), [(True, jnp.bfloat16), (False, jnp.float32)])
@pytest.mark.parametrize(
    ("kind", "arch", "grounded"),
    [
        ("hydra", "mlp", True),
        ("hydra++", "prefix-mlp", True),
        ("ungrounded", "mlp", False),
        ("ungrounded++", "prefix-mlp", False),
        ("medusa", None, None),
    ],
)
def test_heads_round_trip(tiny_model, tmp_path, kind, arch, grounded, share, dtype):
    model, _ = tiny_model
    drafter = heads_of(kind, model.config, n_layers=4, share_blocks=share, dtype=jnp.dtype(dtype))
    params = random_params(drafter, tiny_model)
    export_heads(tmp_path / "heads", drafter, params, base_name="the-base", dtype=dtype, extra={"steps": 10})
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert (config.get("hydra_head_arch"), config.get("grounded_heads")) == (arch, grounded)
    assert (config["base_model_name_or_path"], config["steps"]) == ("the-base", 10)
    loaded, ours = load_draft(tmp_path / "heads", model.config, dtype)
    assert loaded == drafter
    identical(params, ours, dtype)


@pytest.mark.parametrize("kind", ["hydra", "hydra++", "medusa"])
def test_one_layer_and_float32_as_bfloat16(tiny_model, tmp_path, kind):
    """The default dtype rounds to nearest even, as torch does."""
    model, _ = tiny_model
    drafter = heads_of(kind, model.config, n_layers=1)
    params = random_params(drafter, tiny_model)
    export_heads(tmp_path / "heads", drafter, params)
    loaded, ours = load_draft(tmp_path / "heads", model.config)
    assert loaded == drafter
    rounded = jax.tree.map(lambda x: torch.tensor(np.asarray(x)).bfloat16().float().numpy(), params)
    identical(rounded, ours, jnp.float32)


def test_dropout_is_not_written(tiny_model, tmp_path):
    model, _ = tiny_model
    drafter = heads_of("hydra", model.config, dropout=0.2)
    export_heads(tmp_path / "heads", drafter, random_params(drafter, tiny_model))
    assert load_draft(tmp_path / "heads", model.config)[0] == dataclasses.replace(drafter, dropout=0.0)


def test_hidden_state_offset(tiny_model, tmp_path):
    model, _ = tiny_model
    drafter = heads_of("hydra++", model.config, hidden_state_offset=1)
    export_heads(tmp_path / "heads", drafter, random_params(drafter, tiny_model))
    assert load_draft(tmp_path / "heads", model.config)[0].spec.aux_hidden_layers == (1,)


@pytest.mark.parametrize("arch", ["hydra_mlp", "hydra_pp"])
def test_golden_heads_keep_every_tensor(golden, tmp_path, arch):
    model, _ = load_llama(golden / "base" / "mha")
    source = golden / arch / "heads"
    drafter, params = load_draft(source, model.config)
    export_heads(tmp_path / "heads", drafter, params, dtype=None)
    original = load_file(source / "hydra_lm_head.safetensors")
    exported = load_file(tmp_path / "heads" / "hydra_lm_head.safetensors")
    theirs = {name for name in original if not re.fullmatch(Hydra.ignored, name)}
    assert len(theirs) > 10
    assert exported.keys() == theirs
    for name in theirs:
        np.testing.assert_array_equal(exported[name], original[name], err_msg=name)
    fields = json.loads((source / "config.json").read_text())
    written = json.loads((tmp_path / "heads" / "config.json").read_text())
    for field in fields.keys() - {"base_model_name_or_path", "transformers_version"}:
        assert written[field] == fields[field]


@pytest.mark.parametrize(("kind", "settings"), [("medusa++", {}), ("medusa", {"hidden_state_offset": 1})])
def test_heads_that_no_other_format_can_express_are_written_in_ours(tiny_model, tmp_path, kind, settings):
    drafter = heads_of(kind, tiny_model[0].config, **settings)
    export_heads(tmp_path / "heads", drafter, random_params(drafter, tiny_model), dtype=None)
    assert (tmp_path / "heads" / "params").is_dir()
    assert load_draft(tmp_path / "heads", tiny_model[0].config)[0] == drafter


def test_drafters_without_a_format(tmp_path):
    refusal(lambda: export_heads(tmp_path / "heads", NoDrafter(), {}), "export", "NoDrafter", "HydraHeads")
    assert list(tmp_path.iterdir()) == []
