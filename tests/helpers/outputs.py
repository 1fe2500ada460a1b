"""Files of JSON lines: prompts, and the output of `hydrajax generate`."""

import json
from pathlib import Path

from hydrajax.text.answers import Generation


def write_lines(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_answers(path: str | Path) -> list[Generation]:
    found = []
    for line in Path(path).read_text(encoding="utf-8").split("\n")[:-1]:
        fields = json.loads(line)
        if "top_logprobs" in fields:
            fields["top_logprobs"] = [[tuple(pair) for pair in position] for position in fields["top_logprobs"]]
        found.append(Generation(emitted_per_step=fields.pop("accept_lengths"), **fields))
    return found
