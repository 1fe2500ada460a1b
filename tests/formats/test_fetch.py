"""`hydrajax convert fetch`: official heads in a `.pt` on the Hub become safetensors."""

import io
import json
import pickle
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from helpers.draft_heads import VOCAB, identical
from helpers.released import Hydra, Medusa, hydra_config, medusa_config, randomise, refusal
from hydrajax.cli import main
from hydrajax.formats.fetch import fetch_heads
from hydrajax.formats.hub import resolve
from hydrajax.formats.load import load_draft

NAME = "org/heads"
HYDRA, MEDUSA = hydra_config(2, 1), medusa_config(2, 1)


@pytest.fixture(scope="module")
def hydra() -> dict[str, torch.Tensor]:
    """The official state dict: bfloat16, with the copy of the base's embedding."""
    module = randomise(Hydra(2, 1, VOCAB, nn.Embedding(VOCAB, 32)))
    return {name: tensor.bfloat16() for name, tensor in module.state_dict().items()}


def saved(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def release(config: dict, **files: bytes) -> dict[str, bytes]:
    """The files of a repository: ``config.json``, a ``.pt`` per name, and files that must not be fetched."""
    pickles = {"train.py": b"raise SystemExit", "optimizer.pt": saved({"a": 1}), "old/hydra_lm_head.pt": b"old"}
    return {"config.json": json.dumps(config).encode(), **pickles, **{f"{name}.pt": x for name, x in files.items()}}


def test_hydra_heads_become_safetensors_that_load(hub, hydra, tiny_model, tmp_path, capsys):
    """The same keys, dtypes and bits, and the same drafter as from the .pt itself; nothing else is fetched."""
    commit = hub.add(NAME, release(HYDRA, hydra_lm_head=saved(hydra)))
    for name, output in ((NAME, "heads"), (f"{NAME}@{commit}", "again")):
        assert main(["convert", "fetch", name, "--output", output]) == 0
        assert capsys.readouterr().out == f"{output}: config.json, hydra_lm_head.safetensors\n"
    folder = tmp_path / "heads"
    found = load_file(folder / "hydra_lm_head.safetensors")
    assert found.keys() == hydra.keys()
    assert all(found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in hydra.items())
    assert json.loads((folder / "config.json").read_text()).items() >= HYDRA.items()
    assert hub.fetched() == {"config.json", "hydra_lm_head.pt"}

    local = tmp_path / "local"
    local.mkdir()
    (local / "config.json").write_text(json.dumps(HYDRA))
    torch.save(hydra, local / "hydra_lm_head.pt")
    config = tiny_model[0].config
    ours, theirs = load_draft(resolve(folder, "--draft"), config), load_draft(local, config)
    assert ours[0] == theirs[0]
    identical(ours[1], theirs[1])


def test_medusa_heads_and_a_directory_here(hub, tmp_path, tiny_model):
    state = randomise(Medusa(2, 1, VOCAB)).state_dict()
    hub.add(NAME, release(MEDUSA, medusa_lm_head=saved(state)))
    fetch_heads(NAME, tmp_path / "one")
    fetch_heads(NAME, tmp_path / "one")  # an earlier one is replaced
    found = load_file(tmp_path / "one" / "medusa_lm_head.safetensors")
    assert {name: x.tolist() for name, x in found.items()} == {name: x.tolist() for name, x in state.items()}
    fetch_heads(tmp_path / "one", tmp_path / "two")
    assert load_draft(tmp_path / "two", tiny_model[0].config)[0].num_draft_heads == 2
    assert {path.name for path in (tmp_path / "two").iterdir()} == {"config.json", "medusa_lm_head.safetensors"}


def test_the_refusal_of_such_a_repository_names_the_command(hub, hydra, capsys, tmp_path):
    hub.add(NAME, release(HYDRA, hydra_lm_head=saved(hydra)))
    command = f"convert heads in a .pt file with 'hydrajax convert fetch {NAME} --output DIR'"
    refusal(lambda: resolve(NAME, "--draft"), command)
    assert main(["convert", "fetch", NAME, "--output", str(tmp_path / "heads")]) == 0  # also after that
    assert main(["convert", "fetch", "heads", "--output", "./heads/"]) == 2
    assert "the directory of the heads; choose another one" in capsys.readouterr().err


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('code of a stranger was run')",)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(message: str, name: str, output: Path) -> None:
    """One line with this message; the earlier files stay."""
    before = contents(output.parent)
    refusal(lambda: fetch_heads(name, output), "fetch: ", message)
    assert contents(output.parent) == before


def test_what_is_refused(hub, hydra, tmp_path, monkeypatch):
    output = tmp_path / "place" / "heads"
    output.parent.mkdir()
    refused("no such directory: ./heads", "./heads", output)
    refused("the Hub has no such repository", "org/none", output)
    for files, message in [
        (
            release(HYDRA),
            f"'{NAME}' holds neither released Hydra (hydra_lm_head, with 'hydra_num_heads') nor Medusa v1",
        ),
        (release(MEDUSA, hydra_lm_head=saved(hydra)), "holds neither"),  # of another kind than its config.json
        ({"hydra_lm_head.pt": saved(hydra)}, "no such file: "),
        (release(HYDRA, hydra_lm_head=pickle.dumps(Evil())), "hydra_lm_head.pt is damaged or holds more than tensors"),
        (release(HYDRA, hydra_lm_head=saved({"a": Evil()})), "hydra_lm_head.pt is damaged or holds more than tensors"),
        (release(HYDRA, hydra_lm_head=saved(hydra)[:-500]), "hydra_lm_head.pt is damaged"),
        (release(HYDRA, hydra_lm_head=saved([1])), "must hold a state dict of tensors"),
        (release(HYDRA, hydra_lm_head=saved({"a": torch.ones(2, dtype=torch.int32)})), "a: got dtype int32, expected"),
    ]:
        hub.add(NAME, files)
        refused(message, NAME, output)
    assert not output.exists()

    hub.add(NAME, release(HYDRA, hydra_lm_head=saved(hydra)))
    (output.parent / "mine").mkdir()
    (output.parent / "mine" / "notes.txt").write_text("mine")
    refused("holds other files than an earlier export, such as 'notes.txt'", NAME, output.parent / "mine")
    hub.log.clear()
    monkeypatch.setitem(sys.modules, "torch", None)
    refused(".pt and .bin files need torch: pip install 'hydrajax[torch]'", NAME, output)
    assert not hub.log  # nothing is fetched that could not be read
