"""Files of EAGLE drafts: as released (SafeAILab/EAGLE), vLLM's variants, and those of vLLM's library speculators.

A released directory holds ``config.json`` of a one-layer LLaMA, and ``pytorch_model.bin`` or ``model.safetensors``:

- EAGLE-1 and 2: ``fc.*`` and ``layers.0.*``, without ``input_layernorm``
- EAGLE-3: ``fc.weight``, ``midlayer.*``, ``norm.weight``, ``lm_head.weight``. With a reduced vocabulary also ``d2t``
  (id of the i-th draft token minus i) and ``t2d`` (mask of the draft tokens over the base's vocabulary).

A copy of the base's embedding may be there; it is not read and not written.

vLLM also reads a ``config.json`` with ``model_type`` ``eagle`` whose ``model`` holds the layer's fields, which outer
fields override (``vllm/transformers_utils/configs/eagle.py``), and ``layers.0.`` for ``midlayer.``.

speculators (vllm-project/speculators) has ``speculators_model_type``, the layer as ``transformer_layer_config``, and
the base and the number of draft tokens as ``speculators_config``. Its EAGLE-3 (``src/speculators/models/eagle3``) has
``layers.0.*`` for ``midlayer.*``. Its EAGLE-1, dropped by newer versions, has ``fusion_fc.*`` and ``transformer.*``.

EAGLE-3 reads the *inputs* of the base's layers 2, L // 2 and L - 3, counted from 0 (SafeAILab/EAGLE
``eagle/model/modeling_llama_kv.py``). vLLM and speculators use these numbers; SGLang numbers the layers whose *output*
is read, which are one lower. `hydrajax.models.base_model.BaseModel.__call__` counts from the last layer.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from hydrajax.drafters.eagle import Eagle, EagleDrafter
from hydrajax.drafters.eagle3 import Eagle3, default_aux_hidden_layers
from hydrajax.errors import HydrajaxError
from hydrajax.formats import eagle_parts as parts
from hydrajax.formats import interface
from hydrajax.formats.interface import CONFIG
from hydrajax.models.layout import MODEL
from hydrajax.models.llama_config import LlamaConfig

IGNORED = r"embed_tokens\.weight|.*rotary_emb\.inv_freq|d2t|t2d"  # the embedding is a copy of the base's
ONE_PASS = ("dflash", "dspark")  # kinds that `hydrajax.formats.block_format` reads
P_EAGLE, MASK_HIDDEN = "peagle", "mask_hidden"  # kind and tensor of `hydrajax.formats.peagle_format`
DRAFT_TOKENS = 5  # vLLM's num_speculative_tokens unless it is given
EAGLE_CONFIG = {  # variants in SGLang's eagle_config
    "use_aux_hidden_state": parts.ON,
    "use_input_layernorm_in_first_layer": parts.ON,
    "use_last_layernorm": parts.ON,
    "use_mtp_layernorm": parts.OFF,
    "return_hidden_post_norm": parts.OFF,
}


class FeatureFormat(interface.HeadFormat):
    """A format of EAGLE drafts.

    Attributes:
        layer: prefix of the decoder layer's tensor names.
    """

    stem = MODEL
    ignored = IGNORED
    dtype_field = "torch_dtype"
    layer: str

    def layout(self, drafter, config):
        if isinstance(drafter, Eagle):
            return parts.eagle_layout(drafter, self.layer)
        return parts.eagle_3_layout(drafter, self.layer)

    def settled(self, drafter, files, dtype):
        fc = next(name for entry in self.layout(drafter, {}) for name in entry.theirs)
        drafter = dataclasses.replace(drafter, dtype=jnp.dtype(files.dtype(fc) if dtype is None else dtype))
        return parts.with_vocabulary(drafter, files)

    def constants(self, drafter):
        """``d2t`` (int64) and ``t2d`` (bool) of a reduced vocabulary."""
        vocabulary = getattr(drafter, "vocabulary", None)
        if vocabulary is None or len(vocabulary) == drafter.config.vocab_size:
            return {}
        tokens = vocabulary.tokens.astype(np.int64)
        mask = np.zeros(drafter.config.vocab_size, bool)
        mask[tokens] = True
        return {parts.D2T: tokens - np.arange(len(tokens)), parts.T2D: mask}


class EagleFormat(FeatureFormat):
    """EAGLE-1 and 2."""

    name = "eagle"
    known_by = "released EAGLE (fc. and layers.0.)"
    read_by = (
        "`hydrajax generate --base BASE --draft THIS`, the official EAGLE code since 2025 (`use_eagle3=False`; no "
        "llama3 RoPE scaling), and versions of vLLM with the `eagle` method, drafts without a bias: "
        '`--speculative-config \'{"method": "eagle", "model": "THIS", "num_speculative_tokens": 5}\'`.'
    )
    ignored = IGNORED + r"|lm_head\.weight"  # vLLM's own files also copy the base's lm head
    layer = "layers.0."

    def recognises(self, config, names):
        return any(name.startswith(self.layer) for name in names) and f"{self.layer}hidden_norm.weight" not in names

    def drafter(self, config, files, base):
        # The official code and vLLM differ in the bias's default, and vLLM's own files in its name.
        flat, nested = parts.flattened(config), config.get("model_type") == parts.NESTED
        name = "eagle_fc_bias" if nested and "eagle_fc_bias" in flat else "bias"
        interface.expect(flat, {"add_para_norm": parts.OFF, "logit_scale": (None, 1)})
        interface.check_copies(files, base, parts.EMBEDDING, parts.LM_HEAD)
        return Eagle(parts.read_layer(flat, base), fc_bias=interface.flag(flat, name, default=not nested))

    def config(self, drafter, made_for):
        parts.check_class(drafter, Eagle)
        parts.check_all_tokens(drafter)
        return parts.released_fields(drafter.config) | {"bias": drafter.fc_bias}


class Eagle3Format(FeatureFormat):
    """EAGLE-3."""

    name = "eagle-3"
    known_by = "released EAGLE-3 (fc. and midlayer.)"
    read_by = (
        "`hydrajax generate --base BASE --draft THIS`, the official EAGLE code (no llama3 RoPE scaling), SGLang "
        "(`--speculative-algorithm EAGLE3 --speculative-draft-model-path THIS`) and versions of vLLM with the `eagle3` "
        'method: `--speculative-config \'{"method": "eagle3", "model": "THIS", "num_speculative_tokens": 5}\'`.'
    )
    layer = "midlayer."

    def recognises(self, config, names):
        return any(name.startswith(self.layer) for name in names) and MASK_HIDDEN not in names

    def drafter(self, config, files, base):
        config = parts.flattened(config)
        own = {} if config.get("eagle_config") is None else config["eagle_config"]
        if not isinstance(own, dict):
            raise HydrajaxError(f"{CONFIG}: eagle_config: got {own!r}, expected an object")
        interface.expect(own, EAGLE_CONFIG, f"{CONFIG}: eagle_config")
        name, offset = parts.AUX_LAYERS, 0
        if own.get(parts.AUX_LAYERS):
            name, offset = f"eagle_config.{parts.AUX_LAYERS}", 1
            if config.get(parts.AUX_LAYERS):
                raise HydrajaxError(
                    f"{CONFIG}: got both {parts.AUX_LAYERS} and {name}, which count differently; remove one"
                )
        numbers = (own if offset else config).get(parts.AUX_LAYERS)
        return parts.read_eagle_3(
            config, parts.read_layer(config, base), parts.read_aux_layers(numbers, base, name, offset), files, base
        )

    def config(self, drafter, made_for):
        parts.check_class(drafter, Eagle3)
        if drafter.norm_before_residual:
            raise interface.cannot_write("norm_before_residual", True, False)
        layers, n_layers = parts.layers_read(drafter, made_for)
        if len(layers) != 3 or drafter.aux_hidden_layers != default_aux_hidden_layers(n_layers):
            raise interface.cannot_write(
                "aux_hidden_layers", f"inputs of layers {layers} of {n_layers}", "those of 2, L // 2 and L - 3"
            )
        fields = parts.released_fields(drafter.config) | {"architectures": ["LlamaForCausalLMEagle3"]}
        return fields | {"draft_vocab_size": drafter.lm_head.size(drafter.config.vocab_size)}


class VLLMEagle3(Eagle3Format):
    """EAGLE-3 with vLLM's name of the layer. Read only."""

    name = "vllm-eagle-3"
    known_by = "vLLM's EAGLE-3 (layers.0.hidden_norm)"
    read_by = ""
    layer = "layers.0."

    def recognises(self, config, names):
        return f"{self.layer}hidden_norm.weight" in names and MASK_HIDDEN not in names


class Speculators(FeatureFormat):
    """EAGLE-3, and EAGLE-1 without further norms."""

    name = "speculators"
    known_by = "EAGLE of speculators (speculators_model_type 'eagle3' or 'eagle')"
    read_by = (
        "`hydrajax generate --base BASE --draft THIS`, speculators (older versions EAGLE-1 too), and versions of vLLM "
        "with the `eagle3` method: "
        f'`--speculative-config \'{{"method": "eagle3", "model": "THIS", "num_speculative_tokens": {DRAFT_TOKENS}}}\'`.'
    )
    ignored = IGNORED + r"|verifier_(norm|lm_head)\.weight"  # the base's, which some versions saved

    def recognises(self, config, names):
        return parts.KIND in config and config[parts.KIND] not in (*ONE_PASS, P_EAGLE)

    def drafter(self, config, files, base):
        kind, where = config[parts.KIND], f"{CONFIG}: {parts.LAYER}"
        if kind not in ("eagle3", "eagle"):
            raise HydrajaxError(f"{CONFIG}: {parts.KIND}: got {kind!r}, expected 'eagle3' or 'eagle'")
        fields = parts.nested_layer(config)
        # Here model_type is the layer's: Qwen 3's has norms that LLaMA's does not have.
        interface.expect(fields, {"model_type": ("llama",)}, where)
        layer = parts.read_layer(fields | {"quantization_config": config.get("quantization_config")}, base, where)
        if kind == "eagle3":
            # No default: a missing norm_before_residual means true to vLLM and false to speculators.
            interface.flag(config, "norm_before_residual")
            interface.integer(config, "draft_vocab_size", 1)
            aux_hidden_layers = parts.read_aux_layers(config.get(parts.AUX_LAYERS), base, parts.AUX_LAYERS)
            return parts.read_eagle_3(config, layer, aux_hidden_layers, files, base)
        interface.check_copies(files, base, parts.EMBEDDING)
        interface.expect(
            config, {"transformer_layer_architecture": ("LlamaDecoderLayer", None), "layernorms": parts.OFF}
        )
        return Eagle(layer, fc_bias=interface.flag(config, "fusion_bias", default=False))

    def layout(self, drafter, config):
        if isinstance(drafter, Eagle):
            return parts.eagle_layout(drafter, "transformer.", "fusion_fc")
        return parts.eagle_3_layout(drafter, "layers.0.")

    def config(self, drafter, made_for):
        if type(drafter) is Eagle:
            parts.check_all_tokens(drafter)
            fields = {
                "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
                parts.KIND: "eagle",
                "transformer_layer_architecture": "LlamaDecoderLayer",
                parts.LAYER: parts.layer_fields(drafter.config),
                "layernorms": False,
                "fusion_bias": drafter.fc_bias,
            }
        else:
            parts.check_class(drafter, Eagle3)
            fields = {
                "architectures": ["Eagle3Speculator"],
                parts.KIND: "eagle3",
                parts.LAYER: parts.layer_fields(drafter.config),
                "draft_vocab_size": drafter.lm_head.size(drafter.config.vocab_size),
                "norm_before_residual": drafter.norm_before_residual,
                parts.AUX_LAYERS: parts.layers_read(drafter, made_for)[0],
            }
        method = {"proposal_type": "greedy", "speculative_tokens": min(drafter.depth, DRAFT_TOKENS)}
        fields["speculators_config"] = {
            "algorithm": fields[parts.KIND],
            "proposal_methods": [method | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": made_for.name, "architectures": []},
        }
        return fields


def check(heads: EagleDrafter, base: LlamaConfig) -> None:
    """`Files.check`."""
    c: LlamaConfig = heads.config
    interface.check_counts(heads, "depth", "ttt_length")
    if c != c.plain_layer:
        raise ValueError(f"config: got {c}, expected LLaMA's plain layer")
    interface.check_sizes((c.vocab_size, c.width), base)
    interface.check_layer(c)
    parts.check_vocabulary(heads, base)
    if isinstance(heads, Eagle3):
        parts.check_aux_layers(heads, base)


def about(heads: EagleDrafter) -> interface.About:
    if not isinstance(heads, Eagle3):
        return interface.about_layers(heads, "EAGLE heads", "eagle", "one layer", heads.config.width)
    found = interface.about_layers(heads, "EAGLE-3 heads", "eagle3", "one layer", heads.config.width)
    found.rows["reads"] = f"{len(heads.aux_hidden_layers)} layers of the base"
    return found


EAGLE, EAGLE_3 = EagleFormat(), Eagle3Format()
EAGLE_FILES = interface.Files((EAGLE,), check, about)
EAGLE_3_FILES = interface.Files((EAGLE_3, VLLMEagle3(), Speculators()), check, about)
