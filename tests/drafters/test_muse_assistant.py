"""Muse Glimmer's assistant against transformers' assisted generation with it (float32)."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, MuseGlimmerAssistantConfig
from transformers.generation import candidate_generator

import hydrajax
from helpers.family_pairs import EXAMPLES, Pair, random_pair
from helpers.family_settings import YARN
from helpers.lab import quick_jit
from helpers.released import refusal, save
from hydrajax.api import make_decode_fn
from hydrajax.drafters.block import BlockSettings
from hydrajax.drafters.dflash import DFlash
from hydrajax.formats.export import export_heads
from hydrajax.formats.load import load_draft
from hydrajax.language_model import LanguageModel
from hydrajax.models.base_model import BoundBase
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.models.packed_forward import run_base
from hydrajax.train.tasks.heads_task import load_heads
from hydrajax.trees import presets

SHARED = {
    "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "block_size": 6, "mask_token_id": 2, "pad_token_id": None,
}  # fmt: skip
# Windows are shorter than the texts. The first one is also shorter than a block.
DRAFTS = {
    "mixed": SHARED | {
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
        "target_layer_ids": [0, 2], "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
    },
    "windows": SHARED | {
        "num_hidden_layers": 1, "sliding_window": 9, "target_layer_ids": [1, 0, 1], "rms_norm_eps": 1e-2,
        "num_key_value_heads": 4, "rope_parameters": YARN,
    },
}  # fmt: skip
SEEDS = {"mixed": 0, "windows": 8}
NEW = 32
PROMPTS = [[1, 5, 3, 2, 6, 6, 4, 1, 3, 5], [4, 2, 2], [3, 6, 1, 5]]
PADDED = np.array([row + [0] * (10 - len(row)) for row in PROMPTS], np.int32)
LENGTHS = np.array([len(row) for row in PROMPTS], np.int32)


class Reference(NamedTuple):
    """Both packages' base and assistant, and transformers' answers."""

    base: Pair
    assistant: Any
    ours: LanguageModel
    plain: list[list[int]]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Pair:
    """Of few tokens, so that a random draft is often right."""
    fields = EXAMPLES["muse_glimmer_text"] | {"vocab_size": 7}
    return random_pair(tmp_path_factory.mktemp("muse") / "base", "muse_glimmer_text", fields, 0)


@pytest.fixture(scope="module")
def reference(base):
    def make(name: str) -> Reference:
        torch.manual_seed(SEEDS[name])
        assistant = AutoModel.from_config(MuseGlimmerAssistantConfig(**DRAFTS[name]), attn_implementation="eager")
        with torch.no_grad():
            for parameter in assistant.parameters():
                parameter.copy_(parameter + 0.3 * torch.randn_like(parameter))
        folder = base.folder.parent / name
        assistant.eval().save_pretrained(folder)
        plain = [answer(base, prompt) for prompt in PROMPTS]
        return Reference(base, assistant, hydrajax.load(base.folder, folder, dtype="float32"), plain)

    return make


def answer(base: Pair, prompt: list[int], **settings) -> list[int]:
    ids = torch.tensor([prompt])
    more = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW}
    with torch.no_grad():
        out = base.theirs.generate(ids, attention_mask=torch.ones_like(ids), **more, **settings)
    return out[0, len(prompt) :].tolist()


def drafted_by(reference: Reference, prompt: list[int], monkeypatch) -> list[tuple[list[int], list[int], np.ndarray]]:
    """Return text, guesses and logits of every step of transformers' assisted generation."""
    steps, kind = [], candidate_generator.DFlashTokenCandidateGenerator
    original = kind.get_candidates

    def recorded(self, input_ids, *args, **keywords):
        found, logits = original(self, input_ids, *args, **keywords)
        if logits is not None:
            text = input_ids[0].tolist()
            steps.append((text, found[0, len(text) :].tolist(), logits[0].numpy()))
        return found, logits

    monkeypatch.setattr(kind, "get_candidates", recorded)
    answer(reference.base, prompt, assistant_model=reference.assistant, speculation_type="dflash")
    return steps


@pytest.mark.parametrize("name", ["mixed", pytest.param("windows", marks=pytest.mark.slow)])
def test_a_chain_is_transformers_assisted_generation(reference, name, monkeypatch):
    """Every step's guesses and logits, all accept lengths and the text."""
    found = reference(name)
    m, steps = found.ours, drafted_by(found, PROMPTS[0], monkeypatch)
    drafter, rows = m.drafter, len(steps)
    lengths = np.array([len(text) - 1 for text, _, _ in steps])
    tokens = np.array([text + [0] * (len(steps[-1][0]) - len(text)) for text, _, _ in steps], np.int32)
    roots = tokens[np.arange(rows), lengths]

    @quick_jit
    def draft(params):
        bound = BoundBase(m.model, params.base)
        aux = run_base(m.model, params.base, tokens, drafter.spec.aux_hidden_layers).aux_hidden_states
        state = drafter.init_state(rows, tokens.shape[1] + 8)
        state = drafter.begin(params.draft, state, aux, tokens, jnp.asarray(lengths), roots, bound)
        proposal = drafter.propose(params.draft, state, roots, presets.chain(drafter.depth), bound)
        hidden = drafter.slots(params.draft, state, roots, drafter.depth, bound)
        return proposal.tokens, drafter.block_logits(params.draft, hidden, proposal.tokens[:, :-1], bound)

    guesses, logits = map(np.asarray, draft(m.params))
    assert guesses[:, 1:].tolist() == [guesses for _, guesses, _ in steps]
    np.testing.assert_allclose(logits, [logits for _, _, logits in steps], atol=1e-4, rtol=0)

    decode = make_decode_fn(m.model, drafter, f"chain-{drafter.depth}", max_new_tokens=NEW, eos_ids=())
    out = decode(m.params, np.array(PROMPTS[:1], np.int32))
    accepted = np.asarray(out.accept_lengths[0, : out.steps[0]])
    expected = np.diff(lengths) - 1
    assert expected.sum() > 5  # some guesses are right
    np.testing.assert_array_equal(accepted[: len(expected)], expected)
    assert out.tokens[0, :NEW].tolist() == found.plain[0]


@pytest.mark.parametrize("tree", ["best-12", pytest.param("dynamic-12-4-3", marks=pytest.mark.slow)])
def test_trees_give_transformers_greedy_ids(reference, tree):
    """A batch of 3 of several lengths."""
    found = reference("mixed")
    m = found.ours
    decode = make_decode_fn(m.model, m.drafter, tree, max_new_tokens=NEW, eos_ids=())
    out = decode(m.params, PADDED, LENGTHS)
    assert out.tokens[:, :NEW].tolist() == found.plain
    assert out.tokens_per_step() > 1.2


BASE = LlamaConfig(300_000, 32, 9, n_layers=52, n_heads=4, n_kv_heads=2, head_dim=8)
FIELDS = {"model_type": "muse_glimmer_assistant", "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 2}
FIELDS |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layer_types": ["full_attention"] * 2, "rope_parameters": YARN},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7, "target_layer_ids": [51, 3]},
    ],
)
def test_files_are_read_and_written_again(tmp_path, fields):
    """Fields left out have transformers' defaults, and an export is the file for both packages."""
    config = MuseGlimmerAssistantConfig(**(FIELDS | fields))
    state = AutoModel.from_config(config).state_dict()
    folder = save(tmp_path / "theirs", state, FIELDS | {"layer_types": None} | fields)
    drafter, params = load_draft(folder, BASE, None)
    window = config.sliding_window + 1
    assert (drafter.block_size, drafter.mask_token) == (16, 201_818)
    assert drafter.windows in (tuple(window * (kind != "full_attention") for kind in config.layer_types), ())
    assert drafter.aux_hidden_layers == tuple(51 - layer for layer in config.target_layer_ids)
    assert (drafter.config.norm_eps, drafter.config.rope_theta) == (1e-5, config.rope_parameters["rope_theta"])
    export_heads(tmp_path / "ours", drafter, params, dtype=None, base_fingerprint={"shapes": {"n_layers": 52}})
    assert load_draft(tmp_path / "ours", BASE, None)[0] == drafter
    fresh = DFlash.for_base(BASE, jnp.float32, BlockSettings(2, 16))
    assert load_heads(fresh, str(folder), BASE)[0] == drafter  # training starts from it
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], state[name]) for name in state)
    theirs = AutoConfig.from_pretrained(tmp_path / "ours").to_dict()
    for name in (*FIELDS, "layer_types", "target_layer_ids", "block_size", "mask_token_id", "rms_norm_eps"):
        assert theirs[name] == config.to_dict()[name], name
    assert theirs["rope_parameters"]["rope_theta"] == config.rope_parameters["rope_theta"]
    export = partial(export_heads, tmp_path / "x", drafter, params, base_fingerprint={"shapes": {"n_layers": 52}})
    refusal(lambda: export(format="dflash"), "both_ways or plain_logits: got True, expected False")


def test_what_does_not_fit_is_refused_by_its_name(tmp_path):
    state = AutoModel.from_config(MuseGlimmerAssistantConfig(**FIELDS)).state_dict()
    for fields, message in (
        ({"hidden_size": 64}, "width: got 64, expected 32; the heads were made for another base"),
        ({"hidden_act": "relu"}, "hidden_act: got 'relu'"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types: got ['chunked_attention', 'chunked_attention']"),
        ({"target_layer_ids": [1, 52]}, "target_layer_ids: got [1, 52], expected numbers from -1 to 51"),
        ({"mask_token_id": 300_000}, "mask_token_id: got 300000, expected a token of the base's vocabulary"),
        ({"block_size": 1}, "block_size: got 1, expected an integer of at least 2"),
        ({"num_hidden_layers": None}, "num_hidden_layers: got None, expected an integer of at least 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000, expected at most 64"),
        ({"num_hidden_layers": 3}, "missing tensors"),
        ({"sliding_window": 0}, "sliding_window: got 0, expected an integer of at least 1"),
    ):
        save(tmp_path, state, FIELDS | fields)
        refusal(lambda: load_draft(tmp_path, BASE), "draft: ", str(tmp_path), message)
