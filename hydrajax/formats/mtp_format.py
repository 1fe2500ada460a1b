"""Files of MTP modules: within their base's own files, or exported alone.

- MiMo: ``model.mtp_layers.0.*``: ``token_layernorm``, ``hidden_layernorm``, ``input_proj``, the decoder layer and
  ``final_layernorm``. It reads the hidden state before the base's final norm, and M's input has the embedding last
  (vLLM's ``mimo.py`` and ``mimo_mtp.py``, by Xiaomi).
- GLM-4.5 and later, DeepSeek-V3: a layer after the base's last, ``model.layers.L.*`` with L the base's
  ``num_hidden_layers``: ``enorm``, ``hnorm``, ``eh_proj``, the decoder layer and ``shared_head.norm``. Its copies of
  the embedding and the lm head are not read: both are shared with the base (DeepSeek-V3 2.2), as SGLang does.
- Qwen3-Next, Qwen 3.5: ``mtp.*``: ``pre_fc_norm_embedding``, ``pre_fc_norm_hidden``, ``fc``, a layer of full attention
  ``layers.0.*`` and ``norm`` (vLLM's ``qwen3_next_mtp.py`` and ``qwen3_5_mtp.py``; transformers ignores them). All
  norms are the base's kind. Qwen3-Next's published 81,324,862,720 parameters are those of the base and this module.

``config.json`` is the base's, with ``num_nextn_predict_layers``. Of several modules the first one is read.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp

from hydrajax.drafters.mtp import MTP
from hydrajax.errors import HydrajaxError
from hydrajax.families.family_layout import decoder_layer
from hydrajax.families.tensor_names import NO_FILES
from hydrajax.formats import interface
from hydrajax.formats.eagle_parts import check_all_tokens, check_class, check_vocabulary
from hydrajax.models.layout import MODEL, Layout, same, shapes, transposed
from hydrajax.models.llama_config import LlamaConfig

EXPERTS = "mlp.experts.0.gate_proj.weight"


class MTPFormat(interface.HeadFormat):
    """A layout of MTP modules.

    Attributes:
        embedding_first, before_final_norm: of the drafter (`hydrajax.drafters.mtp.MTP`).
        names: of the norms of embedding and hidden state, the projection and the last norm.
        copies: of the base's tensors, which are not read.
        layer: the decoder layer's prefix after the module's.
    """

    stem = MODEL
    dtype_field = "torch_dtype"
    ignored = ".*"  # the base's tensors; `drafter` refuses unknown ones of the module
    embedding_first: bool
    before_final_norm: bool
    names: tuple[str, str, str, str]
    copies: tuple[str, ...] = ()
    architecture: tuple[str, str]
    layer: str = ""

    def prefix(self, config: dict) -> str:
        """Return the start of the names of the module's tensors."""
        raise NotImplementedError

    def found_in(self, config: dict, names: Collection[str]) -> bool:
        """Return True if there is a module in this layout among the tensors of a base or of an export."""
        return f"{self.prefix(config)}{self.names[2]}.weight" in names

    def recognises(self, config, names):
        """Return True for an export; a whole base is a draft model unless its module is asked for by name."""
        return interface.LAST_NORMS.isdisjoint(names) and self.found_in(config, names)

    def drafter(self, config, files, base):
        prefix, found = self.prefix(config), set(files)
        layer = f"{prefix}{self.layer}"
        interface.check_copies(files, base, *(f"{prefix}{name}" for name in self.copies))
        if "vocab_size" in config:
            interface.check_sizes((config["vocab_size"],), base)
        facts = {"embedding_first": self.embedding_first, "before_final_norm": self.before_final_norm}
        drafter = MTP(MTP.layer_of(base), **facts)
        wanted = shapes(self.layout_in(drafter, config, files.shapes))
        if f"{layer}{EXPERTS}" in found - wanted.keys():
            raise HydrajaxError(
                f"the MTP module is a mixture of experts ({EXPERTS}), and the base's last layer of attention is not"
            )
        known = {*wanted, *(f"{prefix}{name}" for name in self.copies)}
        if unknown := sorted(name for name in found - known if name.startswith(prefix)):
            raise HydrajaxError(f"unexpected tensor '{unknown[0]}' of the MTP module")
        return drafter

    def layout(self, drafter, config) -> Layout:
        return self.layout_in(drafter, config, NO_FILES)

    def layout_in(self, drafter, config, files) -> Layout:
        c, prefix = drafter.config, self.prefix(config)
        embedding, hidden, projection, last = (f"{prefix}{name}.weight" for name in self.names)
        return [
            transposed(("fc",), projection, c.width, 2 * c.width),
            same(("embedding_norm", "scale"), embedding, c.width),
            same(("hidden_norm", "scale"), hidden, c.width),
            *decoder_layer(("layer",), f"{prefix}{self.layer}", c, files=files),
            same(("norm", "scale"), last, c.width),
        ]

    def settled(self, drafter, files, dtype):
        projection = next(name for name in files if name.endswith(f".{self.names[2]}.weight"))
        return dataclasses.replace(drafter, dtype=jnp.dtype(files.dtype(projection) if dtype is None else dtype))

    def config(self, drafter, made_for: interface.MadeFor) -> dict[str, Any]:
        check_class(drafter, MTP)
        check_all_tokens(drafter)
        for name in ("embedding_first", "before_final_norm"):
            if getattr(drafter, name) != getattr(self, name):
                raise interface.cannot_write(name, getattr(drafter, name), getattr(self, name))
        architecture, kind = self.architecture
        return {
            "architectures": [architecture],
            "model_type": kind,
            "num_hidden_layers": made_for.n_layers or 0,
            "num_nextn_predict_layers": 1,
            "hidden_size": drafter.config.width,
            "vocab_size": drafter.config.vocab_size,
        }


READ_BY = (
    "`hydrajax generate --base BASE --draft THIS`. Its tensors have the names that vLLM and SGLang read in the base's "
    "own files."
)


class MiMoFormat(MTPFormat):
    """MiMo's module."""

    name = "mimo-mtp"
    known_by = "MiMo's MTP module (model.mtp_layers.0.)"
    read_by = READ_BY
    embedding_first, before_final_norm = False, True
    names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    architecture = ("MiMoMTPModel", "mimo_mtp")

    def prefix(self, config):
        return "model.mtp_layers.0."


class QwenFormat(MTPFormat):
    """The module of Qwen3-Next and Qwen 3.5."""

    name = "qwen-mtp"
    known_by = "Qwen3-Next's MTP module (mtp.fc)"
    read_by = READ_BY
    embedding_first, before_final_norm = True, False
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    architecture = ("Qwen3NextMTP", "qwen3_next_mtp")
    layer = "layers.0."

    def prefix(self, config):
        return "mtp."


class NextNFormat(MTPFormat):
    """The module of GLM-4.5 and later and of DeepSeek-V3."""

    name = "nextn"
    known_by = "an MTP module after the last layer (eh_proj)"
    read_by = READ_BY
    embedding_first, before_final_norm = True, False
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    architecture = ("Glm4MoeMTPModel", "glm4_moe_mtp")

    def prefix(self, config):
        return f"model.layers.{config.get('num_hidden_layers')}."

    def config(self, drafter, made_for):
        fields = super().config(drafter, made_for)
        if drafter.config.attention_gate:
            raise interface.cannot_write("attention_gate", True, False)
        return fields


def check(heads: MTP, base: LlamaConfig) -> None:
    """`Files.check`."""
    interface.check_counts(heads, "depth", "ttt_length")
    interface.check_sizes((heads.config.vocab_size, heads.config.width), base)
    expected = MTP.layer_of(base).replace(max_positions=heads.config.max_positions)
    if heads.config != expected:
        other = [name for name, value in vars(expected).items() if getattr(heads.config, name) != value]
        raise HydrajaxError(f"config: got another {', '.join(other)} than the base's layers; made for another base")
    check_vocabulary(heads, base)


def about(heads: MTP) -> interface.About:
    """`Files.about`."""
    return interface.about_layers(heads, "An MTP module", "mtp", "one layer like the base's", heads.config.width)


FILES = interface.Files((MiMoFormat(), NextNFormat(), QwenFormat()), check, about)
