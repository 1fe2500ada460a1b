"""EAGLE drafts as vLLM's library speculators keeps them, which vLLM reads (vllm-project/speculators).

``config.json`` has ``speculators_model_type``, the layer as ``transformer_layer_config``, and what base it is for and
how many tokens to guess as ``speculators_config``. EAGLE-3 (``src/speculators/models/eagle3``) names its tensors
``fc.weight``, ``layers.0.*``, ``norm.weight``, ``lm_head.weight``, ``d2t`` and ``t2d``, and lists the layers of the
base that it reads as vLLM counts them. EAGLE-1, which newer versions have dropped, names its ``fusion_fc.*`` and
``transformer.*``.

A missing ``norm_before_residual`` means true to vLLM and false to speculators, so it must be there.
"""

from __future__ import annotations

from typing import Any

from hydrajax.drafters.eagle import Eagle
from hydrajax.drafters.eagle3 import Eagle3
from hydrajax.errors import HydrajaxError
from hydrajax.formats import eagle_format
from hydrajax.formats.interface import CONFIG, MadeFor, expect, flag, integer
from hydrajax.models.llama_config import LlamaConfig

KIND, LAYER = "speculators_model_type", "transformer_layer_config"
GUESSES = 5  # how many tokens vLLM drafts, one after the other, unless it is told a number


class Speculators(eagle_format.FeatureFormat):
    """EAGLE-3, and EAGLE-1 without further norms."""

    name = "speculators"
    known_by = "EAGLE as speculators keeps it (speculators_model_type 'eagle3' or 'eagle')"
    read_by = (
        "`hydrajax generate --base BASE --draft THIS`, speculators (older versions EAGLE-1 too), and versions of vLLM "
        "with the `eagle3` method: "
        f'`--speculative-config \'{{"method": "eagle3", "model": "THIS", "num_speculative_tokens": {GUESSES}}}\'`.'
    )
    ignored = eagle_format.IGNORED + r"|verifier_(norm|lm_head)\.weight"  # the base's, which some versions kept

    def recognises(self, config, names):
        return KIND in config

    def drafter(self, config, files, base):
        kind, where = config[KIND], f"{CONFIG}: {LAYER}"
        if kind not in ("eagle3", "eagle"):
            raise HydrajaxError(f"{CONFIG}: {KIND} is {kind!r}, supported are 'eagle3' and 'eagle'")
        fields = config.get(LAYER)
        if not isinstance(fields, dict):
            raise HydrajaxError(f"{CONFIG}: {LAYER} must be an object, found {fields!r}")
        # Here it names the layer: a Qwen 3's has norms that a LLaMA's does not have.
        expect(fields, {"model_type": ("llama",)}, where)
        layer = eagle_format.layer_of(fields | {"quantization_config": config.get("quantization_config")}, base, where)
        if kind == "eagle3":
            flag(config, "norm_before_residual")
            integer(config, "draft_vocab_size", 1)
            return eagle_format.eagle_3_of(
                config,
                layer,
                eagle_format.reads_from(config.get(eagle_format.LAYERS), base, eagle_format.LAYERS),
                files,
                base,
            )
        eagle_format.check_embedding(files, base)
        names = {"transformer_layer_architecture": ("LlamaDecoderLayer", None)}
        expect(config, names | {"layernorms": eagle_format.OFF})
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
        eagle_format.plain(drafter, Eagle3, self.name)
        c: LlamaConfig = drafter.config
        return {
            "architectures": ["Eagle3Speculator"],
            KIND: "eagle3",
            LAYER: eagle_format.layer_fields(c),
            "draft_vocab_size": drafter.lm_head.size(c.vocab_size),
            "norm_before_residual": drafter.norm_before_residual,
            eagle_format.LAYERS: eagle_format.layers_read(drafter, made_for)[0],
            "speculators_config": speculators_config("eagle3", drafter.depth, made_for),
        }

    def constants(self, drafter):
        return eagle_format.token_tensors(drafter)


def speculators_config(algorithm: str, depth: int, made_for: MadeFor) -> dict[str, Any]:
    """What vLLM asks of a draft: its base, and how many tokens to guess."""
    method = {"proposal_type": "greedy", "speculative_tokens": min(depth, GUESSES)}
    return {
        "algorithm": algorithm,
        "proposal_methods": [method | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": made_for.name, "architectures": []},
    }


SPECULATORS = Speculators()
