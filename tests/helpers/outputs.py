"""Output files of `hydrajax generate`."""

from __future__ import annotations

import json
from pathlib import Path

from hydrajax.text.answers import Generation


def read_answers(path: str | Path) -> list[Generation]:
    found = []
    for line in Path(path).read_text(encoding="utf-8").split("\n")[:-1]:
        fields = json.loads(line)
        if "top_logprobs" in fields:
            fields["top_logprobs"] = [[tuple(pair) for pair in position] for position in fields["top_logprobs"]]
        found.append(Generation(emitted_per_step=fields.pop("accept_lengths"), **fields))
    return found
