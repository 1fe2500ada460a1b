"""Misuse of the public interface: mypy must report the error code named on each line."""

from __future__ import annotations

import hydrajax
from hydrajax import Greedy, LanguageModel, TreeTopology


def wrong(m: LanguageModel) -> None:
    hydrajax.load(3)  # refused: arg-type
    hydrajax.load("llama", quantise="int8")  # refused: call-arg
    TreeTopology.from_choices("chain-4")  # refused: arg-type
    TreeTopology.from_choices([0, 1])  # refused: list-item
    hydrajax.make_decode_fn(m.model, m.drafter, 4, Greedy())  # refused: arg-type
    hydrajax.generate(m, ["a"])  # refused: arg-type
    m.generate("a", max_new_tokens="many")  # refused: arg-type
    print(hydrajax.stream(m.executor(), "a").result.text)  # refused: union-attr
    print(hydrajax.generate(m.executor(), ["a"]).text)  # refused: attr-defined
    hydrajax.Request(max_new_tokens="9")  # refused: arg-type
    m.default_tree(batch_size="4")  # refused: arg-type
    Greedy(temperature=0.5)  # refused: call-arg
    m.generate("a", rule="exact", temperature="hot")  # refused: arg-type
