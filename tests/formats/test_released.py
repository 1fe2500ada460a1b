"""Released Hydra and Medusa heads, of torch modules with the formulas of docs/design.md 4.

They give torch's logits, are written again as they were, and are refused if they are of another kind or base.
"""

import dataclasses
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaForCausalLM

import hydrajax
from helpers import released
from helpers.draft_heads import config_in, forced_logits, heads_of
from helpers.released import VOCAB, WIDTH, Medusa, medusa_config, randomise, refusal, save, vllm, vllm_config
from hydrajax import assets
from hydrajax.drafters.hydra import HydraHeads
from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.drafters.none import NoDrafter
from hydrajax.formats import checkpoint
from hydrajax.formats.export import FORMATS, export_heads
from hydrajax.formats.load import load_draft
from hydrajax.models.attention import causal_mask
from hydrajax.models.base_model import BoundBase

TOLERANCE = 1e-5  # relative to logits of magnitude 1 to 10
TOKENS = np.random.default_rng(3).integers(0, VOCAB, (2, 12))


@pytest.fixture(scope="module")
def theirs(tiny_checkpoint) -> LlamaForCausalLM:
    """The base in transformers."""
    return LlamaForCausalLM.from_pretrained(tiny_checkpoint, attn_implementation="eager").eval()


def torchs_logits(official: nn.Module, aux_hidden_states) -> np.ndarray:
    with torch.no_grad():
        return official(torch.tensor(np.asarray(aux_hidden_states)), torch.tensor(TOKENS)).numpy()


def agrees(drafter, params, official: nn.Module, base: BoundBase) -> None:
    """Our teacher-forced logits equal torch's on random hidden states."""
    aux_hidden_states = np.random.default_rng(5).standard_normal((2, 12, WIDTH)).astype(np.float32)
    expected = torchs_logits(official, aux_hidden_states)
    assert 0.3 < expected.std() < 10
    ours = jax.jit(lambda params: forced_logits(drafter, params, aux_hidden_states, TOKENS, base))(params)
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)


def hydra(theirs, n_heads, n_layers, grounded=True, shared=True, prefix=False) -> tuple[nn.Module, dict]:
    layer = released.one_layer(theirs.config) if prefix else None
    settings = {"grounded": grounded, "prefix": layer, "shared": shared}
    module = released.Hydra(n_heads, n_layers, VOCAB, theirs.model.embed_tokens, **settings)
    return module, released.hydra_config(n_heads, n_layers, "prefix-mlp" if prefix else "mlp", grounded)


def medusa(theirs, n_heads, n_layers, shared=True) -> tuple[nn.Module, dict]:
    return Medusa(n_heads, n_layers, VOCAB, shared=shared), medusa_config(n_heads, n_layers)


def medusa_2(theirs, n_heads, n_layers, declared=True) -> tuple[nn.Module, dict]:
    """Heads and base in one file."""
    return released.Medusa2(n_heads, n_layers), theirs.config.to_dict() | (
        medusa_config(n_heads, n_layers) if declared else {}
    )


def of_vllm(theirs, n_heads, n_layers, bias=False, **more) -> tuple[nn.Module, dict]:
    return vllm(n_heads, n_layers, bias), vllm_config(n_heads, n_layers, medusa_fc_bias=bias, **more)


OFFICIAL = {  # the function, its arguments, the kind of files, the drafter's share_blocks
    "hydra": (hydra, (3, 1), "bin", True),
    "hydra, one repeated block": (hydra, (3, 3), "safetensors", True),
    "hydra, separate blocks": (hydra, (3, 3, True, False), "bin", False),
    "ungrounded": (hydra, (3, 2, False), "safetensors", True),
    "ungrounded, separate blocks": (hydra, (3, 2, False, False), "bin", False),
    "hydra++": (hydra, (2, 4, True, True, True), "bin", True),
    "hydra++, separate blocks": (hydra, (2, 3, True, False, True), "safetensors", False),
    "ungrounded++": (hydra, (2, 3, False, True, True), "bin", True),
    "medusa": (medusa, (3, 1), "bin", True),
    "medusa, separate blocks": (medusa, (3, 2, False), "safetensors", False),
    "medusa, one repeated block": (medusa, (3, 3), "bin", True),
    "medusa-2": (medusa_2, (3, 1), "safetensors", True),
    "medusa-2 in shards": (medusa_2, (3, 2), "safetensors shards", False),
    "medusa-2, undeclared": (medusa_2, (3, 2, False), "bin", False),
    "medusa-2 in shards, undeclared": (medusa_2, (3, 1, False), "bin shards", True),
    "vllm as released": (of_vllm, (5, 1), "safetensors", True),
    "vllm with biases": (of_vllm, (3, 2, True), "safetensors shards", False),
    "vllm of torch": (of_vllm, (2, 3), "bin", False),
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_heads_give_torchs_logits_and_are_written_again(base, base_state, theirs, tmp_path, name):
    make, arguments, kind, share_blocks = OFFICIAL[name]
    official, config = make(theirs, *arguments)
    state = randomise(official).state_dict()
    more = base_state if make is medusa_2 else {}
    if "prefix" in config.get(
        "hydra_head_arch", ""
    ):  # the released code runs transformers 4.36, which saves this buffer
        more = {"prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    drafter, params = load_draft(save(tmp_path / "theirs", state | more, config, kind), base.config, None)
    assert (drafter.num_draft_heads, drafter.n_layers, drafter.share_blocks) == (*arguments[:2], share_blocks)
    grounded = config.get("grounded_heads")
    assert type(drafter) is (HydraHeads if grounded else MedusaHeads)
    assert grounded or drafter.lm_head_bias == (make is hydra)
    assert (drafter.prefix is not None) == (config.get("hydra_head_arch") == "prefix-mlp")
    agrees(drafter, params, official, base)

    export_heads(tmp_path / "ours", drafter, params, format="vllm-medusa" if make is of_vllm else None, dtype=None)
    (path,) = (tmp_path / "ours").glob("*.safetensors")
    written = load_file(path)
    expected = {key.removeprefix("medusa_head."): x for key, x in state.items() if "embed" not in key.split(".")[0]}
    expected |= {key: x for key, x in state.items() if key.startswith("prefix") and "embed_tokens" not in key}
    if make is of_vllm:  # without biases they are zeros
        biases = [key for key in written if key.endswith("bias")]
        expected = {key: torch.zeros(WIDTH) for key in biases} | expected
        config = config | {"truncated_vocab_size": VOCAB, "medusa_fc_bias": True}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[key], x) for key, x in expected.items())
    kept = config if make is not medusa_2 else medusa_config(*arguments[:2])
    assert kept.items() <= config_in(tmp_path / "ours").items()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_files_of_half_precision(base, theirs, tmp_path, dtype):
    """They keep their dtype, and a .pt that is asked for has the same numbers as the .safetensors."""
    official, config = hydra(theirs, 2, 2, prefix=True)
    official = randomise(official)
    state = {key: x.to(dtype) for key, x in official.state_dict().items()}
    folder = save(tmp_path / "theirs", state, config, "bin")
    drafter, params = load_draft(folder, base.config, None)
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {str(drafter.dtype)} == {str(dtype).split(".")[1]}
    export_heads(tmp_path / "ours", drafter, params, dtype=None, torch_file=True)
    pt, safe = (
        torch.load(tmp_path / "ours" / "hydra_lm_head.pt"),
        load_file(tmp_path / "ours/hydra_lm_head.safetensors"),
    )
    assert pt.keys() == safe.keys() == {key for key in state if "embed_" not in key}
    assert all(x.dtype == pt[key].dtype == dtype and torch.equal(x, state[key]) for key, x in safe.items())
    assert all(torch.equal(pt[key], x) for key, x in safe.items())
    rounded = {key: x.float() for key, x in state.items() if not key.startswith("input_embed_fn")}
    official.load_state_dict(rounded, strict=False)  # torch computes in float32 with the rounded weights
    agrees(*load_draft(folder, base.config), official, base)
    export_heads(tmp_path / "rounded", *load_draft(folder, base.config), dtype=jnp.dtype(str(dtype).split(".")[1]))
    again = load_file(tmp_path / "rounded" / "hydra_lm_head.safetensors")
    assert all(torch.equal(x, safe[key]) for key, x in again.items())


def test_medusa_file_with_more_heads_than_its_config_declares(base, tmp_path):
    official = randomise(Medusa(5, 1, VOCAB))
    drafter, params = load_draft(save(tmp_path, official.state_dict(), medusa_config(2, 1)), base.config)
    assert drafter.num_draft_heads == 5
    agrees(drafter, params, official, base)


@pytest.mark.parametrize("differ", ["one head", "one number", "a later block"])
def test_blocks_are_shared_only_if_they_are_equal_in_every_head(base, tmp_path, differ):
    official = randomise(Medusa(2, 3, VOCAB))
    for head in [official[0]] if differ == "one head" else official:
        for layer in (1, 2):
            head[layer].load_state_dict(head[0].state_dict())
    with torch.no_grad():
        if differ == "one number":
            official[1][1].linear.bias[7] += 1.0
        if differ == "a later block":
            official[1][2].linear.weight[3, 4] += 1.0
    drafter, params = load_draft(save(tmp_path, official.state_dict(), medusa_config(2, 3)), base.config)
    assert not drafter.share_blocks
    agrees(drafter, params, official, base)


def test_hidden_state_offset(base, theirs, tmp_path):
    """Offset 1 is the input of the last layer, transformers' hidden_states[-2]; not normed."""
    with torch.no_grad():
        states = theirs(torch.tensor(TOKENS), output_hidden_states=True).hidden_states
    official, config = hydra(theirs, 2, 1)
    state = randomise(official).state_dict()
    drafter, params = load_draft(save(tmp_path, state, config | {"hidden_state_offset": 1}), base.config)
    assert drafter.spec.aux_hidden_layers == (1,)
    positions = np.broadcast_to(np.arange(12), TOKENS.shape)
    forward = base.forward(TOKENS, positions, causal_mask(12), aux_hidden_layers=(1,))
    np.testing.assert_allclose(forward.aux_hidden_states, states[-2].numpy(), atol=TOLERANCE, rtol=TOLERANCE)
    np.testing.assert_allclose(forward.hidden, states[-1].numpy(), atol=TOLERANCE, rtol=TOLERANCE)
    hidden = forward.aux_hidden_states
    ours = jax.jit(lambda params: forced_logits(drafter, params, hidden, jnp.asarray(TOKENS), base))(params)
    np.testing.assert_allclose(ours, torchs_logits(official, states[-2]), atol=1e-4, rtol=0)  # the base's rounding too


@pytest.mark.parametrize("kind", ["safetensors shards", "bin"])
def test_medusa_2_is_its_own_base(theirs, tiny_checkpoint, base_state, base_config, tmp_path, kind):
    official = randomise(released.Medusa2(2, 1))
    save(tmp_path, base_state | official.state_dict(), base_config | medusa_config(2, 1), kind)
    loaded, plain = hydrajax.load(tmp_path, tmp_path), hydrajax.load(tiny_checkpoint)
    jax.tree.map(np.testing.assert_array_equal, loaded.params.base, plain.params.base)
    assert loaded.model == plain.model
    assert loaded.drafter == MedusaHeads(2, WIDTH, VOCAB)
    np.testing.assert_array_equal(
        loaded.params.draft["head_1"]["lm_kernel"], official.medusa_head[1][1].weight.detach().T
    )


REFUSED = [  # the directory, changes of its config.json, the message
    ("hydra", {"hydra_head_arch": "eagle-attn"}, "hydra_head_arch: got 'eagle-attn', expected 'mlp' or 'prefix-mlp'"),
    ("hydra", {"hydra_num_heads": 0}, "hydra_num_heads: got 0, expected an integer of at least 1"),
    ("hydra", {"hidden_state_offset": -1}, "hidden_state_offset: got -1"),
    ("hydra", {"hidden_state_offset": 3}, "hidden_state_offset: got 3"),
    ("hydra", {"hydra_num_heads": 3}, "missing tensors 'hydra_lm_head.2.bias'"),
    ("hydra", {"hydra_num_heads": 1}, "unexpected tensors 'hydra_lm_head.1.bias'"),
    ("medusa", {"medusa_num_layers": 2}, "missing tensor '0.2.weight'"),
    ("medusa without head 1", {}, "missing tensors '1.0.linear.bias'"),
    ("medusa-2 without head 1", {}, "missing tensors 'medusa_head.1.0.linear.bias'"),
    ("medusa without lm heads", {"version": "2"}, "share the base's lm head"),
    ("medusa-2 without lm heads", {"version": "2"}, "share the base's lm head"),
    ("vllm", {"truncated_vocab_size": 48}, f"truncated_vocab_size: got 48, expected {VOCAB}"),
    ("vllm", {"original_lm_head": True}, "original_lm_head: got True"),
    ("vllm", {"num_heads": 0}, "num_heads: got 0, expected an integer of at least 1"),
    ("vllm", {"num_heads": 10**9}, "tensors: got 4, too few for 1000000000 heads"),
    ("vllm", {"num_hidden_layers": 10**9}, "1000000000 blocks"),
]


@pytest.mark.parametrize("layout", dict.fromkeys(layout for layout, _, _ in REFUSED))
def test_what_does_not_fit_is_refused_by_its_name(base, base_state, theirs, tmp_path, layout):
    kind, _, without = layout.partition(" without ")
    make = {"hydra": hydra, "medusa": medusa, "medusa-2": medusa_2, "vllm": of_vllm}[kind]
    official, config = make(theirs, 2 + (without == "head 1"), 1)
    state = official.state_dict() | (base_state if make is medusa_2 else {})
    gone = {"": "(?!)", "head 1": r"(medusa_head\.)?1\..*", "lm heads": r"(medusa_head\.)?\d\.1\.weight"}[without]
    state = {key: x for key, x in state.items() if not re.fullmatch(gone, key)}
    for changes, message in [row[1:] for row in REFUSED if row[0] == layout]:
        save(tmp_path, state, config | changes)
        refusal(lambda: load_draft(tmp_path, base.config), "draft", str(tmp_path), message)


@pytest.mark.parametrize("make", [hydra, medusa, medusa_2, of_vllm])
def test_heads_of_another_base(base, base_state, theirs, tmp_path, make):
    official, config = make(theirs, 2, 1)
    save(tmp_path, official.state_dict() | (base_state if make is medusa_2 else {}), config)
    wide, long = base.config.replace(width=64), base.config.replace(vocab_size=97)
    refusal(lambda: load_draft(tmp_path, wide), "draft", "another base", "width: got 32, expected 64")
    refusal(lambda: load_draft(tmp_path, long), "draft", "another base", "vocabulary: got 96, expected 97")


LOADS = ("hydra_lm_head", "medusa_lm_head", "medusa_head.", "model_type 'medusa'", "hydrajax_draft")


def test_a_directory_of_no_known_kind(base, tiny_checkpoint, tmp_path):
    unknown = "no draft heads of a supported format", *LOADS
    refusal(lambda: load_draft(tiny_checkpoint, base.config), "draft", str(tiny_checkpoint), *unknown)  # a plain base
    for config in ("{}", '{"model_type": ["medusa"]}', '{"num_heads": 2, "hydrajax": 3}'):
        (tmp_path / "config.json").write_text(config)
        refusal(lambda: load_draft(tmp_path, base.config), "draft", str(tmp_path), *unknown)
    for content in ("", "[]", '"medusa"', '{"model_type": ', "\x00"):
        (tmp_path / "config.json").write_text(content)
        refusal(lambda: load_draft(tmp_path, base.config), "draft", "config.json")


def test_torch_files_without_torch(base, theirs, tmp_path, monkeypatch):
    """torch is optional: files of it are refused without it, and .safetensors files load."""
    (medusa_state, medusa_fields), (vllm_state, vllm_fields) = (
        (module.state_dict(), config) for module, config in (medusa(theirs, 2, 1), of_vllm(theirs, 2, 1))
    )
    pt = save(tmp_path / "pt", medusa_state, medusa_fields, "bin")
    safe = save(tmp_path / "safe", medusa_state, medusa_fields)
    whole = save(tmp_path / "bin", vllm_state, vllm_fields, "bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    needs = ".pt and .bin files need torch: pip install 'hydrajax[torch]'"
    refusal(lambda: load_draft(pt, base.config), "draft", "medusa_lm_head.pt", needs)
    refusal(lambda: load_draft(whole, base.config), "draft", "pytorch_model.bin", needs)
    load_draft(safe, base.config)


def test_each_configuration_is_read_once(monkeypatch):
    read, names = checkpoint.read_json, []
    monkeypatch.setattr(checkpoint, "read_json", lambda path, what: names.append(str(path)) or read(path, what))
    hydrajax.load("shipped", "hydra++")
    configs = [name for name in names if name.endswith("config.json") and "generation" not in name]
    assert configs == [str(assets.path(name) / "config.json") for name in ("base", "hydra_pp")]


def test_what_text_generation_inference_and_vllm_need(base, theirs, tmp_path):
    """The former takes a file name and the heads' fields; ``architectures`` would mean a whole model. To the latter
    (vllm/transformers_utils/configs/medusa.py) names with "num" and "heads" or "layers" are aliases.
    """
    official, config = of_vllm(theirs, 3, 2, True)
    drafter, params = load_draft(save(tmp_path / "theirs", official.state_dict(), config), base.config)
    mark = {"sha256": "0", "shapes": {"n_heads": 4, "n_layers": 7}}
    story = {"data": "some texts", "recipe": "num_layers of heads", "tokens_per_step": 2.5}
    more = {"base_name": "lab/tiny", "base_fingerprint": mark, "story": story}
    for format in ("medusa", "vllm-medusa"):
        export_heads(tmp_path / format, drafter, params, format=format, torch_file=True, **more)
    fields = config_in(tmp_path / "medusa")
    assert {path.name for path in (tmp_path / "medusa").iterdir() if path.suffix not in (".json", ".md")} == {
        "medusa_lm_head.safetensors", "medusa_lm_head.pt"
    }  # fmt: skip
    assert (medusa_config(3, 2) | {"base_model_name_or_path": "lab/tiny"}).items() <= fields.items()
    assert not fields.keys() & {"architectures", "model_type"}
    fields = config_in(tmp_path / "vllm-medusa")
    assert [path.name for path in (tmp_path / "vllm-medusa").glob("*model*")] == ["model.safetensors"]
    wanted = vllm_config(3, 2, truncated_vocab_size=VOCAB, medusa_fc_bias=True, torch_dtype="bfloat16")
    assert wanted.items() <= fields.items()
    for word, field in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
        assert [name for name in fields if "num" in name and word in name] == [field]


def test_float32_is_rounded_as_torch_does_and_dropout_is_not_written(base, tmp_path):
    official = randomise(Medusa(2, 1, VOCAB))
    drafter, params = load_draft(save(tmp_path / "theirs", official.state_dict(), medusa_config(2, 1)), base.config)
    export_heads(tmp_path / "ours", dataclasses.replace(drafter, dropout=0.2), params)
    assert load_draft(tmp_path / "ours", base.config)[0] == drafter
    found = load_file(tmp_path / "ours" / "medusa_lm_head.safetensors")
    assert all(torch.equal(x, official.state_dict()[name].bfloat16()) for name, x in found.items())


CANNOT = [
    ("medusa", "hydra", ("HydraHeads", "MedusaHeads without lm_head_bias")),
    ("medusa", "hydra++", ("HydraHeads with a prefix layer",)),
    ("medusa", "ungrounded", ("MedusaHeads with lm_head_bias",)),
    ("medusa", "medusa++", ("MedusaHeads with a prefix layer",)),
    ("vllm-medusa", "hydra", ("HydraHeads",)),
    ("vllm-medusa", "ungrounded++", ("MedusaHeads with a prefix layer with lm_head_bias",)),
    ("hydra", "medusa", ("MedusaHeads without lm_head_bias", "Hydra heads")),
    ("hydra", "medusa++", ("MedusaHeads with a prefix layer without lm_head_bias",)),
    ("medusa", "offset", ("hidden_state_offset: got 1, expected 0",)),
    ("vllm-medusa", "offset", ("hidden_state_offset: got 1, expected 0",)),
    ("swan", "hydra", ("'swan'", *FORMATS)),
    ("", "hydra", ("''", *FORMATS)),
    ("eagle", "hydra", ("drafter: got HydraHeads, expected Eagle",)),
    ("speculators", "medusa", ("drafter: got MedusaHeads, expected Eagle3",)),
    *((format, "none", ("NoDrafter", "HydraHeads", "MedusaHeads")) for format in (None, "swan", "native")),
]


def test_formats_that_cannot_express_it(base, tmp_path):
    """The export fails and leaves no files."""
    for format, kind, pieces in CANNOT:
        offset = {"hidden_state_offset": 1} if kind == "offset" else {}
        drafter = NoDrafter() if kind == "none" else heads_of(kind.replace("offset", "medusa"), base.config, **offset)
        refusal(lambda d=drafter, f=format: export_heads(tmp_path / "heads", d, {}, format=f), "export", *pieces)
        assert list(tmp_path.iterdir()) == []
