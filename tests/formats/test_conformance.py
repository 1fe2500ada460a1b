"""Every format of heads: what is written is read back and written again, and what is damaged is refused by its name."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from orbax.checkpoint import v1 as ocp
from safetensors.torch import load_file, save_file

from helpers.draft_heads import config_in, identical
from helpers.every_format import BASE, HEADS, params_of
from helpers.recordings import need
from helpers.released import refusal
from hydrajax.errors import HydrajaxError
from hydrajax.formats import native
from hydrajax.formats.export import NATIVE, WRITTEN, export_heads
from hydrajax.formats.fingerprint import fingerprint
from hydrajax.formats.huggingface import read_config
from hydrajax.formats.load import load_draft

FOREIGN = [*(name for name, (_, format, _) in HEADS.items() if format != NATIVE), "medusa_2"]

SOME = ("prefix", "speculators", "qwen_mtp", "gemma4_assistant", "deepspec", "medusa_2")  # the others are slow tests


def test_every_format_that_is_written_is_here():
    """Except EAGLE-3 as released, which needs a deeper base: tests/formats/test_eagle.py."""
    assert {format for _, format, _ in HEADS.values()} == {*WRITTEN, NATIVE} - {"eagle-3"}


@pytest.mark.parametrize("name", HEADS)
def test_written_and_read_back_bit_for_bit(formats, tmp_path, name):
    drafter, format, _ = HEADS[name]
    base, record = formats / "llama", fingerprint(formats / "llama")
    found, params = load_draft(formats / name, BASE, None, base_directory=base)
    assert found == drafter
    identical(params_of(drafter, base), params)
    for through in (NATIVE, None, format):
        export_heads(tmp_path / "next", found, params, format=through, dtype=None, base_fingerprint=record)
        found, params = load_draft(tmp_path / "next", BASE, None, base_directory=base)
        assert found == drafter
        identical(params_of(drafter, base), params)
    assert config_in(tmp_path / "next").keys() == config_in(formats / name).keys()
    for path in (formats / name).glob("*.safetensors"):
        assert (tmp_path / "next" / path.name).read_bytes() == path.read_bytes()


HYDRA, EAGLE = ("hydra_mlp/heads", "hydra_pp/heads"), ("eagle/eagle1_mha/draft", "eagle/eagle3_mha/draft")
ONE_PASS = [f"parallel/{name}_a/draft" for name in ("dflash", "dspark", "dsdflash", "jetspec")]
UNSAID = ["base_model_name_or_path", "transformers_version"]  # of Hydra heads; then of layers
UNSAID += ["initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout"]
UNSAID += ["auto_map", "layer_types", "max_window_layers", "num_anchors", "rope_parameters"]  # of drafts of one pass


@pytest.mark.parametrize("folder", [*HYDRA, *EAGLE, *ONE_PASS])
def test_official_drafts_are_written_again(golden, tmp_path, folder):
    """The export equals the official file without the base's tensors, and other formats keep the draft."""
    source = need(golden / folder)
    base = read_config(golden / ("parallel/base_a" if folder in ONE_PASS else "base/mha"))
    drafter, params = load_draft(source, base, None)
    for format in (None, NATIVE, *(["speculators"] if folder in EAGLE else [])):
        record = {"shapes": {"n_layers": base.n_layers}}
        export_heads(tmp_path / str(format), drafter, params, format=format, dtype=None, base_fingerprint=record)
        found, again = load_draft(tmp_path / str(format), base, None)
        assert found == drafter
        identical(params, again)
    (path,) = source.glob("*.safetensors")
    official, written = load_file(path), load_file(tmp_path / "None" / path.name)
    own = "(?!.*(embed_|rotary)).*" if folder not in ONE_PASS else "(?!embed_tokens|lm_head).*"
    assert written.keys() == {name for name in official if re.fullmatch(own, name)}
    assert len(written) > 9
    assert all(torch.equal(x, official[name]) for name, x in written.items())
    before, after = config_in(source), config_in(tmp_path / "None")
    unsaid = UNSAID[: 2 if folder in HYDRA else 8 if folder in EAGLE else None]
    kept = {name: value for name, value in before.items() if name not in unsaid}
    assert kept == {name: after.get(name) for name in kept}


@pytest.fixture
def tensors(request, formats, tmp_path):
    """``(directory, state, save)`` of a format's tensors; ``save(state)`` replaces them."""
    folder = shutil.copytree(formats / request.param, tmp_path / request.param)
    (path,) = (path for path in folder.iterdir() if path.suffix in (".pt", ".safetensors"))
    if path.suffix == ".pt":
        return folder, torch.load(path), lambda state: torch.save(state, path)
    return folder, load_file(path), lambda state: save_file({key: x.contiguous() for key, x in state.items()}, path)


# Without one of these a directory has another format, or none.
SHOW_THE_FORMAT = ("input_proj", "eh_proj", "mtp.fc", "midlayer.hidden_norm", "mask_hidden")


@pytest.mark.quick(*SOME)
@pytest.mark.parametrize("tensors", FOREIGN, indirect=True)
def test_every_tensor_is_needed_with_its_name_shape_and_dtype(tensors):
    folder, state, save = tensors
    for key, x in state.items():
        if folder.name == "medusa_2" and not key.startswith("medusa_head."):
            continue
        others = {name: x for name, x in state.items() if name != key}

        def refused(changes: dict, piece: str, dtype=None, others=others) -> str:
            save(others | changes)
            return refusal(lambda: load_draft(folder, BASE, dtype), "draft: ", str(folder), piece)

        shows = any(name in key for name in SHOW_THE_FORMAT)
        if key != "t2d":  # follows from d2t
            refused({}, "" if shows else f"missing tensor '{key}'")
        refused({f"{key}.x": x}, "" if shows else f"'{key}")
        refused({key: x[..., None]}, f"{key}: got ")
        refused({key: x.to(torch.int8)}, f"{key}: got ")
        refused({key: x.to(torch.int8)}, f"{key}: got ", "float32")
        message = refused({key: torch.cat([x, x[:1]])}, "got ")
        assert f"{key}: got " in message or "vocabulary: got 7, expected 6; the heads were made for another" in message
    save(state)
    load_draft(folder, BASE, None)


@pytest.mark.quick(*SOME, "hydra_pt")
@pytest.mark.parametrize("name", FOREIGN)
def test_a_truncated_or_missing_file(formats, tmp_path, name):
    folder = shutil.copytree(formats / name, tmp_path / name)
    for path in [path for path in folder.iterdir() if path.name != "README.md"]:
        content = path.read_bytes()
        for keep in (0, 4, len(content) // 2, len(content) - 2):
            path.write_bytes(content[:keep])
            message = refusal(lambda: load_draft(folder, BASE), "draft: ", str(path))
            assert path.suffix == ".json" or "damaged" in message
        path.unlink()
        message = refusal(lambda: load_draft(folder, BASE), "draft: ", str(folder))
        assert path.name in message or "no draft heads of a supported format" in message
        path.write_bytes(content)
    load_draft(folder, BASE, None)


VALUES = (None, "x", -1, 10**9, [], [7], {}, True)
MEAN = {  # other values of these are valid, and mean another drafter of the same tensors
    *("rms_norm_eps", "norm_eps", "rope_theta", "max_positions", "depth", "ttt_length", "dropout", "layer_types"),
    *("norm_before_residual", "mask_token_id", "mask_token", "ptd_token_id", "num_speculative_tokens", "tied_lm_head"),
    *("embedding_first", "before_final_norm", "windows", "sliding_window", "causal_head", "num_anchors"),
    *("prefix_window", "rope_parameters"),
}


def drafter_or_message(folder: Path, base: Path):
    try:
        return load_draft(folder, BASE, base_directory=base)[0]
    except HydrajaxError as error:
        return str(error)


@pytest.mark.quick(*SOME, "native_dspark")
@pytest.mark.parametrize("name", [*(name for name in HEADS if not name.endswith("_pt")), "medusa_2"])
def test_a_changed_field_is_refused_or_changes_nothing(formats, tmp_path, monkeypatch, name):
    """Or it is one of those that may have other values. The arrays are not read, which takes a tenth of a second."""
    monkeypatch.setattr(ocp, "load", lambda path, target: target)
    monkeypatch.setattr(native, "_check_files", lambda directory, files: None)
    folder = shutil.copytree(formats / name, tmp_path / name)
    path = folder / "config.json"
    whole, drafter = path.read_text(), load_draft(folder, BASE)[0]
    config = json.loads(whole)
    refused = 0
    layer = config.get("transformer_layer_config") or config.get("dflash_config") or {}  # of speculators, of DFlash
    own = [config["drafter"], config["drafter"]["settings"]] if name.startswith(NATIVE) else [config, layer]
    for node in own:
        for field, before in list(node.items()):
            for value in VALUES:
                node[field] = value
                path.write_text(json.dumps(config))
                found = drafter_or_message(folder, formats / "llama")
                if isinstance(found, str):
                    assert found.startswith("draft: "), (field, value)
                    assert "\n" not in found, (field, value)
                    refused += 1
                else:
                    assert found == drafter or field in MEAN, (field, value)
            node[field] = before
    assert refused > 5
