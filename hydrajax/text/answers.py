"""Output files of generation: one JSON object per prompt, written whole or not at all."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.files import WholeFile
from hydrajax.text.jsonl import integers, numbers, read_jsonl, shown

FINISH_REASONS = ("eos", "stop", "length", "context")


@dataclass(frozen=True)
class Generation:
    """One prompt's output. An output line has the same fields, but for one name (docs/design.md 6).

    prompt_ids:    token ids fed, special tokens included.
    output_ids:    generated ids only, EOS included if it was met.
    text:          the output as text without special tokens, None if the base has no tokenizer.
    steps:         decode steps: forward passes of the base after the prompt's.
    emitted_per_step: tokens emitted by each step, the root counted, so that they sum to ``new_tokens``. The file calls
                   them ``accept_lengths`` as Spec-Bench does; `DecodeResult.accept_lengths` leaves the root out.
    new_tokens:    generated tokens.
    wall_time:     seconds, prompt included and compilation excluded, of the whole batch the prompt was in.
    finish_reason: what ended it: "eos", "stop" (a stop string), "length" (the limit) or "context" (it is full). None
                   in files that do not say.
    logprobs:      the natural logarithm of the probability of each of ``output_ids`` in the base's own distribution,
                   without penalties, temperature and cuts (`hydrajax.DecodeResult`); None if it was not asked for, and
                   then no field of the line.
    top_logprobs:  for each of ``output_ids`` the base's likeliest tokens in its place, the likeliest first: pairs of an
                   id and its log-probability. None, and no field, if they were not asked for.
    seed:          of what the rule drew, None for a rule that draws nothing; not in files, whose command says it.
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


def line_of(answer: Generation) -> dict[str, Any]:
    """The output line of a generation, in the names of the file."""
    line = {_in_file(name): value for name, value in dataclasses.asdict(answer).items() if name != "seed"}
    for name in ("logprobs", "top_logprobs"):
        if line[name] is None:
            del line[name]
    return line


def _in_file(name: str) -> str:
    return {"emitted_per_step": "accept_lengths"}.get(name, name)


class AnswerWriter(WholeFile):
    """A `WholeFile` of output lines."""

    def __init__(self, path: str | Path, flag: str = "output"):
        super().__init__(path, flag)

    def write(self, answer: Generation) -> None:
        """Add one line."""
        self.write_text(json.dumps(line_of(answer), ensure_ascii=False) + "\n")


def read_answers(path: str | Path, what: str = "answers") -> list[Generation]:
    """The lines of an output file, in order; fields this version does not know are ignored.

    No command reads its own output: this is for who analyses it in Python.

    Raises `HydrajaxError` naming file, line and field if one is missing, has the wrong type or contradicts another
    (`accept_lengths` must be one per step and sum to `new_tokens`, the number of `output_ids`, of `logprobs` and of
    `top_logprobs`).
    """
    return [_answer(where, line) for where, line in read_jsonl(path, what)]


def _answer(where: str, line: dict) -> Generation:
    fields = dataclasses.fields(Generation)
    names = [_in_file(field.name) for field in fields if field.default is dataclasses.MISSING]
    missing = [name for name in names if name not in line]
    if missing:
        raise HydrajaxError(f"{where}: field {missing[0]} is missing; needed are {', '.join(names)}")

    def number(name, types, allowed):
        value = line[name]
        if isinstance(value, bool) or not isinstance(value, types) or not value >= 0:
            raise HydrajaxError(f"{where}: {name}: must be {allowed} from 0 up, found {shown(value)}")
        return value

    text = line["text"]
    if text is not None and not isinstance(text, str):
        raise HydrajaxError(f"{where}: text: must be text or null, found {shown(text)}")
    reason = line.get("finish_reason")
    if reason not in (None, *FINISH_REASONS):
        allowed = ", ".join(FINISH_REASONS)
        raise HydrajaxError(f"{where}: finish_reason: must be null or one of {allowed}, found {shown(reason)}")
    answer = Generation(
        prompt_ids=integers(line["prompt_ids"], f"{where}: prompt_ids"),
        output_ids=integers(line["output_ids"], f"{where}: output_ids"),
        text=text,
        steps=number("steps", int, "an integer"),
        emitted_per_step=integers(line["accept_lengths"], f"{where}: accept_lengths"),
        new_tokens=number("new_tokens", int, "an integer"),
        wall_time=number("wall_time", (int, float), "a number"),
        finish_reason=reason,
        logprobs=None if line.get("logprobs") is None else numbers(line["logprobs"], f"{where}: logprobs"),
        top_logprobs=_alternatives(line.get("top_logprobs"), f"{where}: top_logprobs"),
    )
    counts = {"output_ids holds": len(answer.output_ids), "accept_lengths sum to": sum(answer.emitted_per_step)}
    for name in ("logprobs", "top_logprobs"):
        if getattr(answer, name) is not None:
            counts[f"{name} holds"] = len(getattr(answer, name))
    for what, count in counts.items():
        if count != answer.new_tokens:
            raise HydrajaxError(f"{where}: {what} {count} tokens, new_tokens is {answer.new_tokens}")
    if len(answer.emitted_per_step) != answer.steps:
        count = len(answer.emitted_per_step)
        raise HydrajaxError(f"{where}: accept_lengths has {count} items, steps is {answer.steps}")
    return answer


def _alternatives(value: Any, where: str) -> list[list[tuple[int, float]]] | None:
    """For each token a list of pairs, each of an id and a number."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(place, list) for place in value):
        raise HydrajaxError(f"{where}: must be a list of lists of pairs, found {shown(value)}")
    for pair in itertools.chain.from_iterable(value):
        if not isinstance(pair, list) or len(pair) != 2:
            raise HydrajaxError(f"{where}: must be a list of lists of pairs, found {shown(pair)}")
        integers(pair[:1], where)
        numbers(pair[1:], where)
    return [[(token, logprob) for token, logprob in place] for place in value]
