"""Compare EAGLE with recordings of the official code (tests/golden/README.md): hidden states, logits, every proposed
tree, every accept length and every token."""

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.golden_drafts import check_end_of_sequence, check_outputs, check_trees, near, slow, steps_of
from helpers.lab import quick_jit
from helpers.recordings import need
from hydrajax.api import load
from hydrajax.language_model import LanguageModel
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import run_base
from hydrajax.trees import presets
from hydrajax.trees.dynamic import DynamicTree
from hydrajax.trees.static_tree import TreeTopology

STATIC = {
    "mc63": presets.sparse("eagle_26"),
    "small": TreeTopology.from_choices([[0], [0, 0], [1], [0, 0, 0], [0, 1], [1, 0]]),
}


@pytest.fixture(scope="module")
def folder(golden):
    return golden / "eagle"


@pytest.fixture(scope="module")
def loaded_for(golden, folder):
    made: dict[str, LanguageModel] = {}

    def get(arch: str) -> LanguageModel:
        if arch not in made:
            made[arch] = load(golden / "base" / "mha", folder / arch / "draft")
        return made[arch]

    return get


def teacher_forced(loaded: LanguageModel, ids: np.ndarray):
    """Return the base's hidden states, and the draft's outputs and logits at every position for each guess."""
    drafter = loaded.drafter

    @quick_jit
    def forward(params):
        base = BoundBase(loaded.model, params.base)
        aux_hidden_states = run_base(loaded.model, params.base, ids, drafter.spec.aux_hidden_layers).aux_hidden_states
        hidden = drafter.teacher_hidden(params.draft, aux_hidden_states, ids, base)
        logits = [drafter.head_logits(params.draft, k, rows, base) for k, rows in enumerate(hidden)]
        return aux_hidden_states, hidden, logits

    return forward(loaded.params)


def test_eagle_1_teacher_forced(folder, loaded_for):
    record = np.load(folder / "eagle1_mha" / "teacher_forced.npz")
    aux_hidden_states, hidden, logits = teacher_forced(loaded_for("eagle1_mha"), record["input_ids"].astype(np.int32))
    near(aux_hidden_states, record["base_hidden_postnorm"])
    # The official code uses token 0 after the last position.
    near(hidden[0][:, :-1], record["draft_hidden"][:, :-1])
    near(logits[0][:, :-1], record["draft_logits"][:, :-1])


def check_decoding(loaded: LanguageModel, tree, run, swaps: int) -> None:
    """Compare trees (``swaps`` steps may differ if two scores are close), token ids and accept lengths of all steps."""
    proposals, state = steps_of(loaded, tree, run)
    check_outputs(run, state.output)
    check_trees(run, proposals, swaps)


@pytest.mark.parametrize("name", [slow("mc63"), "small"])
def test_eagle_1_with_static_trees(folder, loaded_for, name):
    recorded = np.load(need(folder / "eagle1_mha" / f"greedy_static_{name}.npz"))
    check_decoding(loaded_for("eagle1_mha"), STATIC[name], recorded, swaps=1)


def test_official_static_trees(folder):
    for name, tree in STATIC.items():
        recorded = np.load(folder / "eagle1_mha" / f"trace_static_{name}.npz")
        choices = [tuple(rank for rank in path if rank >= 0) for path in recorded["choices_sorted"].tolist()]
        assert tuple(choices) == tree.choices
        np.testing.assert_array_equal(tree.ancestor_mask, recorded["verify_tree_attn_mask"].reshape(tree.size, -1) == 1)


@pytest.mark.parametrize("name", ["t8", slow("t32"), slow("t60")])
@pytest.mark.parametrize("arch", ["eagle1_mha", "eagle3_mha"])
@pytest.mark.quick("eagle3_mha-t8")
def test_dynamic_trees(folder, loaded_for, arch, name):
    recorded = np.load(need(folder / arch / f"greedy_{name}.npz"))
    tree = DynamicTree(int(recorded["total_token"]), int(recorded["depth"]), int(recorded["top_k"]))
    check_decoding(loaded_for(arch), tree, recorded, swaps=3)


def test_eagle_3_teacher_forced(folder, loaded_for):
    """The official training forward: the first pass over the text and the passes over the draft's own outputs."""
    record = np.load(folder / "eagle3_mha" / "teacher_forced.npz")
    aux_hidden_states, hidden, logits = teacher_forced(loaded_for("eagle3_mha"), record["input_ids"].astype(np.int32))
    near(aux_hidden_states, np.concatenate([record[f"hidden_layer_{layer}"] for layer in range(3)], axis=-1))
    near(logits[0][:, :-1], record["draft_logits"][:, :-1])
    for k, recorded in enumerate(record["ttt_hidden"]):
        near(hidden[k][:, : -1 - k], recorded[:, : -1 - k])  # no token follows later positions
    for k, recorded in enumerate(record["ttt_logits"]):
        near(logits[k][:, : -1 - k], recorded[:, : -1 - k])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["eagle1_mha", "eagle3_mha"])
def test_end_of_sequence(folder, loaded_for, arch):
    record = np.load(folder / arch / "eos_t32.npz")
    check_end_of_sequence(loaded_for(arch), DynamicTree(32, 4, 8), record)


@pytest.mark.parametrize("arch", ["eagle1_mha", slow("eagle3_mha")])
def test_bin_and_safetensors_are_the_same(golden, folder, loaded_for, arch, tmp_path):
    """A .bin with the tensors of the .safetensors gives the same parameters (the official .bin in the full set)."""
    draft, copy = folder / arch / "draft", tmp_path / "pytorch_model.bin"
    if (draft / copy.name).exists():
        copy.symlink_to(draft / copy.name)
    else:
        torch.save(load_file(draft / "model.safetensors"), copy)
    (tmp_path / "config.json").symlink_to(draft / "config.json")
    from_bin = load(golden / "base" / "mha", tmp_path)
    assert from_bin.drafter == loaded_for(arch).drafter
    jax.tree.map(np.testing.assert_array_equal, from_bin.params.draft, loaded_for(arch).params.draft)
