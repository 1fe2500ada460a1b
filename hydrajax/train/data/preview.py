"""A document as text in which the tokens to be learnt are marked, to see with one's own eyes what is trained on."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.text import Text

from hydrajax.train.data.packing import Document

OPEN, CLOSE = "⟦", "⟧"


def runs(document: Document, tokenizer: Any) -> list[tuple[str, bool]]:
    """The text cut where targets begin and end: ``(text, whether it is learnt)``, special tokens written out."""
    pairs = zip(document.ids.tolist(), document.targets.tolist(), strict=True)
    groups = [([token for token, _ in group], target) for target, group in groupby(pairs, key=lambda pair: pair[1])]
    # Each run ends where decoding all tokens up to there does: decoders drop a space that begins what they are given.
    texts, ids, before = [], [], ""
    for group, target in groups:
        ids += group
        after = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        texts.append((after[len(before) :], target))
        before = after
    return texts


def preview_text(document: Document, tokenizer: Any) -> str:
    """The text with ⟦brackets⟧ around what is learnt."""
    return "".join(f"{OPEN}{text}{CLOSE}" if target else text for text, target in runs(document, tokenizer))


def preview(document: Document, tokenizer: Any, color: bool = True) -> Text:
    """The text for a rich console: what is learnt bold and green, the rest dim. Without ``color`` as `preview_text`.

    color: such as ``console.is_terminal``; colours do not outlive a file or a pipe.
    """
    if not color:
        return Text(preview_text(document, tokenizer))
    return Text.assemble(*((text, "bold green" if target else "dim") for text, target in runs(document, tokenizer)))
