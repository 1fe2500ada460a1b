"""Files of drafts of one pass: as released by z-lab (DFlash), JetSpec and DeepSpec (DSpark and its variant of DFlash).

A released directory holds ``config.json`` of a small Qwen 3 and ``model.safetensors`` with ``fc.weight``,
``hidden_norm.weight``, ``layers.N.*`` and ``norm.weight``:

- DFlash and JetSpec have a ``dflash_config`` with ``target_layer_ids`` and ``mask_token_id``; JetSpec's also has
  ``causal_head``. They use the base's embedding and lm head.
- DeepSpec has these fields at the top level, and ``markov_head.*`` and ``confidence_head.*`` if the config asks for
  them. Its slots predict the next position. It adds frozen copies of the base's embedding and lm head, which are not
  read and not written.

speculators (vllm-project/speculators) has ``speculators_model_type`` ``dflash`` or ``dspark``, the layers as
``transformer_layer_config``, and a reduced vocabulary as ``d2t`` and ``t2d``, whose rows of the lm head are copies too.
``sample_from_anchor`` means that slots predict the next position. Its ``aux_hidden_state_layer_ids`` number the layers
whose *input* is read.

In layers with a sliding window a slot sees only earlier slots of its block, and the window ends at its own position, as
in SpecForge and vLLM.

Layer i of ``target_layer_ids`` is the base's layer whose *output* is read. The last layer's is after the final norm in
transformers, which DeepSpec therefore refuses; -1 is the embedding.
"""

from typing import Any

from hydrajax.drafters.block import default_target_layers
from hydrajax.drafters.dflash import DFlash, JetSpec
from hydrajax.drafters.dspark import DSpark
from hydrajax.drafters.markov import KINDS, MarkovHead
from hydrajax.errors import HydrajaxError
from hydrajax.formats import interface
from hydrajax.formats.block_parts import BlockFormat, about, block_size_of, check, mask_of, read_layers
from hydrajax.formats.eagle_format import ONE_PASS
from hydrajax.formats.eagle_parts import KIND, draft_vocabulary, nested_layer
from hydrajax.formats.interface import CONFIG
from hydrajax.formats.muse_assistant_format import MuseAssistantFormat

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
NESTED = "dflash_config"
VARIANTS = {  # of DFlash, which are not implemented
    "projector_type": (None, "dflash"),
    "use_swa": (None, False),
    "shift_label": (None, False),
    "final_logit_softcapping": (None,),
    "output_multiplier": (None, 1),
    "attention_value_scale": (None, 1),
    "pure_draft_prefix_len": (None, 0),
}


class DFlashFormat(BlockFormat):
    """DFlash of z-lab/dflash."""

    name = "dflash"
    known_by = "DFlash (dflash_config)"
    read_by = "`hydrajax generate --base BASE --draft THIS`, and the official code of DFlash, SGLang and vLLM."
    drafter_class = DFlash
    causal = False
    architecture = "DFlashDraftModel"

    def recognises(self, config, names):
        own = config.get(NESTED)
        if not isinstance(own, dict) or KIND in config:
            return False
        causal = own.get("causal_head"), own.get("causal"), config.get("is_causal")
        return (True in causal) is self.causal

    def drafter(self, config, files, base):
        own, where = config[NESTED], f"{CONFIG}: {NESTED}"
        interface.expect(own, VARIANTS, where)
        layers, windows = read_layers(config, base)
        if windows and False in (own.get("causal"), config.get("is_causal")):
            raise HydrajaxError(f"{CONFIG}: is_causal: got false, expected true with sliding windows")
        interface.check_copies(files, base, EMBEDDING, LM_HEAD)
        numbers = own.get("target_layer_ids")
        if numbers is None:
            numbers = list(default_target_layers(base.n_layers, layers.n_layers))
        aux_hidden_layers = self.reads(numbers, base, f"{NESTED}.target_layer_ids")
        size = block_size_of(own if "block_size" in own else config, 2)
        return self.drafter_class(layers, aux_hidden_layers, mask_of(own, base, where), size, windows=windows)

    def config(self, drafter, made_for):
        fields, layers = self.common_fields(drafter, made_for)
        if drafter.both_ways or drafter.plain_logits:
            raise interface.cannot_write("both_ways or plain_logits", True, False)
        own = {"mask_token_id": drafter.mask_token, "target_layer_ids": layers}
        own |= {"causal_head": True} if self.causal else {}
        return fields | {"architectures": [self.architecture], NESTED: own}


class JetSpecFormat(DFlashFormat):
    """JetSpec of hao-ai-lab/JetSpec: DFlash's layout with a causal mask."""

    name = "jetspec"
    known_by = "JetSpec (dflash_config.causal_head)"
    read_by = "`hydrajax generate --base BASE --draft THIS --tree fanout-64-7`, and the official code of JetSpec."
    drafter_class = JetSpec
    causal = True


class DeepSpecFormat(BlockFormat):
    """DSpark, and the variant of DFlash, of deepseek-ai/DeepSpec."""

    name = "deepspec"
    known_by = "DeepSpec (target_layer_ids and markov_rank)"
    read_by = "`hydrajax generate --base BASE --draft THIS`."
    drafter_class = DSpark
    first_layer = -1
    last_is_normed = False

    def recognises(self, config, names):
        return "target_layer_ids" in config and "markov_rank" in config

    def drafter(self, config, files, base):
        layers, windows = read_layers(config, base)
        interface.check_copies(files, base, EMBEDDING, LM_HEAD)
        aux_hidden_layers = self.reads(config["target_layer_ids"], base, "target_layer_ids")
        size, mask = block_size_of(config, 1), mask_of(config, base, CONFIG)
        return DSpark(layers, aux_hidden_layers, mask, size, **read_heads(config), windows=windows)

    def config(self, drafter, made_for):
        fields, layers = self.common_fields(drafter, made_for)
        markov = drafter.markov
        return fields | {
            "architectures": ["Qwen3DSparkModel"],
            "target_layer_ids": layers,
            "mask_token_id": drafter.mask_token,
            "markov_rank": markov.rank if markov else 0,
            "markov_head_type": markov.kind if markov else "vanilla",
            "enable_confidence_head": drafter.confidence_head is not None,
            "confidence_head_with_markov": drafter.confidence_head == "markov",
            "num_anchors": drafter.num_anchors,
        }


class SpeculatorsBlocks(BlockFormat):
    """DFlash and DSpark of vllm-project/speculators. Read only."""

    name = "speculators-one-pass"
    known_by = "DFlash or DSpark of speculators (speculators_model_type 'dflash' or 'dspark')"
    ignored = BlockFormat.ignored + "|d2t|t2d"

    def recognises(self, config, names):
        return config.get(KIND) in ONE_PASS

    def drafter(self, config, files, base):
        kind = config[KIND]
        interface.refuse_quantized(config)
        layers, windows = read_layers(nested_layer(config), base)
        if windows:
            interface.expect(config, {"sliding_window_non_causal": (None, False)})
        name = "aux_hidden_state_layer_ids"
        aux_hidden_layers = self.reads(config.get(name), base, name, offset=1)
        interface.check_copies(files, base, EMBEDDING)
        common = {
            "mask_token": mask_of(config, base, CONFIG),
            "block_size": block_size_of(config, 2),
            "vocabulary": draft_vocabulary(config, files, base),
            "windows": windows,
        }
        if interface.flag(config, "sample_from_anchor", default=kind == "dspark"):
            return DSpark(layers, aux_hidden_layers, **common, **(read_heads(config) if kind == "dspark" else {}))
        if kind == "dspark":
            raise HydrajaxError(f"{CONFIG}: sample_from_anchor: got false, expected true for dspark")
        return DFlash(layers, aux_hidden_layers, **common)

    first_layer = -1
    last_is_normed = False


def read_heads(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields ``markov`` and ``confidence_head`` of `DSpark`."""
    rank, markov, confidence = interface.integer(config, "markov_rank", 0), None, None
    if rank:
        kind = config.get("markov_head_type", "vanilla")
        if kind not in KINDS:
            raise HydrajaxError(f"{CONFIG}: markov_head_type: got {kind!r}, expected one of {', '.join(KINDS)}")
        markov = MarkovHead(rank, kind)
    if interface.flag(config, "enable_confidence_head", default=False):
        confidence = "markov" if interface.flag(config, "confidence_head_with_markov", default=False) else "hidden"
        if confidence == "markov" and markov is None:
            raise HydrajaxError(f"{CONFIG}: confidence_head_with_markov: got true, expected false: no Markov head")
    return {"markov": markov, "confidence_head": confidence}


DFLASH_FILES = interface.Files((DFlashFormat(), MuseAssistantFormat(), SpeculatorsBlocks()), check, about)
JETSPEC_FILES = interface.Files((JetSpecFormat(),), check, about)
DSPARK_FILES = interface.Files((DeepSpecFormat(),), check, about)
