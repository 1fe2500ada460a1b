"""P-EAGLE against a plain torch module: one causal sequence of the text's rows and mask rows, as its paper draws it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers.draft_heads import identical
from helpers.lab import quick_jit
from helpers.refusals import refusal
from helpers.torch_eagle import Layer, WideLayer
from hydrajax.drafters import peagle
from hydrajax.drafters.peagle import PEagle, PEagleSettings
from hydrajax.errors import HydrajaxError
from hydrajax.formats.export import export_heads
from hydrajax.formats.load import load_draft
from hydrajax.models.base_model import BoundBase
from hydrajax.models.packed_forward import run_base
from hydrajax.train.block_loss import Anchors, block_loss, draw_anchors
from hydrajax.train.flops import drafter_forward_flops
from hydrajax.train.losses import Objective

LAYERS = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 61,
}  # fmt: skip
READS = [0, 1]  # inputs of these layers, as vLLM counts
RELEASED = LAYERS | {"ptd_token_id": 60, "num_speculative_tokens": 4, "eagle_aux_hidden_state_layer_ids": READS}
SPECULATORS = {
    "speculators_model_type": "peagle", "transformer_layer_config": LAYERS, "mask_token_id": 60,
    "draft_vocab_size": 61, "eagle_aux_hidden_state_layer_ids": READS,
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]},
}  # fmt: skip


class NormedLayer(Layer):
    def __init__(self, c):
        super().__init__(c)
        self.input_layernorm = nn.RMSNorm(c.width, eps=c.norm_eps)

    def forward(self, x):
        return super().forward(x, self.input_layernorm(x))


class TorchPEagle(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc = nn.Linear(len(READS) * c.width, c.width, bias=False)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(READS) * c.width))
        self.layers = nn.ModuleList([WideLayer(c), NormedLayer(c)])
        self.norm = nn.RMSNorm(c.width, eps=c.norm_eps)
        self.lm_head = nn.Linear(c.width, c.vocab_size, bias=False)

    def forward(self, embeddings, features):
        """embeddings: [1, T + K - 1, D], the last of them the mask token's; features: [1, T, n * D]."""
        masks = self.mask_hidden.expand(1, embeddings.shape[1] - features.shape[1], -1)
        x = self.layers[0](self.fc(torch.cat([features, masks], dim=1)), embeddings)
        return self.lm_head(self.norm(self.layers[1](x)))


@pytest.fixture(scope="module")
def drafted(tiny_model, tmp_path_factory):
    """The torch module, its file as speculators writes it, and what loading gives."""
    model, base = tiny_model
    torch.manual_seed(0)
    c = model.config.plain_layer.replace(mlp_width=48)
    module = TorchPEagle(c).requires_grad_(False)
    folder = tmp_path_factory.mktemp("peagle")
    (folder / "config.json").write_text(json.dumps(SPECULATORS))
    save_file(module.state_dict(), folder / "model.safetensors")
    return module, folder, *load_draft(folder, model.config, None), model, base


def expected_logits(module, embedding, features, tokens, root, n_guesses):
    """Logits of the guesses after a text of T tokens and the root."""
    follow = torch.tensor([*tokens[1:], root, *[60] * (n_guesses - 1)])
    with torch.no_grad():
        return module(torch.tensor(embedding)[follow][None], torch.tensor(features)[None])[0, -n_guesses:].numpy()


def test_guesses_equal_torch(drafted):
    module, _, drafter, params, model, base = drafted
    assert isinstance(drafter, PEagle)
    tokens = np.random.default_rng(3).integers(0, 61, (2, 10), dtype=np.int32)
    lengths, anchors = np.array([9, 5], np.int32), np.array([[3, 9], [1, 5]], np.int32)

    @quick_jit
    def run(base_params, params):
        bound = BoundBase(model, base_params)
        aux = run_base(model, base_params, tokens, drafter.spec.aux_hidden_layers).aux_hidden_states
        root = jnp.take_along_axis(tokens, lengths[:, None], axis=1)[:, 0]
        state = drafter.begin(params, drafter.init_state(2, 24), aux, tokens, lengths, root, bound)
        hidden = drafter.slots(params, state, root, 4, bound), drafter.blocks(params, aux, tokens, anchors, bound)
        return aux, *(drafter._apply(params, x, bound.logits, method="logits") for x in hidden)

    aux, slots, blocks = map(np.asarray, run(base, params))
    embedding = np.asarray(base["embedding"])
    for row, block in np.ndindex(2, 2):
        at = anchors[row, block]
        expected = expected_logits(module, embedding, aux[row, :at], tokens[row, :at], tokens[row, at], 4)
        np.testing.assert_allclose(blocks[row, block], expected, atol=1e-4)
        if block == 1:
            np.testing.assert_allclose(slots[row], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("retention", "rows_at_once", "lengths"),
    [pytest.param(1.0, 512, (4, 4), marks=pytest.mark.slow), (1.0, 5, (4, 4)), (0.5, 512, (2, 1))],
)
def test_loss_is_that_of_the_logits(drafted, monkeypatch, retention, rows_at_once, lengths):
    """KL's cross entropy at every guess, without decay: the default objective. COD keeps the first guesses of some."""
    module, _, drafter, params, model, base = drafted
    monkeypatch.setattr(peagle, "ROWS_AT_ONCE", rows_at_once)
    drafter = dataclasses.replace(drafter, retention=retention)
    tokens = np.random.default_rng(7).integers(0, 61, (1, 12), dtype=np.int32)
    anchors = Anchors(np.array([[2, 6, 7]], np.int32), np.array([[True, True, False]]))

    @quick_jit
    def run(params):
        bound, out = BoundBase(model, base), run_base(model, base, tokens, drafter.spec.aux_hidden_layers)
        batch = {"tokens": tokens, "labels": tokens}
        inputs = out.aux_hidden_states, out.hidden, batch, anchors, bound
        return block_loss(Objective(), drafter, params, *inputs), out.aux_hidden_states, bound.logits(out.hidden)

    (loss, parts), aux, teacher = jax.device_get(run(params))
    embedding, nats = np.asarray(base["embedding"]), []
    for at, n in zip((2, 6), lengths, strict=True):
        logits = expected_logits(module, embedding, aux[0, :at], tokens[0, :at], tokens[0, at], 4)[:n]
        log_q = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        p = np.asarray(jax.nn.softmax(teacher[0, at : at + n], axis=-1))
        nats.append(-(p * log_q).sum(-1))
    assert float(loss) == pytest.approx(np.concatenate(nats).mean(), abs=1e-5)
    for guess, mean in enumerate(parts["teacher"]):
        found = [x[guess] for x in nats if len(x) > guess]
        assert mean == pytest.approx(np.mean(found) if found else 0, abs=1e-5)


def test_conditional_drop_token(tiny_model, monkeypatch):
    """Guess g is trained in r^g of the rollouts, those that have guess g - 1; what is dropped is not computed."""
    model, _ = tiny_model
    settings = PEagleSettings(1, 5, num_anchors=100, retention=0.5, least_retention=0.2)
    drafter = PEagle.for_base(model.config, jnp.float32, settings)
    kept = [(rollout, guess) for guess, n in enumerate((100, 50, 25, 20, 20)) for rollout in range(n)]
    assert sorted(drafter.guesses(100)[:, 0]) == sorted(5 * rollout + guess for rollout, guess in kept)
    whole = dataclasses.replace(drafter, retention=1.0)
    assert sorted(whole.guesses(100)[:, 0]) == list(range(500))
    dropped, all_guesses = (drafter_forward_flops(one, model, 101) for one in (drafter, whole))
    assert dropped < 0.7 * all_guesses
    assert whole.trained_on(drafter) == whole
    with pytest.raises(HydrajaxError, match=r"draft\.retention: got 0, expected more than 0 and at most 1"):
        PEagleSettings(retention=0)
    monkeypatch.setattr(peagle, "ROWS_AT_ONCE", 30)  # four passes
    numbers = drafter.guesses(100)[:, 0]
    assert sorted(numbers[numbers >= 0]) == sorted(5 * rollout + guess for rollout, guess in kept)
    assert len(numbers) - len(kept) <= 3 * 4


def gradient_of(drafter, model):
    """Return a function of the draft's and the base's parameters and tokens: the gradient of the loss."""

    def loss(params, base, tokens):
        bound, out = BoundBase(model, base), run_base(model, base, tokens, drafter.spec.aux_hidden_layers)
        batch = {"tokens": tokens, "labels": tokens}
        anchors = draw_anchors(jax.random.key(0), tokens, None, drafter.num_anchors)
        inputs = out.aux_hidden_states, out.hidden, batch, anchors, bound
        return block_loss(Objective(chunk_tokens=64), drafter, params, *inputs)[0]

    return jax.grad(loss)


@pytest.mark.slow
def test_dropped_guesses_do_not_enlarge_the_program(drafted):
    """With a pass for each length of rollouts, a GPU compiled one training step for minutes."""
    _, _, drafter, params, model, base = drafted
    tokens = jax.ShapeDtypeStruct((2, 30), jnp.int32)

    def n_products(retention):
        one = dataclasses.replace(drafter, retention=retention, num_anchors=29)
        return str(jax.make_jaxpr(gradient_of(one, model))(params, base, tokens)).count("dot_general")

    assert n_products(0.7) == n_products(1.0)


def test_files(drafted, tmp_path):
    """The released layout has the same tensors under other names, and an export of it reads back."""
    _, folder, drafter, params, model, _ = drafted
    record = {"shapes": {"n_layers": model.config.n_layers}}
    for format in ("p-eagle", "native"):
        export_heads(tmp_path / format, drafter, params, format=format, dtype=None, base_fingerprint=record)
        again, read = load_draft(tmp_path / format, model.config, None)
        assert again == drafter
        identical(params, read)
    specforge = tmp_path / "specforge"  # the released fields, with vLLM's name of the layer
    specforge.mkdir()
    (specforge / "config.json").write_text(json.dumps(RELEASED))
    (specforge / "model.safetensors").symlink_to(folder / "model.safetensors")
    again, read = load_draft(specforge, model.config, None)
    assert again == drafter
    identical(params, read)
    fields = json.loads((tmp_path / "p-eagle" / "config.json").read_text())
    assert {name: fields[name] for name in RELEASED} == RELEASED


def test_an_embedding_of_its_own(drafted, tmp_path):
    """speculators trains it; the released layout has no place for it, so an export takes our own."""
    _, folder, _, _, model, _ = drafted
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(SPECULATORS))
    embedding = torch.randn(61, 32)
    save_file(
        load_file(folder / "model.safetensors") | {"embed_tokens.weight": embedding},
        tmp_path / "theirs" / "model.safetensors",
    )
    drafter, params = load_draft(tmp_path / "theirs", model.config, None)
    np.testing.assert_array_equal(params["embedding"], embedding)
    export_heads(tmp_path / "ours", drafter, params, dtype=None, base_fingerprint={"shapes": {"n_layers": 2}})
    again, read = load_draft(tmp_path / "ours", model.config, None)
    assert again == drafter
    identical(params, read)


def test_what_does_not_fit_is_refused(drafted, tmp_path):
    _, folder, _, _, model, _ = drafted
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    for changes, message in (
        ({"speculators_config": [1], "quantization_config": {"quant_method": "fp8"}}, "quantization_config: got 'fp8'"),
        (
            {"transformer_layer_config": LAYERS | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}},
            "sliding",
        ),
        ({"mask_token_id": 61}, "mask_token_id: got 61, expected a token of the base's vocabulary of 61"),
        ({"fc_norm": True}, "fc_norm: got True, expected False"),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 0}]}}, "speculative_tokens: got 0"),
        ({"transformer_layer_config": LAYERS | {"num_hidden_layers": 3}}, "missing tensor"),
        ({"transformer_layer_config": None}, "transformer_layer_config: got None, expected an object"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(SPECULATORS | changes))
        refusal(lambda: load_draft(tmp_path, model.config), "draft", str(tmp_path), message)
