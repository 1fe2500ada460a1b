"""Output files of generation: one JSON object per prompt, written completely or not at all."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.text.jsonl import read_jsonl
from hydrajax.text.records import INTEGER, NUMBER, TEXT, Kind, checked, list_of, or_null

FINISH_REASONS = ("eos", "stop", "length", "context", "grammar")


@dataclass(frozen=True)
class Generation:
    """The output of one prompt. The fields of an output line have the same names, except ``accept_lengths``.

    Attributes:
        prompt_ids: token ids of the prompt, special tokens included.
        output_ids: generated ids only, with the EOS if it was generated.
        text: the output as text without special tokens; None if the base has no tokenizer.
        steps: decode steps, that is forward passes of the base after the prefill.
        emitted_per_step: tokens emitted by each step, root included; they sum to ``new_tokens``. Files name them
            ``accept_lengths``, as Spec-Bench does; `DecodeResult.accept_lengths` excludes the root.
        new_tokens: number of generated tokens.
        wall_time: seconds of the prompt's whole batch, prefill included, compilation excluded.
        finish_reason: "eos", "stop" (a stop string), "length" (the limit), "context" (the context is full) or
            "grammar" (its parser gave up, or no token continues the text); None in files without it.
        logprobs: natural log-probability of each of ``output_ids`` under the base alone, before penalties, temperature
            and cuts (`hydrajax.DecodeResult`); None if not requested.
        top_logprobs: for each of ``output_ids``, the base's most likely tokens in descending order, as pairs of id and
            log-probability; None if not requested.
        seed: seed of the rule's draws, None for rules without draws; not in files.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    text: str | None
    steps: int
    emitted_per_step: list[int]
    new_tokens: int
    wall_time: float
    finish_reason: str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    seed: int | None = None


COUNT = Kind("an integer from 0 up", lambda value: INTEGER.holds(value) and value >= 0)
SECONDS = Kind("a number from 0 up", lambda value: NUMBER.holds(value) and value >= 0)
PAIR = Kind(
    "an id and a number",
    lambda value: isinstance(value, list) and len(value) == 2 and INTEGER.holds(value[0]) and NUMBER.holds(value[1]),
    "pairs of an id and a number",
)
REASON = Kind(f"one of {', '.join(FINISH_REASONS)}", lambda value: value in FINISH_REASONS)
REQUIRED = {
    "prompt_ids": list_of(INTEGER), "output_ids": list_of(INTEGER), "text": or_null(TEXT), "steps": COUNT,
    "accept_lengths": list_of(INTEGER), "new_tokens": COUNT, "wall_time": SECONDS,
}  # fmt: skip
OPTIONAL = {
    "finish_reason": or_null(REASON), "logprobs": or_null(list_of(NUMBER)),
    "top_logprobs": or_null(list_of(list_of(PAIR))),
}  # fmt: skip


def line_of(answer: Generation) -> dict[str, Any]:
    """Return the output line of a generation."""
    line = dataclasses.asdict(answer)
    line = {{"emitted_per_step": "accept_lengths"}.get(name, name): value for name, value in line.items()}
    return {
        name: value
        for name, value in line.items()
        if name != "seed" and (value is not None or name not in ("logprobs", "top_logprobs"))
    }


class AnswerWriter(WholeFile):
    """A `WholeFile` of output lines."""

    def __init__(self, path: str | Path, flag: str = "output"):
        super().__init__(path, flag)

    def write(self, answer: Generation) -> None:
        """Add one line."""
        self.write_text(json.dumps(line_of(answer), ensure_ascii=False) + "\n")


def read_answers(path: str | Path, what: str = "answers") -> list[Generation]:
    """Read an output file, for analysis in Python. Unknown fields are ignored.

    Args:
        path: the file.
        what: start of every message.

    Raises:
        HydrajaxError: naming file, line and field, if a field is missing, has the wrong type or contradicts another.
            ``accept_lengths`` must have ``steps`` items that sum to ``new_tokens``, the number of ``output_ids``,
            ``logprobs`` and ``top_logprobs``.
    """
    return [_answer(where, line) for where, line in read_jsonl(path, what)]


def _answer(where: str, line: dict) -> Generation:
    line = checked(dict.fromkeys(OPTIONAL) | line, REQUIRED | OPTIONAL, where)
    counts = {"accept_lengths sum to": sum(line["accept_lengths"])}
    for name in ("output_ids", "logprobs", "top_logprobs"):
        if line[name] is not None:
            counts[f"{name} has"] = len(line[name])
    for found, count in counts.items():
        if count != line["new_tokens"]:
            raise HydrajaxError(f"{where}: {found} {count} tokens, new_tokens is {line['new_tokens']}")
    if len(line["accept_lengths"]) != line["steps"]:
        raise HydrajaxError(
            f"{where}: accept_lengths has {len(line['accept_lengths'])} items, steps is {line['steps']}"
        )
    fields = {name: line[name] for name in REQUIRED | OPTIONAL}
    fields["emitted_per_step"] = fields.pop("accept_lengths")
    if (top := fields["top_logprobs"]) is not None:
        fields["top_logprobs"] = [[tuple(pair) for pair in position] for position in top]
    return Generation(**fields)
