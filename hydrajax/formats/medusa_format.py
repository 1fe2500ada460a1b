"""The files of Medusa heads (docs/design.md 4): Medusa v1, Medusa-2, and Medusa as vLLM names it.

The official Medusa v1 code writes ``config.json`` with ``medusa_num_heads`` and ``medusa_num_layers`` beside
``medusa_lm_head.pt`` (or ``.safetensors``), whose tensors are ``{head}.{block}.linear.weight`` and ``.bias`` and, for
the lm head, ``{head}.{number of blocks}.weight``. Medusa-2 puts the same tensors, behind ``medusa_head.``, into the
file of the base that was trained with them. vLLM has names and a ``config.json`` of its own.
"""

from __future__ import annotations

import re

from hydrajax.drafters.medusa import MedusaHeads
from hydrajax.errors import HydrajaxError
from hydrajax.formats.interface import About, Files, cannot_write, drafter_name, integer
from hydrajax.formats.stacks import Naming, StackFormat, check_lm_head, check_stack, heads_layout, stack_rows
from hydrajax.formats.tensors import TensorFiles
from hydrajax.models.layout import MODEL
from hydrajax.models.llama_config import LlamaConfig


class Medusa(StackFormat):
    """Medusa v1, which text-generation-inference reads too."""

    name = "medusa"
    stem = "medusa_lm_head"
    known_by = "Medusa v1 (medusa_lm_head, with 'medusa_num_heads')"
    read_by = (
        "`hydrajax generate --base BASE --draft THIS`; the official Medusa code opens the `.pt`, "
        "text-generation-inference (versions with Medusa) the `.safetensors`."
    )
    torch_only = True
    prefix = ""  # of the names of all tensors

    def naming(self, drafter):
        n_layers = drafter.n_layers
        return Naming(lambda k, i: f"{self.prefix}{k}.{i}", ".linear", lambda k: f"{self.prefix}{k}.{n_layers}")

    def recognises(self, config, names):
        return "medusa_num_heads" in config

    def drafter(self, config, files, base):
        # The released config.json may declare fewer heads than the file holds: trust the file.
        num_draft_heads = len({match[1] for match in self._matches(files, r"([0-9]{1,4})\..*")})
        if num_draft_heads == 0:
            raise HydrajaxError(
                f"the file holds no tensor named like '{self.prefix}0.0.linear.weight': not Medusa heads"
            )
        lm_heads = self._matches(files, r"[0-9]+\.([0-9]{1,4})\.weight")
        if not lm_heads:
            raise HydrajaxError(
                "the file holds Medusa heads without lm heads of their own (config.json's version 2), supported are "
                "those with them"
            )
        # Some released Medusa-2 configurations do not mention the heads at all.
        if "medusa_num_layers" in config:
            n_layers = integer(config, "medusa_num_layers", 1)
        else:
            n_layers = min(int(lm_heads[0][1]), len(files))
        return self.check_files(separate_heads(num_draft_heads, n_layers, base), files, base)

    def _matches(self, files: TensorFiles, pattern: str) -> list[re.Match]:
        whole = re.compile(re.escape(self.prefix) + pattern)
        return [match for name in files if (match := whole.fullmatch(name))]

    def config(self, drafter, made_for):
        check_plain(drafter)
        return {"medusa_num_heads": drafter.num_draft_heads, "medusa_num_layers": drafter.n_layers}


class Medusa2(Medusa):
    """The heads of a Medusa-2 model, which lie beside their base. It is read only."""

    name = "medusa-2"
    stem = MODEL
    known_by = "Medusa-2 (medusa_head. beside a base)"
    read_by = ""
    prefix = "medusa_head."
    ignored = r"(?!medusa_head\.).*"  # the base

    def recognises(self, config, names):
        return "medusa_num_heads" in config or any(name.startswith(self.prefix) for name in names)


class VLLMMedusa(StackFormat):
    """vLLM's: vllm/transformers_utils/configs/medusa.py and vllm/model_executor/models/medusa.py."""

    name = "vllm-medusa"
    stem = MODEL
    known_by = "vLLM's Medusa (model_type 'medusa')"
    read_by = (
        "`hydrajax generate --base BASE --draft THIS`, and versions of vLLM with the `medusa` method: "
        '`--speculative-config \'{"method": "medusa", "model": "THIS", "num_speculative_tokens": HEADS}\'`.'
    )
    dtype_field = "torch_dtype"

    def naming(self, drafter):
        return Naming(lambda k, i: f"blocks.{k}.layers.{i}", "", lambda k: f"lm_heads.{k}")

    def recognises(self, config, names):
        return config.get("model_type") == "medusa"

    def drafter(self, config, files, base):
        num_draft_heads, n_layers = integer(config, "num_heads", 1), integer(config, "num_hidden_layers", 1)
        for field, allowed in (
            ("truncated_vocab_size", (None, base.vocab_size)),
            ("original_lm_head", (None, False)),
            ("logit_scale", (None, 1)),
        ):
            if config.get(field) not in allowed:
                raise HydrajaxError(
                    f"config.json: {field} is {config[field]!r}, allowed is {allowed[-1]!r}: each head has an lm head "
                    "of its own over the base's whole vocabulary"
                )
        return self.check_files(separate_heads(num_draft_heads, n_layers, base), files, base)

    def layout(self, drafter, config):
        """The files hold the blocks' biases only where ``config.json`` says so."""
        return heads_layout(drafter, self.naming(drafter), block_bias=config.get("medusa_fc_bias", False) is True)

    def config(self, drafter, made_for):
        """vLLM takes any name with "num" and "heads" or "layers" in it for one of its own, so none is added."""
        check_plain(drafter)
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": drafter.width,
            "vocab_size": drafter.vocab_size,
            "truncated_vocab_size": drafter.vocab_size,
            "num_heads": drafter.num_draft_heads,
            "num_hidden_layers": drafter.n_layers,
            "medusa_fc_bias": True,
            "original_lm_head": False,
        }


def separate_heads(num_draft_heads: int, n_layers: int, base: LlamaConfig) -> MedusaHeads:
    """Heads for this base whose blocks are not known to be shared."""
    return MedusaHeads(num_draft_heads, base.width, base.vocab_size, n_layers, share_blocks=False)


def check_plain(drafter) -> None:
    """Refuse what Medusa's formats cannot say: grounded heads, biases of lm heads, a prefix layer, another layer."""
    if not isinstance(drafter, MedusaHeads) or drafter.prefix or drafter.lm_head_bias:
        bias = " with lm_head_bias" if getattr(drafter, "lm_head_bias", False) else ""
        raise cannot_write(
            f"drafter is {drafter_name(drafter)}{bias}", "MedusaHeads without lm_head_bias, for Medusa's formats"
        )
    if drafter.hidden_state_offset:
        raise cannot_write(f"hidden_state_offset of Medusa heads is {drafter.hidden_state_offset}", "0")
    check_lm_head(drafter)


def about(heads: MedusaHeads) -> About:
    if heads.lm_head_bias:
        return About("Ungrounded Hydra heads", "hydra", stack_rows(heads))
    return About("Medusa heads", "medusa", stack_rows(heads))


FILES = Files((Medusa(), Medusa2(), VLLMMedusa()), check_stack, about)
