"""A training document as text with its targets marked."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.text import Text

from hydrajax.train.data.packing import Document


def runs(document: Document, tokenizer: Any) -> list[tuple[str, bool]]:
    """The text split where targets begin and end: ``(text, is a target)``, special tokens included."""
    pairs = zip(document.ids.tolist(), document.targets.tolist(), strict=True)
    groups = [([token for token, _ in group], target) for target, group in groupby(pairs, key=lambda pair: pair[1])]
    # All tokens up to a run's end are decoded, because decoders drop a leading space.
    texts, ids, before = [], [], ""
    for group, target in groups:
        ids += group
        after = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        texts.append((after[len(before) :], target))
        before = after
    return texts


def preview(document: Document, tokenizer: Any, color: bool = True) -> Text:
    """Return the text for a rich console, with targets bold and green; without ``color`` in ⟦brackets⟧."""
    if color:
        return Text.assemble(*((text, "bold green" if target else "dim") for text, target in runs(document, tokenizer)))
    return Text("".join(f"⟦{text}⟧" if target else text for text, target in runs(document, tokenizer)))
