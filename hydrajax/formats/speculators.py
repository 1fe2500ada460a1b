"""EAGLE drafts in the format of vLLM's library speculators (vllm-project/speculators).

``config.json`` has ``speculators_model_type``, the layer as ``transformer_layer_config``, and the base and the number
of draft tokens as ``speculators_config``. EAGLE-3 (``src/speculators/models/eagle3``) has tensors ``fc.weight``,
``layers.0.*``, ``norm.weight``, ``lm_head.weight``, ``d2t`` and ``t2d``, and lists the base's layers that it reads as
vLLM counts them. EAGLE-1, which newer versions have dropped, has ``fusion_fc.*`` and ``transformer.*``.
"""

from __future__ import annotations

from typing import Any

from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3
from hydrajax.errors import HydrajaxError
from hydrajax.formats import eagle_format
from hydrajax.formats.eagle_format import AUX_LAYERS, EMBEDDING, OFF
from hydrajax.formats.interface import CONFIG, MadeFor, expect, flag, integer
from hydrajax.models.llama_config import LlamaConfig

KIND, LAYER = "speculators_model_type", "transformer_layer_config"
DRAFT_TOKENS = 5  # vLLM's num_speculative_tokens unless it is given


class Speculators(eagle_format.FeatureFormat):
    """EAGLE-3, and EAGLE-1 without further norms."""

    name = "speculators"
    known_by = "EAGLE of speculators (speculators_model_type 'eagle3' or 'eagle')"
    read_by = (
        "`hydrajax generate --base BASE --draft THIS`, speculators (older versions EAGLE-1 too), and versions of vLLM "
        "with the `eagle3` method: "
        f'`--speculative-config \'{{"method": "eagle3", "model": "THIS", "num_speculative_tokens": {DRAFT_TOKENS}}}\'`.'
    )
    ignored = eagle_format.IGNORED + r"|verifier_(norm|lm_head)\.weight"  # the base's, which some versions saved

    def recognises(self, config, names):
        return KIND in config

    def drafter(self, config, files, base):
        kind, where, fields = config[KIND], f"{CONFIG}: {LAYER}", config.get(LAYER)
        if kind not in ("eagle3", "eagle"):
            raise HydrajaxError(f"{CONFIG}: {KIND}: got {kind!r}, expected 'eagle3' or 'eagle'")
        if not isinstance(fields, dict):
            raise HydrajaxError(f"{where}: got {fields!r}, expected an object")
        # Here model_type is the layer's: Qwen 3's has norms that LLaMA's does not have.
        expect(fields, {"model_type": ("llama",)}, where)
        layer = eagle_format.read_layer(
            fields | {"quantization_config": config.get("quantization_config")}, base, where
        )
        if kind == "eagle3":
            # No default: a missing norm_before_residual means true to vLLM and false to speculators.
            flag(config, "norm_before_residual")
            integer(config, "draft_vocab_size", 1)
            aux_hidden_layers = eagle_format.read_aux_layers(config.get(AUX_LAYERS), base, AUX_LAYERS)
            return eagle_format.read_eagle_3(config, layer, aux_hidden_layers, files, base)
        eagle_format.check_copies(files, base, EMBEDDING)
        expect(config, {"transformer_layer_architecture": ("LlamaDecoderLayer", None), "layernorms": OFF})
        return Eagle(layer, fc_bias=flag(config, "fusion_bias", default=False))

    def layout(self, drafter, config):
        if isinstance(drafter, Eagle):
            return eagle_format.eagle_layout(drafter, "transformer.", "fusion_fc")
        return eagle_format.eagle_3_layout(drafter, "layers.0.")

    def config(self, drafter, made_for):
        if type(drafter) is Eagle:
            return {
                "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
                KIND: "eagle",
                "transformer_layer_architecture": "LlamaDecoderLayer",
                LAYER: eagle_format.layer_fields(drafter.config),
                "layernorms": False,
                "fusion_bias": drafter.fc_bias,
                "speculators_config": speculators_config("eagle", drafter.depth, made_for),
            }
        eagle_format.check_class(drafter, Eagle3)
        c: LlamaConfig = drafter.config
        return {
            "architectures": ["Eagle3Speculator"],
            KIND: "eagle3",
            LAYER: eagle_format.layer_fields(c),
            "draft_vocab_size": drafter.lm_head.size(c.vocab_size),
            "norm_before_residual": drafter.norm_before_residual,
            AUX_LAYERS: eagle_format.layers_read(drafter, made_for)[0],
            "speculators_config": speculators_config("eagle3", drafter.depth, made_for),
        }


def speculators_config(algorithm: str, depth: int, made_for: MadeFor) -> dict[str, Any]:
    """Return the base's name and the number of draft tokens, as vLLM reads them."""
    method = {"proposal_type": "greedy", "speculative_tokens": min(depth, DRAFT_TOKENS)}
    return {
        "algorithm": algorithm,
        "proposal_methods": [method | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": made_for.name, "architectures": []},
    }


SPECULATORS = Speculators()
