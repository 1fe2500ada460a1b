"""Output files of generation: one JSON object per prompt, written completely or not at all."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydrajax.files import WholeFile


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
        wall_time: seconds from the prompt's prefill to its end, in a batch with others, compilation excluded.
        finish_reason: "eos", "stop" (a stop string or token), "length" (the limit), "context" (the context is full) or
            "grammar" (its parser gave up, or no token continues the text); None in files without it.
        logprobs: natural log-probability of each of ``output_ids`` under the base alone, before penalties, temperature
            and cuts (`hydrajax.DecodeResult`); None if not requested.
        top_logprobs: for each of ``output_ids``, the base's most likely tokens in descending order, as pairs of id and
            log-probability; None if not requested.
        stop_reason: the stop string or token that ended the text, None for other ends; not in files.
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
    stop_reason: str | int | None = None
    seed: int | None = None


def line_of(answer: Generation) -> dict[str, Any]:
    """Return the output line of a generation."""
    line = dataclasses.asdict(answer)
    line = {{"emitted_per_step": "accept_lengths"}.get(name, name): value for name, value in line.items()}
    return {
        name: value
        for name, value in line.items()
        if name not in ("seed", "stop_reason") and (value is not None or name not in ("logprobs", "top_logprobs"))
    }


class AnswerWriter(WholeFile):
    """A `WholeFile` of output lines."""

    def __init__(self, path: str | Path, flag: str = "output"):
        super().__init__(path, flag)

    def write(self, answer: Generation) -> None:
        """Add one line."""
        self.write_text(json.dumps(line_of(answer), ensure_ascii=False) + "\n")
