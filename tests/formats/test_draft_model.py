"""A draft model from its directory: of any family, with the base's tokenizer, and against assisted generation."""

import json
import shutil
import warnings

import numpy as np
import pytest

import hydrajax
from helpers import small_tokenizer
from helpers.released import refusal
from hydrajax import assets
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.formats.draft_registry import title_of
from hydrajax.formats.load import is_model
from hydrajax.sharding import Placement
from hydrajax.text.tokenizer import difference

PROMPTS = [[3, 1, 4, 1, 5], [92, 6], [5, 3, 5, 8, 9, 7, 9]]
DRAFTS = {
    "llama": {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 1, "num_key_value_heads": 4},
    "qwen2": {"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 1},
    "mistral": {"model_type": "mistral", "hidden_size": 16, "intermediate_size": 40, "sliding_window": 6},
}


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer.byte_level()


def with_tokenizer(folder, tokenizer, target):
    shutil.copytree(folder, target)
    tokenizer.save_pretrained(target)
    return target


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "mistral"))]
)
def test_the_text_is_that_of_assisted_generation(llama_checkpoint, tiny_checkpoint, family):
    """The text also equals the base's own in transformers, for drafts of every family."""
    import torch
    from transformers import AutoModelForCausalLM

    directory = llama_checkpoint(**DRAFTS[family])
    base, assistant = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (tiny_checkpoint, directory))
    assistant.generation_config.update(num_assistant_tokens=4, num_assistant_tokens_schedule="constant")
    assistant.generation_config.update(assistant_confidence_threshold=0.0)
    m = hydrajax.load(tiny_checkpoint, directory)
    assert title_of(m.drafter) == "draft model"
    assert "draft model with 0.0M" in repr(m)
    found = m.generate(PROMPTS, tree="chain-4", max_new_tokens=24, batch_size=3)
    for prompt, ours in zip(PROMPTS, found, strict=True):
        settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        ids, mask = torch.tensor([prompt]), torch.ones((1, len(prompt)), dtype=torch.long)
        theirs = base.generate(ids, attention_mask=mask, assistant_model=assistant, **settings)
        assert ours.output_ids == theirs[0, len(prompt) :].tolist()


def test_models_are_distinguished_from_heads(tiny_checkpoint, tmp_path):
    assert is_model(tiny_checkpoint)
    for path in assets.HEADS:
        assert not is_model(assets.path(path))
    medusa_2 = shutil.copytree(tiny_checkpoint, tmp_path / "medusa-2")
    from safetensors.numpy import load_file, save_file

    tensors = load_file(medusa_2 / "model.safetensors")
    tensors["medusa_head.0.0.linear.weight"] = np.zeros((32, 32), np.float32)
    save_file(tensors, medusa_2 / "model.safetensors")
    config = json.loads((medusa_2 / "config.json").read_text()) | {"medusa_num_heads": 1}
    (medusa_2 / "config.json").write_text(json.dumps(config))
    assert not is_model(medusa_2)
    other = shutil.copytree(tiny_checkpoint, tmp_path / "gpt")
    (other / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    assert not is_model(other)
    refusal(lambda: is_model(tmp_path / "nowhere"), "draft: no such directory")


@pytest.mark.slow
def test_the_same_map_and_padded_vocabularies(llama_checkpoint, tokenizer, tmp_path):
    """A tokenizer of 300 tokens; the base has 320 ids and the drafts 304 and 384. The text is the base's own."""
    base = with_tokenizer(llama_checkpoint(vocab_size=320), tokenizer, tmp_path / "base")
    plain = hydrajax.load(base).generate(["the tree", "naïve"], max_new_tokens=12, tree="root")
    for size in (304, 384):
        draft = llama_checkpoint(vocab_size=size, hidden_size=16, intermediate_size=40, num_hidden_layers=1)
        draft = with_tokenizer(draft, tokenizer, tmp_path / f"draft-{size}")
        m = hydrajax.load(base, draft)
        found = m.generate(["the tree", "naïve"], max_new_tokens=12, tree="cartesian-2x2", batch_size=2)
        assert [one.output_ids for one in found] == [one.output_ids for one in plain]


def test_another_tokenizer_is_refused_by_the_first_token_that_differs(llama_checkpoint, tokenizer, tmp_path):
    base = with_tokenizer(llama_checkpoint(vocab_size=320), tokenizer, tmp_path / "base")
    draft = with_tokenizer(llama_checkpoint(vocab_size=320), tokenizer, tmp_path / "draft")
    content = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    seven, nine = (next(token for token, place in vocabulary.items() if place == n) for n in (7, 9))
    vocabulary[seven], vocabulary[nine] = 9, 7
    (draft / "tokenizer.json").write_text(json.dumps(content))
    message = (
        f"draft: {draft} has another tokenizer than the base: {seven!r} has id 7 in the base and id 9 in the draft"
    )
    assert refusal(lambda: hydrajax.load(base, draft)) == message


def test_differences_between_maps():
    assert difference({"a": 0, "b": 1}, {"b": 1, "a": 0}, "one", "two") is None
    assert difference({"a": 0, "b": 1}, {"a": 0}, "one", "two") == "'b' has id 1 in one and no id in two"
    assert difference({"a": 0}, {"a": 0, "b": 1}, "one", "two") == "'b' has no id in one and id 1 in two"


def test_without_tokenizers_the_sizes_must_agree(llama_checkpoint, tiny_checkpoint):
    draft = llama_checkpoint(vocab_size=104, hidden_size=16, intermediate_size=40, num_hidden_layers=1)
    message = f"draft: {draft}: vocab_size: got 104, expected the base's 96; other sizes need equal tokenizers"
    refusal(lambda: hydrajax.load(tiny_checkpoint, draft), message)


def test_a_draft_larger_than_the_base_is_warned_of(llama_checkpoint, tiny_checkpoint):
    small = llama_checkpoint(**DRAFTS["llama"])
    with pytest.warns(UserWarning, match=r"hydrajax: draft: .* has [\d,]+ parameters, more than the base's [\d,]+"):
        hydrajax.load(small, tiny_checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hydrajax.load(tiny_checkpoint, small)


@pytest.mark.slow
def test_settings_of_a_draft_model(llama_checkpoint, tiny_checkpoint):
    small = llama_checkpoint(**DRAFTS["llama"])
    m = hydrajax.load(tiny_checkpoint, small, draft_confidence=0.4)
    assert m.drafter.confidence == 0.4
    assert m.with_draft(small).drafter.confidence == 0
    without = hydrajax.load(tiny_checkpoint).generate(PROMPTS, max_new_tokens=10, tree="root")
    found = m.generate(PROMPTS, max_new_tokens=10, tree="chain-5")
    assert [one.output_ids for one in found] == [one.output_ids for one in without]
    confidence = "draft_confidence: requires a draft model or DSpark with a confidence head, got "
    for settings, message in (
        ({"draft_confidence": 1.0}, "draft_confidence: got 1.0, expected at least 0 and less than 1"),
        ({"draft_confidence": 0.5, "draft": "lookup"}, f"{confidence}Lookup"),
        ({"draft_confidence": 0.5, "draft": None}, f"{confidence}no draft"),
        (
            {"placement": Placement(shard_draft=True), "draft": "lookup"},
            "shard_draft: requires a draft model, got Lookup",
        ),
    ):
        refusal(lambda settings=settings: hydrajax.load(tiny_checkpoint, **({"draft": small} | settings)), message)


def test_a_hybrid_draft_is_refused(llama_checkpoint, tiny_checkpoint):
    hybrid = llama_checkpoint(model_type="lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"])
    refusal(lambda: hydrajax.load(tiny_checkpoint, hybrid), "draft: got a model with recurrent layers, expected one")
    drafter = DraftModel.for_base(hydrajax.load(hybrid).model.config, "float32")
    assert drafter.config.n_layers == 1


def test_a_damaged_draft_is_refused_as_the_draft(llama_checkpoint, tiny_checkpoint, tmp_path):
    small = shutil.copytree(llama_checkpoint(**DRAFTS["llama"]), tmp_path / "small")
    weights, config = (small / "model.safetensors").read_bytes(), json.loads((small / "config.json").read_text())
    (small / "model.safetensors").write_bytes(weights[:-1])
    refusal(lambda: hydrajax.load(tiny_checkpoint, small), "draft: ", "model.safetensors is damaged")
    (small / "model.safetensors").write_bytes(weights)
    for change, message in (({"hidden_act": "gelu"}, "config.json: hidden_act"), ({"num_hidden_layers": 2}, "missing")):
        (small / "config.json").write_text(json.dumps(config | change))
        refusal(lambda: hydrajax.load(tiny_checkpoint, small), "draft: ", message)
