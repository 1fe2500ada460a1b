"""Parameters of tunix, gemma and MaxText: logits of tiny models that those programs computed themselves
(tests/golden/make_jax_programs.py).
"""

import io
import json
import lzma
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import unflatten_dict as unflatten

import hydrajax
from helpers.compilations import no_compilation
from hydrajax.bench.uncached_forward import all_logits
from hydrajax.errors import HydrajaxError
from hydrajax.integrations.axes import ForeignTensors, Place
from hydrajax.integrations.configs import config_of
from hydrajax.integrations.params import arrays_by_path

FOLDER = Path(__file__).parents[1] / "golden" / "jax_programs"
QUICK = {
    "gemma_gemma2_square", "gemma_gemma3", "maxtext_gemma2", "maxtext_gemma3", "maxtext_llama_interleaved",
    "maxtext_llama_unscanned", "maxtext_mistral_tied", "tunix_gemma2", "tunix_gemma4", "tunix_llama3", "tunix_lora",
    "tunix_qwen3",
}  # fmt: skip
# Keys and values of layers of Gemma 4 that attend to those of others.
UNUSED = r"layers\.[23]\.attn\.(kv_einsum\.w|_key_norm\.scale)"
NAMES = sorted(file.name.removesuffix(".npz.xz") for file in FOLDER.iterdir())
NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]


def stand_in(value: Any, module: str = "") -> Any:
    """Return an object with these attributes, of a class of that module; an enum has a name."""
    if isinstance(value, dict):
        return type("Config", (SimpleNamespace,), {"__module__": module})(**value)
    return value


class Recorded(NamedTuple):
    program: str
    config: Any
    arrays: dict[str, np.ndarray]
    tokens: np.ndarray
    logits: np.ndarray
    lora_alpha: float | None

    @staticmethod
    def named(name: str) -> "Recorded":
        content = dict(np.load(io.BytesIO(lzma.decompress((FOLDER / f"{name}.npz.xz").read_bytes()))))
        tokens, logits, given = content.pop("tokens"), content.pop("logits"), json.loads(str(content.pop("config")))
        fields = {
            name: [*map(stand_in, value)] if isinstance(value, list) else stand_in(value)
            for name, value in given["fields"].items()
        }
        config = stand_in(fields, given["module"])
        return Recorded(name.partition("_")[0], config, content, tokens, logits, given.get("lora_alpha"))

    def model(self, **options):
        options = {"max_positions": 64, "lora_alpha": self.lora_alpha} | options
        return hydrajax.from_params(self.config, self.arrays, self.program, **options)


def check_logits(m, recorded: Recorded) -> None:
    got = np.stack([all_logits(m.model, m.params.base, tokens) for tokens in recorded.tokens])
    assert np.abs(got - recorded.logits).max() < 1e-5 * np.abs(recorded.logits).max()


def check_same(found: dict, expected: dict) -> None:
    unused = {path for path in expected if re.fullmatch(UNUSED, path)} if "layers.3.skip_scale" in expected else set()
    assert found.keys() == expected.keys() - unused
    for path, x in found.items():
        np.testing.assert_array_equal(x, expected[path], path)


@pytest.mark.parametrize("name", NAMES)
def test_recorded(name):
    recorded = Recorded.named(name)
    m = recorded.model()
    check_logits(m, recorded)
    if recorded.lora_alpha is None:
        check_same(hydrajax.to_params(m, recorded.program), recorded.arrays)
        check_same(hydrajax.to_params(m, recorded.program, recorded.arrays), recorded.arrays)
    halved = {path: x / 2 for path, x in recorded.arrays.items()}
    with no_compilation():
        m.update_params(halved)
    if recorded.lora_alpha is None:
        check_same(hydrajax.to_params(m, recorded.program), halved)
    path = next(
        path for path in reversed(recorded.arrays) if "einsum" in path or "kernel" in path or path.endswith("w")
    )
    others = {key: x for key, x in recorded.arrays.items() if key != path}
    for wrong, message in (
        (others, f"got no .*{path}"),
        (others | {path: recorded.arrays[path][..., None]}, f"{path}: got the shape .*, expected"),
        (recorded.arrays | {"extra.w": np.zeros(2, np.float32)}, "got extra.w, for which"),
    ):
        with pytest.raises(HydrajaxError, match=message) as error:
            m.update_params(wrong)
        assert "\n" not in str(error.value)


SHAPE = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
GEMMA2 = {"num_hidden_layers": 4, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, "sliding_window": 4}
GEMMA2 |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "final_logit_softcapping": 30.0}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("maxtext_gemma2", {"model_type": "gemma2"} | GEMMA2),
        ("maxtext_llama_interleaved", {"model_type": "llama", "rope_parameters": LLAMA3}),
    ],
)
def test_transformers_configuration(name, fields):
    """Arrays of MaxText are scaled, shifted and reordered as its own conversion does, and back."""
    recorded = Recorded.named(name)
    m = hydrajax.from_params(SHAPE | fields, recorded.arrays, "maxtext")
    check_logits(m, recorded)
    for found in (hydrajax.to_params(m, "maxtext"), hydrajax.to_params(m, "maxtext", recorded.arrays)):
        assert found.keys() == recorded.arrays.keys()
        for path, x in recorded.arrays.items():
            np.testing.assert_allclose(found[path], x, rtol=0, atol=1e-6, err_msg=path)


def test_maxtext_configuration():
    """The same fields in an object, such as that of its ``pyconfig``, or in a dict, such as a model's YAML file."""
    given = Recorded.named("maxtext_gemma3").config
    assert config_of(given) == config_of(vars(given)) == config_of(stand_in(vars(given), "MaxText.pyconfig"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_name": None}, "model_name: got none"),
        ({"decoder_block": "deepseek"}, "decoder_block: got 'deepseek', expected llama2"),
        ({"fused_qkv": True}, "fused_qkv: got True"),
        ({"rope_type": "yarn"}, "rope_type: got 'yarn'"),
        ({"mlp_activations": ["relu"]}, "mlp_activations: got"),
        ({"model_name": "gemma3-1b"}, "model_name: got 'gemma3-1b', expected gemma3-4b"),
        ({"use_post_ffw_norm": False}, "got other norms"),
    ],
)
def test_unsupported_maxtext(change, message):
    with pytest.raises(HydrajaxError, match=message):
        config_of(vars(Recorded.named("maxtext_gemma3").config) | change)


def test_unsupported():
    recorded = Recorded.named("maxtext_llama")
    with pytest.raises(HydrajaxError, match="layout: got 'hf' for a configuration of MaxText, expected 'maxtext'"):
        hydrajax.from_params(recorded.config, recorded.arrays, "hf")
    with pytest.raises(HydrajaxError, match=r"config: got .* of gemma.gm.nn.gemma3n._config, expected"):
        config_of(stand_in({}, "gemma.gm.nn.gemma3n._config"))
    config = Recorded.named("tunix_gemma4").config
    for change in ({"enable_moe": True}, {"frac_shared_layers": 0.25}, {"override_kv_shared_ffw_hidden": 10}):
        with pytest.raises(HydrajaxError, match=r"config: .*got .*, expected"):
            config_of(stand_in(vars(config) | change, type(config).__module__))


def test_maxtext_checkpoint(tmp_path):
    """Of a step's state only the parameters are read."""
    recorded = Recorded.named("maxtext_llama")
    nested = unflatten({("params", "params", *path.split(".")): x for path, x in recorded.arrays.items()})
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "0" / "items", nested | {"opt_state": {"mu": np.ones(3)}, "step": 1})
    for folder in (tmp_path / "0", tmp_path / "0" / "items"):
        check_same(arrays_by_path(folder), recorded.arrays)
    with pytest.raises(HydrajaxError, match="got no Orbax checkpoint"):
        arrays_by_path(tmp_path / "1")


def test_low_rank_weights_of_several_ranks():
    """Each product is multiplied by alpha / its own rank, as qwix' rules may differ by module."""
    random, arrays = np.random.default_rng(0), {}
    for name, inputs, outputs, rank in (("q_proj.w", (8,), (2, 4), 2), ("o_proj.w", (2, 4), (8,), 4)):
        for end, shape in (("", (*inputs, *outputs)), ("_lora_a", (*inputs, rank)), ("_lora_b", (rank, *outputs))):
            arrays[f"layers.0.attn.{name}{end}"] = jnp.asarray(random.normal(size=shape), jnp.float32)
    axes = {"q": "dnh", "o": "nhd"}
    places = {f"model.layers.0.self_attn.{x}_proj.weight": Place(f"layers.0.attn.{x}_proj.w", axes[x]) for x in "qo"}
    tensors = ForeignTensors(arrays, places, lora_alpha=6.0)
    for name, place in places.items():
        weight, a, b = (np.asarray(arrays[place.path + end], np.float64) for end in ("", "_lora_a", "_lora_b"))
        merged = (weight + 6.0 / len(b) * np.tensordot(a, b, 1)).reshape(8, 8)
        np.testing.assert_allclose(tensors.view(name), merged.T, rtol=1e-6)
