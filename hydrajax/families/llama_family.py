"""LLaMA and the many models that share its layers: the family that the others are compared with."""

from __future__ import annotations

from hydrajax.families.family import Family

FAMILY = Family("llama", "LlamaForCausalLM", "LLaMA 1, 2, 3, 3.1, 3.2, Vicuna, TinyLlama, CodeLlama")
