"""Gemma 4's assistant against transformers', on random small models; `test_every_drafter` tests what it decodes."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

import hydrajax
from helpers.family_pairs import EXAMPLES, random_pair
from helpers.family_settings import WINDOW
from helpers.lab import quick_jit
from helpers.refusals import refusal
from hydrajax.formats.export import export_heads
from hydrajax.formats.load import load_draft
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BoundBase
from hydrajax.models.cache import append
from hydrajax.models.packed_forward import row_layout, run_base
from hydrajax.trees import presets

VOCAB = 60
BASE = EXAMPLES["gemma4_text"] | {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB}
SLIDING, FULL = "sliding_attention", "full_attention"
DEPTH = 4


def assistant(folder: Path, ordered: bool = False) -> Gemma4AssistantForCausalLM:
    """Return an assistant with random weights, saved by transformers; ``ordered`` with an ordered embedding."""
    text = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 16,
        "vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0, "sliding_window": WINDOW,
        "layer_types": [SLIDING, SLIDING, FULL], "rope_parameters": BASE["rope_parameters"],
    }  # fmt: skip
    torch.manual_seed(0)
    clusters = {"use_ordered_embeddings": ordered, "num_centroids": 12, "centroid_intermediate_top_k": 3}
    config = Gemma4AssistantConfig(text_config=Gemma4TextConfig(**text), backbone_hidden_size=32, **clusters)
    model = Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            noise = torch.randn_like(tensor)
            tensor.copy_(tensor + 0.2 * noise if tensor.ndim == 1 else 0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.tensor([1.3]))
            elif name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(VOCAB))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return ``(base in both packages, assistant of transformers, its folder)``."""
    root = tmp_path_factory.mktemp("gemma4")
    return random_pair(root / "base", "gemma4_text", BASE), assistant(root / "draft"), root / "draft"


@pytest.fixture(scope="module")
def m(folders):
    return hydrajax.load(folders[0].folder, draft=str(folders[2]))


def texts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(1, VOCAB, length).tolist() for length in lengths]


def proposed(m, tree, texts: list[list[int]]) -> np.ndarray:
    """Return the tokens of a tree after each text, whose last token is the root, of a ragged batch."""
    lengths = np.array([len(text) - 1 for text in texts], np.int32)
    tokens = np.array([text[:-1] + [0] * (30 - length) for text, length in zip(texts, lengths, strict=True)])

    @quick_jit
    def run(params, tokens, lengths, root):
        base = BoundBase(m.model, params.base)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        forward = base.forward(tokens, positions, causal_mask(tokens.shape[1], lengths))
        cache = append(m.model.init_cache(len(tokens), 64), forward.block, lengths)
        state = m.drafter.init_state(len(tokens), 64)
        state = m.drafter.begin(params.draft, state, forward.aux_hidden_states, tokens, lengths, root, base)
        return m.drafter.propose(params.draft, state, root, tree, BoundBase(m.model, params.base, cache=cache)).tokens

    return np.asarray(run(m.params, tokens, lengths, np.array([text[-1] for text in texts], np.int32)))


def proposed_by_transformers(theirs, draft, text: list[int]) -> list[int]:
    """Return the chain that transformers' generator drafts after a text whose last token it has not run."""
    ids = torch.tensor([text])
    with torch.no_grad():
        outputs = theirs(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    draft.generation_config.num_assistant_tokens = DEPTH
    generator = SinglePositionMultiTokenCandidateGenerator(
        draft, theirs.get_input_embeddings(), theirs.generation_config
    )
    generator.main_model_max_length = 1000
    mask = {"attention_mask": torch.ones_like(ids)}
    found = generator.get_candidates(ids, mask, outputs, is_first_iteration=False, n_last_matches=0)
    return found[0][0, len(text) :].tolist()


def test_chains_are_those_of_transformers(folders, m, tmp_path):
    """Shorter and longer than the window, at its edges, in a batch; files come back."""
    found = texts(2, 5, WINDOW, WINDOW + 1, WINDOW + 2, WINDOW + 3, WINDOW + 4, 30)
    expected = [proposed_by_transformers(folders[0].theirs, folders[1], text) for text in found]
    assert len({token for tokens in expected for token in tokens}) > 10
    assert proposed(m, presets.chain(DEPTH), found)[:, 1:].tolist() == expected
    comes_back(m, folders[2], tmp_path / "copy")


def test_an_ordered_embedding(folders, tmp_path):
    """Chains are those of transformers, also where a cluster that is not chosen has a better token; files come back."""
    draft, (base, whole, _) = assistant(tmp_path / "draft", ordered=True), folders
    m = hydrajax.load(base.folder, draft=str(tmp_path / "draft"))
    found = texts(2, 5, 8, 11, 17, 21, 25, 30)
    expected = [proposed_by_transformers(base.theirs, draft, text) for text in found]
    assert expected != [proposed_by_transformers(base.theirs, whole, text) for text in found]
    assert proposed(m, presets.chain(DEPTH), found)[:, 1:].tolist() == expected
    comes_back(m, tmp_path / "draft", tmp_path / "copy")


def comes_back(m, folder: Path, copy: Path) -> None:
    export_heads(copy, m.drafter, m.params.draft, dtype=None)
    theirs, ours = (load_file(path / "model.safetensors") for path in (folder, copy))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())
    assert load_draft(copy, m.model.config, None)[0] == m.drafter
    assert Gemma4AssistantForCausalLM.from_pretrained(copy).config.backbone_hidden_size == 32


def test_a_tree_holds_the_chain_of_every_path(folders, m):
    """A node's children are those of the text with its path, under the root's cache: no node sees another."""
    tree = presets.cartesian([3, 2, 2])
    (text,) = texts(14)
    tokens = proposed(m, tree, [text])[0]
    base, draft = folders[0].theirs, folders[1]
    ids = torch.tensor([text])
    with torch.no_grad():
        outputs = base(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
        embed = base.get_input_embeddings()
        for node, path in enumerate(tree.node_paths):
            hidden = outputs.hidden_states[-1][:, -1:]
            for token in tokens[list(dict.fromkeys(path))]:
                inputs = torch.cat([embed(torch.tensor([[token]])), hidden], dim=-1)
                at = torch.tensor([[len(text) - 1]])
                out = draft(None, inputs, at, torch.ones_like(ids), outputs.shared_kv_states, use_cache=False)
                hidden = out.last_hidden_state
            children = [child for child, parent in enumerate(tree.parents) if child and parent == node]
            best = out.logits[0, 0].topk(max(len(children), 1)).indices.tolist()
            assert tokens[children].tolist() == best[: len(children)]


def test_a_batch_of_training_is_what_decoding_proposes(m):
    """The best guesses at every position of a row, of packed documents too, are the first chain drafted there."""
    (text,) = texts(24)
    row, first = np.array([text], np.int32), 10
    segments = np.array([[1] * first + [2] * (len(text) - first)])

    @jax.jit
    def best(params, segments):
        forward = run_base(m.model, params.base, row, segments=segments)
        base = BoundBase(m.model, params.base, block=forward.block)
        read = m.drafter.teacher_hidden(
            params.draft, forward.aux_hidden_states, row, base, None, *row_layout(row, segments)
        )
        return jnp.argmax(m.drafter.head_logits(params.draft, 0, read[0], base), axis=-1)[0]

    for start, found in ((0, best(m.params, None)), (first, best(m.params, segments))):
        places = [start + after for after in (0, 4, WINDOW, WINDOW + 1, 12)]
        chains = proposed(m, presets.chain(1), [text[start : at + 2] for at in places])
        assert found[np.array(places)].tolist() == chains[:, 1].tolist()


def test_refusals(folders, tmp_path):
    pair, _, folder = folders

    def refused(piece: str, *pieces: str, **changes):
        config = json.loads((folder / "config.json").read_text())
        text = config["text_config"] | changes.pop("text", {})
        (tmp_path / "config.json").write_text(json.dumps(config | changes | {"text_config": text}))
        (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        refusal(lambda: hydrajax.load(pair.folder, draft=str(tmp_path)), piece, *pieces)

    refused("width: got 64, expected 32; the heads were made for another base", backbone_hidden_size=64)
    refused("key-value heads: got 2 of 8, the base has 1 of 8", text={"num_key_value_heads": 2})
    refused("text_config", "keys and values", text={"num_kv_shared_layers": 1})
    refused("vocabulary: got 61, expected 60", text={"vocab_size": 61})
    refused("num_centroids: got 7, expected", "divisor of 60", use_ordered_embeddings=True, num_centroids=7)
    refused("token_ordering: expected int64 [60]", use_ordered_embeddings=True, num_centroids=12)
